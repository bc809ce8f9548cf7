"""Happens-before by vector clocks: every lane is its own thread, every wire an asynchronous one behind it.

A lane learns of others only by its waits, and from a wait only what the first signal that satisfies it knew: the
weakest order that any hardware queues, any skew between ranks and any delays can leave. Two touches of a cell, one of
them a write, must be ordered by it.

In the view of one node only that node's cells are watched, by clocks of the lanes and wires that touch them and of the
lanes that post into the node. Forgetting the others loses order and never invents it, so a node view accepts no race.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hdma.simulator.script import Op, Script

Clock = npt.NDArray[np.int32]


class Race(Exception):
    """Two touches without an order: what the lane does, and the lane that it may overtake."""


class Clocks:
    """Clocks of the lanes and wires of some scripts, and the last touches of every watched cell."""

    def __init__(self, scripts: Iterable[Script], view: int | None = None) -> None:
        unique = {id(s): s for s in scripts}.values()
        self.numbering = next(iter(unique)).numbering
        self.view = view
        names = self.numbering.lanes
        seen, touching = set(), set()
        for script in unique:
            for op in script.ops:
                lane = op.lane if op.wire < 0 else op.wire
                if op.dst is not None and any(self._watched(script, cell) for cell, _ in (op.dst, *op.srcs)):
                    seen |= {op.lane, lane}
                    touching.add(lane)
                elif view is None or self._node(names[op.lane][0]) == view:
                    seen |= {op.lane, lane}
                elif op.wire >= 0 and op.step.flag is not None and self._node(op.step.flag.owner) == view:
                    seen |= {op.lane, lane}
        # Only lanes that touch memory can be overtaken: the others carry clocks, but need no component.
        self._component = [-1] * len(names)
        self._names: list[int] = sorted(touching)
        for component, lane in enumerate(self._names):
            self._component[lane] = component
        width = max(len(touching), 1)
        self._clock: list[Clock | None] = [
            np.zeros(width, np.int32) if lane in seen else None for lane in range(len(names))
        ]
        # From 1: at 0 a lane's first touches would seem known to lanes that have heard nothing of it.
        for lane, component in enumerate(self._component):
            clock = self._clock[lane]
            if component >= 0 and clock is not None:
                clock[component] = 1
        self._fresh: list[Clock | None] = [None] * len(names)
        self._writer: dict[int, tuple[int, int]] = {}
        self._readers: dict[int, dict[int, int]] = {}
        self._values: dict[int, list[int]] = {}
        self._known: dict[int, list[Clock]] = {}
        self._leaves: dict[int, Clock] = {}
        self._loose: dict[int, list[tuple[int, int]]] = {}
        self._entered: dict[int, list[tuple[int, int]]] = {}

    def forget_tensors(self, first_cell: int) -> None:
        """Before a call: cells from `first_cell` on are the caller's new tensors, which no lane has touched."""
        for touches in (self._writer, self._readers):
            for cell in [c for c in touches if c >= first_cell]:
                del touches[cell]

    def wait(self, lane: int, word: int, value: int) -> None:
        """The lane has seen the flag at `value` or above."""
        clock = self._clock[lane]
        values = self._values.get(word)
        if clock is not None and values is not None and value > 0:
            np.maximum(clock, self.known(word, value), out=clock)
            self._fresh[lane] = None

    def known(self, word: int, value: int) -> Clock:
        """What the first signal that raised the flag to `value` or above knew."""
        return self._known[word][bisect_left(self._values[word], value)]

    def clock_of(self, lane: int) -> Clock:
        """A copy of what the lane knows."""
        clock = self._clock[lane]
        return np.zeros(0, np.int32) if clock is None else clock.copy()

    def signal(self, lane: int, word: int, value: int) -> None:
        """The lane or wire raises a flag to `value`."""
        if self._clock[lane] is not None:
            self._values.setdefault(word, []).append(value)
            self._known.setdefault(word, []).append(self._release(lane))

    def post(self, lane: int, wire: int) -> None:
        """The wire does its next work after all that the lane knew when it posted it."""
        clock = self._clock[wire]
        if clock is not None:
            np.maximum(clock, self._release(lane), out=clock)
            self._fresh[wire] = None

    def touch(self, script: Script, op: Op) -> None:
        """The step's reads and its write, by its lane or, for a put, by its wire. Raises `Race`."""
        lane = op.lane if op.wire < 0 else op.wire
        clock, component = self._clock[lane], self._component[lane]
        if clock is None or component < 0 or op.dst is None:
            return
        now = int(clock[component])
        self._fresh[lane] = None
        for cell, _ in op.srcs:
            if self.view is None or self._watched(script, cell):
                if not script.inputs_at <= cell < script.outputs_at:  # Nobody writes an input that is no output.
                    self._check_write(cell, clock, component, "reads")
                    self._readers.setdefault(cell, {})[component] = now
                if cell >= script.inputs_at:
                    owner = script.cell_rank(cell)
                    if owner != op.step.rank:
                        self._check_entered(owner, clock)
                    if op.wire >= 0 or owner != op.step.rank:
                        self._loose.setdefault(owner, []).append((component, now))
        cell = op.dst[0]
        if self.view is None or self._watched(script, cell):
            self._check_write(cell, clock, component, "overwrites")
            readers = self._readers.get(cell)
            if readers:
                for other, then in readers.items():
                    if other != component and clock[other] < then:
                        raise Race(f"overwrites what {self._name(other)} may still be reading")
                readers.clear()
            self._writer[cell] = (component, now)

    def complete(self, lane: int, cells: Iterable[int]) -> None:
        """The last bytes of the cells have landed before this point of the lane. Raises `Race`."""
        clock = self._clock[lane]
        if clock is not None:
            for cell in cells:
                self._check_write(cell, clock, self._component[lane], "gives")

    def enter(self, lane: int) -> None:
        """The lane's rank has made its call: its tensors may be read."""
        clock, component = self._clock[lane], self._component[lane]
        if clock is not None and component >= 0:
            self._fresh[lane] = None
            self._entered.setdefault(self.numbering.lanes[lane][0], []).append((component, int(clock[component])))

    def leave(self, lane: int) -> None:
        clock = self._clock[lane]
        if clock is not None:
            rank = self.numbering.lanes[lane][0]
            known = self._release(lane)
            before = self._leaves.get(rank)
            self._leaves[rank] = known if before is None else np.maximum(before, known)

    def end_call(self) -> None:
        """After the leaves of its rank the caller reuses its tensors: no wire may still be at them. Raises `Race`."""
        for rank, touches in self._loose.items():
            known = self._leaves.get(rank)
            for component, then in touches:
                if known is None or known[component] < then:
                    raise Race(f"the lanes of rank {rank} leave while {self._name(component)} may be at its tensors")
        self._loose.clear()
        self._leaves.clear()
        self._entered.clear()

    def _release(self, lane: int) -> Clock:
        """What the lane knows now, for others to learn."""
        known = self._fresh[lane]
        if known is None:
            clock, component = self._clock[lane], self._component[lane]
            assert clock is not None
            known = self._fresh[lane] = clock.copy()
            if component >= 0:
                known[component] = clock[component]
                clock[component] += 1
        return known

    def _check_write(self, cell: int, clock: Clock, component: int, verb: str) -> None:
        last = self._writer.get(cell)
        if last is not None and last[0] != component and clock[last[0]] < last[1]:
            raise Race(f"{verb} what {self._name(last[0])} may still be writing")

    def _check_entered(self, rank: int, clock: Clock) -> None:
        if not any(clock[component] >= then for component, then in self._entered.get(rank, [])):
            raise Race(f"reads a tensor of rank {rank}, which may not have made its call")

    def _watched(self, script: Script, cell: int) -> bool:
        return self.view is None or self._node(script.cell_rank(cell)) == self.view

    def _node(self, rank: int) -> int:
        return self.numbering.topology.node(rank)

    def _name(self, component: int) -> str:
        rank, lane = self.numbering.lanes[self._names[component]]
        return f"lane {lane} of rank {rank}"
