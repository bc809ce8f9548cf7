"""One node, tensors read where they are: the one copy that each shard needs, and no window.

    rank (0, l)                          node mate (0, j)
    signals: my tensor is ready  ----->  copies from it
    waits                        <-----  signals: I have read it
    leaves

Where the device lets mates read each other's tensors and all agreed at start-up. Nobody leaves before all have read.
"""

from __future__ import annotations

from collections.abc import Callable

from hdma.layout import Flag, Ring
from hdma.plan import Chunk, Place, Steps


def read_mates(
    s: Steps,
    senders: frozenset[int],
    source: Callable[[int, Chunk], Place],
    target: Callable[[int, Chunk], Place],
    copies_own: bool,
) -> None:
    """From each of `senders` its `source` to this rank's `target`; `copies_own`: also this rank's own.

    Then every output shard is given, one from each rank.
    """
    (c,) = s.chunks
    mates, own = s.topology.mates(s.rank), Ring("tensor", s.rank, 0)
    s.uses(tensor=1)
    s.phase()
    s.enter("near", gives=s.rank if s.variant.in_place else None)
    if s.rank in senders:
        for mate in mates:
            s.signal("near", Flag(mate, own, "filled"), c.index)
    s.phase()
    # In rotating order, so that not all read from one.
    readable = [mate for mate in mates if mate in senders]
    for batch in [readable] if s.variant.batched else [[mate] for mate in readable]:
        rings = {mate: Ring("tensor", mate, 0) for mate in batch}
        for ring in rings.values():
            s.wait_filled("near", Flag(s.rank, ring, "filled"), c.index)
        for mate in batch:
            s.copy("near", target(mate, c), source(mate, c), gives=mate if copies_own else None)
        for mate, ring in rings.items():
            s.signal("near", Flag(mate, ring, "credit", s.local_rank), c.index)
    # While the last mates read.
    if copies_own and not s.variant.in_place:
        s.copy("near", target(s.rank, c), source(s.rank, c), gives=s.rank)
    s.phase()
    if s.rank in senders:
        for mate in mates:
            s.wait_filled("near", Flag(s.rank, own, "credit", s.topology.local_rank(mate)), c.index)
    s.leave()
