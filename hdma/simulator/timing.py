"""Time on paper: the same steps in the queues of a machine, with flows that share its links.

An event loop. A queue is one walker's lanes, in issue order; it takes a step when the one before is done, except that
consecutive copies are one batch. Each flow gets an equal share of each resource that it crosses, and the least of them;
but what a flow cannot use of a memory, since something else holds it up, the others there get.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hdma.simulator.machines import Machine
from hdma.simulator.script import Op, Script

Resource = tuple[str, int, int]


class Span(NamedTuple):
    """A step on its lane, or a put on its wire: when it was taken up and when it was done."""

    call: int
    op: Op
    track: str
    start_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class _Flow:
    left_nbytes: float
    crosses: list[tuple[Resource, float]]
    done: Callable[[], None]
    cap: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    version: int = 0


class _Queue:
    def __init__(self) -> None:
        self.steps: deque[tuple[int, Op]] = deque()
        self.last_verb = ""


@dataclass
class Timing:
    """`leave_s[call]`: when the last rank's last lane left that call."""

    leave_s: list[float]
    spans: list[Span] = field(repr=False)


def time_scripts(scripts: list[Script], machine: Machine) -> Timing:
    """Calls issued one behind the other without waiting, on a machine where nothing else runs."""
    return _Clockwork(scripts, machine).run()


class _Clockwork:
    def __init__(self, scripts: list[Script], machine: Machine) -> None:
        self.scripts, self.machine = scripts, machine
        numbering = scripts[0].numbering
        self.now_s = 0.0
        self._tick = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None] | tuple[_Flow, int]]] = []
        self._users: dict[Resource, dict[_Flow, None]] = defaultdict(dict)
        self._levels: dict[Resource, float] = {}
        self._heights: dict[int, int] = defaultdict(int)
        self._blocked: dict[int, list[_Queue]] = defaultdict(list)
        self._nic: dict[int, deque[Callable[[], None]]] = defaultdict(deque)
        self._nic_busy: set[int] = set()
        self._queues: dict[tuple[int, int], _Queue] = defaultdict(_Queue)
        self._leave_s = [0.0] * len(scripts)
        self._spans: list[Span] = []
        walker = {lane: i for i, lanes in enumerate(machine.walkers) for lane in lanes}
        counts = [0] * (numbering.topology.size * numbering.layout.base_count)
        self._bases: list[list[int]] = []
        for call, script in enumerate(scripts):
            self._bases.append(counts.copy())
            for number, span in script.spans.items():
                counts[number] += span
            for op in script.ops:
                self._queues[op.step.rank, walker[op.step.lane]].steps.append((call, op))

    def run(self) -> Timing:
        for queue in list(self._queues.values()):
            self._advance(queue)
        while self._heap:
            at_s, _, event = heapq.heappop(self._heap)
            if not isinstance(event, tuple):
                self.now_s = at_s
                event()
            elif event[0].version == event[1]:
                self.now_s = at_s
                self._end(event[0])
        return Timing(self._leave_s, self._spans)

    def _advance(self, queue: _Queue) -> None:
        if not queue.steps:
            return
        m, (call, op) = self.machine, queue.steps[0]
        verb, first = op.verb, queue.last_verb != op.verb
        if verb == "wait" and self._heights[op.word] < self._bases[call][op.count] + op.value:
            self._blocked[op.word].append(queue)
            return
        queue.last_verb = verb
        queue.steps.popleft()
        start_s = self.now_s
        if verb in ("wait", "signal"):
            delay_s = (m.wait_s if verb == "wait" else m.signal_s) if first else m.more_s
            self._after(delay_s, lambda: self._did(queue, call, op, start_s))
        elif verb == "put":
            self._after(m.post_s, lambda: self._post(queue, call, op, start_s))
        elif verb == "copy":
            batch = [(call, op)]
            while queue.steps and queue.steps[0][1].verb == "copy" and queue.steps[0][0] == call:
                batch.append(queue.steps.popleft())
            self._after(m.copy_s, lambda: self._copy(queue, batch))
        elif verb == "reduce":
            self._after(m.reduce_s, lambda: self._reduce(queue, call, op, start_s))
        else:
            if verb == "leave":
                self._leave_s[call] = max(self._leave_s[call], self.now_s)
            self._advance(queue)

    def _did(self, queue: _Queue, call: int, op: Op, start_s: float) -> None:
        self._spans.append(Span(call, op, op.step.lane, start_s, self.now_s))
        if op.verb == "signal":
            self._raise(op.word, self._bases[call][op.count] + op.value)
        self._advance(queue)

    def _copy(self, queue: _Queue, batch: list[tuple[int, Op]]) -> None:
        waiting, flying = deque(batch), 0

        def start() -> None:
            nonlocal flying
            while waiting and flying < self.machine.copies_at_once:
                flying += 1
                call, op = waiting.popleft()
                step, start_s = op.step, self.now_s
                assert step.dst is not None
                crosses = self._link(step.srcs[0].rank, step.dst.rank)
                self._flow(step.dst.nbytes, crosses, partial(end, call, op, start_s))

        def end(call: int, op: Op, start_s: float) -> None:
            nonlocal flying
            flying -= 1
            self._spans.append(Span(call, op, op.step.lane, start_s, self.now_s))
            start()
            if not flying and not waiting:
                self._advance(queue)

        start()

    def _reduce(self, queue: _Queue, call: int, op: Op, start_s: float) -> None:
        step, m = op.step, self.machine
        assert step.dst is not None
        nbytes = step.dst.nbytes + sum(src.nbytes for src in step.srcs)
        crosses = [(("kernel", step.rank, 0), m.reduce_gb_s), (self._memory(step.rank), m.memory_gb_s)]
        self._flow(nbytes, crosses, lambda: self._did(queue, call, op, start_s))

    def _post(self, queue: _Queue, call: int, op: Op, start_s: float) -> None:
        self._spans.append(Span(call, op, op.step.lane, start_s, self.now_s))
        step, m = op.step, self.machine
        assert step.flag is not None
        rank, peer = step.rank, step.flag.owner
        if step.dst is None:
            self._after(m.put_s, lambda: self._landed(call, op))
        else:
            nbytes = step.dst.nbytes
            crosses = [(("nic out", rank, 0), m.nic_gb_s), (("nic in", peer, 0), m.nic_gb_s)]
            if m.one_memory:
                crosses.append((self._memory(rank), m.memory_gb_s))

            def send() -> None:
                sent_s = self.now_s
                self._flow(nbytes, crosses, lambda: sent(sent_s))

            def sent(sent_s: float) -> None:
                self._spans.append(Span(call, op, "wire", sent_s, self.now_s))
                self._after(m.put_s, lambda: self._landed(call, op))
                self._nic_busy.discard(rank)
                self._send_next(rank)

            self._nic[rank].append(send)
            self._send_next(rank)
        self._advance(queue)

    def _send_next(self, rank: int) -> None:
        if self._nic[rank] and rank not in self._nic_busy:
            self._nic_busy.add(rank)
            self._nic[rank].popleft()()

    def _landed(self, call: int, op: Op) -> None:
        self._raise(op.word, self._bases[call][op.count] + op.value)
        if op.local >= 0:
            self._raise(op.local, self._bases[call][op.local_count] + op.local_value)

    def _raise(self, word: int, value: int) -> None:
        self._heights[word] = value
        for queue in self._blocked.pop(word, ()):
            self._advance(queue)

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._tick), event))

    def _link(self, src: int, dst: int) -> list[tuple[Resource, float]]:
        m = self.machine
        if src == dst:
            return [(("host", src, 0), m.host_gb_s), (self._memory(src), m.memory_gb_s)]
        crosses = [(("link", src, dst), m.link_gb_s), (("out", src, 0), m.out_gb_s), (("in", dst, 0), m.in_gb_s)]
        return crosses + [(memory, m.memory_gb_s) for memory in {self._memory(src), self._memory(dst)}]

    def _memory(self, rank: int) -> Resource:
        return "memory", 0 if self.machine.one_memory else rank, 0

    def _flow(self, nbytes: int, crosses: list[tuple[Resource, float]], done: Callable[[], None]) -> None:
        if nbytes == 0:
            self._after(0.0, done)
            return
        flow = _Flow(nbytes, [(resource, gb_s * 1e9) for resource, gb_s in crosses], done, since_s=self.now_s)
        for resource, _ in crosses:
            self._users[resource][flow] = None
        self._share(flow)

    def _end(self, flow: _Flow) -> None:
        flow.version += 1
        for resource, _ in flow.crosses:
            del self._users[resource][flow]
        self._share(flow)
        flow.done()

    def _share(self, changed: _Flow) -> None:
        """New rates for all that are held up by what the flow that came or went crosses."""
        near = {flow: None for resource, _ in changed.crosses for flow in self._users[resource]}
        for flow in near:
            flow.cap = min((c / len(self._users[r]) for r, c in flow.crosses if r[0] != "memory"), default=math.inf)
        memories = {r: c for flow in (changed, *near) for r, c in flow.crosses if r[0] == "memory"}
        for memory, capacity in memories.items():
            self._levels[memory] = _level([flow.cap for flow in self._users[memory]], capacity)
            near |= self._users[memory]
        for flow in near:
            rate = min([flow.cap, *(self._levels[r] for r, _ in flow.crosses if r[0] == "memory")])
            if rate != flow.rate:
                flow.left_nbytes -= flow.rate * (self.now_s - flow.since_s)
                flow.rate, flow.since_s, flow.version = rate, self.now_s, flow.version + 1
                end_s = self.now_s + max(flow.left_nbytes, 0.0) / rate
                heapq.heappush(self._heap, (end_s, next(self._tick), (flow, flow.version)))


def _level(caps: list[float], capacity: float) -> float:
    """The most that each may have of a capacity of which those with lower caps leave a part."""
    for done, cap in enumerate(sorted(caps)):
        share = capacity / (len(caps) - done)
        if cap > share:
            return share
        capacity -= cap
    return math.inf
