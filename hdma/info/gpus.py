"""GPUs: what their drivers say, each asked in a process of its own with a deadline; and the checks of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdma import env, kernels
from hdma.errors import UsageError
from hdma.info import groups
from hdma.info.checks import Check, Facts

# Drivers of many GPUs that nobody keeps awake take seconds to start. The others of a job wait longer than this.
_DRIVER_S, _TRY_S = 20.0, 120.0
_DRIVERS = {"cuda": "CUDA driver", "hip": "HIP runtime"}
_REMEDIES = {
    "cuda": "install NVIDIA's driver, give the container the GPUs (docker run --gpus all), or set HDMA_DEVICE=host",
    "hip": "install ROCm, give the container the GPUs (--device /dev/kfd --device /dev/dri), or set HDMA_DEVICE=host",
}
_VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    "hip": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
_MIN_HW_QUEUES = 4
_MIB = 1 << 20


def wanted() -> str:
    try:
        return env.DEVICE.read()
    except UsageError:  # One of the checks says so.
        return "auto"


def look(devices: list[dict[str, Any]], tries: bool = False) -> list[dict[str, Any]]:
    """The rows of found.devices(), those of GPUs with what their driver says. `tries`: each GPU is used, too.

    `gpus` (name, pci, arch), `reaches[a][b]`, `links` (see kfd.py), `polls` (why waits are polled by a thread),
    `kernels` (of each architecture), `tried`; `error` of the driver, `doing`: what it was at last, should it not end.
    """
    keys: dict[str, Any] = {"gpus": [], "reaches": [], "links": [], "polls": "", "kernels": [], "tried": []}
    keys |= {"error": "", "peer_error": "", "doing": ""}
    rows = [dict(row) if row["name"] == "host" else row | keys for row in devices]
    asked = [row for row in rows if row["name"] in _DRIVERS and row["library"] and wanted() in ("auto", row["name"])]
    with tempfile.TemporaryDirectory() as folder:
        for row, said in zip(asked, _ask(asked, Path(folder), tries)):
            row |= said
            row["used"] = bool(row["gpus"])
    return rows


def _ask(rows: list[dict[str, Any]], folder: Path, tries: bool) -> list[dict[str, Any]]:
    """All drivers at once. A process that cannot even be killed, as in a driver that hangs, is left alone."""
    own = {name: value for name, value in os.environ.items() if name != env.RANKS_PER_NODE.name}
    own["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    started = []
    for row in rows:
        command = [sys.executable, "-m", "hdma.info.driver", row["name"], row["library"], *(["try"] if tries else [])]
        with open(folder / row["name"], "w") as out, open(folder / f"{row['name']}-errors", "w") as errors:
            started.append(
                subprocess.Popen(
                    command,
                    env=own | {env.DEVICE.name: row["name"]},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                )
            )
    limit_s = _TRY_S if tries else _DRIVER_S
    deadline = time.monotonic() + limit_s
    answers = []
    for row, process in zip(rows, started):
        how = ""
        try:
            if process.wait(max(0.0, deadline - time.monotonic())):
                how = f"ended by signal {-process.returncode}" if process.returncode < 0 else "failed"
        except subprocess.TimeoutExpired:
            how = f"gave no answer within {limit_s:g} s"
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        said: dict[str, Any] = {}
        for line in (folder / row["name"]).read_text(errors="replace").splitlines():
            with suppress(ValueError):  # Drivers print, too; and who was killed may have been in a line.
                said |= json.loads(line) if line.startswith("{") else {}
        if how:
            lines = (folder / f"{row['name']}-errors").read_text(errors="replace").strip().splitlines()
            last = f": {lines[-1]}" if lines and how == "failed" else ""
            said["error"] = f"{how} while {said.get('doing') or 'loading its library'}{last}"
        answers.append(said)
    return answers


def checks(facts: Facts, gpus_here: int | None, torch: str | None) -> list[Check]:
    """`gpus_here`: of all ranks of the job on this host; None without a job. `torch`: its version."""
    if wanted() == "host":
        return [Check("gpus", "ok", "HDMA_DEVICE=host: they are not looked at, tensors are in host memory")]
    rows = [row for row in facts.devices if row["name"] in _DRIVERS]
    found = [check for row in rows for check in _driver(row)]
    if not found:
        drivers = " and ".join(f"no {_DRIVERS[row['name']]}" for row in rows) or "no driver"
        found = [Check("gpus", "ok", f"{drivers}: tensors in host memory only")]
    for row in rows:
        if row["gpus"]:
            amd = [*_amd_variables(len(row["gpus"])), *_links(row)] if row["name"] == "hip" else []
            found += [*_peers(row), *_kernels(row), *_waits(row), *amd, *_tried(row)]
    if any(row["gpus"] for row in rows):
        found += [*_pinned(facts), *_shared(facts.here, gpus_here), *_torch(torch)]
    return found


def _driver(row: dict[str, Any]) -> Iterator[Check]:
    name, driver, count = row["name"], _DRIVERS[row["name"]], len(row["gpus"])
    files, is_wanted = row["devices"], wanted() == row["name"]
    if row["library"] is None:
        if files or is_wanted:
            evidence = f"{', '.join(files)}, but no {driver}" if files else f"HDMA_DEVICE={name}, but no {driver}"
            yield Check(name, "fail" if is_wanted else "warn", evidence, _REMEDIES[name])
    elif row["error"] and not _no_device(row["error"]):
        broken = files or is_wanted or count
        remedy = (
            f"look at the driver ({'nvidia-smi' if name == 'cuda' else 'rocm-smi'}, dmesg), or set HDMA_DEVICE=host"
        )
        yield Check(name, "fail" if broken else "warn", f"the {driver} ({row['library']}): {row['error']}", remedy)
    elif not count:
        hidden = [f"{key}={os.environ[key]}" for key in _VISIBLE[name] if key in os.environ]
        why = f" ({', '.join(hidden)})" if hidden else ""
        verdict = "fail" if is_wanted else "warn" if files else "ok"
        evidence = f"a {driver}, which shows no GPU{why}: tensors in host memory only"
        yield Check(name, verdict, evidence, _REMEDIES[name] if verdict != "ok" else "")
    else:
        kinds = list(dict.fromkeys(f"{gpu['name']} ({gpu['arch'] or 'unknown'})" for gpu in row["gpus"]))
        never = "; no AMD GPU has run hdma yet" if name == "hip" else ""
        yield Check(name, "ok", f"{count} GPU{'s' if count > 1 else ''}: {', '.join(kinds)}{never}")


def _no_device(error: str) -> bool:
    """CUDA and HIP have one number for it."""
    return bool(re.search(r"\b100\)$", error))


def _peers(row: dict[str, Any]) -> Iterator[Check]:
    count, name = len(row["gpus"]), f"{row['name']} peers"
    if row["peer_error"]:
        yield Check(name, "warn", row["peer_error"], "see that the ranks of a node reach each other's GPUs")
        return
    if count < 2 or not row["reaches"]:
        return
    apart = [f"{a}-{b}" for a in range(count) for b in range(a) if not (row["reaches"][a][b] and row["reaches"][b][a])]
    if not apart:
        yield Check(name, "ok", f"all {count} GPUs reach each other's memory")
        return
    pairs = ", ".join(apart[:8]) + (", ..." if len(apart) > 8 else "")
    evidence = f"GPUs {pairs} do not reach each other's memory: their ranks cannot be of one node"
    remedy = f"only GPUs that do ({_VISIBLE[row['name']][0]}), or HDMA_RANKS_PER_NODE, or what keeps them apart "
    remedy += (
        "(nvidia-smi topo -p2p r; IOMMU, virtual machine)" if row["name"] == "cuda" else "(IOMMU, virtual machine)"
    )
    yield Check(name, "fail" if len(apart) == count * (count - 1) // 2 else "warn", evidence, remedy)


def _kernels(row: dict[str, Any]) -> Iterator[Check]:
    name, folder = f"{row['name']} kernels", kernels.folder()
    for each in row["kernels"]:
        arch = each["arch"] or "an unknown architecture"
        if each["error"]:
            evidence = each["error"].partition(" What helps:")[0]
            yield Check(name, "fail", f"{arch}: {evidence}", kernels.KINDS[row["name"]].advice)
        elif each["kept"]:
            yield Check(name, "ok", f"{arch}: kept in {folder}; compiler {each['compiler']}")
        elif folder is None or not _can_write(folder):
            evidence = f"{arch}: {folder or 'no folder'} cannot be written to, so that every process compiles them"
            yield Check(name, "warn", evidence, "set XDG_CACHE_HOME to a folder that can")
        else:
            evidence = f"{arch}: to be compiled at the first use, for some seconds, by {each['compiler']}"
            yield Check(name, "ok", f"{evidence}; kept in {folder}")


def _can_write(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _waits(row: dict[str, Any]) -> Iterator[Check]:
    name = f"{row['name']} waits"
    if not row["polls"]:
        yield Check(name, "ok", "streams hold them: calls never block the host")
        return
    evidence = f"{row['polls']}: a thread polls them, and wait() blocks until the call is issued"
    if row["name"] == "hip":
        yield Check(name, "ok", evidence)
    else:
        remedy = "unset CUDA_LAUNCH_BLOCKING; CUDA_DEVICE_MAX_CONNECTIONS unset or 4 to 32, before the program starts"
        yield Check(name, "warn", evidence, remedy)


def _amd_variables(count: int) -> Iterator[Check]:
    name, found = "hip variables", False
    for variable, copies in (("HSA_ENABLE_SDMA", "all copies"), ("HSA_ENABLE_PEER_SDMA", "copies between GPUs")):
        if os.environ.get(variable, "").strip() == "0":
            found = True
            evidence = f"{variable}=0: {copies} run on compute units, which hdma is to leave to the GEMMs"
            yield Check(name, "warn", evidence, f"unset {variable}")
    for variable in ("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING"):
        if os.environ.get(variable, "").strip() not in ("", "0"):
            found = True
            evidence = f"{variable}={os.environ[variable]}: the host waits for all that it puts on a GPU"
            yield Check(name, "warn", evidence, f"unset {variable}, which is for debugging")
    queues = os.environ.get("GPU_MAX_HW_QUEUES", "").strip()
    if queues.isdecimal() and int(queues) < _MIN_HW_QUEUES:
        found = True
        evidence = f"GPU_MAX_HW_QUEUES={queues}: streams share so few queues that copies wait for the program's kernels"
        yield Check(name, "warn", evidence, f"unset it ({_MIN_HW_QUEUES}), or 8 on a node of 8 GPUs")
    if not found:
        more = "; GPU_MAX_HW_QUEUES=8 might help, with a stream a peer" if count > _MIN_HW_QUEUES and not queues else ""
        yield Check(name, "ok", f"none that keeps copies from SDMA or calls from overlapping{more}")


def _links(row: dict[str, Any]) -> Iterator[Check]:
    if not row["links"]:
        yield Check("hip links", "ok", "unknown: the kernel's list of nodes (/sys/class/kfd) is not to be read here")
        return
    count = len(row["gpus"])
    pairs = [row["links"][a][b] for a in range(count) for b in range(count) if a != b]
    kinds = [link["type"] if link else "no direct link" for link in pairs]
    if not pairs:
        return
    counts = ", ".join(f"{kinds.count(kind)} of {len(pairs)} {kind}" for kind in dict.fromkeys(kinds))
    named = sum(bool(link and link["engines"] & (link["engines"] - 1) == 0 and link["engines"]) for link in pairs)
    engines = f"the kernel recommends one SDMA engine for {named} of them"
    yield Check("hip links", "ok", f"{counts}; {engines}")


def _tried(row: dict[str, Any]) -> Iterator[Check]:
    for number, each in enumerate(row["tried"]):
        if each["error"]:
            yield Check(f"{row['name']} use", "fail", f"GPU {number}: {each['error']}", "see what the driver says")
    if row["tried"] and not any(each["error"] for each in row["tried"]):
        longest = max(each["s"] for each in row["tried"])
        yield Check(f"{row['name']} use", "ok", f"a first call works on each of {len(row['tried'])} ({longest:.1f} s)")


def _pinned(facts: Facts) -> Iterator[Check]:
    """The drivers of NVIDIA and AMD are not known to count pinned pages as locked ones; containers and RDMA do."""
    topology = facts.topology
    try:
        need = groups.group(*((topology.nodes, topology.ranks_per_node) if topology.size > 1 else (1, 2)))[
            "pinned_nbytes"
        ]
    except UsageError:
        return
    limit, left = facts.limits["memlock_nbytes"], facts.limits["memory"]["available_nbytes"]
    size = f"{need / _MIB:.0f} MiB" if need >= _MIB else f"{need / 1024:.0f} KiB"
    evidence = f"{size} of host memory a rank for calls on GPUs"
    if left < facts.here * need:
        yield Check(
            "pinned memory", "fail", f"{evidence}; {left // _MIB} MiB available", "free memory, raise the limit"
        )
    elif limit is not None and limit < need and os.geteuid() != 0:
        evidence += f"; the limit of locked memory is {limit / 1024:.0f} KiB, should the driver count it"
        yield Check(
            "pinned memory", "warn", evidence, "ulimit -l unlimited (limits.conf, docker run --ulimit memlock=-1)"
        )
    else:
        yield Check("pinned memory", "ok", evidence)


def _shared(here: int, gpus_here: int | None) -> Iterator[Check]:
    if gpus_here and here > gpus_here:
        evidence = f"{here} ranks here for {gpus_here} GPUs: between ranks of one GPU, kernels copy"
        yield Check("gpus", "warn", evidence, "a GPU for each rank, where tensors are on GPUs")


def _torch(version: str | None) -> Iterator[Check]:
    if version and version.endswith("+cpu"):
        yield Check("torch", "warn", f"{version} makes no tensors on GPUs", "install torch's build for CUDA or ROCm")
