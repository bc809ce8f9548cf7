"""Broadcast, in place: an AllGather with one sender. The root's NIC carries (nodes - 1) times the tensor."""

from __future__ import annotations

from hdma.algorithms.all_gather import Gather, gather
from hdma.algorithms.direct import read_mates
from hdma.plan import Steps


def broadcast(s: Steps) -> None:
    """Writes the steps of Broadcast; the tensor of every rank becomes that of rank `root`."""
    root = frozenset([s.variant.root])
    if s.variant.direct:
        read_mates(s, root, lambda q, c: s.tensor("input", q, 0, c), lambda q, c: s.place("output", 0, c), False)
        return
    s.uses(stage=len(s.chunks), rail=len(s.chunks))
    gather(Gather(s, senders=root, own=lambda c: s.place("output", 0, c), shard=lambda sender: 0))
    s.phase()
    s.leave()
