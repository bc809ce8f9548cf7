"""AllGather: staged once, pulled by node mates, put on the rail, relayed by the rail peers to their mates.

One builder for every grid: with one node the rail steps vanish, with one rank a node the near ones do. A NIC carries
(nodes - 1) shards a rank, the minimum.

    rank (n, l)                     node mate (n, j)            rail peer (m, l)         its node mate (m, j)
    input -> stage slot  --copy-->  output
                         --put--------------------------------> rail slot -> output
                                                                          --copy-->      output

Lanes: near = stage and pulls of staged chunks; rail = relay and pulls of rail chunks; put, credit = the proxy. On
streams (`batched`) of one node, where the rail has nothing else to do, it stages, so that chunks are copied on the GPU
while others are pulled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hdma.algorithms.direct import read_mates
from hdma.layout import Flag, Ring
from hdma.plan import Chunk, Place, Steps


def all_gather(s: Steps) -> None:
    """Writes the steps of AllGather; output shard r is the input of rank r."""
    everyone = frozenset(range(s.topology.size))
    if s.variant.direct:
        shard = (lambda q: q) if s.variant.in_place else (lambda q: 0)
        source = lambda q, c: s.tensor("input", q, shard(q), c)  # noqa: E731
        read_mates(s, everyone, source, lambda q, c: s.place("output", q, c), True)
        return
    s.uses(stage=len(s.chunks), rail=len(s.chunks))
    gather(Gather(s, senders=everyone, own=lambda c: s.place("input", 0, c), copies_own=True))
    s.phase()
    s.leave()


@dataclass(frozen=True)
class Gather:
    """Chunks of `senders` brought to every rank; broadcast and all_reduce are made of it too.

    own: where a sender's chunk lies. copies_own: it must also be copied to the sender's own output. shard: where a
    sender's chunks go in the outputs. reduced: another lane has made the chunk and says so.
    """

    s: Steps
    senders: frozenset[int]
    own: Callable[[Chunk], Place]
    copies_own: bool = False
    shard: Callable[[int], int] = lambda sender: sender
    reduced: bool = False

    def of(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.senders]


def stage_lane(s: Steps) -> str:
    """The same for all calls of a communicator: a flag has one writer."""
    return "rail" if s.variant.batched and s.topology.nodes == 1 else "near"


def gather(g: Gather) -> None:
    """Every chunk through every phase; the caller leaves."""
    s = g.s
    count = len(s.chunks)
    if s.variant.shard_major:
        # With at most S chunks no slot is used twice in a plan: every chunk can be staged before the first is read.
        for phase in (_stage, _put, _pull, _relay, _pull_rail, _credit):
            phase(g, s.chunks)
        return
    # Chunks by which each phase trails the first. The longest way from writing a slot to its credit is 3 chunks (put to
    # credit), which needs 4 slots; without skew 1 slot would do.
    skew = s.variant.skew
    trail = ((_stage, 0), (_put, 0), (_pull, skew), (_relay, 2 * skew), (_pull_rail, 3 * skew), (_credit, 3 * skew))
    for t in range(count + 3 * skew):
        for phase, behind in trail:
            phase(g, s.chunks[t - behind : t - behind + 1] if 0 <= t - behind < count else ())


def _stage(g: Gather, chunks: tuple[Chunk, ...]) -> None:
    s = g.s
    s.phase()
    if s.rank not in g.senders:
        return
    ring, mates, rail = Ring("stage", s.rank, 0), s.topology.mates(s.rank), s.topology.rail(s.rank)
    lane, host_wire = stage_lane(s), s.variant.host_wire

    def copy_own() -> None:
        s.copy(lane, s.place("output", g.shard(s.rank), c), g.own(c), gives=_whole(g, c, s.rank))

    for c in chunks:
        s.enter(lane)
        for mate in mates:
            s.wait_credit(lane, Flag(s.rank, ring, "credit", s.topology.local_rank(mate)), c.index)
        for peer in rail:
            s.wait_credit(lane, Flag(s.rank, ring, "sent", s.topology.node(peer)), c.index)
        if mates or rail:
            if g.reduced and lane == "near":
                s.wait_filled(lane, Flag(s.rank, Ring("sum", s.rank, s.node), "reduced"), c.index)
            if mates or not host_wire:
                s.copy(lane, s.slot(ring, c.index, c), g.own(c))
            # A GPU reads the chunk once for both copies, if they follow one another.
            if g.copies_own and s.variant.batched:
                copy_own()
            if rail and host_wire:
                s.copy(lane, s.wire_slot(ring, c.index, c), g.own(c))
        for mate in mates:
            s.signal(lane, Flag(mate, ring, "filled"), c.index)
        if rail:
            s.signal(lane, Flag(s.rank, ring, "posted"), c.index)
        if g.copies_own and not (s.variant.batched and (mates or rail)):
            copy_own()


def _put(g: Gather, chunks: tuple[Chunk, ...]) -> None:
    s = g.s
    s.phase()
    if s.rank not in g.senders:
        return
    stage = Ring("stage", s.rank, 0)
    for c in chunks:
        for peer in s.topology.rail(s.rank):
            ring = Ring("rail", peer, s.node)
            if peer == s.topology.rail(s.rank)[0]:  # One lane: the first wait for the chunk serves all of its puts.
                s.wait_filled("put", Flag(s.rank, stage, "posted"), c.index)
            s.wait_credit("put", Flag(s.rank, ring, "credit"), c.index)
            sent = Flag(s.rank, stage, "sent", s.topology.node(peer))
            src, dst = s.wire_slot(stage, c.index, c), s.wire_slot(ring, c.index, c)
            s.put("put", dst, src, Flag(peer, ring, "filled"), sent, c.index)


def _pull(g: Gather, chunks: tuple[Chunk, ...]) -> None:
    s = g.s
    s.phase()
    for batch in _batches(s, chunks, g.of(s.topology.mates(s.rank))):
        for mate, c in batch:
            s.enter("near")
            s.wait_filled("near", Flag(s.rank, Ring("stage", mate, 0), "filled"), c.index)
        for mate, c in batch:
            src = s.slot(Ring("stage", mate, 0), c.index, c)
            s.copy("near", s.place("output", g.shard(mate), c), src, gives=_whole(g, c, mate))
        for mate, c in batch:
            s.signal("near", Flag(mate, Ring("stage", mate, 0), "credit", s.local_rank), c.index)


def _relay(g: Gather, chunks: tuple[Chunk, ...]) -> None:
    s = g.s
    s.phase()
    for batch in _batches(s, chunks, _rail_senders(g)):
        for sender, c in batch:
            ring = Ring("rail", s.rank, s.topology.node(sender))
            s.enter("rail")
            s.wait_filled("rail", Flag(s.rank, ring, "filled"), c.index)
            mates, src = s.topology.mates(s.rank), s.wire_slot(ring, c.index, c)
            if mates and s.variant.host_wire:
                s.copy("rail", s.slot(ring, c.index, c), src)
            for mate in mates:
                s.signal("rail", Flag(mate, ring, "relayed"), c.index)
            s.copy("rail", s.place("output", g.shard(sender), c), src, gives=_whole(g, c, sender))
            s.signal("rail", Flag(s.rank, ring, "own"), c.index)


def _pull_rail(g: Gather, chunks: tuple[Chunk, ...]) -> None:
    s = g.s
    s.phase()
    t = s.topology
    for m in [t.node(peer) for peer in t.rail(s.rank)[::-1]]:
        mates = [mate for mate in t.mates(s.rank) if t.rank(m, t.local_rank(mate)) in g.senders]
        for batch in _batches(s, chunks, mates):
            for mate, c in batch:
                s.enter("rail")
                s.wait_filled("rail", Flag(s.rank, Ring("rail", mate, m), "relayed"), c.index)
            for mate, c in batch:
                sender = t.rank(m, t.local_rank(mate))
                src = s.slot(Ring("rail", mate, m), c.index, c)
                s.copy("rail", s.place("output", g.shard(sender), c), src, gives=_whole(g, c, sender))
            for mate, c in batch:
                s.signal("rail", Flag(mate, Ring("rail", mate, m), "read", s.local_rank), c.index)


def _credit(g: Gather, chunks: tuple[Chunk, ...]) -> None:
    s = g.s
    s.phase()
    for c in chunks:
        for sender in _rail_senders(g):
            ring = Ring("rail", s.rank, s.topology.node(sender))
            for mate in s.topology.mates(s.rank):
                s.wait_filled("credit", Flag(s.rank, ring, "read", s.topology.local_rank(mate)), c.index)
            s.wait_filled("credit", Flag(s.rank, ring, "own"), c.index)
            s.credit("credit", Flag(sender, ring, "credit"), c.index)


def _rail_senders(g: Gather) -> list[int]:
    """The nearest first: rail peers put in rotating order, so its chunk is the first to arrive."""
    return g.of(g.s.topology.rail(g.s.rank)[::-1])


def _batches(s: Steps, chunks: tuple[Chunk, ...], ranks: list[int]) -> list[list[tuple[int, Chunk]]]:
    """What goes in one batch of copies: one chunk from each rank, or (shard-major) all chunks from one rank."""
    if s.variant.shard_major:
        return [[(rank, c) for c in chunks] for rank in ranks]
    return [[(rank, c) for rank in ranks] for c in chunks]


def _whole(g: Gather, c: Chunk, sender: int) -> int | None:
    return g.shard(sender) if g.copies_own and c.index == len(g.s.chunks) - 1 else None
