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
    shard.
    """

    input_shards: int
    output_shards: int
    holds: Callable[[int, int], Tree]
    put_nbytes: int
    gives: bool = False
    needs: bool = False


def meaning(plan: Plan) -> Meaning:
    """The promise of the plan's operation. Raises `UsageError` for an operation that has no row here."""
    row = MEANINGS.get(plan.operation)
    if row is None:
        raise UsageError(f"the simulator knows no operation {plan.operation!r}: there are {', '.join(MEANINGS)}")
    return row(plan)


def _all_gather(plan: Plan) -> Meaning:
    t = plan.topology
    return Meaning(1, t.size, lambda rank, shard: (shard, 0), (t.nodes - 1) * plan.nbytes, gives=True)


def _reduce_scatter(plan: Plan) -> Meaning:
    t = plan.topology
    put_nbytes = (t.nodes - 1) * plan.nbytes * plan.variant.wire_ratio
    return Meaning(t.size, 1, lambda rank, shard: _sum_by_node(t, rank), put_nbytes, needs=True)


def _sum_by_node(t: Topology, shard: int) -> Tree:
    """Within a node by local rank, then by node: the order that fixes the bits of the result."""
    return [[(t.rank(m, j), shard) for j in range(t.ranks_per_node)] for m in range(t.nodes)]


MEANINGS: dict[str, Callable[[Plan], Meaning]] = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}


def sources(tree: Tree) -> Iterator[tuple[int, int]]:
    """The leaves of the tree, in order."""
    if isinstance(tree, tuple):
        yield tree
    else:
        for part in tree:
            yield from sources(part)
