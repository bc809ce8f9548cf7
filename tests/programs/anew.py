"""Threads as ranks that meet in a folder, or in a store, and fail and start anew at different moments.

anew.py FOLDER|store
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hdma import errors
from hdma.launch import Launch
from hdma.rendezvous import Rendezvous
from hdma.rendezvous.folder import Folder

SIZE, TIMEOUT_S = 3, 20.0
store = None
if sys.argv[1] == "store":
    import torch.distributed as dist

    store = dist.HashStore()


def place(rank: int) -> Rendezvous:
    launch = Launch(rank, SIZE, None, None, "test", None)
    if store is None:
        return Folder(launch, Path(sys.argv[1]), "a", TIMEOUT_S)
    from hdma.rendezvous.torch_store import TorchStore

    return TorchStore(launch, store, "a", timeout_s=TIMEOUT_S)


def start(rank: int, fail: Callable[[int], None] = lambda step: None) -> str:
    """Three exchanges; what went wrong."""
    started = time.monotonic()
    try:
        with place(rank) as meeting:
            try:
                for step in range(3):
                    fail(step)
                    mine = f"{rank} at {step}".encode()
                    assert meeting.exchange(f"key {step}", mine, TIMEOUT_S) == [
                        f"{r} at {step}".encode() for r in range(SIZE)
                    ]
            except BaseException as error:
                meeting.tell(error)
                raise
    except errors.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        assert time.monotonic() - started < 5.0, "the others were not told"
    return ""


def refuse(at: int, late_s: float) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step == at:
            time.sleep(late_s)
            raise errors.DeviceError(f"on purpose at {step}")

    return fail


def until_it_works(rank: int) -> int:
    failures = 0
    while problem := start(rank):
        assert problem.startswith(("DeviceError: rank 1 could not start: on purpose", "WireError: rank 1 failed")), (
            problem
        )
        failures += 1
    return failures


def unlucky(at: int, late_s: float) -> int:
    """Rank 1 fails twice, then starts."""
    for _ in range(2):
        assert start(1, refuse(at, late_s)).startswith("DeviceError: on purpose")
    return until_it_works(1)


with ThreadPoolExecutor(SIZE) as pool:
    assert list(pool.map(start, range(SIZE))) == [""] * SIZE  # And again: what is left of the last start does no harm.
    for at in range(3):
        for late_s in (0.0, 0.2):
            results = pool.map(lambda rank: unlucky(at, late_s) if rank == 1 else until_it_works(rank), range(SIZE))
            counts = list(results)
            assert counts[1] == 0 and max(counts) <= 2, counts
            assert at == 0 or min(counts[0], counts[2]) >= 1, counts
