"""`hdma.simulate`: a plan, or calls of several plans, proved and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike

from hdma.errors import UsageError
from hdma.plan import Plan
from hdma.simulator.machines import Machine, find_machine
from hdma.simulator.prove import Proof, no_collector, prove_scripts, write_scripts
from hdma.simulator.timing import Timing, time_scripts
from hdma.simulator.trace import write_trace


@dataclass(frozen=True)
class Simulation:
    """What was proved and, where a machine was named, how long it took there on paper.

    `time_s`: until the last rank left the last call; None without a machine. `call_s`: the same for each call.
    """

    plans: tuple[Plan, ...]
    proof: Proof
    machine: Machine | None = None
    _timing: Timing | None = field(default=None, repr=False)

    @property
    def time_s(self) -> float | None:
        return None if self._timing is None else self._timing.leave_s[-1]

    @property
    def call_s(self) -> list[float]:
        return [] if self._timing is None else list(self._timing.leave_s)

    @property
    def link_nbytes(self) -> dict[tuple[int, int], int]:
        """Bytes copied or put from rank to rank."""
        return self.proof.link_nbytes

    @property
    def put_nbytes(self) -> list[int]:
        """Bytes that each rank's NIC sent."""
        return self.proof.put_nbytes

    @property
    def steps(self) -> int:
        return self.proof.steps

    def trace(self, path: str | PathLike[str]) -> None:
        """Writes trace events (JSON) that Perfetto opens. Raises `UsageError` where no machine was named."""
        if self._timing is None:
            raise UsageError("nothing was timed: name a machine, simulate(plan, machine=...)")
        write_trace(path, self.plans[0].topology, self._timing.spans)

    def __str__(self) -> str:
        plans = ", ".join(f"{plan.operation} of {plan.nbytes} bytes a shard" for plan in self.plans)
        view = "" if self.proof.view is None else f" (clocks of node {self.proof.view}, the others by symmetry)"
        lines = [
            f"{self.plans[0].topology}: {plans}",
            f"  proved: {self.steps} steps, no deadlock, no race, right bytes{view}",
            f"  put: {max(self.put_nbytes)} bytes a rank, copied: "
            f"{sum(self.link_nbytes.values()) - sum(self.put_nbytes)} bytes by all ranks",
        ]
        if self.machine is not None and self.time_s is not None:
            guess = f" (estimated: {', '.join(self.machine.estimated)})" if self.machine.estimated else ""
            lines.append(f"  on paper: {self.time_s * 1e6:.0f} us on {self.machine.name}{guess}")
        return "\n".join(lines)


def simulate(plans: Plan | Sequence[Plan], machine: str | Machine | None = None) -> Simulation:
    """Proves one call, or calls of `plans` one behind the other on one communicator, and times them on `machine`.

    `machine`: a name of MACHINES or a `Machine`. Raises `PlanError` that names the rank, the lane and the step where a
    plan is wrong; `UsageError` for an unknown machine or plans that do not share a layout.
    """
    calls = (plans,) if isinstance(plans, Plan) else tuple(plans)
    if not all(isinstance(plan, Plan) for plan in calls):
        raise UsageError(f"simulate takes plans, as hdma.make_plan makes them, not {plans!r}")
    found = None if machine is None else find_machine(machine)
    with no_collector():
        scripts = write_scripts(calls)
        proof = prove_scripts(scripts)
        return Simulation(calls, proof, found, None if found is None else time_scripts(scripts, found))
