"""What each collective promises, apart from how a plan does it: the table that plans are proved against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hdma.errors import UsageError
from hdma.plan import Plan
from hdma.topology import Topology

# A source (rank, shard of its input), or a sum of trees in this order. A sum of one tree is that tree.
Tree: TypeAlias = "tuple[int, int] | list[Tree]"


@dataclass(frozen=True)
class Meaning:
    """`input_shards` and `output_shards` a rank, what each output shard holds, and the least bytes that a NIC carries.

    Where `gives`, every output shard is marked once as complete; where `needs`, the caller pushes its input shard by
    shard; where `in_place`, input and output are one tensor. `like_all`: every node does what node 0 does.
    """

    input_shards: int
    output_shards: int
    holds: Callable[[int, int], Tree]
    put_nbytes: Callable[[int], int]
    gives: bool = False
    needs: bool = False
    in_place: bool = False
    like_all: bool = True


def meaning(plan: Plan) -> Meaning:
    """The promise of the plan's operation. Raises `UsageError` for an operation that has no row here."""
    row = MEANINGS.get(plan.operation)
    if row is None:
        raise UsageError(f"the simulator knows no operation {plan.operation!r}: there are {', '.join(MEANINGS)}")
    return row(plan)


def _all_gather(plan: Plan) -> Meaning:
    put_nbytes, size = _leaving(plan), plan.topology.size
    if plan.variant.in_place:
        holds = lambda rank, shard: (shard, shard)  # noqa: E731
        return Meaning(size, size, holds, lambda rank: put_nbytes, gives=True, in_place=True)
    return Meaning(1, size, lambda rank, shard: (shard, 0), lambda rank: put_nbytes, gives=True)


def _reduce_scatter(plan: Plan) -> Meaning:
    t, put_nbytes = plan.topology, _leaving(plan) * plan.variant.wire_ratio
    return Meaning(t.size, 1, lambda rank, shard: _sum_by_node(t, rank), lambda rank: put_nbytes, needs=True)


def _all_reduce(plan: Plan) -> Meaning:
    t, put_nbytes = plan.topology, _leaving(plan) * (plan.variant.wire_ratio + 1)
    return Meaning(t.size, t.size, lambda rank, shard: _sum_by_node(t, shard), lambda rank: put_nbytes, in_place=True)


def _all_reduce_once(plan: Plan) -> Meaning:
    t, put_nbytes = plan.topology, _leaving(plan) * plan.variant.wire_ratio
    return Meaning(1, 1, lambda rank, shard: _sum_by_node(t, 0), lambda rank: put_nbytes, in_place=True)


def _broadcast(plan: Plan) -> Meaning:
    root, put_nbytes = plan.variant.root, _leaving(plan)
    return Meaning(
        1,
        1,
        lambda rank, shard: (root, 0),
        lambda rank: put_nbytes if rank == root else 0,
        in_place=True,
        like_all=False,
    )


def _all_to_all(plan: Plan) -> Meaning:
    t, put_nbytes = plan.topology, _leaving(plan) * plan.topology.ranks_per_node
    return Meaning(
        t.size, t.size, lambda rank, shard: (shard, rank), lambda rank: put_nbytes, gives=plan.variant.direct
    )


def _leaving(plan: Plan) -> int:
    """A shard for each other node."""
    return (plan.topology.nodes - 1) * plan.nbytes


def _sum_by_node(t: Topology, shard: int) -> Tree:
    """Within a node by local rank, then by node: the order that fixes the bits of the result."""
    return [[(t.rank(m, j), shard) for j in range(t.ranks_per_node)] for m in range(t.nodes)]


MEANINGS: dict[str, Callable[[Plan], Meaning]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_reduce_once": _all_reduce_once,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}


def sources(tree: Tree) -> Iterator[tuple[int, int]]:
    """The leaves of the tree, in order."""
    if isinstance(tree, tuple):
        yield tree
    else:
        for part in tree:
            yield from sources(part)
