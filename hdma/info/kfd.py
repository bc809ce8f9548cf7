"""AMD GPUs and their links as the kernel's driver lists them: text files, for which no library need be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NODES = "/sys/class/kfd/kfd/topology/nodes"
_TYPES = {2: "PCIe", 11: "xGMI"}

Link = dict[str, Any]


def links(addresses: list[str], nodes: str = NODES) -> list[list[Link | None]]:
    """What links each GPU to each other, by PCI addresses: None where the kernel names no link; empty without its list.

    `type` xGMI or PCIe, `weight` (15 for one hop of xGMI), `engines`: the SDMA engines recommended for it, 0 for none.
    """
    by_node = {node: _properties(node) for node in _folders(Path(nodes))}
    numbers = {_address(properties): int(node.name) for node, properties in by_node.items() if _is_gpu(properties)}
    if not numbers:
        return []
    found: dict[tuple[int, int], Link] = {}
    for node in by_node:
        # Links through another device are in a folder of their own.
        for folder in (*_folders(node / "p2p_links"), *_folders(node / "io_links")):
            link = _properties(folder)
            kind = _TYPES.get(link.get("type", -1), f"type {link.get('type', '?')}")
            row = {"type": kind, "weight": link.get("weight", 0)}
            row["engines"] = link.get("recommended_sdma_engine_id_mask", 0)
            found[int(node.name), link.get("node_to", -1)] = row
    mine = [numbers.get(address.lower(), -1) for address in addresses]
    return [[found.get((a, b)) if a != b else None for b in mine] for a in mine]


def _is_gpu(properties: dict[str, int]) -> bool:
    return properties.get("simd_count", 0) > 0


def _address(properties: dict[str, int]) -> str:
    place = properties.get("location_id", 0)
    return f"{properties.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"


def _properties(folder: Path) -> dict[str, int]:
    """Numbers by name; empty for what a container may not read."""
    try:
        lines = (folder / "properties").read_text(errors="replace").split("\n")
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _folders(above: Path) -> list[Path]:
    try:
        return sorted(path for path in above.iterdir() if path.name.isdecimal())
    except OSError:
        return []
