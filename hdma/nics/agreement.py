"""What the ranks agree on from what each of them offers: RDMA or TCP between nodes, and whose port is which.

Pure functions: every rank computes the same from the same cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hdma import env
from hdma.errors import Error, UsageError, WireError
from hdma.nics.choice import LIBRARY, Offer, Reason, choose, library_error, why_none
from hdma.nics.sysfs import find
from hdma.topology import Topology

Card = dict[str, Any]


def card(gpu: str = "", root: str = "/") -> Card:
    """What this rank tells the others, as JSON has it: its `offers`, or the `reason` why there are none.

    By HDMA_NIC, HDMA_GID_INDEX and `gpu`, the PCI address of the rank's GPU (empty: host memory). Neither with
    HDMA_WIRE=tcp, for which nothing is looked at.
    """
    if env.WIRE.read() == "tcp":
        return {"offers": [], "reason": None}
    wanted, gid_index, nics = env.NIC.read(), env.GID_INDEX.read(), find(root)
    offers = choose(nics, wanted, gid_index, gpu, root)
    missing = library_error() if offers else ""
    if missing:
        text, remedy = f"there is {offers[0]}, but no {LIBRARY}: {missing}", "apt install libibverbs1 ibverbs-providers"
        return {"offers": [], "reason": asdict(Reason("device", text, remedy))}
    reason = None if offers else asdict(why_none(nics, wanted, gid_index))
    return {"offers": [asdict(offer) for offer in offers], "reason": reason}


def decide(cards: Sequence[Card], topology: Topology, names: Sequence[str], wire: str = "auto") -> list[Offer]:
    """The port of each rank, by rank; empty where TCP is used: one node, HDMA_WIRE=tcp, or auto and no RDMA device.

    `names[rank]` as in messages. Raises `UsageError` or `WireError` where a rank has RDMA devices but none that can
    be used, where only some ranks have any, with HDMA_WIRE=verbs where there are none, and as `along_rails()` does.
    """
    if wire == "tcp" or topology.nodes == 1:
        return []
    reasons = {rank: Reason(**card["reason"]) for rank, card in enumerate(cards) if not card["offers"]}
    if wire == "auto" and len(reasons) == len(cards) and all(reason.kind == "none" for reason in reasons.values()):
        return []
    for rank, reason in sorted(reasons.items(), key=lambda item: item[1].kind == "none"):
        kind: type[Error] = UsageError if reason.kind == "usage" else WireError
        other = next((r for r in range(len(cards)) if r not in reasons), None)
        but = f", while {names[other]} has {cards[other]['offers'][0]['device']}" if other is not None else ""
        raise kind(
            f"{names[rank]} cannot use RDMA: {reason.text}{but if reason.kind == 'none' else ''}. "
            f"What helps: {reason.remedy}; or HDMA_WIRE=tcp on all ranks"
        )
    return along_rails([[Offer(**offer) for offer in card["offers"]] for card in cards], topology, names)


def along_rails(offers: Sequence[Sequence[Offer]], topology: Topology, names: Sequence[str]) -> list[Offer]:
    """The port of each rank, by rank, from what each offers.

    The ranks of a rail take the same position in their hosts' lists: the nearest to all of them together that each has,
    of equally near ones the fastest, then the one that the fewest rails before have taken. A rank that was told its
    device takes that. Where no position fits, each takes its own nearest. Raises `UsageError` where two ranks of a rail
    would then have ports that cannot be connected.
    """
    chosen: dict[int, Offer] = {}
    taken: Counter[tuple[int, str]] = Counter()
    for local_rank in range(topology.ranks_per_node):
        rail = [topology.rank(node, local_rank) for node in range(topology.nodes)]
        told = [rank for rank in rail if offers[rank][0].told]
        free = [rank for rank in rail if rank not in told]
        ranks_and_choices = [([rank], _each(offers[rank])) for rank in told]
        common = _common([offers[rank] for rank in free])
        ranks_and_choices += [(free, common)] if common else [([rank], _each(offers[rank])) for rank in free]
        for ranks, choices in ranks_and_choices:
            best = min(choices, key=lambda choice: _cost(choice, ranks, topology, taken))
            for rank, offer in zip(ranks, best):
                chosen[rank] = offer
                taken[topology.node(rank), str(offer)] += 1
        for rank in rail:
            if chosen[rank].fabric != chosen[rail[0]].fabric:
                first, other = chosen[rail[0]], chosen[rank]
                raise UsageError(
                    f"{names[rail[0]]} and {names[rank]} are to exchange data, but the first would use {first} "
                    f"({first.fabric}) and the other {other} ({other.fabric}), which cannot be connected. What helps: "
                    f"ports of one kind by HDMA_NIC, GIDs of one kind by HDMA_GID_INDEX, or HDMA_WIRE=tcp on all ranks"
                )
    return [chosen[rank] for rank in range(topology.size)]


def _each(offers: Sequence[Offer]) -> list[list[Offer]]:
    return [[offer] for offer in offers]


def _common(offers: Sequence[Sequence[Offer]]) -> list[list[Offer]]:
    """For each position that all have, on one kind of fabric, their offers in it."""
    tables = [{offer.position: offer for offer in own} for own in offers]
    positions = sorted(set.intersection(*map(set, tables))) if tables else []
    rows = [[table[position] for table in tables] for position in positions]
    return [row for row in rows if len({offer.fabric for offer in row}) == 1]


def _cost(
    choice: Sequence[Offer], ranks: Sequence[int], topology: Topology, taken: Counter[tuple[int, str]]
) -> tuple[float, ...]:
    busy = sum(taken[topology.node(rank), str(offer)] for rank, offer in zip(ranks, choice))
    far, slowest = sum(offer.distance for offer in choice), min(offer.rate_gbit_s for offer in choice)
    return far, -slowest, busy, choice[0].position
