"""Plans as data: any grid and size gives chunks that cover a shard, the least NIC bytes, and a plan that is proved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import calls

from hdma.algorithms import BUILDERS, MAX_CHUNKS, SHARD_MAJOR, build, make_plan, max_shard_nbytes
from hdma.errors import UsageError
from hdma.layout import Layout
from hdma.plan import Plan, Variant
from hdma.simulator import prove
from hdma.simulator.numbering import Numbering
from hdma.simulator.script import Script
from hdma.topology import Topology

OPERATIONS = tuple(BUILDERS)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    nodes, mates = draw(st.sampled_from([(n, m) for n in range(1, 5) for m in range(1, 5) if n * m <= 8]))
    order = tuple(draw(st.permutations(range(nodes * mates)))) if draw(st.booleans()) else ()
    return Layout(Topology(nodes, mates, order), draw(st.integers(1, 5)), draw(st.sampled_from([16, 24, 64])))


@st.composite
def plans(draw: st.DrawFn, layout: Layout | None = None) -> Plan:
    """Any operation, size and variant that fits the layout."""
    made = draw(layouts()) if layout is None else layout
    element_nbytes = draw(st.sampled_from([1, 2, 4, 8]))
    operation = draw(st.sampled_from(OPERATIONS))
    variant = Variant(
        element_nbytes,
        draw(st.sampled_from([0, element_nbytes, 2 * element_nbytes])),
        draw(st.integers(0, 1)) if made.slots >= 4 else 0,
        operation in SHARD_MAJOR and draw(st.booleans()),
        draw(st.integers(0, made.topology.size - 1)) if operation == "broadcast" else 0,
    )
    elements = draw(st.integers(0, max_shard_nbytes(made, variant) // element_nbytes))
    return build(operation, made, elements * element_nbytes, variant)


@given(plans())
@settings(max_examples=300, deadline=None)
def test_chunks_cover_the_shard_and_cut_no_element(plan: Plan) -> None:
    assert [c.index for c in plan.chunks] == list(range(len(plan.chunks)))
    assert [c.offset for c in plan.chunks] == [sum(c.nbytes for c in plan.chunks[:i]) for i in range(len(plan.chunks))]
    assert sum(c.nbytes for c in plan.chunks) == plan.nbytes
    assert all(c.nbytes % plan.variant.element_nbytes == 0 for c in plan.chunks)
    assert all(c.nbytes * plan.variant.wire_ratio <= plan.layout.slot_nbytes for c in plan.chunks)
    assert len(plan.chunks) <= (plan.layout.slots if plan.variant.shard_major else MAX_CHUNKS)


@given(plans())
@settings(max_examples=150, deadline=None)
def test_any_plan_is_proved_and_puts_the_least(plan: Plan) -> None:
    proof = prove([plan, plan])
    t, ratio = plan.topology, plan.variant.wire_ratio
    shards = {"all_gather": 1, "reduce_scatter": ratio, "all_reduce": ratio + 1, "all_reduce_once": ratio}
    shards |= {"broadcast": 1, "all_to_all": t.ranks_per_node}
    nbytes = 2 * (t.nodes - 1) * plan.nbytes * shards[plan.operation]
    senders = {plan.variant.root} if plan.operation == "broadcast" else set(range(t.size))
    assert proof.put_nbytes == [nbytes if rank in senders else 0 for rank in range(t.size)]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_calls_of_one_communicator_are_proved(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    prove(data.draw(st.lists(plans(layout), min_size=2, max_size=5)))


@given(plans())
@settings(max_examples=60, deadline=None)
def test_ranks_agree_on_spans_and_phases(plan: Plan) -> None:
    spans: dict[object, int] = {}
    for rank in range(plan.topology.size):
        for ring, span in plan.spans(rank).items():
            assert span % plan.layout.slots == 0
            assert spans.setdefault(ring, span) == span
    assert len({plan.steps(rank)[-1].phase for rank in range(plan.topology.size)}) == 1


@given(plans())
@settings(max_examples=60, deadline=None)
def test_the_proof_reads_the_issue_order(plan: Plan) -> None:
    script = Script(plan, Numbering(plan.layout))
    assert all(op.step is step for op, step in zip(script.ops, plan.issue_order(), strict=True))
    assert [op.step.phase for op in script.ops] == sorted(op.step.phase for op in script.ops)


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_slots_and_flags_have_places_of_their_own(layout: Layout) -> None:
    made = [build(operation, layout, layout.slots, Variant(skew=0)) for operation in OPERATIONS]
    flags = {step.flag for plan in made for step in plan.issue_order() if step.flag is not None}
    flags |= {step.local for plan in made for step in plan.issue_order() if step.local is not None}
    assert len({(flag.owner, layout.flag_number(flag)) for flag in flags}) == len(flags)
    assert all(0 <= layout.flag_number(flag) < layout.flag_count for flag in flags)
    rings = {flag.ring for flag in flags}
    if layout.topology.nodes == 1:  # Sums go to the output at once: their rings have flags, but no slots.
        rings = {ring for ring in rings if ring.purpose != "sum"}
    slots = {(ring.owner, layout.slot_offset(ring, chunk)) for ring in rings for chunk in range(layout.slots)}
    assert len(slots) == len(rings) * layout.slots
    assert all(0 <= offset < layout.window_nbytes for _, offset in slots)


def test_too_long_a_shard_and_half_an_element_are_refused() -> None:
    layout = Layout(Topology(2, 2), 4, 64)
    with pytest.raises(UsageError, match="longer than one plan"):
        build("all_gather", layout, max_shard_nbytes(layout, Variant()) + 1, Variant())
    with pytest.raises(UsageError, match="whole elements"):
        build("all_gather", layout, 6, Variant(element_nbytes=4))
    with pytest.raises(UsageError, match="nbytes must be a whole number"):
        make_plan("all_gather", nodes=2, ranks_per_node=2, nbytes=1e6)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no operation 'gather'"):
        build("gather", layout, 4, Variant())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_plan_writes_only_the_steps_that_are_asked_for(operation: str) -> None:
    plan = make_plan(operation, nodes=64, ranks_per_node=8, nbytes=1 << 20)
    mine = plan.steps(5)
    assert list(plan._cache) == [5]
    # Of one rank: a few steps for each peer and chunk, whatever the number of all ranks' steps.
    assert len(mine) < 16 * plan.topology.size * len(plan.chunks)
    assert {step.rank for step in mine} == {5}


def test_a_plan_prints_every_step() -> None:
    plan = make_plan("reduce_scatter", nodes=2, ranks_per_node=2, nbytes=64)
    text = str(plan)
    assert text.count("\n") == 4 + sum(len(plan.steps(rank)) for rank in range(4))
    assert "reduce_scatter 2x2, 64 bytes a shard in 16 chunks" in text
    assert "put    put    window@2+" in text


def test_shards_complete_one_after_the_other_in_a_shard_major_plan() -> None:
    (plan,) = calls("a", 2, 2, slots=4, chunks=4, shard_major=True)
    steps = plan.steps(0)
    given_at = {step.gives: i for i, step in enumerate(steps) if step.gives is not None}
    assert sorted(given_at) == [0, 1, 2, 3]
    assert max(given_at[0], given_at[1]) < 0.6 * len(steps)
    (plan,) = calls("r", 2, 2, slots=4, chunks=4, shard_major=True)
    steps = plan.steps(0)
    first_needed = {shard: min(i for i, s in enumerate(steps) if s.needs == shard) for shard in range(4)}
    assert max(first_needed.values()) > 0.3 * len(steps)
