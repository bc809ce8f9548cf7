"""The proof: every grid is accepted, every planted fault is rejected with its place named."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import schedules

from hdma.algorithms import build
from hdma.errors import PlanError, UsageError
from hdma.layout import Flag, Layout, Ring
from hdma.plan import Place, Plan, Step, Steps, Variant
from hdma.simulator import prove, simulate
from hdma.simulator.faults import Reasons, drops, edited, rejection
from hdma.simulator.symmetry import check_symmetry
from hdma.topology import Topology

NAMES = {"a": "all_gather", "r": "reduce_scatter"}
CHUNK_NBYTES = 8


def calls(word: str, nodes: int, mates: int, slots: int, chunks: int, skew: int = 0, **variant: bool) -> list[Plan]:
    """A plan for each letter; letters that are the same share it. `chunks` chunks of a shard fill the slots exactly."""
    layout = Layout(Topology(nodes, mates), slots, CHUNK_NBYTES)
    made = Variant(skew=skew, **variant)
    plans = {letter: build(NAMES[letter], layout, chunks * CHUNK_NBYTES, made) for letter in set(word)}
    return [plans[letter] for letter in word]


@pytest.mark.timeout(240)
def test_every_grid_to_8x8_is_proved_in_under_a_minute() -> None:
    # One slot and three chunks: every slot is used again within a call and by the next call. All pairs of calls occur.
    start_s = time.process_time()
    for nodes in range(1, 9):
        for mates in range(1, 9):
            assert prove(calls("aarra", nodes, mates, slots=1, chunks=3)).view is None
    assert time.process_time() - start_s < 60


@pytest.mark.parametrize(("slots", "skew"), [(2, 0), (3, 0), (4, 1), (5, 1)])
def test_small_grids_with_more_slots_and_skew(slots: int, skew: int) -> None:
    for nodes, mates in [(1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (4, 2), (3, 3), (4, 4)]:
        prove(calls("aarra", nodes, mates, slots, chunks=2 * slots + 1, skew=skew))
        prove(calls("arara", nodes, mates, slots, chunks=slots, skew=skew, shard_major=True))


@pytest.mark.timeout(120)
def test_64x8_is_proved_by_the_view_of_a_node() -> None:
    start_s = time.process_time()
    plans = calls("arar", 64, 8, slots=1, chunks=1)
    proof = prove(plans)
    assert proof.view == 0
    assert proof.steps > 5_000_000
    assert proof.put_nbytes == [4 * 63 * CHUNK_NBYTES] * 512
    assert time.process_time() - start_s < 120


def test_calls_of_different_sizes_on_one_communicator() -> None:
    layout, variant = Layout(Topology(2, 3), 2, 64), Variant(element_nbytes=4, wire_nbytes=8)
    rng = random.Random(7)
    for _ in range(20):
        names = [rng.choice(list(NAMES.values())) for _ in range(5)]
        prove([build(name, layout, 4 * rng.choice([0, 1, 7, 8, 9, 16, 33, 100]), variant) for name in names])


def test_plans_must_share_a_layout() -> None:
    (one,), (other,) = calls("a", 2, 2, 1, 1), calls("a", 2, 2, 2, 1)
    with pytest.raises(UsageError, match="share one layout"):
        prove([one, other])
    with pytest.raises(UsageError, match="no plan"):
        simulate([])


def test_a_rank_order_other_than_node_after_node() -> None:
    layout = Layout(Topology(2, 2, (3, 0, 2, 1)), 1, CHUNK_NBYTES)
    plans = [build(name, layout, 3 * CHUNK_NBYTES, Variant(skew=0)) for name in NAMES.values()]
    prove(plans + plans)
    for plan in plans:
        check_symmetry(plan)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("variant", [{}, {"skew": 1}, {"shard_major": True}])
def test_plans_treat_all_nodes_alike(nodes: int, variant: dict[str, int]) -> None:
    for plan in calls("ar", nodes, 3, 4, 4, **variant):  # type: ignore[arg-type]
        check_symmetry(plan)


def test_an_uneven_plan_is_not_symmetric() -> None:
    (plan,) = calls("r", 3, 2, 1, 2)
    with pytest.raises(PlanError, match="rank 3"):
        check_symmetry(edited(plan, lambda steps: steps.pop(5), rank=3))


# Every wait and every signal is needed with one slot; with more slots some order is given twice, and the flags are
# these: (letter, slots, chunks, skew) -> verbs and flags whose drop is accepted.
REDUNDANT: dict[tuple[str, int, int, int], set[tuple[str, str]]] = {
    ("a", 1, 3, 0): set(),
    ("r", 1, 3, 0): set(),
    ("a", 2, 4, 0): {
        ("wait", "stage.credit"),
        ("signal", "stage.credit"),
        ("put", "rail.filled"),
        ("put", "rail.credit"),
    },
    ("r", 2, 4, 0): {
        ("wait", "sum.sent"),
        ("signal", "scatter.credit"),
        ("put", "rail.filled"),
        ("wait", "rail.own"),
        ("put", "rail.credit"),
        ("wait", "rail.credit"),
    },
}


@pytest.mark.parametrize("case", REDUNDANT)
def test_each_wait_and_signal_dropped_is_rejected_or_redundant_for_a_reason(case: tuple[str, int, int, int]) -> None:
    letter, slots, chunks, skew = case
    plan, other = calls("ar" if letter == "a" else "ra", 2, 2, slots, chunks, skew)
    reasons = Reasons([plan] * 3)
    accepted = set()
    for fault in drops(plan):
        error = rejection(fault, plan=fault.plan, other=other)
        if error is None:
            flag, reason = fault.step.flag, reasons.of(fault.step)
            assert flag is not None
            accepted.add((fault.step.verb, f"{flag.ring.purpose}.{flag.role}"))
            assert any(word in reason for word in ("implied by", "no wait asks", "is issued behind")), reason
    assert accepted == REDUNDANT[case]


def test_a_rejection_names_rank_lane_step_and_flag() -> None:
    plan, other = calls("ar", 2, 2, 1, 3)
    fault = next(f for f in drops(plan) if f.step.flag is not None and f.step.flag.role == "credit")
    assert "rank 1" in str(rejection(fault, plan, other)) or "rank 0" in str(rejection(fault, plan, other))
    text = str(rejection(fault, plan, other))
    assert "all_gather 2x2, call" in text
    assert "lane near, step" in text


def index(steps: list[Step], verb: str, text: str = "", nth: int = 0) -> int:
    return [i for i, step in enumerate(steps) if step.verb == verb and text in str(step)][nth]


def swap(steps: list[Step], first: int, second: int) -> None:
    steps[first], steps[second] = steps[second], steps[first]


def signal_before(verb: str, text: str) -> object:
    def edit(steps: list[Step]) -> None:
        at = index(steps, "signal", text)
        before = max(i for i in range(at) if steps[i].verb == verb)
        steps.insert(before, replace(steps.pop(at), phase=steps[before].phase))

    return edit


def early_reuse(flag: str) -> object:
    def edit(steps: list[Step]) -> None:
        for i, step in enumerate(steps):
            if step.verb == "wait" and flag in str(step):
                steps[i] = replace(step, value=step.value - 1)

    return edit


def change(verb: str, text: str, **fields: object) -> object:
    def edit(steps: list[Step]) -> None:
        at = index(steps, verb, text)
        made = {name: value(steps[at]) if callable(value) else value for name, value in fields.items()}
        steps[at] = replace(steps[at], **made)  # type: ignore[arg-type]

    return edit


def wrong_chunk(steps: list[Step]) -> None:
    at = index(steps, "copy", "output")
    (src,) = steps[at].srcs
    steps[at] = replace(steps[at], srcs=(src._replace(offset=src.offset + CHUNK_NBYTES),))


def twice(verb: str, text: str) -> object:
    def edit(steps: list[Step]) -> None:
        at = index(steps, verb, text)
        steps.insert(at, steps[at])

    return edit


def without_waits(text: str) -> object:
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


def put_from_the_input(steps: list[Step]) -> None:
    """Zero copies, but the lane leaves before the NIC has read."""
    rank, out = steps[0].rank, []
    for step in steps:
        if step.verb == "put" and step.dst is not None:
            inp = Place("input", rank, 0, 0, step.dst.nbytes)
            step = replace(step, srcs=(inp,))
            out += [replace(step, verb="enter", dst=None, srcs=(), flag=None, local=None), step]
            out += [replace(out[-2], verb="leave")]
        else:
            out.append(step)
    steps[:] = out


FAULTS = [
    ("a", "signal before the copy it tells of", signal_before("reduce", "stage[0.0].filled"), "reads|overwrites|gives"),
    ("r", "signal before the slice", signal_before("copy", "scatter[1.0].filled"), "reads|nothing"),
    ("r", "signal before the node sum", signal_before("reduce", "sum[0.1].posted"), "may still be writing"),
    ("a", "stage reused one early, mates", early_reuse("stage[0.0].credit"), "may still be reading"),
    ("a", "stage reused one early, NIC", early_reuse("stage[0.0].sent"), "may still be reading"),
    ("a", "rail slot reused one early", early_reuse("rail[2.0].credit"), "may still be reading"),
    ("r", "scatter slot reused one early", early_reuse("scatter[1.0].credit"), "may still be reading"),
    ("r", "node sum reused one early", early_reuse("sum[0.1].sent"), "may still be reading"),
    ("r", "rail slot reused one early", early_reuse("rail[2.0].credit"), "may still be reading"),
    ("a", "wrong slot", wrong_chunk, "was written"),
    ("r", "a source twice", change("reduce", "scatter", srcs=lambda s: (s.srcs[0], s.srcs[0])), "not the bytes"),
    ("r", "sources in another order", change("reduce", "+", srcs=lambda s: s.srcs[::-1]), "another order"),
    ("a", "put twice", twice("put", "window"), "does not rise"),
    ("a", "copied twice", twice("copy", "output"), "a second time|given"),
    ("a", "no wait for the NIC's reads", without_waits("sent"), "may still be reading"),
    ("a", "no local completion", change("put", "window", local=None), "blocks|may still be reading"),
    ("a", "leaves before its last copy", leave_early, "outside the lane's enter and leave"),
    ("a", "one flag from two lanes", another_lane, "two writers|may still"),
    ("a", "consumer first", consumer_first, "blocks in the issue order"),
    ("a", "the NIC reads the caller's tensor on", put_from_the_input, "leave while"),
    ("a", "never gives", change("copy", "gives", gives=None), "never gives"),
    ("a", "gives before the last chunk", change("copy", "output", gives=1), "before all of its chunks"),
    ("r", "does not say what it needs", change("copy", "needs", needs=None), "needs it"),
    ("a", "raises a flag of another node", change("signal", "filled", flag=Flag(2, Ring("stage", 0, 0), "filled")), "put"),
    ("a", "waits elsewhere", change("wait", "filled", flag=Flag(1, Ring("stage", 0, 0), "filled")), "memory of rank 1"),
    ("a", "wrong kind of waiter", change("wait", "posted", lane="near"), "the proxy waits"),
    ("a", "beyond its slot", change("copy", "", dst=lambda s: s.dst._replace(space="window", offset=4)), "inside one slot"),
    ("a", "half a chunk", change("reduce", "output", dst=lambda s: s.dst._replace(nbytes=4)), "number of elements"),
    ("a", "fewer phases", change("leave", "near", phase=0), "phases|outside"),
    ("a", "no such lane", change("wait", "", lane="middle"), "no lane 'middle'"),
    ("a", "no such verb", change("wait", "", verb="jump"), "no verb 'jump'"),
]


@pytest.mark.parametrize(("letter", "name", "edit", "says"), FAULTS, ids=[f"{f[0]}: {f[1]}" for f in FAULTS])
def test_planted_faults_are_rejected(letter: str, name: str, edit: object, says: str) -> None:
    plan, other = calls("ar" if letter == "a" else "ra", 2, 2, 1, 3)
    prove([plan, other, plan])
    wrong = edited(plan, edit, rank=0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=says):
        prove([wrong, other, wrong])


def counted(plan: Plan, edit: object) -> Plan:
    """The plan with its spans changed by `edit`."""
    builder = plan.builder

    def built(steps: Steps) -> None:
        builder(steps)
        edit(steps)  # type: ignore[operator]

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
    mates = {r: [ring for ring in scatter.spans(r) if ring.purpose == "rail" and ring.owner // 2 == r // 2] for r in range(4)}
    lazy = counted(scatter, lambda s: [s.spans.pop(ring) for ring in mates[s.rank] if ring.owner != s.rank])
    with pytest.raises(PlanError, match="their counts part"):
        prove([gather, lazy, gather])


def test_no_schedule_breaks_a_proved_plan() -> None:
    seed = 0
    for nodes, mates in [(1, 2), (2, 1), (2, 2), (3, 1)]:
        for slots, chunks, skew in [(1, 3, 0), (4, 5, 1)]:
            plans = calls("arra", nodes, mates, slots, chunks, skew)
            prove(plans)
            for queues in (1, 2, 4):
                for policy in schedules.POLICIES:
                    seed += 1
                    schedules.run(plans, queues, policy, seed, reuse=seed % 2 == 0)


def test_every_fault_that_a_schedule_shows_is_rejected() -> None:
    shown = rejected = 0
    for word in ("ara", "rar"):
        plan, other, _ = calls(word, 2, 2, 1, 2)
        for i, fault in enumerate(drops(plan)):
            if i % 3:
                continue
            error = rejection(fault, plan, other)
            rejected += error is not None
            try:
                for policy in schedules.POLICIES:
                    for reuse in (True, False):
                        schedules.run([fault.plan, other, fault.plan], 4, policy, i, reuse)
            except schedules.Wrong:
                shown += 1
                assert error is not None, fault.step
    assert 20 < shown <= rejected


def test_a_node_view_is_as_sharp_as_full_clocks() -> None:
    for nodes in (2, 3):
        plan, other = calls("ar", nodes, 2, 1, 2)
        views = list(range(nodes))
        for i, fault in enumerate(drops(plan)):
            if i % 4:
                continue
            sequence = [fault.plan, other, fault.plan]

            def accepts(view: int | None, sequence: list[Plan] = sequence) -> bool:
                try:
                    prove(sequence, view)
                except PlanError:
                    return False
                return True

            assert accepts(None) == all(accepts(view) for view in views), fault.step
