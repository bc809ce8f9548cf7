"""The proof: one pass over the global issue order of a sequence of calls on one communicator.

- No wait blocks when a single thread runs the steps in that order. Flags only rise and every rank issues its steps in
  that order, so no number of hardware queues, mapping of lanes to them or skew between ranks can deadlock.
- Bytes: every input chunk holds a random number. Each output chunk must hold the sum that the operation promises, its
  sources added once each and in the documented order; every read finds exactly the bytes that were written there.
- Races: clocks.py. All calls may be in flight at once (a call is not held back by the one before it), which is the
  weakest order; and behind the leaves of a call its caller may reuse its tensors at once.

Grids of more than FULL_RANKS ranks are proved by the view of one node and by the symmetry of the plan (symmetry.py).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hdma.errors import PlanError, UsageError
from hdma.layout import Ring
from hdma.plan import Plan
from hdma.simulator.clocks import Clocks, Race
from hdma.simulator.meaning import Tree, meaning, sources
from hdma.simulator.numbering import Numbering
from hdma.simulator.script import Bytes, Op, Script
from hdma.simulator.symmetry import check_symmetry

FULL_RANKS = 64
_PRIME = (1 << 61) - 1

# What a cell holds: the sum of its sources modulo a prime, and a number that also depends on their order.
Content = tuple[int, int]


@dataclass(frozen=True)
class Proof:
    """What was proved: `calls` and their `steps`, all ranks' together; the bytes that each rank put and that went from
    rank to rank. `view`: the node whose clocks were kept, None for all."""

    calls: int
    steps: int
    put_nbytes: list[int]
    link_nbytes: dict[tuple[int, int], int]
    view: int | None


def prove(plans: Sequence[Plan], view: int | None = None) -> Proof:
    """Proves calls of `plans` one after the other on one communicator. Raises `PlanError` with the step that is wrong.

    `view` keeps the clocks of one node only; by default all nodes', or those of node 0 and symmetry on large grids.
    """
    with no_collector():
        return prove_scripts(write_scripts(plans), view)


def prove_scripts(scripts: list[Script], view: int | None = None) -> Proof:
    """As `prove`, of scripts that are written already."""
    plans = {id(script.plan): script.plan for script in scripts}.values()
    if view is None and scripts[0].plan.topology.size > FULL_RANKS:
        for plan in plans:
            if not meaning(plan).like_all:
                raise UsageError(
                    f"{plan.operation} treats nodes differently: it is proved on up to {FULL_RANKS} ranks, not on "
                    f"{plan.topology}"
                )
            check_symmetry(plan)
        view = 0
    return Run(scripts, Clocks(scripts, view)).run()


def write_scripts(plans: Sequence[Plan]) -> list[Script]:
    """One script a call; calls of the same plan share it. Raises `PlanError` where plans do not go together."""
    if not plans:
        raise UsageError("no plan to prove")
    if any(plan.layout != plans[0].layout for plan in plans):
        raise UsageError("plans of one communicator share one layout")
    numbering = Numbering(plans[0].layout)
    scripts = {id(plan): Script(plan, numbering) for plan in plans}
    counters: dict[Ring, list[int]] = {}
    for script in scripts.values():
        for ring, ranks in script.counters.items():
            if counters.setdefault(ring, ranks) != ranks:
                raise PlanError(
                    f"{script.plan.operation} moves {ring} at ranks {ranks}, another plan at ranks {counters[ring]}: "
                    "their counts part"
                )
    return [scripts[id(plan)] for plan in plans]


class Run:
    """The pass itself. Raises `PlanError`."""

    def __init__(self, scripts: list[Script], clocks: Clocks) -> None:
        self.scripts, self.clocks = scripts, clocks
        self.numbering = scripts[0].numbering
        size = self.numbering.topology.size
        self.counts = [0] * (size * self.numbering.layout.base_count)
        self.heights = [0] * (size * self.numbering.rank_words)
        self.raiser: dict[int, int] = {}
        self.cells: list[tuple[Bytes, Content] | None] = [None] * max(script.cells for script in scripts)
        self.written: set[int] = set()  # output cells, in this call

    def run(self) -> Proof:
        for call, script in enumerate(self.scripts):
            given = self._fill(script, call)
            for op in script.ops:
                self._step(script, op, call)
            self._check_output(script, given, call)
            try:
                self.clocks.end_call()
            except Race as why:
                raise PlanError(f"{script.plan.operation} {script.plan.topology}, call {call}: {why}") from None
            for number, span in script.spans.items():
                self.counts[number] += span
        link_nbytes: dict[tuple[int, int], int] = {}
        for script in self.scripts:
            for pair, nbytes in script.link_nbytes.items():
                link_nbytes[pair] = link_nbytes.get(pair, 0) + nbytes
        return Proof(
            len(self.scripts),
            sum(len(script.ops) for script in self.scripts),
            [sum(each) for each in zip(*(script.put_nbytes for script in self.scripts))],
            link_nbytes,
            self.clocks.view,
        )

    def _step(self, script: Script, op: Op, call: int) -> None:
        verb = op.verb
        try:
            if verb == "wait":
                value = self.counts[op.count] + op.value
                if self.heights[op.word] < value:
                    raise Race(f"blocks in the issue order: the flag is at {self.heights[op.word]}, awaited is {value}")
                self.clocks.wait(op.lane, op.word, value)
            elif verb == "signal":
                self._raise(op.word, self.counts[op.count] + op.value, op.lane, op.lane)
            elif verb == "put":
                self.clocks.post(op.lane, op.wire)
                if op.dst is not None:
                    self._write(script, op)
                    self.clocks.touch(script, op)
                self._raise(op.word, self.counts[op.count] + op.value, op.wire, op.wire)
                if op.local >= 0:
                    self._raise(op.local, self.counts[op.local_count] + op.local_value, op.wire, ~op.wire)
            elif verb == "leave":
                self.clocks.leave(op.lane)
            elif verb == "enter":
                self.clocks.enter(op.lane)
            else:
                self._write(script, op)
                self.clocks.touch(script, op)
            if op.step.gives is not None:
                self._complete(script, op, op.step.gives)
        except Race as why:
            raise script.fail(op.step, str(why), call) from None

    def _raise(self, word: int, value: int, lane: int, raiser: int) -> None:
        if value <= self.heights[word]:
            raise Race(f"a flag does not rise: to {value} from {self.heights[word]}")
        if self.raiser.setdefault(word, raiser) != raiser:
            raise Race(f"a flag has two writers, the other is {self._raiser_name(self.raiser[word])}")
        self.heights[word] = value
        self.clocks.signal(lane, word, value)

    def _raiser_name(self, raiser: int) -> str:
        rank, lane = self.numbering.lanes[raiser if raiser >= 0 else ~raiser]
        return f"lane {lane} of rank {rank}"

    def _write(self, script: Script, op: Op) -> None:
        assert op.dst is not None
        read: list[Content] = []
        for cell, part in op.srcs:
            held = self.cells[cell]
            if held is None or held[0] != part:
                place = op.step.srcs[len(read)]
                found = "nothing" if held is None else f"{held[0][1]} bytes at {held[0][0]} of the slot"
                raise Race(f"reads {place}, where {found} was written")
            read.append(held[1])
        cell, part = op.dst
        if cell >= script.outputs_at:
            if cell in self.written:
                raise Race(f"writes {op.step.dst} a second time")
            self.written.add(cell)
        self.cells[cell] = (part, _sum(read))

    def _complete(self, script: Script, op: Op, shard: int) -> None:
        cells = [script.output_cell(op.step.rank, shard, c.index) for c in script.chunks]
        if any(self.cells[cell] is None for cell in cells):
            raise Race(f"gives shard {shard} before all of its chunks were written")
        self.clocks.complete(op.lane, cells)

    def _fill(self, script: Script, call: int) -> dict[int, Content]:
        """The caller fills its inputs with random numbers, and its outputs hold nothing."""
        rng = random.Random(call)
        given: dict[int, Content] = {}
        chunks = [(0, c.nbytes, False) for c in script.chunks]
        self.written.clear()
        for cell in range(script.inputs_at, script.inputs_end):
            token = rng.getrandbits(61) % _PRIME
            given[cell] = (token, token)
            self.cells[cell] = (chunks[(cell - script.inputs_at) % len(chunks)], given[cell])
        if not script.meaning.in_place:
            self.cells[script.outputs_at : script.cells] = [None] * (script.cells - script.outputs_at)
        self.clocks.forget_tensors(script.inputs_at)
        return given

    def _check_output(self, script: Script, given: dict[int, Content], call: int) -> None:
        plan = script.plan
        for rank in range(plan.topology.size):
            for shard in range(script.meaning.output_shards):
                tree = script.meaning.holds(rank, shard)
                for chunk in script.chunks:
                    held = self.cells[script.output_cell(rank, shard, chunk.index)]
                    want = _evaluate(script, given, tree, chunk.index)
                    if held is None or held[1] != want:
                        count = len(list(sources(tree)))
                        why = (
                            "nothing was written"
                            if held is None
                            else "not the bytes promised"
                            if held[1][0] != want[0]
                            else f"its {count} sources are summed in another order than documented"
                        )
                        where = f"output shard {shard}, chunk {chunk.index} of rank {rank}"
                        raise PlanError(f"{plan.operation} {plan.topology}, call {call}: {where}: {why}")


def _evaluate(script: Script, given: dict[int, Content], tree: Tree, chunk: int) -> Content:
    if isinstance(tree, tuple):
        return given[script.input_cell(*tree, chunk)]
    return _sum([_evaluate(script, given, part, chunk) for part in tree])


def _sum(parts: list[Content]) -> Content:
    if len(parts) == 1:
        return parts[0]
    return sum([total for total, _ in parts]) % _PRIME, hash(tuple([order for _, order in parts]))


@contextmanager
def no_collector() -> Iterator[None]:
    """Millions of small objects and no cycles: the garbage collector would only walk them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
