"""A plan in numbers, for the passes over it, and the rules that each step keeps on its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hdma.errors import PlanError
from hdma.layout import ROLES, Flag, Ring
from hdma.plan import PROXY_LANES, Place, Plan, Step
from hdma.simulator.meaning import meaning
from hdma.simulator.numbering import Numbering

# A place in memory as the simulator sees it: a cell (a slot of a window, or one chunk of the caller's tensors), and the
# bytes within it. What is read must be exactly what was written.
Bytes = tuple[int, int, bool]
Spot = tuple[int, Bytes]


@dataclass(slots=True)
class Op:
    """One step in numbers. Absolute flag value = the rank's running count number `count` + `value`."""

    step: Step
    verb: str
    lane: int
    dst: Spot | None = None
    srcs: tuple[Spot, ...] = ()
    word: int = -1
    count: int = -1
    value: int = 0
    local: int = -1
    local_count: int = -1
    local_value: int = 0
    wire: int = -1


class Script:
    """The steps of all ranks in the global issue order. Raises `PlanError` where a step breaks a rule by itself."""

    def __init__(self, plan: Plan, numbering: Numbering) -> None:
        self.plan, self.numbering, self.meaning = plan, numbering, meaning(plan)
        t = plan.topology
        self.chunks = plan.chunks
        self._chunk_at = {(c.offset, c.nbytes): c.index for c in self.chunks}
        self.inputs_at = 2 * numbering.window_cells  # behind the windows and the host windows
        self.inputs_end = self.inputs_at + t.size * self.meaning.input_shards * len(self.chunks)
        self.outputs_at = self.inputs_at if self.meaning.in_place else self.inputs_end
        self.cells = self.outputs_at + t.size * self.meaning.output_shards * len(self.chunks)
        self.put_nbytes = [0] * t.size
        self.link_nbytes: dict[tuple[int, int], int] = defaultdict(int)
        self.counters: dict[Ring, list[int]] = defaultdict(list)  # the ranks that count each ring
        self._flags: dict[tuple[int, Flag | None], tuple[int, int, str]] = {}
        self._nodes = [t.node(rank) for rank in range(t.size)]
        self._open: set[int] = set()
        self._needed: set[tuple[int, int]] = set()
        self._given: set[tuple[int, int]] = set()
        self._check_chunks()
        self.spans = self._spans()
        # Rank by rank, then sorted: the same order as plan.issue_order(), and much kinder to the processor's caches.
        self.ops = [self._op(step) for rank in range(t.size) for step in plan.steps(rank)]
        self.ops.sort(key=lambda op: op.step.phase)
        self._check_whole()

    def fail(self, step: Step, why: str, call: int | None = None) -> PlanError:
        """The error, with the rank, the lane and the step named."""
        t, at = self.plan.topology, "" if call is None else f", call {call}"
        index = next((i for i, other in enumerate(self.plan.steps(step.rank)) if other is step), -1)
        return PlanError(
            f"{self.plan.operation} {t}{at}: rank {step.rank} (node {t.node(step.rank)}, local rank "
            f"{t.local_rank(step.rank)}), lane {step.lane}, step {index} ({' '.join(str(step).split())}): {why}"
        )

    def input_cell(self, rank: int, shard: int, chunk: int) -> int:
        return self.inputs_at + (rank * self.meaning.input_shards + shard) * len(self.chunks) + chunk

    def output_cell(self, rank: int, shard: int, chunk: int) -> int:
        return self.outputs_at + (rank * self.meaning.output_shards + shard) * len(self.chunks) + chunk

    def cell_rank(self, cell: int) -> int:
        """The rank whose memory the cell is."""
        if cell < self.inputs_at:
            return cell % self.numbering.window_cells // self.numbering.rank_slots
        if cell < self.inputs_end:
            return (cell - self.inputs_at) // (self.meaning.input_shards * len(self.chunks))
        return (cell - self.outputs_at) // (self.meaning.output_shards * len(self.chunks))

    def _op(self, step: Step) -> Op:
        verb = step.verb
        lane = self.numbering.lane(step.rank, step.lane)
        op = Op(step, verb, lane)
        if step.gives is not None:
            if (step.rank, step.gives) in self._given:
                raise self.fail(step, f"gives shard {step.gives} a second time")
            self._given.add((step.rank, step.gives))
        if verb == "wait":
            op.word, op.count, who = self._flag(step, step.flag)
            op.value = step.value
            if step.flag is not None and step.flag.owner != step.rank:
                raise self.fail(step, f"waits for a flag in the memory of rank {step.flag.owner}")
            if (who == "proxy") != (step.lane in PROXY_LANES):
                raise self.fail(step, f"the {who} waits for this flag, no other kind of waiter")
        elif verb == "signal":
            op.word, op.count, _ = self._flag(step, step.flag)
            op.value = step.value
            self._check_mate(step, op.word // self.numbering.rank_words)
        elif verb == "put":
            self._put(op, step)
        elif verb in ("copy", "reduce"):
            self._move(op, step)
        elif verb == "enter":
            if lane in self._open:
                raise self.fail(step, "the lane has entered already")
            self._open.add(lane)
        elif verb == "leave":
            if lane not in self._open:
                raise self.fail(step, "the lane has not entered")
            self._open.remove(lane)
        else:
            raise self.fail(step, f"no verb {verb!r}")
        return op

    def _flag(self, step: Step, flag: Flag | None) -> tuple[int, int, str]:
        """Its word, the number of the rank's count of its ring, and the kind of waiter."""
        found = self._flags.get((step.rank, flag))
        if found is None:
            if flag is None:
                raise self.fail(step, "names no flag")
            if (flag.ring.purpose, flag.role) not in ROLES:
                raise self.fail(step, f"no role {flag.ring.purpose}.{flag.role} in layout.ROLES")
            count = self.numbering.count(step.rank, flag.ring)
            if count not in self.spans:
                raise self.fail(step, f"the rank's count of {flag.ring} does not move with this plan")
            found = self.numbering.word(flag), count, ROLES[flag.ring.purpose, flag.role][0]
            self._flags[step.rank, flag] = found
        return found

    def _put(self, op: Op, step: Step) -> None:
        op.word, op.count, _ = self._flag(step, step.flag)
        op.value = step.value
        assert step.flag is not None
        peer = step.flag.owner
        if self._nodes[peer] == self._nodes[step.rank]:
            raise self.fail(step, f"puts to rank {peer} of its own node")
        op.wire = self.numbering.wire(op.lane, peer)
        if step.local is not None:
            op.local, op.local_count, _ = self._flag(step, step.local)
            op.local_value = step.local_value
            if step.local.owner != step.rank:
                raise self.fail(step, f"its local completion is a flag of rank {step.local.owner}")
        if step.dst is None:
            return
        (src,) = step.srcs
        if step.dst.rank != peer or src.rank != step.rank:
            raise self.fail(step, "a put goes from the rank that posts it to the rank whose flag it raises")
        if (step.dst.nbytes, step.dst.wire) != (src.nbytes, src.wire):
            raise self.fail(step, "source and destination differ in bytes or dtype")
        if ("window" if self.plan.variant.host_wire else "host") in (src.space, step.dst.space):
            raise self.fail(step, "the wire takes no memory of that window")
        op.dst, op.srcs = self._spot(step, op.lane, step.dst), (self._spot(step, op.lane, src),)
        self.put_nbytes[step.rank] += src.nbytes
        self.link_nbytes[step.rank, peer] += src.nbytes

    def _move(self, op: Op, step: Step) -> None:
        if step.dst is None or not step.srcs:
            raise self.fail(step, "has no source or no destination")
        dst = step.dst
        ranks = {src.rank for src in step.srcs}
        if step.verb == "copy":
            (src,) = step.srcs
            self._check_mate(step, src.rank)
            self._check_mate(step, dst.rank)
            if step.rank not in (src.rank, dst.rank) or (src.rank == dst.rank) != ("host" in (src.space, dst.space)):
                raise self.fail(
                    step, "a copy goes between the rank that issues it and a node mate, or to or from its host window"
                )
            if (dst.nbytes, dst.wire) != (src.nbytes, src.wire):
                raise self.fail(step, "source and destination differ in bytes or dtype")
            if src.rank != dst.rank:
                self.link_nbytes[src.rank, dst.rank] += src.nbytes
        elif ranks != {step.rank} or dst.rank != step.rank or "host" in {dst.space, *(src.space for src in step.srcs)}:
            raise self.fail(step, "a reduce stays on the device of the rank that issues it")
        ratio = self.plan.variant.wire_ratio
        if {p.nbytes // (ratio if p.wire else 1) for p in step.srcs} != {dst.nbytes // (ratio if dst.wire else 1)}:
            raise self.fail(step, "sources and destination differ in their number of elements")
        op.dst = self._spot(step, op.lane, dst)
        op.srcs = tuple([self._spot(step, op.lane, src) for src in step.srcs])

    def _spot(self, step: Step, lane: int, place: Place) -> Spot:
        space, rank, shard, offset, nbytes, wire = place
        if space in ("window", "host"):
            stride = self.plan.layout.slot_nbytes
            slot, within = divmod(offset, stride)
            if offset < 0 or slot >= self.numbering.rank_slots or within + nbytes > stride:
                raise self.fail(step, f"{place} is not inside one slot of the window")
            if space == "host":
                slot += self.numbering.window_cells
            return rank * self.numbering.rank_slots + slot, (within, nbytes, wire)
        if rank != step.rank and not (self.plan.variant.direct and space == "input" and place is not step.dst):
            raise self.fail(step, f"{place} is a tensor of another rank's caller")
        if lane not in self._open:
            raise self.fail(step, f"{place} is touched outside the lane's enter and leave")
        chunk = self._chunk_at.get((offset, nbytes))
        shards = self.meaning.input_shards if space == "input" else self.meaning.output_shards
        if chunk is None or not 0 <= shard < shards or wire:
            raise self.fail(step, f"{place} is not a chunk of the caller's {space}")
        if space == "output":
            return self.output_cell(rank, shard, chunk), (0, nbytes, False)
        if place is step.dst:
            raise self.fail(step, "writes the caller's input")
        if self.meaning.needs:
            if step.needs == shard:
                self._needed.add((lane, shard))
            if (lane, shard) not in self._needed:
                raise self.fail(step, f"reads input shard {shard} before the lane said that it needs it")
        return self.input_cell(rank, shard, chunk), (0, nbytes, False)

    def _check_mate(self, step: Step, rank: int) -> None:
        if self._nodes[rank] != self._nodes[step.rank]:
            raise self.fail(step, f"reaches rank {rank} of another node without a put")

    def _check_chunks(self) -> None:
        at = 0
        for c in self.chunks:
            if c.offset != at or c.nbytes % self.plan.variant.element_nbytes:
                raise PlanError(f"{self.plan.operation}: chunk {c} cuts an element or leaves a gap after byte {at}")
            at += c.nbytes
        if at != self.plan.nbytes:
            raise PlanError(f"{self.plan.operation}: chunks cover {at} of {self.plan.nbytes} bytes of a shard")

    def _spans(self) -> dict[int, int]:
        """How far each running count moves, the same at every rank that counts the ring."""
        spans: dict[int, int] = {}
        first: dict[Ring, tuple[int, int]] = {}
        for rank in range(self.plan.topology.size):
            for ring, span in self.plan.spans(rank).items():
                other, agreed = first.setdefault(ring, (rank, span))
                if span != agreed:
                    raise PlanError(f"{ring} moves by {span} at rank {rank}, by {agreed} at rank {other}")
                if span % self.plan.layout.slots:
                    raise PlanError(f"{ring} moves by {span}, not by a multiple of its {self.plan.layout.slots} slots")
                self.counters[ring].append(rank)
                number = self.numbering.count(rank, ring)
                if number in spans:
                    raise PlanError(f"rank {rank} counts {ring} and another ring with one number")
                spans[number] = span
        return spans

    def _check_whole(self) -> None:
        plan, size = self.plan, self.plan.topology.size
        phases = [plan.steps(rank)[-1].phase for rank in range(size)]
        if len(set(phases)) > 1:
            raise PlanError(f"{plan.operation}: ranks have {sorted(set(phases))} phases, not the same number")
        if self._open:
            rank, lane = self.numbering.lanes[min(self._open)]
            raise PlanError(f"{plan.operation}: lane {lane} of rank {rank} enters and does not leave")
        if self.meaning.gives and len(self._given) != size * self.meaning.output_shards:
            missing = next((r, s) for r in range(size) for s in range(size) if (r, s) not in self._given)
            raise PlanError(f"{plan.operation}: rank {missing[0]} never gives shard {missing[1]}")
        for rank, nbytes in enumerate(self.put_nbytes):
            if nbytes != self.meaning.put_nbytes(rank):
                least = f"the minimum is {self.meaning.put_nbytes(rank)}"
                raise PlanError(f"{plan.operation}: the NIC of rank {rank} carries {nbytes} bytes, {least}")
