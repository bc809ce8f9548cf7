"""Broadcast, in place: an AllGather with one sender. The root's NIC carries (nodes - 1) times the tensor."""

from __future__ import annotations

from hdma.algorithms.all_gather import Gather, gather
from hdma.plan import Steps


def broadcast(s: Steps) -> None:
    """Writes the steps of Broadcast; the tensor of every rank becomes that of rank `root`."""
    s.uses(stage=len(s.chunks), rail=len(s.chunks))
    root = frozenset([s.variant.root])
    gather(Gather(s, senders=root, own=lambda c: s.place("output", 0, c), shard=lambda sender: 0))
    s.phase()
    s.leave()
