"""Which ranks share a node, and which form a rail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

from hdma.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """`nodes` x `ranks_per_node` ranks.

    `order[n * ranks_per_node + l]` is the rank with local rank `l` on node `n`; by default ranks fill node after node.
    Local ranks follow the order of ranks within a node; nodes follow their lowest ranks.
    """

    nodes: int
    ranks_per_node: int
    order: tuple[int, ...] = ()
    _place: dict[int, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise UsageError(f"a topology of {self.nodes} nodes x {self.ranks_per_node} ranks has no rank")
        order = tuple(self.order) or tuple(range(self.size))
        if sorted(order) != list(range(self.size)):
            raise UsageError(f"order must hold each rank of 0..{self.size - 1} once, got {order}")
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "_place", {rank: i for i, rank in enumerate(order)})

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    def rank(self, node: int, local_rank: int) -> int:
        return self.order[node * self.ranks_per_node + local_rank]

    def node(self, rank: int) -> int:
        return self._place[rank] // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        return self._place[rank] % self.ranks_per_node

    def mates(self, rank: int) -> list[int]:
        """The other ranks of the node, in rotating order from the next local rank (so that not all turn to one)."""
        n, l, size = self.node(rank), self.local_rank(rank), self.ranks_per_node
        return [self.rank(n, (l + e) % size) for e in range(1, size)]

    def rail(self, rank: int) -> list[int]:
        """The ranks with the same local rank on the other nodes, in rotating order from the next node."""
        n, l = self.node(rank), self.local_rank(rank)
        return [self.rank((n + d) % self.nodes, l) for d in range(1, self.nodes)]

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def from_hosts(hosts: Sequence[str], ranks_per_node: int | None = None) -> Topology:
    """The topology of ranks whose memory handles can be passed exactly where `hosts[rank]` is equal.

    `ranks_per_node` splits each host into nodes of that many ranks (HDMA_RANKS_PER_NODE). Where the nodes would not all
    have the same number of ranks, all are split further, to the greatest number that divides them.
    """
    nodes = _nodes(hosts, ranks_per_node)
    equal = gcd(*map(len, nodes))
    nodes = [ranks[i : i + equal] for ranks in nodes for i in range(0, len(ranks), equal)]
    nodes.sort(key=lambda ranks: ranks[0])
    return Topology(len(nodes), equal, tuple(rank for ranks in nodes for rank in ranks))


def node_sizes(hosts: Sequence[str], ranks_per_node: int | None = None) -> list[int]:
    """How many ranks the nodes would have if none were split to make all equal."""
    return [len(ranks) for ranks in _nodes(hosts, ranks_per_node)]


def _nodes(hosts: Sequence[str], ranks_per_node: int | None) -> list[list[int]]:
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    nodes: list[list[int]] = []
    for ranks in by_host.values():
        step = ranks_per_node or len(ranks)
        nodes += [ranks[i : i + step] for i in range(0, len(ranks), step)]
    return nodes
