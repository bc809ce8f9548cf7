"""`python -m hdma.simulator`: proves grids, drops every wait and signal of the 2x2 plans in turn, prints what came out.

`--all` goes on to 8x8 and to 64x8, which takes a minute or two.
"""

from __future__ import annotations

import argparse
import resource
import time

from hdma.algorithms import BUILDERS, build
from hdma.layout import Layout
from hdma.plan import Plan, Variant
from hdma.simulator.faults import Fault, Reasons, drops, rejection
from hdma.simulator.prove import prove
from hdma.topology import Topology


def plans(nodes: int, ranks_per_node: int, slots: int, chunks: int) -> list[Plan]:
    """A plan of each operation, in chunks that fill the slots, on one layout."""
    layout = Layout(Topology(nodes, ranks_per_node), slots, slot_nbytes=8)
    return [build(operation, layout, 8 * chunks, Variant(skew=0)) for operation in BUILDERS]


def prove_grids(most: int) -> None:
    """One slot and three chunks: each slot is used again within a call and by the next one."""
    start_s, steps = time.perf_counter(), 0
    for nodes in range(1, most + 1):
        for mates in range(1, most + 1):
            each = plans(nodes, mates, slots=1, chunks=3)
            steps += prove([plan for plan in each for _ in range(2)] + each[:1]).steps
    took_s = time.perf_counter() - start_s
    print(
        f"1x1 to {most}x{most}: {most * most} grids, 13 calls each, {steps} steps proved in {took_s:.1f} s", flush=True
    )


def prove_large() -> None:
    start_s = time.perf_counter()
    gather, scatter, *_ = plans(64, 8, slots=1, chunks=1)
    proof = prove([gather, scatter] * 2)
    took_s, peak_gb = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"64x8 by node view and symmetry: 4 calls, {proof.steps} steps proved in {took_s:.1f} s, {peak_gb:.1f} GB")


def drop_each(plan: Plan, other: Plan) -> None:
    accepted: dict[str, list[Fault]] = {}
    reasons, count = Reasons([plan] * 3), 0
    for fault in drops(plan):
        count += 1
        if rejection(fault, other) is None:
            accepted.setdefault(f"{fault.step.verb} {fault.flag.ring.purpose}.{fault.flag.role}", []).append(fault)
    slots, rejected = plan.layout.slots, count - sum(map(len, accepted.values()))
    print(f"2x2 {plan.operation}, {slots} slots: {rejected} of {count} waits and signals are needed")
    for name, faults in accepted.items():
        print(f"    {len(faults):3} x {name}: {reasons.of(faults[0].step)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hdma.simulator", description="Proves the plans of hdma.")
    parser.add_argument("--all", action="store_true", help="all grids to 8x8, and 64x8")
    everything: bool = parser.parse_args().all
    prove_grids(8 if everything else 4)
    if everything:
        prove_large()
    for slots, chunks in ((1, 3), (2, 4)):
        each = plans(2, 2, slots, chunks)
        for plan, other in zip(each, [*each[1:], each[0]]):
            drop_each(plan, other)


if __name__ == "__main__":
    main()
