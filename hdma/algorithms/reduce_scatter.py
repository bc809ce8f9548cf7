"""ReduceScatter: slices scattered to their owners in the node, summed there, node sums put on the rail, summed again.

For each chunk, for each destination node, the own node last (the other nesting deadlocks with bounded slots):

    node mates (n, j)                owner (n, l)                              rail peer (m, l)
    input slice  --copy-->  scatter slots ++ own input slice -> sum slot --put--> rail slots ++ own sum slot -> output

One builder for every grid. Accumulation is wide and in fixed order: within a node by local rank, then by node. A NIC
carries (nodes - 1) shards a rank, the minimum.

Lanes: near = scatter; rail = node sum and final sum; put, credit = the proxy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hdma.layout import Flag, Ring
from hdma.plan import Chunk, Place, Steps


def reduce_scatter(s: Steps) -> None:
    """Writes the steps of ReduceScatter; the output is the sum over ranks q of shard `rank` of q's input."""
    s.uses(scatter=parts(s), sum=len(s.chunks), rail=len(s.chunks))
    scatter_and_sum(Sum(s, result=lambda c: s.place("output", 0, c)))
    s.phase()
    s.leave()


@dataclass(frozen=True)
class Sum:
    """Sums of every rank's slices at their owners; all_reduce is made of it too.

    result: where the sum of a chunk goes. shard: the input shard that a rank owns. whole: the result overwrites what
    the near lane scatters, which must say when it is done. reduced: another lane goes on with the result.
    """

    s: Steps
    result: Callable[[Chunk], Place]
    shard: Callable[[int], int] = lambda owner: owner
    whole: bool = False
    reduced: bool = False


def scatter_and_sum(r: Sum) -> None:
    """Every chunk through every phase; the caller leaves."""
    s = r.s
    nodes = s.topology.nodes
    if s.variant.shard_major:
        # Destination by destination; safe because at most S chunks use each slot of the sum and rail rings once.
        order = [(c, d) for d in range(nodes) for c in s.chunks]
    else:
        order = [(c, d) for c in s.chunks for d in range(nodes)]
    # Parts by which the node sums trail the scatter, and the final sums trail the node sums (a chunk).
    skew = s.variant.skew
    trail = skew * nodes
    for q in range(len(order) + skew + trail):
        if q < len(order):
            c, d = order[q]
            scatter(s, q, c, d, r.shard)
            if r.whole and d == nodes - 1 and s.topology.mates(s.rank):
                s.signal("near", _whole_flag(s), c.index)
        if 0 <= q - skew < len(order):
            _node_sum(r, q - skew, *order[q - skew])
            _put(s, *order[q - skew])
        done = q - skew - trail
        if not s.variant.shard_major and done >= 0 and done % nodes == nodes - 1:
            _finish(r, s.chunks[done // nodes])
    if s.variant.shard_major:
        for c in s.chunks:
            _finish(r, c)
    count_rails_of_mates(s)


def parts(s: Steps) -> int:
    """Chunks that a call moves through each scatter ring: one for each destination node."""
    return len(s.chunks) * s.topology.nodes


def destination(s: Steps, distance: int) -> int:
    return (s.node + distance + 1) % s.topology.nodes


def count_rails_of_mates(s: Steps) -> None:
    """AllGather shares the rail rings, and there node mates count them too."""
    for mate in s.topology.mates(s.rank):
        for peer in s.topology.rail(mate):
            s.move(Ring("rail", mate, s.topology.node(peer)))


def scatter(s: Steps, q: int, c: Chunk, distance: int, shard: Callable[[int], int]) -> None:
    """Part `q`: to each node mate its slice of what goes to the node at `distance`."""
    s.phase()
    t = s.topology
    mates, m = t.mates(s.rank), destination(s, distance)
    rings = [Ring("scatter", mate, s.local_rank) for mate in mates]
    for ring in rings:
        s.wait_credit("near", Flag(s.rank, ring, "credit"), q)
    for mate, ring in zip(mates, rings):
        s.enter("near")
        index = shard(t.rank(m, t.local_rank(mate)))
        s.copy("near", s.slot(ring, q, c), s.place("input", index, c), needs=index)
    for mate, ring in zip(mates, rings):
        s.signal("near", Flag(mate, ring, "filled"), q)


def wait_scattered(s: Steps, q: int) -> None:
    """Until part `q` has come from every node mate."""
    for mate in s.topology.mates(s.rank):
        ring = Ring("scatter", s.rank, s.topology.local_rank(mate))
        s.wait_filled("rail", Flag(s.rank, ring, "filled"), q)


def credit_scattered(s: Steps, q: int) -> None:
    """Part `q` of every node mate has been read."""
    for mate in s.topology.mates(s.rank):
        ring = Ring("scatter", s.rank, s.topology.local_rank(mate))
        s.signal("rail", Flag(mate, ring, "credit"), q)


def _whole_flag(s: Steps) -> Flag:
    return Flag(s.rank, Ring("sum", s.rank, s.node), "scattered")


def _node_sum(r: Sum, q: int, c: Chunk, distance: int) -> None:
    s = r.s
    s.phase()
    t, m = s.topology, destination(s, distance)
    total = Ring("sum", s.rank, m)
    wait_scattered(s, q)
    if m != s.node:
        s.wait_credit("rail", Flag(s.rank, total, "sent"), c.index)
    s.enter("rail")
    index = r.shard(t.rank(m, s.local_rank))
    srcs = [
        s.place("input", index, c) if j == s.local_rank else s.slot(Ring("scatter", s.rank, j), q, c)
        for j in range(t.ranks_per_node)
    ]
    if t.nodes > 1:
        s.reduce("rail", s.slot(total, c.index, c, wire=True), srcs, needs=index)
        if m != s.node and s.variant.host_wire:
            s.copy("rail", s.wire_slot(total, c.index, c, wire=True), s.slot(total, c.index, c, wire=True))
    else:
        _result(r, c, srcs, index)
    credit_scattered(s, q)
    if m != s.node:
        s.signal("rail", Flag(s.rank, total, "posted"), c.index)


def _put(s: Steps, c: Chunk, distance: int) -> None:
    s.phase()
    m = destination(s, distance)
    if m == s.node:
        return
    peer = s.topology.rank(m, s.local_rank)
    total, ring = Ring("sum", s.rank, m), Ring("rail", peer, s.node)
    s.wait_filled("put", Flag(s.rank, total, "posted"), c.index)
    s.wait_credit("put", Flag(s.rank, ring, "credit"), c.index)
    dst, src = s.wire_slot(ring, c.index, c, wire=True), s.wire_slot(total, c.index, c, wire=True)
    s.put("put", dst, src, Flag(peer, ring, "filled"), Flag(s.rank, total, "sent"), c.index)


def _finish(r: Sum, c: Chunk) -> None:
    s = r.s
    t = s.topology
    if t.nodes == 1:
        return
    # The nearest sender first, as in AllGather; the sum below is in the order of nodes all the same.
    rings = {t.node(peer): Ring("rail", s.rank, t.node(peer)) for peer in t.rail(s.rank)[::-1]}
    s.phase()
    for ring in rings.values():
        s.wait_filled("rail", Flag(s.rank, ring, "filled"), c.index)
    if s.variant.host_wire:
        for ring in rings.values():
            s.copy("rail", s.slot(ring, c.index, c, wire=True), s.wire_slot(ring, c.index, c, wire=True))
    own = Ring("sum", s.rank, s.node)
    _result(r, c, [s.slot(rings.get(m, own), c.index, c, wire=True) for m in range(t.nodes)])
    for ring in rings.values():
        s.signal("rail", Flag(s.rank, ring, "own"), c.index)
    s.phase()
    for m, ring in rings.items():
        s.wait_filled("credit", Flag(s.rank, ring, "own"), c.index)
        s.credit("credit", Flag(t.rank(m, s.local_rank), ring, "credit"), c.index)


def _result(r: Sum, c: Chunk, srcs: list[Place], needs: int | None = None) -> None:
    s = r.s
    if r.whole and s.topology.mates(s.rank):
        s.wait_filled("rail", _whole_flag(s), c.index)
    s.reduce("rail", r.result(c), srcs, needs=needs)
    if r.reduced and s.topology.size > 1:
        s.signal("rail", Flag(s.rank, Ring("sum", s.rank, s.node), "reduced"), c.index)
