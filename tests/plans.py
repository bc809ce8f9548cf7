"""Small plans, for the tests of plans and of their proof."""

from __future__ import annotations

from dataclasses import replace

from hdma.algorithms import build
from hdma.layout import Layout
from hdma.plan import Plan, Variant
from hdma.topology import Topology

NAMES = {
    "a": "all_gather",
    "r": "reduce_scatter",
    "A": "all_reduce",
    "o": "all_reduce_once",
    "b": "broadcast",
    "t": "all_to_all",
}
CHUNK_NBYTES = 8


def calls(
    word: str,
    nodes: int,
    mates: int,
    slots: int,
    chunks: int,
    skew: int = 0,
    shard_major: bool = False,
    root: int = 0,
    host_wire: bool = False,
    batched: bool | None = None,
) -> list[Plan]:
    """A plan for each letter; letters that are the same share it. Chunks fill their slots."""
    layout = Layout(Topology(nodes, mates), slots, CHUNK_NBYTES)
    variant = Variant(skew=skew, shard_major=shard_major, root=root, host_wire=host_wire)
    variant = replace(variant, batched=host_wire if batched is None else batched)
    plans = {letter: build(NAMES[letter], layout, chunks * CHUNK_NBYTES, variant) for letter in set(word)}
    return [plans[letter] for letter in word]
