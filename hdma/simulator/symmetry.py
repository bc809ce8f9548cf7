"""A plan treats all nodes alike: the steps of every node are those of node 0 with the nodes renamed by rotation.

Then what holds for the memory of node 0 holds for every node's. The sources of a reduce are in an order fixed by rank,
not by distance, so they are compared as a set: a reduce reads all of them at once.
"""

from __future__ import annotations

from hdma.errors import PlanError
from hdma.layout import Flag
from hdma.plan import Place, Plan, Step
from hdma.simulator.meaning import meaning

_BY_NODE = ("rail", "sum")


def check_symmetry(plan: Plan) -> None:
    """Raises `PlanError` with the first step that has no counterpart on node 0."""
    t = plan.topology
    for local in range(t.ranks_per_node):
        first = _Renamed(plan, 0)
        model = [first.step(step) for step in plan.steps(t.rank(0, local))]
        for node in range(1, t.nodes):
            rank, renamed = t.rank(node, local), _Renamed(plan, node)
            steps = plan.steps(rank)
            for i, step in enumerate(steps):
                if i >= len(model) or renamed.step(step) != model[i]:
                    raise PlanError(f"rank {rank}, step {i} ({step}): not the step of node 0 after rotation")
            if len(steps) < len(model):
                raise PlanError(f"rank {rank} has {len(steps)} steps, its counterpart on node 0 has {len(model)}")


class _Renamed:
    """Steps with nodes as distances from `node`."""

    def __init__(self, plan: Plan, node: int) -> None:
        t = plan.topology
        self.nodes, self.node = t.nodes, node
        self.rank = [((t.node(r) - node) % t.nodes) * t.ranks_per_node + t.local_rank(r) for r in range(t.size)]
        shards = meaning(plan)
        self.by_rank = {
            "window": False,
            "host": False,
            "input": shards.input_shards > 1,
            "output": shards.output_shards > 1,
        }

    def step(self, s: Step) -> tuple[object, ...]:
        needs = s.needs if s.needs is None or not self.by_rank["input"] else self.rank[s.needs]
        gives = s.gives if s.gives is None or not self.by_rank["output"] else self.rank[s.gives]
        return (
            s.verb,
            s.lane,
            s.phase,
            (s.value, s.local_value),
            self._flag(s.flag),
            self._flag(s.local),
            None if s.dst is None else self._place(s.dst),
            sorted(self._place(p) for p in s.srcs) if len(s.srcs) > 1 else [self._place(p) for p in s.srcs],
            (needs, gives),
        )

    def _flag(self, flag: Flag | None) -> tuple[object, ...] | None:
        if flag is None:
            return None
        owner, (purpose, ring_owner, index), role, who = flag
        if purpose in _BY_NODE:
            index = (index - self.node) % self.nodes
        if role == "sent" and purpose == "stage":
            who = (who - self.node) % self.nodes
        return self.rank[owner], purpose, self.rank[ring_owner], index, role, who

    def _place(self, p: Place) -> tuple[object, ...]:
        space, rank, shard, offset, nbytes, wire = p
        return space, self.rank[rank], self.rank[shard] if self.by_rank[space] else shard, offset, nbytes, wire
