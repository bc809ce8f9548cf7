"""AllReduce, in place: a ReduceScatter and an AllGather in one plan; small tensors in one shot.

Both plans add in the order of ReduceScatter, so that all ranks and all runs have the same bits. `all_reduce` moves
2 (nodes - 1) shards over a NIC, the minimum, in two rounds of flags; `all_reduce_once` is a ReduceScatter in which
every rank owns the whole tensor: one round, but (nodes - 1) tensors over a NIC and (ranks - 1) inside a node.
"""

from __future__ import annotations

from hdma.algorithms.all_gather import Gather, gather, stage_lane
from hdma.algorithms.reduce_scatter import Sum, parts, scatter_and_sum
from hdma.plan import Steps


def all_reduce(s: Steps) -> None:
    """Writes the steps of AllReduce of a tensor of `size` shards; each shard becomes the sum of all ranks'."""
    count = len(s.chunks)
    s.uses(scatter=parts(s), sum=count, stage=count, rail=2 * count)
    scatter_and_sum(Sum(s, result=lambda c: s.place("output", s.rank, c), reduced=stage_lane(s) == "near"))
    s.go_on(rail=count)
    everyone = frozenset(range(s.topology.size))
    gather(Gather(s, senders=everyone, own=lambda c: s.place("output", s.rank, c), reduced=True))
    s.phase()
    s.leave()


def all_reduce_once(s: Steps) -> None:
    """Writes the steps of AllReduce of a tensor of one shard, which becomes the sum of all ranks'."""
    s.uses(scatter=parts(s), sum=len(s.chunks), rail=len(s.chunks))
    scatter_and_sum(Sum(s, result=lambda c: s.place("output", 0, c), shard=lambda owner: 0, whole=True))
    s.phase()
    s.leave()
