"""ReduceScatter: slices scattered to their owners in the node, summed there, node sums put on the rail, summed again.

For each chunk, for each destination node, the own node last (the other nesting deadlocks with bounded slots):

    node mates (n, j)                owner (n, l)                              rail peer (m, l)
    input slice  --copy-->  scatter slots ++ own input slice -> sum slot --put--> rail slots ++ own sum slot -> output

One builder for every grid. Accumulation is wide and in fixed order: within a node by local rank, then by node. A NIC
carries (nodes - 1) shards a rank, the minimum.

Lanes: near = scatter; rail = node sum and final sum; put, credit = the proxy.
"""

from __future__ import annotations

from hdma.layout import Flag, Ring
from hdma.plan import Chunk, Steps


def reduce_scatter(s: Steps) -> None:
    """Writes the steps of ReduceScatter; the output is the sum over ranks q of shard `rank` of q's input."""
    nodes = s.topology.nodes
    if s.variant.shard_major:
        # Destination by destination; safe because at most S chunks use each slot of the sum and rail rings once.
        parts = [(c, d) for d in range(nodes) for c in s.chunks]
    else:
        parts = [(c, d) for c in s.chunks for d in range(nodes)]
    # Parts by which the node sums trail the scatter, and the final sums trail the node sums (a chunk).
    skew = s.variant.skew
    trail = skew * nodes
    for q in range(len(parts) + skew + trail):
        if q < len(parts):
            _scatter(s, q, *parts[q])
        if 0 <= q - skew < len(parts):
            _node_sum(s, q - skew, *parts[q - skew])
            _put(s, *parts[q - skew])
        done = q - skew - trail
        if not s.variant.shard_major and done >= 0 and done % nodes == nodes - 1:
            _finish(s, s.chunks[done // nodes])
    if s.variant.shard_major:
        for c in s.chunks:
            _finish(s, c)
    # AllGather shares the rail rings, and there node mates count them too.
    for mate in s.topology.mates(s.rank):
        for peer in s.topology.rail(mate):
            s.move(Ring("rail", mate, s.topology.node(peer)), len(s.chunks))
    s.phase()
    s.leave()


def _scatter(s: Steps, q: int, c: Chunk, distance: int) -> None:
    s.phase()
    t = s.topology
    mates, m = t.mates(s.rank), _destination(s, distance)
    rings = [Ring("scatter", mate, s.local_rank) for mate in mates]
    for ring in rings:
        s.wait_credit("near", Flag(s.rank, ring, "credit"), q)
    for mate, ring in zip(mates, rings):
        s.enter("near")
        shard = t.rank(m, t.local_rank(mate))
        s.copy("near", s.slot(ring, q, c), s.place("input", shard, c), needs=shard)
    for mate, ring in zip(mates, rings):
        s.signal("near", Flag(mate, ring, "filled"), q, _parts(s))


def _node_sum(s: Steps, q: int, c: Chunk, distance: int) -> None:
    s.phase()
    t = s.topology
    mates, m = t.mates(s.rank), _destination(s, distance)
    shard, total = t.rank(m, s.local_rank), Ring("sum", s.rank, m)
    for mate in mates:
        s.wait_filled("rail", Flag(s.rank, Ring("scatter", s.rank, t.local_rank(mate)), "filled"), q)
    if m != s.node:
        s.wait_credit("rail", Flag(s.rank, total, "sent"), c.index)
    s.enter("rail")
    srcs = [
        s.place("input", shard, c) if j == s.local_rank else s.slot(Ring("scatter", s.rank, j), q, c)
        for j in range(t.ranks_per_node)
    ]
    dst = s.slot(total, c.index, c, wire=True) if t.nodes > 1 else s.place("output", 0, c)
    s.reduce("rail", dst, srcs, needs=shard)
    for mate in mates:
        ring = Ring("scatter", s.rank, t.local_rank(mate))
        s.signal("rail", Flag(mate, ring, "credit"), q, _parts(s))
    if m != s.node:
        s.signal("rail", Flag(s.rank, total, "posted"), c.index, len(s.chunks))


def _put(s: Steps, c: Chunk, distance: int) -> None:
    s.phase()
    m = _destination(s, distance)
    if m == s.node:
        return
    peer = s.topology.rank(m, s.local_rank)
    total, ring = Ring("sum", s.rank, m), Ring("rail", peer, s.node)
    s.wait_filled("put", Flag(s.rank, total, "posted"), c.index)
    s.wait_credit("put", Flag(s.rank, ring, "credit"), c.index)
    dst, src = s.slot(ring, c.index, c, wire=True), s.slot(total, c.index, c, wire=True)
    s.put("put", dst, src, Flag(peer, ring, "filled"), Flag(s.rank, total, "sent"), c.index, len(s.chunks))


def _finish(s: Steps, c: Chunk) -> None:
    t = s.topology
    if t.nodes == 1:
        return
    # The nearest sender first, as in AllGather; the sum below is in the order of nodes all the same.
    rings = {t.node(peer): Ring("rail", s.rank, t.node(peer)) for peer in t.rail(s.rank)[::-1]}
    s.phase()
    for ring in rings.values():
        s.wait_filled("rail", Flag(s.rank, ring, "filled"), c.index)
    own = Ring("sum", s.rank, s.node)
    s.reduce(
        "rail", s.place("output", 0, c), [s.slot(rings.get(m, own), c.index, c, wire=True) for m in range(t.nodes)]
    )
    for ring in rings.values():
        s.signal("rail", Flag(s.rank, ring, "own"), c.index, len(s.chunks))
    s.phase()
    for m, ring in rings.items():
        s.wait_filled("credit", Flag(s.rank, ring, "own"), c.index)
        s.credit("credit", Flag(t.rank(m, s.local_rank), ring, "credit"), c.index, len(s.chunks))


def _destination(s: Steps, distance: int) -> int:
    return (s.node + distance + 1) % s.topology.nodes


def _parts(s: Steps) -> int:
    return len(s.chunks) * s.topology.nodes
