"""What a communicator takes from each of its ranks: memory, descriptors, threads."""

from __future__ import annotations

from typing import Any

from hdma import _core, env, gpu
from hdma.communicator import DEFAULT_CHUNK_NBYTES, DEFAULT_WINDOW_NBYTES, SLOTS
from hdma.layout import Layout
from hdma.plan import PROXY_LANES
from hdma.topology import Topology

GRIDS = ((1, 2), (1, 8), (2, 2), (2, 8), (4, 8), (8, 8))
# Flags, window and doorbell: of the rank itself, and of each node mate.
_HANDLES = 3
# Listeners and handshakes while a communicator starts; epoll and the like while it runs.
_PASSING = 8


def group(nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """What one communicator of this grid takes. Raises `UsageError` where HDMA_WINDOW_BYTES is too small for it.

    `window_nbytes` and `flags_nbytes` of a rank, both taken once however often the communicator is used, the window at
    its first collective; `node_nbytes` of all ranks of a node; `descriptors` of a rank. With its first call on a GPU it
    takes, of each rank, `gpu_window_nbytes` there and has `pinned_nbytes` of host memory pinned: the flags of the node
    and, between nodes, what travels.
    """
    topology = Topology(nodes, ranks_per_node)
    chunk_nbytes = env.CHUNK_NBYTES.read() or DEFAULT_CHUNK_NBYTES
    layout = Layout.for_window(topology, SLOTS, env.WINDOW_NBYTES.read() or DEFAULT_WINDOW_NBYTES, chunk_nbytes)
    flags_nbytes = _core.flags_nbytes(layout.flag_count)
    on_gpu = gpu.layout_of(topology)
    return {
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "slot_nbytes": layout.slot_nbytes,
        "window_nbytes": layout.window_nbytes,
        "flags_nbytes": flags_nbytes,
        "node_nbytes": ranks_per_node * (layout.window_nbytes + flags_nbytes),
        "descriptors": descriptors(nodes, ranks_per_node),
        "gpu_window_nbytes": on_gpu.window_nbytes,
        "pinned_nbytes": ranks_per_node * flags_nbytes + (on_gpu.window_nbytes if nodes > 1 else 0),
    }


def descriptors(nodes: int, ranks_per_node: int) -> int:
    """File descriptors of a rank for one communicator, with those that its start needs."""
    mates, rail = ranks_per_node - 1, nodes - 1
    return _HANDLES * (1 + mates) + mates + (1 + len(PROXY_LANES)) * rail + _PASSING


def threads(nodes: int) -> int:
    """Threads of a rank besides the program's: worker and control, and between nodes the proxy."""
    return 2 if nodes == 1 else 3
