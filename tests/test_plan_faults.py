"""Plans made wrong on purpose: the proof rejects each, and names the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from plans import CHUNK_NBYTES, calls

from hdma.errors import PlanError
from hdma.layout import Flag, Ring
from hdma.plan import Place, Plan, Step, Steps
from hdma.simulator import prove
from hdma.simulator.faults import Edit, Reasons, drops, edited, rejection

# (letter, slots, chunks, skew) -> verbs and flags whose drop is accepted, some or all of them. With one slot every wait
# and every signal is needed; with more, some order is given twice.
REDUNDANT: dict[tuple[str, int, int, int], set[tuple[str, str]]] = {
    ("a", 1, 3, 0): set(),
    ("r", 1, 3, 0): set(),
    # AllGather begins behind ReduceScatter: the last chunk's signal comes before the first one's wait, and the second
    # time round a slot the rails tell what the stage's readers tell.
    ("A", 1, 2, 0): {("signal", "sum.reduced"), ("wait", "stage.credit"), ("wait", "stage.sent")},
    ("o", 1, 3, 0): set(),
    ("b", 1, 3, 0): set(),
    ("t", 1, 3, 0): set(),
    ("a", 2, 4, 0): {
        ("wait", "stage.credit"),
        ("signal", "stage.credit"),
        ("put", "stage.sent"),
        ("put", "rail.credit"),
    },
    ("r", 2, 4, 0): {
        ("wait", "sum.sent"),
        ("signal", "scatter.credit"),
        ("put", "sum.sent"),
        ("wait", "rail.own"),
        ("put", "rail.credit"),
        ("wait", "rail.credit"),
    },
    ("a", 4, 5, 1): {
        ("signal", "stage.filled"),
        ("put", "stage.sent"),
        ("wait", "stage.credit"),
        ("wait", "stage.sent"),
        ("wait", "rail.credit"),
        ("signal", "stage.credit"),
        ("signal", "rail.relayed"),
        ("signal", "rail.own"),
        ("wait", "rail.read"),
        ("wait", "rail.own"),
        ("put", "rail.credit"),
    },
    ("r", 4, 5, 1): {
        ("signal", "scatter.filled"),
        ("signal", "scatter.credit"),
        ("put", "sum.sent"),
        ("wait", "scatter.credit"),
        ("wait", "sum.sent"),
        ("wait", "rail.credit"),
        ("wait", "rail.own"),
        ("put", "rail.credit"),
    },
}


@pytest.mark.parametrize("case", REDUNDANT)
def test_each_wait_and_signal_dropped_is_rejected_or_redundant_for_a_reason(case: tuple[str, int, int, int]) -> None:
    letter, slots, chunks, skew = case
    plan, other = calls(letter + ("a" if letter == "r" else "r"), 2, 2, slots, chunks, skew)
    reasons = Reasons([plan] * 3)
    accepted = set()
    for fault in drops(plan):
        error = rejection(fault, other)
        if error is None:
            reason = reasons.of(fault.step)
            accepted.add((fault.step.verb, f"{fault.flag.ring.purpose}.{fault.flag.role}"))
            assert any(word in reason for word in ("implied by", "no wait asks", "is issued behind")), reason
    assert accepted == REDUNDANT[case]


def test_a_rejection_names_rank_lane_step_and_flag() -> None:
    plan, other = calls("ar", 2, 2, 1, 3)
    fault = next(f for f in drops(plan) if f.step.flag is not None and f.step.flag.role == "credit")
    assert "rank 1" in str(rejection(fault, other)) or "rank 0" in str(rejection(fault, other))
    text = str(rejection(fault, other))
    assert "all_gather 2x2, call" in text
    assert "lane near, step" in text


def index(steps: list[Step], verb: str, text: str = "", nth: int = 0) -> int:
    return [i for i, step in enumerate(steps) if step.verb == verb and text in str(step)][nth]


def swap(steps: list[Step], first: int, second: int) -> None:
    steps[first], steps[second] = steps[second], steps[first]


def signal_before(verb: str, text: str) -> Edit:
    def edit(steps: list[Step]) -> None:
        at = index(steps, "signal", text)
        before = max(i for i in range(at) if steps[i].verb == verb)
        steps.insert(before, replace(steps.pop(at), phase=steps[before].phase))

    return edit


def early_reuse(flag: str) -> Edit:
    def edit(steps: list[Step]) -> None:
        for i, step in enumerate(steps):
            if step.verb == "wait" and flag in str(step):
                steps[i] = replace(step, value=step.value - 1)

    return edit


def change(which: str, text: str, **fields: object) -> Edit:
    def edit(steps: list[Step]) -> None:
        at = index(steps, which, text)
        made = {name: value(steps[at]) if callable(value) else value for name, value in fields.items()}
        steps[at] = replace(steps[at], **made)  # type: ignore[arg-type]

    return edit


def wrong_chunk(steps: list[Step]) -> None:
    at = index(steps, "copy", "output")
    (src,) = steps[at].srcs
    steps[at] = replace(steps[at], srcs=(src._replace(offset=src.offset + CHUNK_NBYTES),))


def twice(verb: str, text: str) -> Edit:
    def edit(steps: list[Step]) -> None:
        at = index(steps, verb, text)
        steps.insert(at, steps[at])

    return edit


def without_waits(text: str) -> Edit:
    def edit(steps: list[Step]) -> None:
        steps[:] = [step for step in steps if not (step.verb == "wait" and text in str(step))]

    return edit


def leave_early(steps: list[Step]) -> None:
    leave = steps.pop(index(steps, "leave", "rail"))
    at = max(i for i, step in enumerate(steps) if step.verb == "copy" and step.lane == "rail")
    steps.insert(at, replace(leave, phase=steps[at].phase))


def consumer_first(steps: list[Step]) -> None:
    at = index(steps, "wait", "stage[1.0].filled")
    moved = [replace(step, phase=0) for step in steps[at : at + 1]]
    steps[:] = moved + steps[:at] + steps[at + 1 :]


def another_lane(steps: list[Step]) -> None:
    at = index(steps, "put", "window", nth=1)
    steps[at] = replace(steps[at], lane="credit")


def gives_early(steps: list[Step]) -> None:
    first, last = (index(steps, "copy", text) for text in ("output[1]", "gives shard 1"))
    steps[first], steps[last] = replace(steps[first], gives=1), replace(steps[last], gives=None)


def fewer_phases(steps: list[Step]) -> None:
    for i in range(len(steps) - 4, len(steps)):
        steps[i] = replace(steps[i], phase=steps[-5].phase)


def put_from_the_input(steps: list[Step]) -> None:
    """Zero copies, but the lane leaves before the NIC has read."""
    rank, out = steps[0].rank, []
    for step in steps:
        if step.verb == "put" and step.dst is not None:
            inp = Place("input", rank, 0, CHUNK_NBYTES * (step.value - 1), step.dst.nbytes)
            step = replace(step, srcs=(inp,))
            out += [replace(step, verb="enter", dst=None, srcs=(), flag=None, local=None), step]
            out += [replace(out[-2], verb="leave")]
        else:
            out.append(step)
    steps[:] = out


FAULTS = [
    ("a", "signal before the copy it tells of", signal_before("reduce", "stage[0.0].filled"), "may still be writing"),
    ("r", "signal before the slice", signal_before("copy", "scatter[1.0].filled"), "reads|nothing"),
    ("r", "signal before the node sum", signal_before("reduce", "sum[0.1].posted"), "may still be writing"),
    ("a", "stage reused one early, mates", early_reuse("stage[0.0].credit"), "may still be reading"),
    ("a", "stage reused one early, NIC", early_reuse("stage[0.0].sent"), "may still be reading"),
    ("a", "rail slot reused one early", early_reuse("rail[2.0].credit"), "may still be reading"),
    ("r", "scatter slot reused one early", early_reuse("scatter[1.0].credit"), "may still be reading"),
    ("r", "node sum reused one early", early_reuse("sum[0.1].sent"), "may still be reading"),
    ("r", "rail slot reused one early", early_reuse("rail[2.0].credit"), "may still be reading"),
    ("a", "wrong slot", wrong_chunk, "overwrites what|may still be writing|not the bytes"),
    ("r", "a source twice", change("reduce", "+", srcs=lambda s: (s.srcs[0], s.srcs[0])), "not the bytes"),
    ("r", "sources in another order", change("reduce", "+", srcs=lambda s: s.srcs[::-1]), "another order"),
    ("a", "put twice", twice("put", "window"), "carries 32 bytes, the minimum is 24"),
    ("a", "signals twice", twice("signal", "stage"), "does not rise"),
    ("a", "copied twice", twice("copy", "output"), "a second time|given"),
    ("a", "no wait for the NIC's reads", without_waits("sent"), "may still be reading"),
    ("a", "no local completion", change("put", "window", local=None), "blocks|may still be reading"),
    ("a", "leaves before its last copy", leave_early, "outside the lane's enter and leave"),
    ("a", "one flag from two lanes", another_lane, "two writers|may still"),
    ("a", "consumer first", consumer_first, "blocks in the issue order"),
    ("a", "the NIC reads the caller's tensor on", put_from_the_input, "leave while"),
    ("a", "never gives", change("copy", "gives", gives=None), "never gives"),
    ("a", "gives twice", change("copy", "output", gives=1), "gives shard 1 a second time"),
    ("a", "gives before the last chunk", gives_early, "before all of its chunks"),
    ("r", "does not say what it needs", change("copy", "needs", needs=None), "needs it"),
    (
        "a",
        "raises a flag of another node",
        change("signal", "filled", flag=Flag(2, Ring("stage", 0, 0), "filled")),
        "put",
    ),
    ("a", "waits elsewhere", change("wait", "filled", flag=Flag(1, Ring("stage", 0, 0), "filled")), "memory of rank 1"),
    ("a", "wrong kind of waiter", change("wait", "posted", lane="near"), "the proxy waits"),
    (
        "a",
        "beyond its slot",
        change("copy", "", dst=lambda s: s.dst._replace(space="window", offset=4)),
        "inside one slot",
    ),
    ("a", "half a chunk", change("reduce", "output", dst=lambda s: s.dst._replace(nbytes=4)), "number of elements"),
    ("a", "fewer phases", fewer_phases, "phases"),
    ("a", "no such lane", change("wait", "", lane="middle"), "no lane 'middle'"),
    ("a", "no such verb", change("wait", "", verb="jump"), "no verb 'jump'"),
]


@pytest.mark.parametrize(("letter", "name", "edit", "says"), FAULTS, ids=[f"{f[0]}: {f[1]}" for f in FAULTS])
def test_planted_faults_are_rejected(letter: str, name: str, edit: Edit, says: str) -> None:
    plan, other = calls("ar" if letter == "a" else "ra", 2, 2, 1, 3)
    prove([plan, other, plan])
    wrong = edited(plan, edit, rank=0)
    with pytest.raises(PlanError, match=says):
        prove([wrong, other, wrong])


def counted(plan: Plan, edit: Callable[[Steps], object]) -> Plan:
    """The plan with its spans changed by `edit`."""
    builder = plan.builder

    def built(steps: Steps) -> None:
        builder(steps)
        edit(steps)

    return replace(plan, builder=built)


def test_both_ends_of_a_ring_agree_how_far_it_moves() -> None:
    gather, scatter = calls("ar", 2, 2, 2, 4)
    stage = Ring("stage", 0, 0)
    with pytest.raises(PlanError, match="moves by 6 at rank 1, by 4 at rank 0"):
        prove([counted(gather, lambda s: s.spans.update({stage: 6} if s.rank == 1 else {}))])
    with pytest.raises(PlanError, match="not by a multiple"):
        prove([counted(gather, lambda s: s.spans.update({stage: 5} if stage in s.spans else {}))])
    with pytest.raises(PlanError, match="does not move with this plan"):
        prove([counted(gather, lambda s: s.spans.pop(stage, None) if s.rank == 1 else None)])
    # ReduceScatter leaves the mates' counts of a rail ring alone: AllGather after it would wait for ever.
    mates = {
        r: [ring for ring in scatter.spans(r) if ring.purpose == "rail" and ring.owner // 2 == r // 2] for r in range(4)
    }
    lazy = counted(scatter, lambda s: [s.spans.pop(ring) for ring in mates[s.rank] if ring.owner != s.rank])
    with pytest.raises(PlanError, match="their counts part"):
        prove([gather, lazy, gather])
