"""The checks: each looks at what was found and gives a verdict, the evidence for it, and a remedy."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hdma.errors import UsageError
from hdma.info import groups, settings
from hdma.topology import Topology

_MIB = 1 << 20
# Of Python and a training program, besides what hdma takes.
_SPARE_DESCRIPTORS, _SPARE_PIDS = 32, 64


@dataclass(frozen=True)
class Facts:
    """What the checks look at: of host.py and found.py, the job's grid, how many of its ranks are on this host and the
    CPUs that these may use together."""

    machine: dict[str, Any]
    limits: dict[str, Any]
    wires: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    topology: Topology
    here: int
    cpus: int


@dataclass(frozen=True)
class Check:
    name: str
    verdict: str  # ok, warn or fail
    evidence: str
    remedy: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def host(facts: Facts) -> list[Check]:
    """Those of one host, which every rank makes."""
    makers: Iterable[Callable[[Facts], list[Check]]] = (
        _variables,
        _descriptors,
        _memory,
        _pids,
        _shm,
        _cores,
        _features,
        _memfd,
        _tcp,
    )
    return [check for maker in makers for check in maker(facts)]


def _variables(facts: Facts) -> list[Check]:
    found = []
    for row in settings.table():
        if row["error"]:
            found.append(Check("variables", "fail", row["error"]))
        elif not row["known"]:
            remedy = f"did you mean {row['nearest']}?" if row["nearest"] else "python -m hdma.info --env lists them"
            found.append(Check("variables", "warn", f"{row['name']} has no effect: there is no such variable", remedy))
    folder = os.environ.get("HDMA_RENDEZVOUS", "").strip()
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        remedy = "make the folder, on a file system that all ranks share"
        found.append(
            Check("variables", "warn", f"HDMA_RENDEZVOUS={folder} is no folder that can be written to", remedy)
        )
    return found or [Check("variables", "ok", "every HDMA_* variable is known and can be used")]


def _descriptors(facts: Facts) -> list[Check]:
    limit, hard = facts.limits["descriptors"]["soft"], facts.limits["descriptors"]["hard"]
    in_job = facts.topology.size > 1
    grids = [(facts.topology.nodes, facts.topology.ranks_per_node)] if in_job else [(1, 2), (8, 8)]
    remedy = "ulimit -n 65536 before the launcher starts the ranks"
    if hard is not None and hard < 65536:
        remedy = f"raise the hard limit, {hard} (limits.conf, docker run --ulimit nofile=65536), then ulimit -n"
    for number, (nodes, local) in enumerate(grids):
        need = groups.descriptors(nodes, local) + facts.limits["descriptors"]["open"]
        evidence = f"limit {limit}; a rank of {nodes}x{local} needs {need} with one communicator, and its program some "
        evidence += str(_SPARE_DESCRIPTORS)
        if limit is not None and limit < need + _SPARE_DESCRIPTORS:
            # Alone, only what not even two ranks could do with is a fault.
            return [Check("descriptors", "fail" if number == 0 else "warn", evidence, remedy)]
    return [Check("descriptors", "ok", evidence)]


def _memory(facts: Facts) -> list[Check]:
    memory, topology = facts.limits["memory"], facts.topology
    grid = (topology.nodes, topology.ranks_per_node) if topology.size > 1 else (1, 2)
    try:
        row = groups.group(*grid)
    except UsageError as error:
        known = any(row["error"] for row in settings.table())
        return [] if known else [Check("memory", "fail", str(error))]
    need = facts.here * (row["window_nbytes"] + row["flags_nbytes"])
    left = memory["available_nbytes"]
    group = memory["cgroup_nbytes"]
    evidence = f"{left // _MIB} MiB available"
    evidence += f" (the control group's limit is {group // _MIB} MiB)" if group else ""
    evidence += f"; a communicator takes {need / _MIB:.1f} MiB here for {facts.here} ranks of {row['nodes']}x"
    evidence += f"{row['ranks_per_node']}"
    remedy = "free memory, raise the limit, or lower HDMA_WINDOW_BYTES on all ranks"
    if left < need:
        return [Check("memory", "fail", evidence, remedy)]
    return [Check("memory", "warn" if left < 10 * need else "ok", evidence, remedy if left < 10 * need else "")]


def _pids(facts: Facts) -> list[Check]:
    pids, need = facts.limits["pids"], facts.here * groups.threads(facts.topology.nodes)
    if pids is None:
        return [Check("processes", "ok", "the control group does not limit them")]
    evidence = f"{pids['left']} of {pids['limit']} processes and threads left; a communicator starts {need} here"
    remedy = "raise the limit (docker run --pids-limit, systemd TasksMax)"
    if pids["left"] >= need + _SPARE_PIDS:
        return [Check("processes", "ok", evidence)]
    return [Check("processes", "fail" if pids["left"] < need else "warn", evidence, remedy)]


def _shm(facts: Facts) -> list[Check]:
    shm = facts.limits["shm"]
    uses = "hdma keeps nothing there (memfd); MPI and torch's data loaders do"
    if shm is None:
        return [Check("/dev/shm", "warn", f"it is not there. {uses}", "mount a tmpfs there")]
    evidence = f"{shm['free_nbytes'] // _MIB} MiB of {shm['total_nbytes'] // _MIB} free; {uses}"
    if shm["free_nbytes"] < 64 * _MIB:
        return [
            Check("/dev/shm", "warn", evidence, "docker run --shm-size=1g or --ipc=host; remove what is left there")
        ]
    return [Check("/dev/shm", "ok", evidence)]


def _cores(facts: Facts) -> list[Check]:
    cpus, here = facts.cpus, facts.here
    if here > cpus:
        remedy = "fewer ranks, or read no performance from it: ranks that wait sleep instead of spinning"
        return [Check("cores", "warn", f"{here} ranks share {cpus} CPUs", remedy)]
    return [Check("cores", "ok", f"{cpus} CPUs for {here} rank{'s' if here > 1 else ''} here")]


def _features(facts: Facts) -> list[Check]:
    features = facts.machine["features"]
    missing = [name for name, there in features.items() if not there]
    if missing:
        remedy = "use a machine, or a virtual machine's CPU model, that has them"
        evidence = f"no {' and no '.join(missing)}: copies and reductions of 16-bit floats use slower loops"
        return [Check("processor", "warn", evidence, remedy)]
    return [Check("processor", "ok", f"has {' and '.join(features)}, which the copies and reductions use")]


def _memfd(facts: Facts) -> list[Check]:
    """What node mates do: pass memory over an abstract Unix socket."""
    name = "memory handles"
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.settimeout(2.0)
            client.settimeout(2.0)
            server.bind(f"\0hdma-info-{os.getpid()}-{os.urandom(8).hex()}")
            server.listen(1)
            client.connect(server.getsockname())
            accepted, _ = server.accept()
            with accepted:
                fds.append(os.memfd_create("hdma-info"))
                os.posix_fallocate(fds[0], 0, 4096)
                socket.send_fds(client, [b"m"], fds[:1])
                _, got, _, _ = socket.recv_fds(accepted, 1, 1)
                fds += got
    except OSError as error:
        remedy = "allow memfd_create and Unix sockets (seccomp profile, descriptor and memory limits)"
        return [Check(name, "fail", f"cannot be made and passed between node mates: {error}", remedy)]
    finally:
        for fd in fds:
            os.close(fd)
    return [Check(name, "ok", "can be made and passed between node mates (memfd, Unix sockets)")]


def _tcp(facts: Facts) -> list[Check]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], 2.0).close()
    except OSError as error:
        return [Check("tcp", "fail", f"no connection over loopback: {error}", "bring up the interface lo")]
    others = [name for wire in facts.wires if wire["name"] == "tcp" for name in wire["devices"] if name != "lo"]
    if not others:
        return [
            Check("tcp", "warn", "only loopback: no other host can be reached", "start the container with a network")
        ]
    return [Check("tcp", "ok", f"loopback connects; interfaces {', '.join(others)}")]
