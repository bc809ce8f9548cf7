"""Plans: a collective as a list of steps. Python writes them, C++ walks them, the simulator proves them.

Five verbs (copy, put, signal, wait, reduce), and `enter` / `leave` around a lane's touch of the caller's tensors.
A builder emits the steps of one rank in phases. The global issue order is: phase after phase, and within a phase rank
after rank. A single thread could execute that order without blocking, so no number of queues, no mapping of lanes to
queues and no skew between ranks can deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hdma.errors import UsageError
from hdma.layout import Flag, Layout, Ring
from hdma.topology import Topology

# Lanes, and who walks them: near and rail a stream or the calling thread, put and credit the proxy.
LANES = ("near", "rail", "put", "credit")
PROXY_LANES = ("put", "credit")
CHUNK_ALIGN_NBYTES = 512


class Place(NamedTuple):
    """`nbytes` bytes of `rank`: at shard * (the call's shard stride) + offset in `input` or `output`, at `offset` in
    its `window`, or in its `host` window, which has the same slots. `wire`: the elements there are in the wire dtype
    (node sums), not in the tensor's."""

    space: str
    rank: int
    shard: int
    offset: int
    nbytes: int
    wire: bool = False

    def __str__(self) -> str:
        shard = f"[{self.shard}]" if self.space in ("input", "output") else ""
        return f"{self.space}{shard}@{self.rank}+{self.offset}:{self.nbytes}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one lane. Flag values are relative: chunks of the flag's ring since the call began."""

    verb: str
    rank: int
    lane: str
    phase: int
    dst: Place | None = None
    srcs: tuple[Place, ...] = ()
    flag: Flag | None = None
    value: int = 0
    local: Flag | None = None  # put only: raised to `local_value` when the source may be reused
    local_value: int = 0
    needs: int | None = None  # shard that the caller must have pushed before this step
    gives: int | None = None  # shard that is complete in the output after this step

    def __str__(self) -> str:
        where = f"{self.lane:6} {self.verb:6}"
        if self.verb == "wait":
            return f"{where} {_flag(self.flag)} >= {self.value}"
        if self.verb == "signal":
            return f"{where} {_flag(self.flag)} = {self.value}"
        text = where
        if self.dst is not None:
            text += f" {self.dst} <- {' + '.join(map(str, self.srcs))}"
        if self.verb == "put":
            text += f" then {_flag(self.flag)} = {self.value}"
            text += f", here {_flag(self.local)} = {self.local_value}" if self.local else ""
        if self.needs is not None:
            text += f"  needs shard {self.needs}"
        if self.gives is not None:
            text += f"  gives shard {self.gives}"
        return text


def _flag(flag: Flag | None) -> str:
    if flag is None:
        return "no flag"
    many = flag.role in ("credit", "read", "sent") and flag.ring.purpose in ("stage", "tensor")
    who = f" by {flag.who}" if many else ""
    at = f"@{flag.owner}" if flag.owner != flag.ring.owner else ""
    return f"{flag.ring.purpose}[{flag.ring.owner}.{flag.ring.index}].{flag.role}{who}{at}"


@dataclass(frozen=True)
class Variant:
    """How a plan is built, the same on all ranks.

    element_nbytes: a chunk never cuts an element. wire_nbytes: bytes of an element of a node sum on the wire.
    skew: chunks by which the issue order lets early phases run ahead (0 for two walkers, 1 for one in-order walker).
    shard_major: all chunks of a shard before the next shard, so that shards complete one after the other.
    root: the rank that a broadcast starts from.
    direct: node mates read each other's tensors; for one node.
    in_place: the input of a direct AllGather is the rank's shard of the output, which all ranks have so.
    batched: the copies from all node mates are handed over at once, behind the waits for all.
    chunk_nbytes: of a chunk at most, where a slot takes more; 0: what a slot takes.
    host_wire: windows are a GPU's, of which the wire takes no memory: what goes to other nodes and what comes from
        there is copied by plan, from and to a slot of the host window.
    """

    element_nbytes: int = 1
    wire_nbytes: int = 0
    skew: int = 1
    shard_major: bool = False
    root: int = 0
    direct: bool = False
    in_place: bool = False
    batched: bool = False
    host_wire: bool = False
    chunk_nbytes: int = 0

    def __post_init__(self) -> None:
        element, wire = self.element_nbytes, self.wire_nbytes
        if element < 1 or (wire and (wire < element or wire % element)) or min(self.skew, self.chunk_nbytes) < 0:
            raise UsageError(f"no plan has elements of {element} bytes, of {wire} on the wire, and skew {self.skew}")

    @property
    def wire_ratio(self) -> int:
        return max(1, self.wire_nbytes // self.element_nbytes)


class Chunk(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    offset: int
    nbytes: int


Builder = Callable[["Steps"], None]


class Steps:
    """What a builder writes to: the steps of `rank`, in phases.

    A builder first says how many chunks the call moves through the rings of each purpose (`uses`). `index` of a slot,
    a wait or a signal is a chunk of the ring, counted from the last `go_on`.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.topology, self.layout, self.variant = plan.topology, plan.layout, plan.variant
        self.node, self.local_rank = self.topology.node(rank), self.topology.local_rank(rank)
        self.chunks = plan.chunks
        self.steps: list[Step] = []
        self.spans: dict[Ring, int] = {}
        self._uses: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._phase = 0
        self._entered: set[str] = set()

    def uses(self, **chunks: int) -> None:
        """How many chunks the call moves through each ring of a purpose that it moves at all."""
        self._uses = chunks

    def go_on(self, **chunks: int) -> None:
        """A second collective of the same call goes on behind so many chunks in the rings that both use."""
        self._first = chunks

    def phase(self) -> None:
        """Begins the next phase. Every rank must begin the same number of phases in the same order."""
        self._phase += 1

    def place(self, space: str, shard: int, chunk: Chunk) -> Place:
        return self.tensor(space, self.rank, shard, chunk)

    def tensor(self, space: str, rank: int, shard: int, chunk: Chunk) -> Place:
        """In the caller's tensors of this rank or (`direct`, to read from its input) of a node mate."""
        return Place(space, rank, shard, chunk.offset, chunk.nbytes)

    def slot(self, ring: Ring, index: int, chunk: Chunk, wire: bool = False) -> Place:
        nbytes = chunk.nbytes * (self.variant.wire_ratio if wire else 1)
        return Place("window", ring.owner, 0, self.layout.slot_offset(ring, self._at(ring, index)), nbytes, wire)

    def wire_slot(self, ring: Ring, index: int, chunk: Chunk, wire: bool = False) -> Place:
        """Where the wire reads or writes the slot: there, or in the host window."""
        slot = self.slot(ring, index, chunk, wire)
        return slot._replace(space="host") if self.variant.host_wire else slot

    def enter(self, lane: str, gives: int | None = None) -> None:
        """Before the lane's first touch of the caller's tensors; `gives`: a shard that is complete from the start."""
        if lane not in self._entered:
            self._entered.add(lane)
            self._add("enter", lane, gives=gives)

    def leave(self) -> None:
        """After the last touch of every lane that entered."""
        for lane in LANES:
            if lane in self._entered:
                self._add("leave", lane)

    def wait_filled(self, lane: str, flag: Flag, index: int) -> None:
        """Until chunk `index` of the flag's ring is there."""
        self._add("wait", lane, flag=flag, value=self._at(flag.ring, index) + 1)

    def wait_credit(self, lane: str, flag: Flag, index: int) -> None:
        """Until the slot that chunk `index` will be written to has been read."""
        self._add("wait", lane, flag=flag, value=self._at(flag.ring, index) + 1 - self.layout.slots)

    def signal(self, lane: str, flag: Flag, index: int) -> None:
        """Chunk `index` done."""
        self._add("signal", lane, flag=flag, value=self._raised(flag, index))

    def copy(self, lane: str, dst: Place, src: Place, needs: int | None = None, gives: int | None = None) -> None:
        """Between ranks, or with the host, a copy; on one device a reduce of one source (a driver's memcpy would hold
        compute units)."""
        moves = dst.rank != src.rank or "host" in (dst.space, src.space)
        self._add("copy" if moves else "reduce", lane, dst, (src,), needs=needs, gives=gives)

    def reduce(self, lane: str, dst: Place, srcs: list[Place], needs: int | None = None) -> None:
        self._add("reduce", lane, dst, tuple(srcs), needs=needs)

    def put(self, lane: str, dst: Place, src: Place, flag: Flag, local: Flag, index: int) -> None:
        value, local_value = self._raised(flag, index), self._raised(local, index)
        self._add("put", lane, dst, (src,), flag=flag, value=value, local=local, local_value=local_value)

    def credit(self, lane: str, flag: Flag, index: int) -> None:
        """A signal to another node: an empty put."""
        self._add("put", lane, flag=flag, value=self._raised(flag, index))

    def move(self, ring: Ring) -> int:
        """The call moves this rank's count of the ring past all of its chunks, to a multiple of its slots."""
        span = self.spans[ring] = -(-self._uses[ring.purpose] // self.layout.slots) * self.layout.slots
        return span

    def _at(self, ring: Ring, index: int) -> int:
        return self._first.get(ring.purpose, 0) + index

    def _raised(self, flag: Flag, index: int) -> int:
        """The last chunk of the call moves the ring to a multiple of its slots."""
        span, at = self.move(flag.ring), self._at(flag.ring, index)
        return span if at == self._uses[flag.ring.purpose] - 1 else at + 1

    def _add(
        self,
        verb: str,
        lane: str,
        dst: Place | None = None,
        srcs: tuple[Place, ...] = (),
        flag: Flag | None = None,
        value: int = 0,
        local: Flag | None = None,
        local_value: int = 0,
        needs: int | None = None,
        gives: int | None = None,
    ) -> None:
        self.steps.append(
            Step(verb, self.rank, lane, self._phase, dst, srcs, flag, value, local, local_value, needs, gives)
        )


@dataclass(frozen=True)
class Plan:
    """One collective on one grid, for shards of `nbytes` bytes; lazy over ranks.

    A longer message is the same plan run again at an offset: `nbytes` is at most
    `hdma.algorithms.max_shard_nbytes(...)`.
    """

    operation: str
    layout: Layout
    nbytes: int
    variant: Variant
    builder: Builder = field(repr=False)

    @property
    def topology(self) -> Topology:
        return self.layout.topology

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Pieces of a shard. An empty shard is one empty chunk, so that empty calls are ordered like any other."""
        if self.variant.direct:
            return (Chunk(0, 0, self.nbytes),)
        element = self.variant.element_nbytes
        longest = self.chunk_nbytes(self.layout, self.variant)
        count = max(1, -(-self.nbytes // longest))
        elements = self.nbytes // element
        size = -(-elements // count) * element
        # Kernels move narrow units where a chunk does not begin as its slot does.
        aligned = -(-size // CHUNK_ALIGN_NBYTES) * CHUNK_ALIGN_NBYTES
        if CHUNK_ALIGN_NBYTES % element == 0 and count > 1 and aligned <= longest:
            size = aligned
        if size == 0:
            return (Chunk(0, 0, 0),)
        offsets = range(0, self.nbytes, size)
        return tuple(Chunk(i, at, min(size, self.nbytes - at)) for i, at in enumerate(offsets))

    @staticmethod
    def chunk_nbytes(layout: Layout, variant: Variant) -> int:
        """The largest chunk that fits a slot, whole elements (also in the wire dtype)."""
        element = variant.element_nbytes
        fits = layout.slot_nbytes // (element * variant.wire_ratio)
        wanted = -(-variant.chunk_nbytes // element) or fits
        return min(fits, wanted) * element

    def steps(self, rank: int) -> list[Step]:
        """The steps of one rank in issue order."""
        return self._built(rank).steps

    def spans(self, rank: int) -> dict[Ring, int]:
        """How far the call moves the running chunk count of each ring that `rank` has to do with."""
        return self._built(rank).spans

    def issue_order(self, ranks: list[int] | None = None) -> Iterator[Step]:
        """All ranks' steps in the one global order, for the simulator."""
        each = [self.steps(rank) for rank in (range(self.topology.size) if ranks is None else ranks)]
        return heapq.merge(*each, key=lambda step: step.phase)

    def _built(self, rank: int) -> Steps:
        built = self._cache.get(rank)
        if built is None:
            built = self._cache[rank] = Steps(self, rank)
            self.builder(built)
        return built

    @cached_property
    def _cache(self) -> dict[int, Steps]:
        return {}

    def __str__(self) -> str:
        t = self.topology
        head = f"{self.operation} {t}, {self.nbytes} bytes a shard in {len(self.chunks)} chunks, {self.variant}"
        lines = [head]
        for rank in range(t.size):
            lines.append(f"rank {rank} (node {t.node(rank)}, local rank {t.local_rank(rank)})")
            lines += [f"  {step.phase:4} {step}" for step in self.steps(rank)]
        return "\n".join(lines)
