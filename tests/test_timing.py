"""Time on paper: never faster than the bytes allow, close to it where the plan pipelines, and written as a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hdma.algorithms import make_plan
from hdma.errors import UsageError
from hdma.simulator import MACHINES, Machine, Simulation, simulate
from hdma.simulator.machines import ONE_WALKER

OPERATIONS = ("all_gather", "reduce_scatter")
MIB = 1 << 20

# Bandwidth only. Links and NICs of 50 GB/s are the machine whose times, with latencies, a prototype had put down.
FLAT = Machine(
    "flat",
    link_gb_s=50,
    out_gb_s=350,
    in_gb_s=350,
    nic_gb_s=50,
    reduce_gb_s=4000,
    memory_gb_s=4000,
    copies_at_once=8,
    copy_s=3e-6,
    reduce_s=6e-6,
    signal_s=1.5e-6,
    wait_s=1e-6,
    more_s=0.2e-6,
    post_s=1e-6,
    put_s=5e-6,
)


def timed(operation: str, nodes: int, mates: int, nbytes: int, machine: str | Machine, chunks: int = 16) -> Simulation:
    plan = make_plan(operation, nodes, mates, nbytes, chunk_nbytes=-(-nbytes // chunks))
    return simulate(plan, machine)


def time_s(simulation: Simulation) -> float:
    assert simulation.time_s is not None
    return simulation.time_s


def bound_s(simulation: Simulation) -> float:
    """The time that the busiest link, GPU or NIC needs for its bytes alone."""
    machine, size = simulation.machine, len(simulation.put_nbytes)
    assert machine is not None
    topology = simulation.plans[0].topology
    near = {pair: n for pair, n in simulation.link_nbytes.items() if topology.node(pair[0]) == topology.node(pair[1])}
    out = [sum(n for (src, _), n in near.items() if src == rank) for rank in range(size)]
    into = [sum(n for (_, dst), n in near.items() if dst == rank) for rank in range(size)]
    return 1e-9 * max(
        max(near.values(), default=0) / machine.link_gb_s,
        max(out) / machine.out_gb_s,
        max(into) / machine.in_gb_s,
        max(simulation.put_nbytes) / machine.nic_gb_s,
        sum(near.values()) / machine.memory_gb_s if machine.one_memory else 0,
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_machine_is_faster_than_its_links(operation: str, machine: str) -> None:
    for nodes, mates in [(1, 2), (1, 4), (2, 1), (2, 2), (3, 2)]:
        for nbytes in (1000, MIB, 64 * MIB):
            simulation = timed(operation, nodes, mates, nbytes, machine, chunks=4)
            assert time_s(simulation) > bound_s(simulation) > 0


def test_what_copies_cannot_use_of_a_memory_is_left_to_the_sums() -> None:
    """Fourteen slow copies and a sum on each rank ask for less than the memory has: as fast as with any memory."""
    enough, endless = (replace(FLAT, reduce_gb_s=2000, memory_gb_s=gb_s) for gb_s in (4000, 1e9))
    times = [time_s(timed("reduce_scatter", 1, 8, 64 * MIB, machine)) for machine in (enough, endless)]
    assert times[0] == pytest.approx(times[1])


@pytest.mark.parametrize(("nodes", "factor"), [(1, 1.25), (2, 1.25), (4, 1.35)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_64_mib_shards_come_near_the_bound(operation: str, nodes: int, factor: float) -> None:
    simulation = timed(operation, nodes, 8, 64 * MIB, FLAT, chunks=8)
    assert bound_s(simulation) == pytest.approx(64 * MIB * max(nodes, 1) / 50e9, rel=1e-6)
    assert bound_s(simulation) < time_s(simulation) < factor * bound_s(simulation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_chunks_hide_the_far_leg_of_large_messages_and_cost_small_ones(operation: str) -> None:
    one, many = (time_s(timed(operation, 2, 2, 64 * MIB, "h200", chunks)) for chunks in (1, 8))
    assert many < 0.9 * one
    one, many = (time_s(timed(operation, 2, 8, 65536, "h200", chunks)) for chunks in (1, 8))
    assert many > 2 * one


def test_one_walker_overlaps_less_than_two() -> None:
    for operation in OPERATIONS:
        one, two = (
            time_s(timed(operation, 2, 4, 16 * MIB, replace(FLAT, walkers=walkers), 8))
            for walkers in (ONE_WALKER, FLAT.walkers)
        )
        assert one > 1.05 * two


def test_a_slow_nic_costs_time_only_between_nodes() -> None:
    slow = replace(FLAT, nic_gb_s=10)
    for operation in OPERATIONS:
        far, near = (timed(operation, nodes, 2, 64 * MIB, slow) for nodes in (2, 1))
        assert time_s(far) == pytest.approx(64 * MIB / 10e9, rel=0.1)
        assert time_s(near) == time_s(timed(operation, 1, 2, 64 * MIB, FLAT))


def test_copies_measured_on_two_gpus_are_met_within_a_third() -> None:
    # GB/s of one shard, 256 MB a rank, 4 chunks: a pull AllGather and a push ReduceScatter on two H200.
    for operation, measured in (("all_gather", 238), ("reduce_scatter", 247)):
        nbytes = 256_000_000
        got = nbytes / time_s(timed(operation, 1, 2, nbytes, "h200", chunks=4)) / 1e9
        assert measured / 1.34 < got < measured * 1.34


def test_calls_one_behind_the_other() -> None:
    plan = make_plan("all_gather", 2, 2, MIB)
    once, twice = simulate(plan, FLAT), simulate([plan, plan], FLAT)
    assert len(twice.call_s) == 2
    assert time_s(once) < time_s(twice) < 2.2 * time_s(once)
    assert twice.put_nbytes == [2 * MIB] * 4
    assert twice.steps == 2 * once.steps


def test_a_simulation_counts_bytes_and_prints() -> None:
    simulation = simulate(make_plan("reduce_scatter", 2, 2, 1000), machine="mi355x")
    assert simulation.put_nbytes == [1000] * 4
    # Each rank pushes its mate's two slices and puts one node sum.
    assert simulation.link_nbytes == {(a, a ^ 1): 2000 for a in range(4)} | {(a, a ^ 2): 1000 for a in range(4)}
    assert "2x2: reduce_scatter of 1000 bytes a shard" in str(simulation)
    assert "us on mi355x (estimated: " in str(simulation)


def test_without_a_machine_nothing_is_timed(tmp_path: Path) -> None:
    simulation = simulate(make_plan("all_gather", 1, 2, 1000))
    assert simulation.time_s is None
    assert simulation.call_s == []
    with pytest.raises(UsageError, match="name a machine"):
        simulation.trace(tmp_path / "x.json")
    with pytest.raises(UsageError, match="no machine 'abacus': there are host, h200, mi355x"):
        simulate(make_plan("all_gather", 1, 2, 1000), "abacus")


def test_a_trace_shows_every_step_on_its_lane(tmp_path: Path) -> None:
    plan = make_plan("all_gather", 2, 2, 64 * 1024, chunk_nbytes=32 * 1024)
    simulation = simulate(plan, "h200")
    simulation.trace(tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(names) == 4 * 5
    shown = [e for e in events if e["ph"] == "X"]
    moved = sum(step.verb not in ("enter", "leave") for rank in range(4) for step in plan.steps(rank))
    carried = sum(step.verb == "put" and step.dst is not None for rank in range(4) for step in plan.steps(rank))
    assert len(shown) == moved + carried
    assert {names[e["pid"], e["tid"]] for e in shown} == {"near", "rail", "put", "credit", "wire"}
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in shown:
        if e["name"] != "copy":
            by_lane.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_lane.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    assert max(e["ts"] + e["dur"] for e in shown) >= 1e6 * time_s(simulation)
