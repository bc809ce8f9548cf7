"""The proof: every grid is accepted, in time, and the proof is as sharp as schedules and full clocks."""

from __future__ import annotations

import itertools
import time

import pytest
import schedules
from plans import CHUNK_NBYTES, NAMES, calls

from hdma.algorithms import BUILDERS, DIRECT, build
from hdma.errors import PlanError, UsageError
from hdma.layout import Layout
from hdma.plan import Plan, Step, Variant
from hdma.simulator import prove, simulate
from hdma.simulator.faults import drops, edited, rejection
from hdma.simulator.symmetry import check_symmetry
from hdma.topology import Topology


def test_every_grid_to_5x5_is_proved() -> None:
    for nodes, mates in itertools.product(range(1, 6), repeat=2):
        assert prove(calls("aarra", nodes, mates, slots=1, chunks=3)).view is None


@pytest.mark.long
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


@pytest.mark.parametrize(("slots", "chunks", "skew"), [(1, 3, 0), (4, 5, 1)])
def test_every_operation_behind_every_other(slots: int, chunks: int, skew: int) -> None:
    word = "".join(a + b for a in NAMES for b in NAMES)
    for nodes, mates in [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (3, 2), (2, 3)]:
        for root in {0, nodes * mates - 1}:
            prove(calls(word, nodes, mates, slots, chunks, skew, root=root))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_large_grids_of_every_operation() -> None:
    for nodes, mates in [(1, 8), (8, 1), (4, 4), (8, 8)]:
        prove(calls("AAotbbtoA", nodes, mates, slots=1, chunks=2, root=nodes * mates // 2))
    prove(calls("Aot", 16, 8, slots=1, chunks=1))
    with pytest.raises(UsageError, match="broadcast treats nodes differently"):
        prove(calls("b", 16, 8, slots=1, chunks=1))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_64x8_is_proved_by_the_view_of_a_node() -> None:
    start_s = time.process_time()
    plans = calls("ar", 64, 8, slots=1, chunks=1)
    proof = prove(plans)
    assert proof.view == 0
    assert proof.steps > 2_500_000
    assert proof.put_nbytes == [2 * 63 * CHUNK_NBYTES] * 512
    assert time.process_time() - start_s < 120


def test_tensors_read_where_they_are() -> None:
    for mates in (1, 2, 3, 8):
        layout = Layout(Topology(1, mates), 1, CHUNK_NBYTES)
        plans = [build(name, layout, 24, Variant(skew=0, direct=True)) for name in DIRECT]
        plans += [build(name, layout, 24, Variant(skew=0)) for name in BUILDERS]
        prove([plan for pair in itertools.product(plans, plans) for plan in pair])
    layout = Layout(Topology(1, 3), 1, CHUNK_NBYTES)
    staged = build("all_gather", layout, CHUNK_NBYTES, Variant(skew=0))
    for name in DIRECT:
        for fault in drops(build(name, layout, CHUNK_NBYTES, Variant(skew=0, direct=True))):
            assert rejection(fault, staged) is not None, fault.step
    with pytest.raises(UsageError, match="within one node"):
        build("all_gather", Layout(Topology(2, 2), 1, CHUNK_NBYTES), CHUNK_NBYTES, Variant(skew=0, direct=True))


def test_plans_for_gpus_that_a_nic_reaches() -> None:
    word = "".join(a + b for a in NAMES for b in NAMES)
    for nodes, mates in [(2, 1), (3, 2), (2, 3)]:
        for slots, chunks, skew in ((1, 3, 0), (4, 5, 1)):
            prove(calls(word, nodes, mates, slots, chunks, skew, root=nodes * mates - 1, batched=True))
            prove(calls("arara", nodes, mates, slots, min(slots, chunks), skew, shard_major=True, batched=True))
    prove(calls("arAotra", 4, 8, slots=1, chunks=2, batched=True))


def test_plans_for_gpus() -> None:
    # Windows whose rails go through host memory, copies of node mates in batches.
    word = "".join(a + b for a in NAMES for b in NAMES)
    for nodes, mates in [(1, 2), (2, 1), (3, 2), (2, 3)]:
        for slots, chunks, skew in ((1, 3, 0), (4, 5, 1)):
            prove(calls(word, nodes, mates, slots, chunks, skew, root=nodes * mates - 1, host_wire=True))
            prove(calls("arara", nodes, mates, slots, min(slots, chunks), skew, shard_major=True, host_wire=True))
    prove(calls("arAotra", 4, 8, slots=1, chunks=2, host_wire=True))
    (plan,) = calls("a", 2, 2, 1, 3, host_wire=True)
    check_symmetry(plan)
    mixed = calls("a", 2, 2, 1, 3)[0]

    def from_the_wrong_window(steps: list[Step]) -> None:
        put = next(i for i, s in enumerate(steps) if s.verb == "put" and s.srcs)
        steps[put] = next(s for s in mixed.steps(0) if s.verb == "put" and s.srcs)

    with pytest.raises(PlanError, match="no memory of that window"):
        prove([edited(plan, from_the_wrong_window, rank=0)])


@pytest.mark.parametrize("letter", "art")
def test_every_wait_and_signal_of_a_plan_for_gpus_is_needed(letter: str) -> None:
    plan, other = calls(letter + ("a" if letter == "r" else "r"), 2, 2, 1, 3, host_wire=True)
    for fault in drops(plan):
        assert rejection(fault, other) is not None, fault.step


def test_tensors_in_symmetric_memory() -> None:
    for mates in (1, 2, 3, 8):
        layout = Layout(Topology(1, mates), 1, CHUNK_NBYTES)
        direct = [build(name, layout, 24, Variant(skew=0, direct=True, batched=True)) for name in DIRECT]
        in_place = build("all_gather", layout, 24, Variant(skew=0, direct=True, batched=True, in_place=True))
        plans = [*direct, in_place, *(build(name, layout, 24, Variant(skew=0, batched=True)) for name in BUILDERS)]
        prove([plan for pair in itertools.product(plans, plans) for plan in pair])
        for step in in_place.steps(0):
            assert step.verb != "reduce", "no compute units for what is in place"
    layout = Layout(Topology(1, 3), 1, CHUNK_NBYTES)
    in_place = build("all_gather", layout, 24, Variant(skew=0, direct=True, batched=True, in_place=True))
    for fault in drops(in_place):
        assert rejection(fault, build("all_gather", layout, CHUNK_NBYTES, Variant(skew=0))) is not None, fault.step
    with pytest.raises(UsageError, match="in place"):
        build("broadcast", layout, 24, Variant(skew=0, direct=True, in_place=True))


def test_a_direct_read_of_a_caller_that_may_be_elsewhere_is_rejected() -> None:
    plan = build("all_gather", Layout(Topology(1, 2), 1, CHUNK_NBYTES), CHUNK_NBYTES, Variant(skew=0, direct=True))

    def read_first(steps: list[Step]) -> None:
        copy = next(i for i, s in enumerate(steps) if s.srcs and s.srcs[0].rank != s.rank)
        steps[copy - 1], steps[copy] = steps[copy], steps[copy - 1]

    with pytest.raises(PlanError, match="reads a tensor of rank 1, which may not have made its call"):
        prove([edited(plan, read_first, rank=0)])
    leave_early = edited(plan, lambda steps: steps.insert(-1, steps.pop(-1)), rank=1)
    with pytest.raises(PlanError, match="leave while lane near of rank 0 may be at its tensors"):
        prove([leave_early])


@pytest.mark.long
def test_8x8_with_the_slots_and_skew_of_a_single_walker() -> None:
    prove(calls("ar", 8, 8, slots=4, chunks=5, skew=1))


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
        if plan.operation != "broadcast":
            check_symmetry(plan)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize(("skew", "shard_major"), [(0, False), (1, False), (0, True)])
def test_plans_treat_all_nodes_alike(nodes: int, skew: int, shard_major: bool) -> None:
    for plan in calls("ar" if shard_major else "arAot", nodes, 3, 4, 4, skew, shard_major):
        check_symmetry(plan)


def test_an_uneven_plan_is_not_symmetric() -> None:
    (plan,) = calls("r", 3, 2, 1, 2)
    with pytest.raises(PlanError, match="rank 3"):
        check_symmetry(edited(plan, lambda steps: steps.pop(5), rank=3))


def test_no_schedule_breaks_a_proved_plan() -> None:
    seed = 0
    for nodes, mates in [(1, 2), (2, 1), (2, 2), (3, 1)]:
        for slots, chunks, skew in [(1, 3, 0), (4, 5, 1)]:
            plans = calls("arraAobtA", nodes, mates, slots, chunks, skew)
            prove(plans)
            for queues in (1, 2, 4):
                for policy in schedules.POLICIES:
                    seed += 1
                    schedules.run(plans, queues, policy, seed, reuse=seed % 2 == 0)


def test_every_fault_that_a_schedule_shows_is_rejected() -> None:
    shown = rejected = 0
    for word in ("ara", "rar", "oAo", "tbt"):
        plan, other, _ = calls(word, 2, 2, 1, 2)
        for i, fault in enumerate(drops(plan)):
            if i % 6:
                continue
            error = rejection(fault, other)
            rejected += error is not None
            try:
                for policy in schedules.POLICIES:
                    for reuse in (True, False):
                        schedules.run([fault.plan, other, fault.plan], 4, policy, i, reuse)
            except PlanError:
                continue  # A step that cannot even be written down.
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
