"""Lanes, wires, flags, running counts and window slots as integers, as an engine would address them."""

from __future__ import annotations

from hdma.errors import PlanError
from hdma.layout import Flag, Layout, Ring
from hdma.plan import LANES


class Numbering:
    """The numbers of one layout, shared by a sequence of plans. Raises `PlanError` where two flags are one word."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.topology = layout, layout.topology
        self.rank_words = layout.flag_count
        self.rank_slots = layout.window_nbytes // layout.slot_nbytes
        self.window_cells = self.topology.size * self.rank_slots
        self.lanes: list[tuple[int, str]] = [(r, lane) for r in range(self.topology.size) for lane in LANES]
        self._lane = {key: number for number, key in enumerate(self.lanes)}
        self._wires: dict[tuple[int, int], int] = {}
        self._words: dict[Flag, int] = {}
        self._flags: dict[int, Flag] = {}
        self._counts: dict[tuple[int, Ring], int] = {}

    def lane(self, rank: int, lane: str) -> int:
        if (rank, lane) not in self._lane:
            raise PlanError(f"rank {rank} has no lane {lane!r}: there are {', '.join(LANES)}")
        return self._lane[rank, lane]

    def wire(self, lane: int, peer: int) -> int:
        """One queue pair or socket for each peer of a lane; numbered on after the lanes."""
        number = self._wires.get((lane, peer))
        if number is None:
            number = self._wires[lane, peer] = len(self.lanes)
            rank, name = self.lanes[lane]
            self.lanes.append((rank, f"{name} wire to rank {peer}"))
        return number

    def word(self, flag: Flag) -> int:
        number = self._words.get(flag)
        if number is None:
            number = flag.owner * self.rank_words + self.layout.flag_number(flag)
            other = self._flags.setdefault(number, flag)
            if other != flag:
                raise PlanError(f"{flag} and {other} are one word of rank {flag.owner}")
            self._words[flag] = number
        return number

    def count(self, rank: int, ring: Ring) -> int:
        """The running chunk count that the rank keeps for the ring."""
        number = self._counts.get((rank, ring))
        if number is None:
            number = rank * self.layout.base_count + self.layout.base_number(rank, ring)
            self._counts[rank, ring] = number
        return number
