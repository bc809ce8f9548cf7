"""python -m hdma.info.driver RUNTIME LIBRARY [try]: what a driver says of its GPUs, for gpus.py.

A process of its own, since a driver may crash or never answer. It prints a JSON object a line, each when it is known:
`doing`, what it begins, or something found. `try` uses each GPU, as a communicator of one rank does.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np

from hdma import _core, kernels, memory
from hdma.communicator import Communicator
from hdma.errors import Error
from hdma.info import kfd
from hdma.rendezvous.base import SingleProcess


def main(runtime: str, library: str, tries: bool) -> None:
    if os.path.isabs(library):
        # What torch brings: the core finds it by name once it is loaded, as in a program that imports torch.
        ctypes.CDLL(library, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    _say(doing="starting the driver")
    try:
        count = _core.gpu_count(runtime)
        _say(doing="asking for the GPUs' names")
        names = [_core.gpu_info(runtime, ordinal) for ordinal in range(count)]
        _say(gpus=[dict(zip(("name", "pci", "arch"), each)) for each in names], polls=_core.gpu_polls(runtime))
    except Error as error:
        _say(error=str(error))
        return
    if runtime == "hip":
        _say(links=kfd.links([pci for _, pci, _ in names]))
    _say(doing="asking which GPUs reach each other")
    try:
        _say(reaches=[[a == b or _core.gpu_reaches(runtime, a, b) for b in range(count)] for a in range(count)])
    except Error as error:
        _say(peer_error=str(error))
    _say(doing="looking for the kernels' compiler")
    _say(kernels=[_kernels(runtime, arch) for arch in sorted({arch for _, _, arch in names})])
    tried: list[dict[str, Any]] = []
    for ordinal in range(count if tries else 0):
        _say(doing=f"using GPU {ordinal}", tried=tried)
        tried.append(_use(ordinal))
    _say(doing="", tried=tried)


def _kernels(runtime: str, arch: str) -> dict[str, Any]:
    row: dict[str, Any] = {"arch": arch, "compiler": "", "kept": False, "error": ""}
    try:
        row["compiler"], row["kept"] = kernels.prospect(runtime, arch)
    except Error as error:
        row["error"] = str(error)
    return row


def _use(ordinal: int) -> dict[str, Any]:
    begun, error = time.monotonic(), ""
    try:
        with Communicator(SingleProcess()) as comm:
            x = memory.empty(1 << 16, np.float32, ordinal, comm)
            comm.all_reduce(x)
    except Error as failure:
        error = str(failure)
    return {"error": error, "s": time.monotonic() - begun}


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "try" in sys.argv[3:])
