"""Where every ring's slots and every flag lie in the memory of a rank: the same arithmetic on all ranks.

A window is `slots` slots for each ring of its owner; a second part holds one word for each flag. Both depend on the
grid only, never on a call, so that a slot or a flag means the same thing in every plan of a communicator.

Rings are numbered by the distance from their owner (next node first), so that the window of every node looks the same
after renaming nodes by rotation: the simulator proves large grids by that symmetry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hdma.errors import UsageError
from hdma.topology import Topology

SLOT_ALIGN_NBYTES = 64


class Ring(NamedTuple):
    """S slots in the window of `owner` with one purpose.

    | purpose | written by | read by | index |
    |---|---|---|---|
    | stage | owner: its own shard | node mates, NIC | 0 |
    | rail | NIC of the rail peer on node `index` | owner, and (AllGather) its node mates | node |
    | scatter | the node mate with local rank `index` | owner | local rank |
    | sum | owner: node sum for node `index` | NIC, or owner itself | node |
    | tensor | (no slots) the owner's caller | node mates, in the caller's tensor | 0 |
    """

    purpose: str
    owner: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls


class Flag(NamedTuple):
    """A word in the memory of `owner` that only rises, counting chunks of `ring`. Roles are listed in ROLES."""

    owner: int
    ring: Ring
    role: str
    who: int = 0


# (purpose, role) -> (who waits, what a raised flag says). The proxy waits on words that it can be woken for.
ROLES: dict[tuple[str, str], tuple[str, str]] = {
    ("stage", "filled"): ("walker", "chunk staged, for a node mate to read"),
    ("stage", "credit"): ("walker", "node mate `who` has read the staged chunk"),
    ("stage", "posted"): ("proxy", "chunk staged, for the NIC to read"),
    ("stage", "sent"): ("walker", "the NIC has read the chunk for node `who`"),
    ("rail", "filled"): ("walker", "the chunk of a rail peer has arrived"),
    ("rail", "relayed"): ("walker", "the chunk of a mate's rail peer has arrived"),
    ("rail", "read"): ("proxy", "node mate `who` has read the rail chunk"),
    ("rail", "own"): ("proxy", "the owner has read the rail chunk"),
    ("rail", "credit"): ("proxy", "all readers on the other node have read the rail chunk"),
    ("scatter", "filled"): ("walker", "a node mate's slice has arrived"),
    ("scatter", "credit"): ("walker", "the owner has read the slice"),
    ("sum", "posted"): ("proxy", "node sum done, for the NIC to read"),
    ("sum", "sent"): ("walker", "the NIC has read the node sum"),
    ("sum", "scattered"): ("walker", "the other lane has scattered the chunk"),
    ("sum", "reduced"): ("walker", "the other lane has reduced the chunk"),
    ("tensor", "filled"): ("walker", "a tensor is there, for a node mate to read"),
    ("tensor", "credit"): ("walker", "node mate `who` has read the tensor"),
}


@dataclass(frozen=True)
class Layout:
    """Slots and flags for a grid; `slot_nbytes` is the fixed stride of every slot of the communicator."""

    topology: Topology
    slots: int
    slot_nbytes: int

    @staticmethod
    def for_window(topology: Topology, slots: int, window_nbytes: int, max_slot_nbytes: int) -> Layout:
        """The largest slots that fit `window_nbytes` a rank, at most `max_slot_nbytes` each.

        Raises `UsageError` where not even the smallest slot fits.
        """
        count = slots * ring_count(topology)
        fit = window_nbytes // max(count, 1)
        slot = min(fit, max_slot_nbytes) // SLOT_ALIGN_NBYTES * SLOT_ALIGN_NBYTES
        if slot < SLOT_ALIGN_NBYTES:
            raise UsageError(
                f"HDMA_WINDOW_BYTES={window_nbytes} is too small for {topology} ranks, which need {count} slots of at "
                f"least {SLOT_ALIGN_NBYTES} bytes: set it to {count * SLOT_ALIGN_NBYTES} or more"
            )
        return Layout(topology, slots, slot)

    @property
    def window_nbytes(self) -> int:
        return ring_count(self.topology) * self.slots * self.slot_nbytes

    @property
    def flag_count(self) -> int:
        """Words of one rank (a cache line each, see csrc/shared.h)."""
        return self._flag_first["end"]

    def slot_offset(self, ring: Ring, chunk: int) -> int:
        """Byte offset, in the owner's window, of the slot that `chunk` uses."""
        t = self.topology
        node_part = (ring.index - t.node(ring.owner)) % t.nodes
        local_part = (ring.index - t.local_rank(ring.owner)) % t.ranks_per_node
        first = self._ring_first[ring.purpose]
        place = {"stage": 0, "rail": node_part - 1, "scatter": local_part - 1, "sum": node_part}[ring.purpose]
        return ((first + place) * self.slots + chunk % self.slots) * self.slot_nbytes

    def flag_number(self, flag: Flag) -> int:
        """Index of the flag among the words of its owner."""
        t, ring = self.topology, flag.ring
        n, l = t.nodes, t.ranks_per_node
        if ring.purpose in ("stage", "tensor"):
            index = t.local_rank(ring.owner) if flag.role == "filled" else flag.who
        elif ring.purpose == "rail":
            if flag.role == "relayed":
                index = t.local_rank(ring.owner) * n + ring.index
            elif flag.role == "read":
                index = flag.who * n + ring.index
            else:  # A sender's credits are told apart by the node that gives them, the others by the sender's node.
                index = t.node(ring.owner) if flag.role == "credit" else ring.index
        elif ring.purpose == "scatter":
            index = t.local_rank(ring.owner) if flag.role == "credit" else ring.index
        else:
            index = ring.index
        assert 0 <= index < n * l, flag
        return self._flag_first[ring.purpose, flag.role] + index

    def flag_names(self, rank: int) -> list[str]:
        """What each flag of `rank` counts, for the report of a wait that never ended."""
        t = self.topology
        n, l = t.node(rank), t.local_rank(rank)
        names = [""] * self._flag_first["end"]

        def name(flag: Flag, peer: int) -> None:
            _, meaning = ROLES[flag.ring.purpose, flag.role]
            who = str(flag.who)
            names[self.flag_number(flag)] = f"{meaning.replace('`who`', who)} (rank {peer})"

        for j in range(t.ranks_per_node):
            mate = t.rank(n, j)
            for purpose in ("stage", "tensor"):
                name(Flag(rank, Ring(purpose, mate, 0), "filled"), mate)
                name(Flag(rank, Ring(purpose, rank, 0), "credit", j), mate)
            name(Flag(rank, Ring("scatter", rank, j), "filled"), mate)
            name(Flag(rank, Ring("scatter", mate, l), "credit"), mate)
            for m in range(t.nodes):
                name(Flag(rank, Ring("rail", mate, m), "relayed"), mate)
                name(Flag(rank, Ring("rail", rank, m), "read", j), mate)
        name(Flag(rank, Ring("stage", rank, 0), "posted"), rank)
        for m in range(t.nodes):
            peer = t.rank(m, l)
            name(Flag(rank, Ring("stage", rank, 0), "sent", m), peer)
            name(Flag(rank, Ring("rail", rank, m), "filled"), peer)
            name(Flag(rank, Ring("rail", rank, m), "own"), rank)
            name(Flag(rank, Ring("rail", peer, n), "credit"), peer)
            name(Flag(rank, Ring("sum", rank, m), "posted"), rank)
            name(Flag(rank, Ring("sum", rank, m), "sent"), peer)
            for role in ("scattered", "reduced"):
                name(Flag(rank, Ring("sum", rank, m), role), rank)
        return names

    def base_number(self, rank: int, ring: Ring) -> int:
        """Index, among the running chunk counts that `rank` keeps, of a ring that it writes, reads or credits.

        A count for each ring rather than for each purpose: a collective that uses the rings unevenly (a broadcast)
        must not move the counts of the rings that it leaves alone.
        """
        t = self.topology
        n, l = t.nodes, t.ranks_per_node
        owner_local, node = t.local_rank(ring.owner), t.node(rank)
        if ring.purpose == "stage":
            return owner_local
        if ring.purpose == "rail":
            if t.node(ring.owner) == node:
                return l + owner_local * n + ring.index
            return l + l * n + t.node(ring.owner)
        if ring.purpose == "scatter":
            return l + l * n + n + owner_local * l + ring.index
        return l + l * n + n + l * l + (ring.index if ring.purpose == "sum" else n + owner_local)

    @property
    def base_count(self) -> int:
        n, l = self.topology.nodes, self.topology.ranks_per_node
        return l + l * n + n + l * l + n + l

    @cached_property
    def _ring_first(self) -> dict[str, int]:
        n, l = self.topology.nodes, self.topology.ranks_per_node
        return {"stage": 0, "rail": 1, "scatter": 1 + (n - 1), "sum": 1 + (n - 1) + (l - 1)}

    @cached_property
    def _flag_first(self) -> dict[object, int]:
        n, l = self.topology.nodes, self.topology.ranks_per_node
        first: dict[object, int] = {}
        at = 0
        for purpose, role in ROLES:
            first[purpose, role] = at
            if purpose in ("stage", "tensor"):
                at += {"filled": l, "credit": l, "posted": 1, "sent": n}[role]
            elif purpose == "rail":
                at += l * n if role in ("relayed", "read") else n
            else:
                at += l if purpose == "scatter" else n
        first["end"] = at
        return first


def ring_count(topology: Topology) -> int:
    """Rings in one window: stage, rail from each other node, scatter from each mate, sum for each node."""
    n, l = topology.nodes, topology.ranks_per_node
    return 1 + (n - 1) + (l - 1) + (n if n > 1 else 0)
