"""Made-up trees of /sys and /dev with RDMA devices and GPUs, linked as the kernel links them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

V1, V2 = "IB/RoCE v1", "RoCE v2"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"
GLOBAL = "fd00:0000:0000:0001:0000:0000:0000:0007"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
# What a RoCE port has with an IPv4 address: the entries from 4 on are empty.
ROCE = ((LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2))
INFINIBAND = ((LINK_LOCAL, V1),)


class Tree:
    def __init__(self, root: Path) -> None:
        self.root, self._uverbs = root, 0
        self.write("sys/devices/system/node/node0/cpulist", "0-1023")

    def __str__(self) -> str:
        return str(self.root)

    def write(self, path: str | Path, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))

    def pci(self, path: str, numa_node: int = 0) -> str:
        """A PCI device below bridges: pci0000:00/0000:00:01.0/0000:01:00.0. Gives its folder."""
        folder = f"sys/devices/{path}"
        self.write(f"{folder}/numa_node", str(numa_node))
        self.link(f"sys/bus/pci/devices/{path.rpartition('/')[2]}", folder)
        return folder

    def nic(
        self,
        name: str,
        path: str = "",
        numa_node: int = 0,
        *,
        gids: Sequence[tuple[str, str]] = ROCE,
        layer: str = "Ethernet",
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        rate: str = "100 Gb/sec (2X HDR)",
        netdev: str = "",
        ports: int = 1,
        node_type: str = "1: CA",
        device_file: bool = True,
    ) -> None:
        """An RDMA device, of a PCI device or (no path) virtual."""
        above = self.pci(path, numa_node) if path else "sys/devices/virtual"
        folder = f"{above}/infiniband/{name}"
        netdev = netdev or f"net-{name}"
        self.write(f"{folder}/node_type", node_type)
        if path:
            self.link(f"{folder}/device", above)
            self.write(f"{above}/net/{netdev}/dev_port", "0")
        else:
            self.write(f"{folder}/parent", netdev)
        for number in range(1, ports + 1):
            port = f"{folder}/ports/{number}"
            lid = "0x12" if layer == "InfiniBand" else "0x0"
            for file, text in {"state": state, "phys_state": physical, "link_layer": layer, "rate": rate}.items():
                self.write(f"{port}/{file}", text)
            self.write(f"{port}/lid", lid)
            self._gids(port, gids, netdev if layer == "Ethernet" else "")
        self.link(f"sys/class/infiniband/{name}", folder)
        verbs = f"uverbs{self._uverbs}"
        self._uverbs += 1
        self.write(f"{above}/infiniband_verbs/{verbs}/ibdev", name)
        self.link(f"sys/class/infiniband_verbs/{verbs}", f"{above}/infiniband_verbs/{verbs}")
        if device_file:
            self.write(f"dev/infiniband/{verbs}", "")

    def _gids(self, port: str, gids: Sequence[tuple[str, str]], netdev: str) -> None:
        for index in range(len(gids) + 2):
            address, kind = gids[index] if index < len(gids) else (ZERO, "")
            self.write(f"{port}/gids/{index}", address)
            for attribute, text in (("types", kind), ("ndevs", netdev if kind else "")):
                file = f"{port}/gid_attrs/{attribute}/{index}"
                if text:
                    self.write(file, text)
                else:  # To be read no more than the kernel's: an error also for root.
                    (self.root / file).mkdir(parents=True)


def dgx(root: Path) -> tuple[Tree, list[str]]:
    """Eight GPUs and eight InfiniBand devices in pairs below switches, four switches a NUMA node; two Ethernet devices
    for storage at host bridges of their own. Gives the addresses of the GPUs."""
    tree, gpus = Tree(root), []
    for i in range(8):
        bus = 0x10 + 0x10 * i
        top = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        gpu = f"0000:{bus + 3:02x}:00.0"
        tree.pci(f"{top}/0000:{bus + 2:02x}:00.0/{gpu}", i // 4)
        # Named in another order than the GPUs are.
        number = 7 - i if i < 4 else i + 6
        path = f"{top}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0"
        tree.nic(f"mlx5_{number}", path, i // 4, gids=INFINIBAND, layer="InfiniBand", rate="400 Gb/sec (4X NDR)")
        gpus.append(gpu)
    for node in (0, 1):
        tree.nic(
            f"mlx5_{20 + node}", f"pci0000:{0xE0 + node:x}/0000:{0xE0 + node:x}:01.0/0000:{0xE8 + node:x}:00.0", node
        )
    return tree, gpus
