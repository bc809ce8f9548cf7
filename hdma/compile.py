"""From a Plan to the rows of numbers that csrc/plan.cc decodes."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from hdma.layout import ROLES
from hdma.plan import LANES, Place, Plan, Step

# The numbers of Verb and Space in csrc/plan.h; lanes are numbered as in LANES.
VERBS = ("copy", "put", "signal", "wait", "reduce", "enter", "leave")
SPACES = ("none", "input", "output", "window", "host")
_WIRE = 0x100
_NOWHERE = Place("none", 0, 0, 0, 0)


class Compiled(NamedTuple):
    """int64 rows as bytes, and the order in which the walk needs or gives shards (positions are the marks)."""

    steps: bytes
    sources: bytes
    spans: bytes
    order: tuple[int, ...]


def compile_rank(plan: Plan, rank: int) -> Compiled:
    """The steps of one rank, in issue order, with flags and rings as numbers of `plan.layout`."""
    layout = plan.layout
    steps, sources = array("q"), array("q")
    order: dict[int, int] = {}
    count = 0
    for step in plan.steps(rank):
        for shard in (step.needs, step.gives):
            if shard is not None:
                order.setdefault(shard, len(order))
        for src in step.srcs:
            sources.extend(_place(src))
        flag, local = step.flag, step.local
        steps.extend((VERBS.index(step.verb), LANES.index(step.lane), _doorbell(step)))
        steps.extend(_place(step.dst or _NOWHERE))
        steps.extend((count, len(step.srcs)))
        steps.extend((flag.owner, layout.flag_number(flag), layout.base_number(rank, flag.ring)) if flag else (0, 0, 0))
        steps.append(step.value)
        steps.extend((layout.flag_number(local), layout.base_number(rank, local.ring)) if local else (-1, 0))
        steps.append(step.local_value)
        steps.append(-1 if step.needs is None else order[step.needs])
        steps.append(-1 if step.gives is None else order[step.gives])
        count += len(step.srcs)
    spans = array("q")
    for ring, chunks in plan.spans(rank).items():
        spans.extend((layout.base_number(rank, ring), chunks))
    return Compiled(steps.tobytes(), sources.tobytes(), spans.tobytes(), tuple(order))


def _place(place: Place) -> tuple[int, int, int, int, int]:
    space = SPACES.index(place.space) | (_WIRE if place.wire else 0)
    return space, place.rank, place.shard, place.offset, place.nbytes


def _doorbell(step: Step) -> bool:
    """Whether the signal's waiter is a proxy, which sleeps elsewhere than on the flag."""
    flag = step.flag
    return step.verb == "signal" and flag is not None and ROLES[flag.ring.purpose, flag.role][0] == "proxy"
