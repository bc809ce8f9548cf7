"""RDMA devices: what the kernel and libibverbs say of them, how near they are to GPUs, and the checks of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hdma import env, nics
from hdma.errors import Error, UsageError
from hdma.info import groups, settings
from hdma.info.checks import Check, Facts
from hdma.nics.choice import HOST_BRIDGE, LIBRARY, NO_DISTANCE, OTHER_NODE, SAME_NODE

Found = dict[str, Any]

# As nvidia-smi topo -m calls them. Two hops up and two down: a switch, with its ports.
_RELATIONS = ((5, "PIX"), (HOST_BRIDGE, "PXB"), (SAME_NODE, "PHB"), (OTHER_NODE, "NODE"), (NO_DISTANCE, "SYS"))
_PACKAGES = "apt install libibverbs1 ibverbs-providers"
_CAP_IPC_LOCK = 14  # linux/capability.h
_MIB = 1 << 20


def look(root: str = "/") -> Found:
    """What there is without GPUs: nothing is started or held.

    `library` (or `library_error`), `unseen`: devices that libibverbs does not show, `devices` with their ports (each
    with its `fault`, and `gid_index` if it can be used), `offers` and `reason` of this rank as `nics.card()` has them,
    `error` of the variables, `locked_nbytes`: the limit of locked memory, None if there is none for this process.
    """
    row: Found = {"library": None, "devices": [], "unseen": [], "offers": [], "reason": None, "error": ""}
    row |= {"gpus": [], "distances": [], "relations": [], "locked_nbytes": _locked_nbytes(root)}
    row["library_error"] = nics.library_error()
    row["library"] = None if row["library_error"] else LIBRARY
    there = nics.find(root)
    gid_index = None
    try:
        row |= nics.card(root=root)
        gid_index = env.GID_INDEX.read()
        nics.qp_timeout(env.TIMEOUT_S.read(), env.QP_TIMEOUT.read(), env.QP_RETRIES.read())
    except UsageError as error:
        row["error"] = str(error)
        row["reason"] = {"kind": "usage", "text": row["error"], "remedy": "set the variable right"}
    for nic in there:
        device = asdict(nic) | {"pci": nic.pci, "numa_node": nic.numa_node}
        for port, shown in zip(nic.ports, device["ports"]):
            fault = nics.fault(nic, port, gid_index)
            # Where HDMA_WIRE or HDMA_NIC keep it from being used, too.
            offers = [] if fault else nics.choose([nic], f"{nic.name}:{port.number}", gid_index, root=root)
            shown |= {"fault": fault.text if fault else "", "gid_index": offers[0].gid_index if offers else None}
        row["devices"].append(device)
    if there and row["library"]:
        seen = _seen()
        row["unseen"] = [nic.name for nic in there if nic.name not in seen]
    return row


def near(row: Found, devices: Sequence[dict[str, Any]], root: str = "/") -> Found:
    """`row` with `gpus` of the rows of gpus.look(), `distances[gpu][device]` of nics.distance(), and `relations`."""
    gpus = [
        {"runtime": device["name"], "number": number, "pci": gpu["pci"]}
        for device in devices
        for number, gpu in enumerate(device.get("gpus", []))
    ]
    there, places = nics.find(root), [nics.gpu_place(gpu["pci"], root) for gpu in gpus]
    distances = [[nics.distance(place, nic) for nic in there] for place in places]
    return row | {"gpus": gpus, "distances": distances, "relations": [[_relation(d) for d in far] for far in distances]}


def wire(row: Found) -> dict[str, Any]:
    """The row of RDMA in the list of wires."""
    names = [device["name"] for device in row["devices"]]
    return {"name": "verbs", "used": bool(row["offers"]), "library": row["library"], "devices": names}


def _relation(distance: int) -> str:
    return next((name for limit, name in _RELATIONS if distance < limit), "-")


def taken(row: Found, cards: Sequence[dict[str, Any]], facts: Facts, rank: int) -> tuple[list[str], str, list[Check]]:
    """The port of each rank (none where TCP is used), why rank `rank` has its own, and what keeps them from agreeing.

    The ranks of one node, which need none: as it would be between nodes.
    """
    topology = facts.topology
    names = [f"rank {each}" for each in range(topology.size)]
    try:
        if topology.nodes > 1:
            chosen = nics.decide(cards, topology, names, env.WIRE.read())
        elif all(card["offers"] for card in cards):
            offers = [[nics.Offer(**offer) for offer in card["offers"]] for card in cards]
            chosen = nics.along_rails(offers, topology, names)
        else:
            chosen = []
    except Error as error:
        text, _, remedy = str(error).partition(" What helps: ")
        return [], "", [Check("rdma agreement", "fail", text, remedy)]
    return [str(offer) for offer in chosen], _why(row["offers"], chosen[rank]) if chosen else "", []


def _why(offers: Sequence[dict[str, Any]], own: nics.Offer) -> str:
    same = [offer for offer in offers if offer["distance"] == own.distance]
    if own.told:
        return "HDMA_NIC names it"
    if len(offers) == 1:
        return "the only one that can be used"
    if own.distance > offers[0]["distance"]:
        return "the nearest that all ranks of its rail have"
    if len(same) == 1:
        return "the nearest"
    fastest = {offer["rate_gbit_s"] for offer in same} != {own.rate_gbit_s}
    return f"of {len(same)} equally near ones {'the fastest' if fastest else 'by turns of the ranks'}"


def gpu_memory() -> str:
    """How the memory of GPUs reaches a NIC."""
    if env.GPU_RDMA.read() == "off":
        return "by way of pinned host memory (HDMA_GPU_RDMA=auto tries dma-buf, which no machine has shown to work yet)"
    return "by dma-buf where the NICs of all ranks can, which their first call finds out and tells where they cannot"


def checks(facts: Facts, row: Found) -> list[Check]:
    found = [*_usable(row)]
    if row["devices"] and _wanted() != "tcp":
        found += [*_library(row), *_names(row), *_locked(facts, row), *_nearest(row)]
        if row["gpus"] and row["offers"]:
            found.append(Check("rdma and GPUs", "ok", f"their memory reaches the NIC {gpu_memory()}"))
    return found


def _wanted() -> str:
    try:
        return env.WIRE.read()
    except UsageError:  # One of the checks says so.
        return "auto"


def _usable(row: Found) -> Iterator[Check]:
    count, wanted, reason = len(row["devices"]), _wanted(), row["reason"]
    devices = f"{count} device{'' if count == 1 else 's'}"
    if row["error"]:
        if not any(variable["error"] for variable in settings.table()):
            yield Check("rdma", "fail", row["error"])
    elif wanted == "tcp":
        yield Check("rdma", "ok", f"HDMA_WIRE=tcp: {devices if count else 'no device'}, not used")
    elif row["offers"]:
        ports = [f"{offer['device']}:{offer['port']} ({offer['fabric']})" for offer in row["offers"]]
        yield Check("rdma", "ok", f"{devices}, usable: {', '.join(ports)}")
    elif reason["kind"] == "none" and wanted == "auto":
        missing = "" if row["library"] else f"; nor is there {LIBRARY}, which they would need ({_PACKAGES})"
        yield Check("rdma", "ok", f"{reason['text']}: between nodes is TCP{missing}")
    else:
        remedy = f"{reason['remedy']}; or HDMA_WIRE=tcp on all ranks"
        yield Check("rdma", "fail" if wanted == "verbs" else "warn", reason["text"], remedy)


def _library(row: Found) -> Iterator[Check]:
    if row["library"] is None:
        yield Check("rdma library", "warn", f"no {LIBRARY}: {row['library_error']}", _PACKAGES)
    elif row["unseen"]:
        text = f"{LIBRARY} does not show {', '.join(row['unseen'])}: it has no provider for it, or may not open it"
        yield Check("rdma library", "warn", text, f"{_PACKAGES}; give the container /dev/infiniband")
    else:
        yield Check("rdma library", "ok", f"{LIBRARY} shows all devices")


def _names(row: Found) -> Iterator[Check]:
    try:
        wanted = env.NIC.read() or ""
    except UsageError:  # One of the checks says so.
        return
    ports = [f"{device['name']}:{port['number']}" for device in row["devices"] for port in device["ports"]]
    there = {*ports, *(device["name"] for device in row["devices"])}
    unknown = [name for name in wanted.removeprefix("^").split(",") if wanted and name not in there]
    if unknown:
        evidence = f"HDMA_NIC={wanted}: there is no {' and no '.join(unknown)} here"
        yield Check("rdma names", "warn", evidence, f"there are {', '.join(ports)}")


def _locked(facts: Facts, row: Found) -> Iterator[Check]:
    """What a NIC may read or write is pinned, and counts as locked memory."""
    grid = (facts.topology.nodes, facts.topology.ranks_per_node) if facts.topology.size > 1 else (2, 1)
    try:
        group = groups.group(*grid)
    except UsageError:  # One of the checks says so.
        return
    need, limit = max(group["window_nbytes"], group["gpu_window_nbytes"] if row["gpus"] else 0), row["locked_nbytes"]
    evidence = f"a communicator's window is {need / _MIB:.1f} MiB; "
    if limit is None:
        yield Check("rdma memory", "ok", f"{evidence}this process may lock as much as it likes")
        return
    evidence += f"the limit of locked memory is {limit / _MIB:.1f} MiB (ulimit -l)"
    remedy = (
        "ulimit -l unlimited (limits.conf, docker run --ulimit memlock=-1), or lower HDMA_WINDOW_BYTES on all ranks"
    )
    yield Check("rdma memory", "warn" if limit < need else "ok", evidence, remedy if limit < need else "")


def _nearest(row: Found) -> Iterator[Check]:
    """GPUs next to a device that cannot be used."""
    usable = [any(port["gid_index"] is not None for port in device["ports"]) for device in row["devices"]]
    lost = []
    for gpu, distances in zip(row["gpus"], row["distances"]):
        best = min(distances)
        if best < SAME_NODE and any(usable) and not any(u for d, u in zip(distances, usable) if d == best):
            faults = [port["fault"] for port in row["devices"][distances.index(best)]["ports"] if port["fault"]]
            lost.append(f"GPU {gpu['number']} ({faults[0]})" if faults else f"GPU {gpu['number']}")
    if lost:
        evidence = f"the device nearest to {', '.join(lost)} cannot be used: a farther one is taken"
        yield Check("rdma nearest", "warn", evidence, "see the port; the ranks share the other devices meanwhile")


def _seen() -> list[str]:
    """Names of the devices that libibverbs shows; a provider for the kernel's driver is there for those."""
    try:
        verbs = ctypes.CDLL(LIBRARY)
        get_list, get_name = verbs.ibv_get_device_list, verbs.ibv_get_device_name
        get_list.restype, get_name.restype = ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p
        get_list.argtypes, get_name.argtypes = [ctypes.POINTER(ctypes.c_int)], [ctypes.c_void_p]
        verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        count = ctypes.c_int(0)
        devices = get_list(ctypes.byref(count))
        if not devices:
            return []
        names = [get_name(devices[i]).decode() for i in range(count.value)]
        verbs.ibv_free_device_list(devices)
    except (AttributeError, OSError):
        return []
    return names


def _locked_nbytes(root: str) -> int | None:
    """The kernel does not look at the limit where a process has CAP_IPC_LOCK in the host's namespace of users."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        lines = dict(line.split(":", 1) for line in Path(root, "proc/self/status").read_text().splitlines())
        own_namespace = Path(root, "proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
        may = int(lines["CapEff"], 16) >> _CAP_IPC_LOCK & 1
    except (OSError, ValueError, KeyError):
        may, own_namespace = os.geteuid() == 0, False
    return None if may and not own_namespace else soft
