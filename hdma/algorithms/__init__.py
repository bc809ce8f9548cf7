"""The collectives, one file each: a function that writes one rank's steps. To add one: a file and a row here."""

from __future__ import annotations

from hdma.algorithms.all_gather import all_gather
from hdma.algorithms.all_reduce import all_reduce, all_reduce_once
from hdma.algorithms.all_to_all import all_to_all
from hdma.algorithms.broadcast import broadcast
from hdma.algorithms.reduce_scatter import reduce_scatter
from hdma.errors import UsageError
from hdma.layout import Layout
from hdma.plan import Builder, Plan, Variant
from hdma.topology import Topology

BUILDERS: dict[str, Builder] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_reduce_once": all_reduce_once,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
}
# Those whose shards can be pushed or waited for one by one.
SHARD_MAJOR = ("all_gather", "reduce_scatter")
# Those that can read node mates' tensors where they are.
DIRECT = ("all_gather", "broadcast", "all_to_all")

# Chunks of one plan. More hide the fill and drain of the pipeline better; fewer keep a plan small.
MAX_CHUNKS = 16
# Nothing bounds a read of a mate's tensor; longer ones only make a wait for all of it longer than need be.
MAX_DIRECT_NBYTES = 1 << 30
# AllGather gives a slot back this many skews after it was written; the next write must not wait for that.
MIN_SLOTS_PER_SKEW = 3


def max_shard_nbytes(layout: Layout, variant: Variant) -> int:
    """The longest shard that one plan carries; shard-major plans hold every chunk of a shard in the rings at once.

    Raises `UsageError` where not even one element fits a slot.
    """
    if variant.direct:
        return MAX_DIRECT_NBYTES
    chunks = layout.slots if variant.shard_major else MAX_CHUNKS
    longest = chunks * Plan.chunk_nbytes(layout, variant)
    if not longest:
        raise UsageError(
            f"an element of {variant.element_nbytes} bytes does not fit a slot of {layout.slot_nbytes} bytes: view the "
            "tensor as a smaller dtype, or set HDMA_CHUNK_BYTES (and HDMA_WINDOW_BYTES) higher"
        )
    return longest


def build(operation: str, layout: Layout, nbytes: int, variant: Variant) -> Plan:
    """The plan of a collective. Raises `UsageError` for an unknown operation or a shard that does not fit one plan."""
    if operation not in BUILDERS:
        raise UsageError(f"no operation {operation!r}: there are {', '.join(BUILDERS)}")
    if nbytes < 0 or nbytes % variant.element_nbytes:
        raise UsageError(f"{nbytes} bytes are not whole elements of {variant.element_nbytes} bytes")
    if variant.shard_major and operation not in SHARD_MAJOR:
        raise UsageError(f"{operation} has no shard-major plan: {', '.join(SHARD_MAJOR)} have")
    if variant.direct and (operation not in DIRECT or layout.topology.nodes > 1 or variant.shard_major):
        raise UsageError(f"only {', '.join(DIRECT)} within one node read tensors directly, not {operation} ({variant})")
    if variant.in_place and (operation != "all_gather" or not variant.direct):
        raise UsageError(f"only a direct all_gather has a plan for tensors in place, not {operation} ({variant})")
    if not 0 <= variant.root < layout.topology.size:
        raise UsageError(f"root must be a rank, 0 to {layout.topology.size - 1}, not {variant.root}")
    if layout.slots < MIN_SLOTS_PER_SKEW * variant.skew + 1:
        raise UsageError(
            f"{layout.slots} slots a ring deadlock with a skew of {variant.skew} chunks: give "
            f"{MIN_SLOTS_PER_SKEW * variant.skew + 1} slots, or skew 0"
        )
    longest = max_shard_nbytes(layout, variant)
    if nbytes > longest:
        raise UsageError(f"a shard of {nbytes} bytes is longer than one plan carries ({longest}): run it in pieces")
    return Plan(operation, layout, nbytes, variant, BUILDERS[operation])


def make_plan(
    operation: str,
    nodes: int,
    ranks_per_node: int,
    nbytes: int,
    *,
    element_nbytes: int = 1,
    wire_nbytes: int = 0,
    slots: int = 4,
    chunk_nbytes: int | None = None,
    skew: int | None = None,
    shard_major: bool = False,
    root: int = 0,
) -> Plan:
    """The plan of `operation` for shards of `nbytes` bytes; `print(plan)` shows it, `hdma.simulate(plan)` proves it.

    The slots are made as large as `nbytes` in MAX_CHUNKS chunks needs (or `chunk_nbytes`).
    Raises `UsageError` for what cannot be built.
    """
    for name, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node), ("nbytes", nbytes)):
        if not isinstance(value, int):
            raise UsageError(f"{name} must be a whole number (an int), not {value!r}")
    variant = Variant(
        element_nbytes, wire_nbytes, (1 if slots >= 4 else 0) if skew is None else skew, shard_major, root
    )
    most = slots if shard_major else MAX_CHUNKS
    if chunk_nbytes is None:
        chunk_nbytes = -(-max(nbytes, 1) // (most * element_nbytes)) * element_nbytes
    layout = Layout(Topology(nodes, ranks_per_node), slots, chunk_nbytes * variant.wire_ratio)
    return build(operation, layout, nbytes, variant)
