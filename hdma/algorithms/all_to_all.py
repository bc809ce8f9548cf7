"""AllToAll: shards gathered on the node mate of their rail, put to the rail peer, which owns them.

For each chunk, for each destination node, the own node last:

    node mates (n, j)               on rail l: (n, l)                          owner (m, l)
    input shard  --copy-->  scatter slots ++ own input shard -> sum slots --put--> rail slots -> output

The way of ReduceScatter without the sum: what it adds, this sends one behind the other. A NIC carries every shard that
leaves its node once, the minimum, though ranks have links to their rail peers only.

Lanes: near = scatter; rail = forwarding and delivery; put, credit = the proxy.
"""

from __future__ import annotations

from hdma.algorithms.direct import read_mates
from hdma.algorithms.reduce_scatter import (
    count_rails_of_mates,
    credit_scattered,
    destination,
    parts,
    scatter,
    wait_scattered,
)
from hdma.layout import Flag, Ring
from hdma.plan import Chunk, Place, Steps


def all_to_all(s: Steps) -> None:
    """Writes the steps of AllToAll; output shard q is shard `rank` of the input of rank q."""
    t, skew = s.topology, s.variant.skew
    if s.variant.direct:
        everyone = frozenset(range(t.size))
        read_mates(
            s, everyone, lambda q, c: s.tensor("input", q, s.rank, c), lambda q, c: s.place("output", q, c), True
        )
        return
    s.uses(scatter=parts(s), sum=len(s.chunks) * t.ranks_per_node, rail=len(s.chunks) * t.ranks_per_node)
    order = [(c, d) for c in s.chunks for d in range(t.nodes)]
    sent: list[tuple[Chunk, int, int]] = []
    received = 0
    for q in range(len(order) + skew):
        if q < len(order):
            scatter(s, q, *order[q], shard=lambda owner: owner)
        if q < skew:
            continue
        c, d = order[q - skew]
        s.phase()
        wait_scattered(s, q - skew)
        s.enter("rail")
        if destination(s, d) == s.node:
            for j in range(t.ranks_per_node):
                s.copy("rail", s.place("output", t.rank(s.node, j), c), _source(s, q - skew, c, s.rank, j))
        else:
            for j in range(t.ranks_per_node):
                _forward(s, q - skew, c, d, j)
                sent.append((c, d, j))
                # Pieces by which the arrivals trail what is sent: below the 4 slots that a skew asks for.
                if len(sent) > 2 * skew:
                    _receive(s, *sent[received])
                    received += 1
        s.phase()
        credit_scattered(s, q - skew)
    for piece in sent[received:]:
        _receive(s, *piece)
    count_rails_of_mates(s)
    s.phase()
    s.leave()


def _source(s: Steps, q: int, c: Chunk, owner: int, j: int) -> Place:
    """What the mate with local rank `j`, or this rank itself, has for `owner`."""
    return s.place("input", owner, c) if j == s.local_rank else s.slot(Ring("scatter", s.rank, j), q, c)


def _forward(s: Steps, q: int, c: Chunk, distance: int, j: int) -> None:
    t, m = s.topology, destination(s, distance)
    peer = t.rank(m, s.local_rank)
    total, ring, index = Ring("sum", s.rank, m), Ring("rail", peer, s.node), c.index * t.ranks_per_node + j
    s.phase()
    s.wait_credit("rail", Flag(s.rank, total, "sent"), index)
    s.copy("rail", s.wire_slot(total, index, c), _source(s, q, c, peer, j))
    s.signal("rail", Flag(s.rank, total, "posted"), index)
    s.phase()
    s.wait_filled("put", Flag(s.rank, total, "posted"), index)
    s.wait_credit("put", Flag(s.rank, ring, "credit"), index)
    src, dst = s.wire_slot(total, index, c), s.wire_slot(ring, index, c)
    s.put("put", dst, src, Flag(peer, ring, "filled"), Flag(s.rank, total, "sent"), index)


def _receive(s: Steps, c: Chunk, distance: int, j: int) -> None:
    """The piece that came while this rank sent its own to the same distance."""
    t, m = s.topology, (s.node - distance - 1) % s.topology.nodes
    ring, index = Ring("rail", s.rank, m), c.index * t.ranks_per_node + j
    s.phase()
    s.wait_filled("rail", Flag(s.rank, ring, "filled"), index)
    s.copy("rail", s.place("output", t.rank(m, j), c), s.wire_slot(ring, index, c))
    s.signal("rail", Flag(s.rank, ring, "own"), index)
    s.phase()
    s.wait_filled("credit", Flag(s.rank, ring, "own"), index)
    s.credit("credit", Flag(t.rank(m, s.local_rank), ring, "credit"), index)
