"""Slots and flags of a grid never share a byte, and a topology says who is whose mate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdma.algorithms import BUILDERS, make_plan
from hdma.compile import compile_rank
from hdma.errors import UsageError
from hdma.layout import Flag, Layout, Ring, ring_count
from hdma.plan import Plan
from hdma.tensors import dtype_name
from hdma.topology import Topology, from_hosts

GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@settings(deadline=None)
@given(GRIDS, st.integers(1, 5), st.sampled_from(sorted(BUILDERS)))
def test_flags_have_words_and_rings_have_slots_of_their_own(grid: tuple[int, int], slots: int, operation: str) -> None:
    plan: Plan = make_plan(operation, *grid, 64 * slots, slots=slots, chunk_nbytes=64, skew=0)
    layout, words = plan.layout, {}
    names = [layout.flag_names(rank) for rank in range(plan.topology.size)]
    places: dict[tuple[int, int], Ring] = {}
    for rank in range(plan.topology.size):
        rings = {}
        for step in plan.steps(rank):
            for flag in (step.flag, step.local):
                if flag is not None:
                    assert words.setdefault((flag.owner, layout.flag_number(flag)), flag) == flag
                    assert layout.flag_number(flag) < layout.flag_count
                    assert rings.setdefault(layout.base_number(rank, flag.ring), flag.ring) == flag.ring
                    assert layout.base_number(rank, flag.ring) < layout.base_count
                    assert names[flag.owner][layout.flag_number(flag)]
    for owner in range(plan.topology.size):
        node, local = plan.topology.node(owner), plan.topology.local_rank(owner)
        rings_of_owner = [Ring("stage", owner, 0)]
        rings_of_owner += [Ring("rail", owner, m) for m in range(grid[0]) if m != node]
        rings_of_owner += [Ring("scatter", owner, j) for j in range(grid[1]) if j != local]
        rings_of_owner += [Ring("sum", owner, m) for m in range(grid[0]) if grid[0] > 1]
        assert len(rings_of_owner) == ring_count(plan.topology)
        for ring in rings_of_owner:
            for chunk in range(slots):
                at = layout.slot_offset(ring, chunk)
                assert at % layout.slot_nbytes == 0 and at < layout.window_nbytes
                assert places.setdefault((owner, at), ring) == ring
        assert sum(1 for o, _ in places if o == owner) == slots * len(rings_of_owner)


def test_large_grids_are_named_in_full() -> None:
    layout = Layout(Topology(64, 8), 4, 64)
    assert sum(bool(name) for name in layout.flag_names(77)) >= 1000
    flag = Flag(77, Ring("rail", 77, 3), "filled")
    assert layout.flag_names(77)[layout.flag_number(flag)] == "the chunk of a rail peer has arrived (rank 29)"


def test_window_sets_the_slots() -> None:
    layout = Layout.for_window(Topology(2, 2), 4, 64 << 10, 512 << 10)
    assert layout.slot_nbytes == 3264 and layout.window_nbytes <= 64 << 10
    assert Layout.for_window(Topology(2, 2), 4, 64 << 20, 512 << 10).slot_nbytes == 512 << 10
    with pytest.raises(UsageError, match=r"HDMA_WINDOW_BYTES=32768 is too small for 64x8 .* set it to 34560 or more"):
        Layout.for_window(Topology(64, 8), 4, 32 << 10, 512 << 10)


@pytest.mark.parametrize(
    "hosts, ranks_per_node, nodes",
    [
        ("aabb", None, [[0, 1], [2, 3]]),
        ("abab", None, [[0, 2], [1, 3]]),
        ("bbaa", None, [[0, 1], [2, 3]]),
        ("aaaa", 2, [[0, 1], [2, 3]]),
        ("aaaa", 1, [[0], [1], [2], [3]]),
        ("abababab", 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_topology_from_hosts(hosts: str, ranks_per_node: int | None, nodes: list[list[int]]) -> None:
    topology = from_hosts(hosts, ranks_per_node)
    assert [[topology.rank(n, l) for l in range(topology.ranks_per_node)] for n in range(topology.nodes)] == nodes
    for n, node in enumerate(nodes):
        for l, rank in enumerate(node):
            assert (topology.node(rank), topology.local_rank(rank)) == (n, l)
            assert sorted([rank, *topology.mates(rank)]) == node
            assert sorted([rank, *topology.rail(rank)]) == sorted(other[l] for other in nodes)


@pytest.mark.parametrize(
    "hosts, ranks_per_node, nodes",
    [
        ("aab", None, [[0], [1], [2]]),
        ("aaa", 2, [[0], [1], [2]]),
        ("aaabab", None, [[0, 1], [2, 4], [3, 5]]),
        ("aaabbbbbb", None, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_unequal_nodes_are_split_into_equal_ones(
    hosts: str, ranks_per_node: int | None, nodes: list[list[int]]
) -> None:
    topology = from_hosts(hosts, ranks_per_node)
    assert [[topology.rank(n, l) for l in range(topology.ranks_per_node)] for n in range(topology.nodes)] == nodes


def test_plans_that_cannot_be_built() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"operation": "gather"}, "no operation 'gather'"),
        ({"nbytes": 7, "element_nbytes": 2}, "not whole elements"),
        ({"nbytes": 1000, "chunk_nbytes": 10}, "longer than one plan carries"),
        ({"nodes": 0}, "has no rank"),
        ({"slots": 3, "skew": 1}, "3 slots a ring deadlock with a skew of 1 chunks: give 4 slots"),
    ]
    for options, text in bad:
        with pytest.raises(UsageError, match=text):
            make_plan(**{"operation": "all_gather", "nodes": 2, "ranks_per_node": 2, "nbytes": 8, **options})
    with pytest.raises(UsageError, match="each rank"):
        Topology(2, 2, (0, 1, 2, 2))


def test_compiled_rows_hold_every_step() -> None:
    plan = make_plan("reduce_scatter", 2, 2, 100, chunk_nbytes=25)
    compiled = compile_rank(plan, 1)
    assert len(compiled.steps) == 8 * 19 * len(plan.steps(1))
    assert len(compiled.sources) == 8 * 5 * sum(len(step.srcs) for step in plan.steps(1))
    assert sorted(compiled.order) == [0, 1, 2, 3] and compiled.order[0] == 2
    assert len(str(plan).splitlines()) > sum(len(plan.steps(rank)) for rank in range(4))


def test_dtype_names() -> None:
    import ml_dtypes
    import numpy as np

    names = [dtype_name(d) for d in ("float32", np.float32, np.dtype("f4"), ml_dtypes.bfloat16, "bfloat16", "nonsense")]
    assert names == ["float32"] * 3 + ["bfloat16"] * 2 + ["nonsense"]
