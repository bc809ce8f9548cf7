"""RDMA devices as the kernel lists them: text files and links, for which no library need be loaded.

The files are described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_UNKNOWN_NODE = -1  # as the kernel writes it


@dataclass(frozen=True)
class Gid:
    """An entry of a port's table of GIDs. `kind` as the kernel writes it: "RoCE v2" or "IB/RoCE v1"."""

    index: int
    address: str
    kind: str
    netdev: str

    @property
    def family(self) -> str:
        """Over what a packet to such a GID goes: IPv4, IPv6 or link-local IPv6."""
        address = IPv6Address(self.address)
        return "IPv4" if address.ipv4_mapped else "link-local IPv6" if address.is_link_local else "IPv6"

    def __str__(self) -> str:
        mapped = IPv6Address(self.address).ipv4_mapped
        return f"{self.index}: {mapped or IPv6Address(self.address)} ({self.kind or 'of unknown type'})"


@dataclass(frozen=True)
class Port:
    """`state` and `physical_state` are the kernel's words (ACTIVE, DOWN, INIT, ...; LinkUp, Polling, Disabled, ...)."""

    number: int
    state: str
    physical_state: str
    link_layer: str  # InfiniBand, Ethernet, or Unspecified
    rate: str  # the kernel's text, such as "100 Gb/sec (4X EDR)"
    lid: int
    gids: tuple[Gid, ...]

    @property
    def rate_gbit_s(self) -> float:
        found = re.match(r"[\d.]+", self.rate)
        return float(found[0]) if found else 0.0


@dataclass(frozen=True)
class Place:
    """Where a PCI device is: `path` leads from the host bridge over all bridges to its own address, which is last."""

    path: tuple[str, ...]
    numa_node: int

    @property
    def pci(self) -> str:
        return self.path[-1]


@dataclass(frozen=True)
class Nic:
    """An RDMA device; `place` is None for virtual ones (rxe, siw)."""

    name: str
    kind: str  # the node type: CA, or RNIC for iWARP, ...
    place: Place | None
    netdevs: tuple[str, ...]
    uverbs: str  # its character device; empty where the kernel offers none
    open_error: str  # why this process may not open that for reading and writing; empty if it may
    ports: tuple[Port, ...]

    @property
    def pci(self) -> str:
        return self.place.pci if self.place else ""

    @property
    def numa_node(self) -> int:
        return self.place.numa_node if self.place else _UNKNOWN_NODE


def find(root: str = "/") -> list[Nic]:
    """All RDMA devices of this host, by name (mlx5_2 before mlx5_10), virtual ones last. `root`: of sys/ and dev/."""
    verbs = _verbs_devices(root)
    nics = [_nic(folder, verbs.get(folder.name, ""), root) for folder in _folders(Path(root, "sys/class/infiniband"))]
    return sorted(nics, key=lambda nic: (nic.place is None, _natural(nic.name)))


def gpu_place(address: str, root: str = "/") -> Place | None:
    """Where the device with this PCI address is, written as CUDA, HIP or nvidia-smi do; None if the kernel has none."""
    domain, _, rest = address.strip().lower().partition(":")
    name = f"{int(domain, 16):04x}:{rest}" if re.fullmatch("[0-9a-f]+", domain) else ""
    folder = Path(root, "sys/bus/pci/devices", name)
    return _place(folder) if name and folder.exists() else None


def own_numa_node(root: str = "/") -> int | None:
    """The NUMA node to which this process is bound; None if it may run on several or there is but one."""
    own, nodes = os.sched_getaffinity(0), _folders(Path(root, "sys/devices/system/node"))
    cpus = {node.name: _cpus(_read(node / "cpulist")) for node in nodes if re.fullmatch(r"node\d+", node.name)}
    found = [int(name.removeprefix("node")) for name, there in cpus.items() if own & there]
    return found[0] if len(found) == 1 and len(cpus) > 1 else None


def _nic(folder: Path, uverbs: str, root: str) -> Nic:
    ports = tuple(
        _port(port) for port in sorted(_folders(folder / "ports"), key=lambda p: int(p.name)) if port.name.isdecimal()
    )
    netdevs = {gid.netdev for port in ports for gid in port.gids if gid.netdev}
    # IPoIB's and those without an address are beside the PCI device; that of rxe is in a file of its own.
    netdevs |= {net.name for net in _folders(folder / "device" / "net")} | {*_read(folder / "parent").split()}
    place = _place(folder / "device") if (folder / "device").exists() else None
    path = str(Path(root, "dev/infiniband", uverbs)) if uverbs else ""
    kind = _word(folder / "node_type")
    return Nic(folder.name, kind, place, tuple(sorted(netdevs)), path, _open_error(path), ports)


def _port(folder: Path) -> Port:
    lid = _read(folder / "lid")
    return Port(
        int(folder.name),
        _word(folder / "state"),
        _word(folder / "phys_state"),
        _read(folder / "link_layer"),
        _read(folder / "rate"),
        int(lid, 16) if re.fullmatch("0x[0-9a-f]+", lid) else 0,
        tuple(_gids(folder)),
    )


def _gids(port: Path) -> list[Gid]:
    found = []
    for index in sorted(int(path.name) for path in _folders(port / "gids") if path.name.isdecimal()):
        # Entries not in use are zero, and their attributes cannot be read (EINVAL); some kernels refuse both.
        address = _read(f"{port}/gids/{index}")
        if address.strip("0:"):
            kind, netdev = (_read(f"{port}/gid_attrs/{name}/{index}") for name in ("types", "ndevs"))
            found.append(Gid(index, address, kind, netdev))
    return found


def _place(link: Path) -> Place | None:
    """Of what a link leads to, or of the PCI device above it (virtio)."""
    parts = Path(os.path.realpath(link)).parts
    addresses = [i for i, part in enumerate(parts) if _PCI.fullmatch(part)]
    if not addresses:
        return None
    path = parts[addresses[0] - 1 : addresses[-1] + 1]  # from the host bridge, pci0000:00
    numa = _read(Path(*parts[: addresses[-1] + 1], "numa_node"))
    return Place(path, int(numa) if re.fullmatch(r"-?\d+", numa) else _UNKNOWN_NODE)


def _verbs_devices(root: str) -> dict[str, str]:
    return {_read(folder / "ibdev"): folder.name for folder in _folders(Path(root, "sys/class/infiniband_verbs"))}


def _open_error(path: str) -> str:
    """Found by opening it: a container's device rules refuse what the file's mode allows."""
    if not path:
        return ""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _cpus(text: str) -> set[int]:
    ends = [part.split("-") for part in text.split(",") if part]
    return {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}


def _word(path: Path) -> str:
    """ACTIVE of "4: ACTIVE"."""
    return _read(path).partition(": ")[2]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or -1), text) for digits, text in re.findall(r"(\d+)|(\D+)", name)]


def _read(path: str | Path) -> str:
    """Without a file object: tables of GIDs have up to a thousand entries, a file each."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 4096).decode(errors="replace").strip()
        finally:
            os.close(file)
    except OSError:
        return ""


def _folders(above: Path) -> list[Path]:
    try:
        return sorted(above.iterdir())
    except OSError:
        return []
