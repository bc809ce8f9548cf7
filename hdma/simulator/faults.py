"""Plans made wrong on purpose, to show that the proof notices: every wait and every signal dropped in turn.

A drop that the proof accepts is redundant, and `reason` says why, from the clocks of the plan as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hdma.errors import PlanError
from hdma.layout import Flag
from hdma.plan import Plan, Step, Steps
from hdma.simulator.clocks import Clock, Clocks
from hdma.simulator.prove import Run, prove, write_scripts
from hdma.simulator.script import Op, Script

Edit = Callable[[list[Step]], None]


@dataclass(frozen=True)
class Fault:
    """`plan`: the plan without `step`; of a put that carries bytes, without the raising of `flag`."""

    step: Step
    flag: Flag
    plan: Plan


def edited(plan: Plan, edit: Edit, rank: int | None = None) -> Plan:
    """The plan with the steps of one rank (or of each rank) changed by `edit`, in place."""
    builder = plan.builder

    def build(steps: Steps) -> None:
        builder(steps)
        if rank is None or steps.rank == rank:
            edit(steps.steps)

    return replace(plan, builder=build)


def drops(plan: Plan) -> Iterator[Fault]:
    """One fault for each wait, each signal (also by an empty put) and each of the two flags of a put."""
    for rank in range(plan.topology.size):
        for i, step in enumerate(plan.steps(rank)):
            if step.flag is None:
                continue
            if step.dst is None:
                yield Fault(step, step.flag, edited(plan, _instead(i), rank))
            else:
                yield Fault(step, step.flag, edited(plan, _instead(i, replace(step, flag=None)), rank))
            if step.local is not None:
                yield Fault(step, step.local, edited(plan, _instead(i, replace(step, local=None)), rank))


def _instead(i: int, *steps: Step) -> Edit:
    def edit(mine: list[Step]) -> None:
        mine[i : i + 1] = steps

    return edit


def rejection(fault: Fault, other: Plan) -> str | None:
    """What the proof says to the faulty plan, called three times or around a call of `other`; None if it accepts it."""
    for calls in ([fault.plan] * 3, [fault.plan, other, fault.plan]):
        try:
            prove(calls)
        except PlanError as error:
            return str(error)
    return None


class Reasons(Run):
    """Runs the plan as it is, and keeps which signal served each wait and what told each lane what it knows."""

    def __init__(self, calls: Sequence[Plan]) -> None:
        scripts = write_scripts(calls)
        clocks = _Watched(scripts)
        super().__init__(scripts, clocks)
        self.watched = clocks
        # By step: for each call, what the wait did.
        self.told: dict[int, list[str]] = defaultdict(list)
        # By step: the waits, of any call, that its signal (or local completion) is the first to satisfy.
        self.served: dict[int, list[Step]] = defaultdict(list)
        self._raised: dict[int, list[tuple[int, Step]]] = defaultdict(list)
        self.run()

    def of(self, step: Step) -> str:
        """Why the proof accepts the plan without the step."""
        if step.verb == "wait":
            told = sorted(set(self.told[id(step)]))
            if "news" not in told:
                return told[-1]
            steps = self.scripts[0].plan.steps(step.rank)
            behind = [s for s in steps[steps.index(step) :] if s.lane == step.lane and s.verb in ("signal", "put")]
            return (
                f"guards `{_text(behind[0])}`, which is redundant: {self.of(behind[0])}" if behind else "guards nothing"
            )
        waits = self.served[id(step)]
        if not waits:
            return "no wait asks for it: they are past it, or ask for a later value of the flag"
        told = sorted({told for wait in waits for told in self.told[id(wait)]})
        if "news" not in told:
            return f"its wait, `{_text(waits[0])}` of rank {waits[0].rank}, is {told[-1]}"
        return f"its wait, `{_text(waits[0])}` of rank {waits[0].rank}, is issued behind the flag's next value as well"

    def _step(self, script: Script, op: Op, call: int) -> None:
        self.watched.current = op.step
        super()._step(script, op, call)
        value = self.counts[op.count] + op.value if op.count >= 0 else 0
        if op.verb == "wait":
            self.told[id(op.step)].append(self.watched.last)
            first = next((step for height, step in self._raised[op.word] if height >= value), None)
            if value > 0 and first is not None:
                self.served[id(first)].append(op.step)
        elif op.local >= 0:
            self._raised[op.local].append((self.counts[op.local_count] + op.local_value, op.step))
        elif op.word >= 0:
            self._raised[op.word].append((value, op.step))


class _Watched(Clocks):
    def __init__(self, scripts: Sequence[Script]) -> None:
        super().__init__(scripts)
        self.current: Step | None = None
        self.last = ""
        self._history: dict[int, list[tuple[Step, Clock]]] = defaultdict(list)

    def wait(self, lane: int, word: int, value: int) -> None:
        before = self.clock_of(lane)
        super().wait(lane, word, value)
        after = self.clock_of(lane)
        assert self.current is not None
        if not np.array_equal(before, after):
            self.last = "news"
            self._history[lane].append((self.current, after))
        elif value <= 0:
            self.last = "always true"
        else:
            known = self.known(word, value)
            source = next((step for step, clock in self._history[lane] if (known <= clock).all()), None)
            self.last = "implied by " + (f"`{_text(source)}` before it" if source else "what the lane did itself")


def _text(step: Step) -> str:
    return " ".join(str(step).split())
