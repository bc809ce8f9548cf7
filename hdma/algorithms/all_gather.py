"""AllGather: staged once, pulled by node mates, put on the rail, relayed by the rail peers to their mates.

One builder for every grid: with one node the rail steps vanish, with one rank a node the near ones do. A NIC carries
(nodes - 1) shards a rank, the minimum.

    rank (n, l)                     node mate (n, j)            rail peer (m, l)         its node mate (m, j)
    input -> stage slot  --copy-->  output
                         --put--------------------------------> rail slot -> output
                                                                          --copy-->      output

Lanes: near = stage and pulls of staged chunks; rail = relay and pulls of rail chunks; put, credit = the proxy.
"""

from __future__ import annotations

from hdma.layout import Flag, Ring
from hdma.plan import Chunk, Steps


def all_gather(s: Steps) -> None:
    """Writes the steps of AllGather; output shard r is the input of rank r."""
    count = len(s.chunks)
    if s.variant.shard_major:
        # With at most S chunks no slot is used twice in a plan: every chunk can be staged before the first is read.
        for phase in (_stage, _put, _pull, _relay, _pull_rail, _credit):
            phase(s, s.chunks)
    else:
        # Chunks by which each phase trails the first. The longest way from writing a slot to its credit is 3 chunks
        # (put to credit), which needs 4 slots; without skew 1 slot would do.
        skew = s.variant.skew
        trail = ((_stage, 0), (_put, 0), (_pull, skew), (_relay, 2 * skew), (_pull_rail, 3 * skew), (_credit, 3 * skew))
        for t in range(count + 3 * skew):
            for phase, behind in trail:
                chunks = s.chunks[t - behind : t - behind + 1] if 0 <= t - behind < count else ()
                phase(s, chunks)
    s.phase()
    s.leave()


def _stage(s: Steps, chunks: tuple[Chunk, ...]) -> None:
    s.phase()
    ring, mates, rail = Ring("stage", s.rank, 0), s.topology.mates(s.rank), s.topology.rail(s.rank)
    for c in chunks:
        s.enter("near")
        for mate in mates:
            s.wait_credit("near", Flag(s.rank, ring, "credit", s.topology.local_rank(mate)), c.index)
        for peer in rail:
            s.wait_credit("near", Flag(s.rank, ring, "sent", s.topology.node(peer)), c.index)
        if mates or rail:
            s.copy("near", s.slot(ring, c.index, c), s.place("input", 0, c))
        for mate in mates:
            s.signal("near", Flag(mate, ring, "filled"), c.index, len(s.chunks))
        if rail:
            s.signal("near", Flag(s.rank, ring, "posted"), c.index, len(s.chunks))
        s.copy("near", s.place("output", s.rank, c), s.place("input", 0, c), gives=_whole(s, c, s.rank))


def _put(s: Steps, chunks: tuple[Chunk, ...]) -> None:
    s.phase()
    stage = Ring("stage", s.rank, 0)
    for c in chunks:
        for peer in s.topology.rail(s.rank):
            ring = Ring("rail", peer, s.node)
            if peer == s.topology.rail(s.rank)[0]:  # One lane: the first wait for the chunk serves all of its puts.
                s.wait_filled("put", Flag(s.rank, stage, "posted"), c.index)
            s.wait_credit("put", Flag(s.rank, ring, "credit"), c.index)
            sent = Flag(s.rank, stage, "sent", s.topology.node(peer))
            src, dst = s.slot(stage, c.index, c), s.slot(ring, c.index, c)
            s.put("put", dst, src, Flag(peer, ring, "filled"), sent, c.index, len(s.chunks))


def _pull(s: Steps, chunks: tuple[Chunk, ...]) -> None:
    s.phase()
    mates = s.topology.mates(s.rank)
    for batch in _batches(s, chunks, mates):
        for mate, c in batch:
            s.wait_filled("near", Flag(s.rank, Ring("stage", mate, 0), "filled"), c.index)
        for mate, c in batch:
            src = s.slot(Ring("stage", mate, 0), c.index, c)
            s.copy("near", s.place("output", mate, c), src, gives=_whole(s, c, mate))
        for mate, c in batch:
            s.signal("near", Flag(mate, Ring("stage", mate, 0), "credit", s.local_rank), c.index, len(s.chunks))


def _relay(s: Steps, chunks: tuple[Chunk, ...]) -> None:
    s.phase()
    # The nearest sender first: rail peers put in rotating order, so its chunk is the first to arrive.
    senders = s.topology.rail(s.rank)[::-1]
    for batch in _batches(s, chunks, senders):
        for sender, c in batch:
            ring = Ring("rail", s.rank, s.topology.node(sender))
            s.enter("rail")
            s.wait_filled("rail", Flag(s.rank, ring, "filled"), c.index)
            for mate in s.topology.mates(s.rank):
                s.signal("rail", Flag(mate, ring, "relayed"), c.index, len(s.chunks))
            s.copy("rail", s.place("output", sender, c), s.slot(ring, c.index, c), gives=_whole(s, c, sender))
            s.signal("rail", Flag(s.rank, ring, "own"), c.index, len(s.chunks))


def _pull_rail(s: Steps, chunks: tuple[Chunk, ...]) -> None:
    s.phase()
    t = s.topology
    for sender in t.rail(s.rank)[::-1]:
        m = t.node(sender)
        mates = t.mates(s.rank)
        for batch in _batches(s, chunks, mates):
            for mate, c in batch:
                s.wait_filled("rail", Flag(s.rank, Ring("rail", mate, m), "relayed"), c.index)
            for mate, c in batch:
                shard = t.rank(m, t.local_rank(mate))
                src = s.slot(Ring("rail", mate, m), c.index, c)
                s.copy("rail", s.place("output", shard, c), src, gives=_whole(s, c, shard))
            for mate, c in batch:
                s.signal("rail", Flag(mate, Ring("rail", mate, m), "read", s.local_rank), c.index, len(s.chunks))


def _credit(s: Steps, chunks: tuple[Chunk, ...]) -> None:
    s.phase()
    for c in chunks:
        for sender in s.topology.rail(s.rank)[::-1]:
            ring = Ring("rail", s.rank, s.topology.node(sender))
            for mate in s.topology.mates(s.rank):
                s.wait_filled("credit", Flag(s.rank, ring, "read", s.topology.local_rank(mate)), c.index)
            s.wait_filled("credit", Flag(s.rank, ring, "own"), c.index)
            s.credit("credit", Flag(sender, ring, "credit"), c.index, len(s.chunks))


def _batches(s: Steps, chunks: tuple[Chunk, ...], ranks: list[int]) -> list[list[tuple[int, Chunk]]]:
    """What goes in one batch of copies: one chunk from each rank, or (shard-major) all chunks from one rank."""
    if s.variant.shard_major:
        return [[(rank, c) for c in chunks] for rank in ranks]
    return [[(rank, c) for rank in ranks] for c in chunks]


def _whole(s: Steps, c: Chunk, shard: int) -> int | None:
    return shard if c.index == len(s.chunks) - 1 else None
