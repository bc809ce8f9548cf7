"""An adversary to check the proof against: the same steps run as threads would, in an order that it chooses."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from hdma.plan import LANES, Plan
from hdma.simulator.meaning import sources
from hdma.simulator.prove import write_scripts
from hdma.simulator.script import Op

POLICIES = ("random", "lifo", "starving")


class Wrong(Exception):
    """A deadlock, or bytes that are not the promised ones."""


def run(calls: list[Plan], queues: int, policy: str, seed: int, reuse: bool) -> None:
    """Runs the calls with `queues` in-order queues a rank, lanes mapped to them at random. Raises `Wrong`.

    `reuse`: the caller reads and fills its tensors between the calls; otherwise all calls are under way at once.
    """
    _Schedule(calls, queues, policy, seed, reuse).run()


class _Schedule:
    def __init__(self, calls: list[Plan], queues: int, policy: str, seed: int, reuse: bool) -> None:
        self.scripts = write_scripts(calls)
        self.rng, self.policy, self.reuse = random.Random(seed), policy, reuse
        size = calls[0].topology.size
        self.todo: dict[object, deque[tuple[int, Op]]] = defaultdict(deque)
        self.wires: dict[object, deque[tuple[int, Op]]] = defaultdict(deque)
        self.heights: dict[int, int] = defaultdict(int)
        self.memory: dict[tuple[int, int], object] = {}
        self.opened = [[not reuse or call == 0 for call in range(len(calls))] for _ in range(size)]
        self.inside = [[0] * len(calls) for _ in range(size)]
        self.bases: list[dict[int, int]] = []
        base: dict[int, int] = defaultdict(int)
        queue = {(rank, lane): self.rng.randrange(queues) for rank in range(size) for lane in LANES}
        for call, script in enumerate(self.scripts):
            self.bases.append(dict(base))
            for number, span in script.spans.items():
                base[number] += span
            for op in script.ops:
                self.todo[op.step.rank, queue[op.step.rank, op.step.lane]].append((call, op))
                self.inside[op.step.rank][call] += op.verb == "leave"
        self.love = [self.rng.random() for _ in range(size)]

    def run(self) -> None:
        while True:
            able = [key for key, steps in self.todo.items() if steps and self._able(*steps[0])]
            able += [key for key, steps in self.wires.items() if steps]
            if not able:
                break
            self._do(self._choose(able))
        stuck = [steps[0][1].step for steps in self.todo.values() if steps]
        if stuck:
            raise Wrong("deadlock: " + ", ".join(map(str, stuck)))
        if not self.reuse:
            for rank in range(len(self.opened)):
                for call in range(len(self.scripts)):
                    self._check(rank, call)

    def _choose(self, able: list[object]) -> object:
        if self.policy == "lifo":
            return able[-1]
        if self.policy == "starving":
            return max(able, key=lambda key: (hash((key, self.love[0])), str(key)))
        return self.rng.choice(able)

    def _able(self, call: int, op: Op) -> bool:
        if op.verb == "wait":
            return self.heights[op.word] >= self._value(call, op.count, op)
        return op.verb != "enter" or self.opened[op.step.rank][call]

    def _value(self, call: int, count: int, op: Op) -> int:
        return self.bases[call].get(count, 0) + op.value

    def _do(self, key: object) -> None:
        if key in self.wires:
            call, op, half = *self.wires[key][0], isinstance(key, tuple) and key[0] == "done"
            self.wires[key].popleft()
            if half:
                self.heights[op.local] = self.bases[call].get(op.local_count, 0) + op.local_value
                return
            if op.dst is not None:
                self._move(call, op)
            self.heights[op.word] = self._value(call, op.count, op)
            if op.local >= 0:
                self.wires["done", op.wire].append((call, op))
            return
        call, op = self.todo[key].popleft()
        if op.verb == "signal":
            self.heights[op.word] = self._value(call, op.count, op)
        elif op.verb == "put":
            self.wires["wire", op.wire].append((call, op))
        elif op.verb in ("copy", "reduce"):
            self._move(call, op)
        elif op.verb == "leave":
            self._left(op.step.rank, call)

    def _left(self, rank: int, call: int) -> None:
        self.inside[rank][call] -= 1
        if self.reuse and self.inside[rank][call] == 0:
            self._check(rank, call)
            script = self.scripts[call]
            for cell in range(script.inputs_at, script.cells):
                if script.cell_rank(cell) == rank:
                    self.memory[call, cell] = "overwritten by the caller"
            if call + 1 < len(self.scripts):
                self.opened[rank][call + 1] = True

    def _move(self, call: int, op: Op) -> None:
        assert op.dst is not None
        added = [source for cell, _ in op.srcs for source in self._read(call, cell)]
        cell = op.dst[0]
        self.memory[call if cell >= self.scripts[call].inputs_at else -1, cell] = added

    def _read(self, call: int, cell: int) -> list[object]:
        script = self.scripts[call]
        held = self.memory.get((call if cell >= script.inputs_at else -1, cell))
        if held is None and script.inputs_at <= cell < script.inputs_end:
            return [(call, cell)]
        return held if isinstance(held, list) else [held]

    def _check(self, rank: int, call: int) -> None:
        script = self.scripts[call]
        for shard in range(script.meaning.output_shards):
            for chunk in script.chunks:
                leaves = sources(script.meaning.holds(rank, shard))
                want = [(call, script.input_cell(*leaf, chunk.index)) for leaf in leaves]
                cell = script.output_cell(rank, shard, chunk.index)
                got = self._read(call, cell) if script.meaning.in_place else self.memory.get((call, cell))
                if got != want:
                    raise Wrong(f"call {call}, rank {rank}, shard {shard}, chunk {chunk.index}: {got}")
