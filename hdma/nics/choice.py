"""Which port a rank could use, how near each is, and why there is none."""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass

from hdma.nics.sysfs import Gid, Nic, Place, Port, gpu_place, own_numa_node

LIBRARY = "libibverbs.so.1"
ROCE = "RoCE v2"
# Added to the bridges on the way, of which there are fewer than a hundred: what lies between two PCI devices.
HOST_BRIDGE, SAME_NODE, OTHER_NODE = 100, 200, 300
NO_DISTANCE = 1000  # of a device that is nowhere on PCI


@dataclass(frozen=True)
class Offer:
    """A port that a rank could use. Its fields are plain: `Offer(**json)` and `asdict(offer)` are inverse.

    `position`: in the list of all ports that HDMA_NIC admits on this host, usable or not; equal on hosts that are built
    alike. `distance`: see `distance()`. `told`: HDMA_NIC names only this device.
    """

    device: str
    port: int
    gid_index: int
    gid: str
    link_layer: str  # InfiniBand or Ethernet
    fabric: str  # what both ends of a queue pair must share: an InfiniBand subnet, or RoCE v2 over one family of IP
    rate_gbit_s: float
    distance: int
    position: int
    told: bool

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class Reason:
    """Why a rank, or a port, cannot be used. `kind`: none (no RDMA device exists), device or usage (a setting)."""

    kind: str
    text: str
    remedy: str


def choose(
    nics: Sequence[Nic], wanted: str | None = None, gid_index: int | None = None, gpu: str = "", root: str = "/"
) -> list[Offer]:
    """The ports that this rank could use, the nearest first; none if there is no such port, see `why_none()`.

    `nics` of `find()`, `wanted` of HDMA_NIC, `gid_index` of HDMA_GID_INDEX, `gpu`: the PCI address of the rank's GPU,
    empty for host memory. Ports equally near come with the fastest first, then by position.
    """
    place = gpu_place(gpu, root) if gpu else None
    own_node = own_numa_node(root)
    ports = admitted(nics, wanted)
    told = bool(wanted) and not str(wanted).startswith("^") and len({nic.name for nic, _ in ports}) == 1
    offers = []
    for position, (nic, port) in enumerate(ports):
        gid = _gid(port, gid_index)
        if gid is None or fault(nic, port, gid_index):
            continue
        fabric = (
            f"InfiniBand subnet {gid.address[:19]}" if port.link_layer == "InfiniBand" else f"{ROCE} over {gid.family}"
        )
        far = distance(place, nic) if gpu else _distance_of_host_memory(own_node, nic)
        about = (port.link_layer, fabric, port.rate_gbit_s, far, position, told)
        offers.append(Offer(nic.name, port.number, gid.index, gid.address, *about))
    return sorted(offers, key=lambda offer: (offer.distance, -offer.rate_gbit_s, offer.position))


def admitted(nics: Sequence[Nic], wanted: str | None) -> list[tuple[Nic, Port]]:
    """The ports that HDMA_NIC admits (`device` or `device:port` by commas, after ^: all others), usable or not."""
    text = wanted or ""
    names = {name for name in text.removeprefix("^").split(",") if name}
    inverse = not names or text.startswith("^")
    ports = [(nic, port) for nic in nics for port in nic.ports]
    return [(nic, port) for nic, port in ports if bool(names & {nic.name, f"{nic.name}:{port.number}"}) != inverse]


def distance(gpu: Place | None, nic: Nic) -> int:
    """Hops up from the GPU to the bridge above both and down to the NIC, and more if there is no such bridge.

    Below HOST_BRIDGE: some switch is above both; from there, SAME_NODE and OTHER_NODE on: the way leads over their host
    bridge, between host bridges of one NUMA node, or between NUMA nodes. NO_DISTANCE: one of them is not on PCI.
    """
    if gpu is None or nic.place is None:
        return NO_DISTANCE
    a, b = gpu.path, nic.place.path
    common = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    hops = len(a) + len(b) - 2 * common
    if common:
        return hops if common > 1 else HOST_BRIDGE + hops
    return (SAME_NODE if gpu.numa_node == nic.numa_node else OTHER_NODE) + hops


def _distance_of_host_memory(own_node: int | None, nic: Nic) -> int:
    if nic.place is None:
        return NO_DISTANCE
    return SAME_NODE if own_node in (None, nic.numa_node) or nic.numa_node < 0 else OTHER_NODE


def _gid(port: Port, forced: int | None) -> Gid | None:
    if forced is not None or port.link_layer == "InfiniBand":
        gid = next((gid for gid in port.gids if gid.index == (forced or 0)), None)
        return gid if gid and (port.link_layer == "InfiniBand" or gid.kind == ROCE) else None
    usable = [gid for gid in port.gids if gid.kind == ROCE]
    order = ("IPv4", "IPv6", "link-local IPv6")
    return min(usable, key=lambda gid: (order.index(gid.family), gid.index), default=None)


def library_error() -> str:
    """Why libibverbs cannot be loaded; empty if it can."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return str(error)
    return ""


def why_none(nics: Sequence[Nic], wanted: str | None = None, gid_index: int | None = None) -> Reason:
    """Why `choose()` gave nothing."""
    if not any(nic.ports for nic in nics):
        text = "there is no RDMA device: /sys/class/infiniband is empty"
        return Reason(
            "none", text, "load the driver of the device (rdma link shows it then), or use hosts that have one"
        )
    ports = admitted(nics, wanted)
    if not ports:
        there = ", ".join(f"{nic.name}:{port.number}" for nic in nics for port in nic.ports)
        verb = "excludes every" if str(wanted).startswith("^") else "names no"
        return Reason("usage", f"HDMA_NIC={wanted} {verb} RDMA device of this host", f"set it to one of {there}")
    faults = [found for nic, port in ports if (found := fault(nic, port, gid_index))]
    kind = "usage" if any(found.kind == "usage" for found in faults) else "device"
    texts, remedies = ("; ".join(dict.fromkeys(lines)) for lines in zip(*((f.text, f.remedy) for f in faults)))
    return Reason(kind, texts, remedies)


def fault(nic: Nic, port: Port, gid_index: int | None = None) -> Reason | None:
    """What keeps a port from being used, if anything does."""
    name, interface = f"{nic.name} port {port.number}", ", ".join(nic.netdevs) or "its network interface"
    if nic.kind == "RNIC" or port.link_layer not in ("InfiniBand", "Ethernet"):
        what = "an iWARP device" if nic.kind == "RNIC" else f"of link layer {port.link_layer or 'unknown'}"
        return Reason("device", f"{name} is {what}", "only InfiniBand and RoCE v2 are supported")
    if port.state != "ACTIVE":
        return _link_fault(name, port, interface)
    if _gid(port, gid_index) is None:
        table = ", ".join(map(str, port.gids)) or "empty"
        if gid_index is not None:
            what = "entry" if port.link_layer == "InfiniBand" else f"{ROCE} entry"
            text = f"HDMA_GID_INDEX={gid_index} is no {what} of the GID table of {name}, which is {table}"
            return Reason("usage", text, "unset HDMA_GID_INDEX to have one chosen")
        if port.link_layer == "InfiniBand":
            return Reason("device", f"{name} has no GID at index 0; its table is {table}", "look at the subnet manager")
        text = f"{name} has no {ROCE} GID (its table: {table}): {interface} has no address, or is of another namespace"
        return Reason("device", text, f"ip address add ADDRESS/BITS dev {interface}, or start with the host's network")
    return _permission_fault(nic)


def _link_fault(name: str, port: Port, interface: str) -> Reason:
    text = f"{name} is {port.state or 'in an unknown state'} (physical state {port.physical_state or 'unknown'})"
    if port.link_layer == "Ethernet":
        remedy = f"ip link set {interface} up, and look at its link (ethtool, cable, switch)"
        return Reason("device", f"{text}: {interface} is down or has no link", remedy)
    if port.state in ("INIT", "ARMED"):
        remedy = "start a subnet manager (opensm), or look at the one of the switch"
        return Reason("device", f"{text}: no subnet manager has configured it", remedy)
    return Reason("device", f"{text}: it has no link", "look at cable and switch (ibstat, iblinkinfo)")


def _permission_fault(nic: Nic) -> Reason | None:
    if not nic.uverbs:
        text = f"{nic.name} has no character device /dev/infiniband/uverbs*"
        return Reason("device", text, "modprobe ib_uverbs")
    if not nic.open_error:
        return None
    container = "give the container the devices (docker run --device /dev/infiniband)"
    try:
        status = os.stat(nic.uverbs)
    except OSError:
        return Reason("device", f"{nic.uverbs} of {nic.name} cannot be opened: {nic.open_error}", container)
    user, group = _name_of_user(os.geteuid()), _name_of_group(status.st_gid)
    text = f"user {user} cannot open {nic.uverbs} of {nic.name}: {nic.open_error}"
    text += f" (mode {status.st_mode & 0o777:o}, group {group})"
    return Reason(
        "device", text, f"add the user to group {group}, chmod 666 {nic.uverbs} by a udev rule, or {container}"
    )


def _name_of_user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _name_of_group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
