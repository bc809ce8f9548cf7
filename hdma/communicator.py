"""The heart: a communicator checks a call, finds its request, and makes one call into the engine."""

from __future__ import annotations

import atexit
import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from hdma import _core, connect, env, nics
from hdma.errors import Error, UsageError
from hdma.gpu import GpuSide
from hdma.layout import Layout
from hdma.reach import readable_mates
from hdma.rendezvous import Rendezvous
from hdma.requests import OPS, Prepared, Requests
from hdma.tensors import buffer, current_streams, dtype_name
from hdma.version import VERSION
from hdma.work import StartedCall, Work

SLOTS = 4
DEFAULT_WINDOW_NBYTES = 64 << 20
# Measured on the host: smaller chunks pay more for flags and system calls, larger ones leave the caches.
DEFAULT_CHUNK_NBYTES = 256 << 10
_SPIN_S = 20e-6


_NOTHING = _core.Buffer((0, 0, 0, 1, "bytes", -1))
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
# Of calls that a GPU did not end before their communicator was closed: it may use them at any time.
_never_freed: list[Any] = []


class _Ended:
    """What is left of an engine after close()."""

    def __init__(self, fault: str, stats: dict[str, int]) -> None:
        self._fault, self._stats = fault, stats

    def fault(self) -> str:
        return self._fault

    def stats(self) -> dict[str, int]:
        return self._stats

    def close(self) -> None:
        pass

    drain = close

    def abort(self, kind: int, text: str) -> None:
        pass

    def forget(self) -> None:
        pass

    def check(self) -> None:
        self.run()

    def run(self, *call: object) -> NoReturn:
        raise Error("this communicator is closed: make a new one with hdma.init()")

    submit = push = run


class Communicator:
    """Ranks that make the same collective calls in the same order. Made by `hdma.init()`.

    Tensors are torch tensors, in host memory or all on one GPU of this process, or numpy arrays, or other arrays on the
    GPU that have `__cuda_array_interface__`; contiguous. bfloat16 arrays come from `ml_dtypes`. On a GPU a call is put
    behind the current stream's work and returns at once: the current stream goes on after it, or after `Work.wait()`.
    One thread issues the calls, since their order must be the same on all ranks. Works may be waited for anywhere.
    Every method may raise `hdma.Error`. Arguments that cannot be right raise `UsageError` before anything is moved,
    and the communicator stays usable. Whatever goes wrong between ranks (one is killed or late, a connection is lost,
    they disagree on a call) ends the communicator on all of them with the same first cause; see `closed`.
    """

    def __init__(
        self, rendezvous: Rendezvous, timeout_s: float | None = None, parent: Communicator | None = None
    ) -> None:
        """Collective over the ranks of `rendezvous`. `timeout_s`: instead of HDMA_TIMEOUT_S.

        `parent`: the communicator whose nodes this one's ranks keep.
        """
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._rendezvous, self._given_s = rendezvous, timeout_s
        self._pid, self._closed = os.getpid(), False
        # Re-entrant: a signal handler may call or close while its own thread does.
        self._lock, self._closing = threading.RLock(), threading.RLock()
        self._in_flight: deque[Work] = deque()
        self._failed: list[Any] = []  # tensors of calls that failed in the middle
        self._gpu: GpuSide | None = None
        self._meetings = 0
        try:
            self._connect(rendezvous, timeout_s, parent)
        except BaseException as error:
            rendezvous.tell(error)
            raise
        _open.add(self)
        # The last registered runs first: goodbyes before what the launcher's library does at exit, which may wait.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def _connect(self, rendezvous: Rendezvous, timeout_s: float | None, parent: Communicator | None) -> None:
        self._timeout_s = env.TIMEOUT_S.read() if timeout_s is None else timeout_s
        self._trace = env.DEBUG.read() == "TRACE"
        chunk_nbytes = env.CHUNK_NBYTES.read() or DEFAULT_CHUNK_NBYTES
        agreed = env.agreed() | {"the version of hdma": VERSION}
        settled = None if parent is None else parent.node
        self._card: nics.Card = nics.card() if parent is None else parent._card
        peers = connect.discover(rendezvous, agreed, env.RANKS_PER_NODE.read(), settled, self._card, self._timeout_s)
        nic = nics.settings(peers.ports[self.rank], self._timeout_s) if peers.ports else None
        self.topology = peers.topology
        self.node: int = self.topology.node(self.rank)
        self.local_rank = self.topology.local_rank(self.rank)
        self.nodes, self.local_size = self.topology.nodes, self.topology.ranks_per_node
        self._layout = Layout.for_window(
            self.topology, SLOTS, env.WINDOW_NBYTES.read() or DEFAULT_WINDOW_NBYTES, chunk_nbytes
        )
        flag_count, flag_names = self._layout.flag_count, self._layout.flag_names(self.rank)
        alone = self.nodes == 1 and self.size > 1
        pids = readable_mates(rendezvous, self._timeout_s) if alone else {}
        self._requests = Requests(self._layout, self.rank, direct=bool(pids))
        self._peers = peers
        self._limit = "HDMA_TIMEOUT_S" if timeout_s is None else "the time-out that its group was given"
        connect.connect(rendezvous, peers, _core.flags_nbytes(flag_count), self._timeout_s)
        threads = peers.host_ranks * (1 if self.nodes == 1 else 2)
        # A thread that spins on a core which the awaited one needs only makes it later.
        spins = threads <= peers.host_cpus
        self._engine: _core.Engine | _Ended = _core.Engine(
            rank=self.rank,
            size=self.size,
            flag_count=flag_count,
            ring_count=self._layout.base_count,
            window_nbytes=self._layout.window_nbytes,
            timeout_s=self._timeout_s,
            limit=self._limit,
            spin_s=_SPIN_S if spins else 0.0,
            flag_names=flag_names,
            peers=[(rank, *fds, pids.get(rank, 0)) for rank, fds in peers.memory.items()],
            control=[(rank, fd, peers.names[rank]) for rank, fd in peers.control.items()],
            links=[(rank, lane, fd) for (rank, lane), fd in peers.lanes.items()],
            nic=nic,
        )
        try:
            # All or none: who is through knows that nobody fails any more before the first call.
            rendezvous.watch(self._engine.check)
            rendezvous.exchange("ready", b"", self._timeout_s)
        except BaseException as error:
            self._engine.abort(0, f"rank {self.rank} could not start: {error}")
            self._engine.close()
            self._engine = _Ended(str(error), {})
            raise
        if self.rank == 0:
            env.debug("VERSION", f"version {VERSION}")
            if peers.split:
                env.debug("WARN", f"{peers.split}, so all nodes were split to {self.topology} (nodes x ranks)")
            if self.wire == "tcp" and env.WIRE.read() == "auto" and parent is None:
                # Nodes that one host pretends to have miss nothing.
                level = "WARN" if peers.host_ranks < self.size else "INFO"
                env.debug(
                    level, "no RDMA device: TCP carries what goes between nodes (HDMA_WIRE=tcp says that this is right)"
                )
        if not spins:
            text = f"{threads} threads on {peers.host_cpus} cores: waits sleep at once instead of spinning first"
            env.debug("INFO", f"{peers.names[self.rank]}: {text}")
        slot = f"{SLOTS} slots of {self._layout.slot_nbytes} bytes a ring"
        by = f", RDMA by {peers.ports[self.rank]}" if peers.ports else ""
        env.debug("INFO", f"{peers.names[self.rank]}: {self.topology} nodes x ranks, {slot}{by}")

    @property
    def wire(self) -> str:
        """The network between nodes: "verbs" (RDMA) or "tcp"; empty where there is one node."""
        return "" if self.nodes == 1 else "verbs" if self._peers.ports else "tcp"

    def all_gather(self, out: Any, inp: Any, async_op: bool = False) -> Work | None:
        """out[r * inp.numel() : (r + 1) * inp.numel()] = inp of rank r, for any dtype.

        `inp` may be that part of `out` itself (in place). With `async_op` returns a `Work`; neither tensor may be
        touched before its `wait()`. Raises `UsageError` where sizes or dtypes do not fit, or they overlap otherwise.
        """
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        self._check("all_gather", dst, src, whole=dst, part=src)
        prepared, src = self._gather(dst, src)
        return self._issue(prepared, src, dst, (out, inp), async_op)

    def reduce_scatter(
        self, out: Any, inp: Any, op: Any = "sum", wire_dtype: Any = None, async_op: bool = False
    ) -> Work | None:
        """out = the sum over ranks r of inp[rank * out.numel() : (rank + 1) * out.numel()] of r.

        `op`: sum, avg, max, min or prod, or a torch ReduceOp; avg of floats only, max and min propagate NaN, the sum
        of bools is "or". dtypes: float64, 32, 16, bfloat16, float8_e4m3fn, float8_e5m2, int8 to int64, uint8, bool.

        Floats of 16 and 8 bits accumulate in float32, all else in its own type, in fixed order (within a node by local
        rank, then by node), so that every run gives the same bits. Node sums travel in the tensors' dtype, rounded once
        per node and once at the end, or (bfloat16, float16) with `wire_dtype="float32"` in float32: one rounding, twice
        the bytes between nodes. `out` may be this rank's part of `inp`. Raises `UsageError` where sizes, dtypes or `op`
        do not fit.
        """
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        self._check("reduce_scatter", dst, src, whole=src, part=dst)
        prepared = self._reduction("reduce_scatter", src, dst.nbytes, op, wire_dtype)
        return self._issue(prepared, src, dst, (out, inp), async_op)

    def all_reduce(self, x: Any, op: Any = "sum", wire_dtype: Any = None, async_op: bool = False) -> Work | None:
        """x = the sum (or `op`) over ranks of x, in place; the same bits on all ranks.

        `op`, dtypes, order and rounding as in `reduce_scatter`.
        """
        both = buffer(x, "x", writable=True)
        prepared = self._reduction("all_reduce", both, both.nbytes, op, wire_dtype)
        return self._issue(prepared, both, both, (x,), async_op)

    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Work | None:
        """x = x of rank `root`, in place, for any dtype. Raises `UsageError` for a root that is no rank."""
        both = buffer(x, "x", writable=True)
        try:
            root = operator.index(root)
        except TypeError:
            root = -1
        if not 0 <= root < self.size:
            raise UsageError(f"broadcast: root must be a rank, 0 to {self.size - 1}, not {root!r}")
        return self._issue(self._moved("broadcast", both, both.nbytes, root), both, both, (x,), async_op)

    def all_to_all(self, out: Any, inp: Any, async_op: bool = False) -> Work | None:
        """Shard r of out = shard `rank` of the inp of rank r, of `size` equal shards each, for any dtype.

        Raises `UsageError` where sizes or dtypes do not fit, or `out` and `inp` overlap.
        """
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        if dst.dtype != src.dtype or dst.numel != src.numel or src.numel % self.size or dst.gpu != src.gpu:
            self._check_places("all_to_all", dst, src)
            raise UsageError(
                f"all_to_all: out ({dst.numel} of {dst.dtype}) and inp ({src.numel} of {src.dtype}) must have the same "
                f"dtype and number of elements, a multiple of {self.size} (the ranks)"
            )
        if dst.address < src.address + src.nbytes and src.address < dst.address + dst.nbytes:
            raise UsageError("all_to_all: out and inp overlap: it does not work in place, pass another out")
        prepared = self._moved("all_to_all", src, src.nbytes // self.size)
        return self._issue(prepared, src, dst, (out, inp), async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Returns (or its `Work` is done) after every rank has called it. It does not wait for what is on a GPU."""
        return self._issue(self._moved("barrier", _NOTHING, 0), _NOTHING, _NOTHING, (), async_op)

    def start_all_gather(self, out: Any, inp: Any) -> StartedCall:
        """AllGather whose shards can be used as they land: see `StartedCall`."""
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        self._check("all_gather", dst, src, whole=dst, part=src)
        prepared, src = self._gather(dst, src, started=True)
        return self._start(prepared, src, dst, (out, inp), pushes=False)

    def start_reduce_scatter(self, out: Any, inp: Any, op: Any = "sum", wire_dtype: Any = None) -> StartedCall:
        """ReduceScatter whose input shards are pushed as they are made: see `StartedCall`."""
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        self._check("reduce_scatter", dst, src, whole=src, part=dst)
        prepared = self._reduction("reduce_scatter", src, dst.nbytes, op, wire_dtype, started=True)
        return self._start(prepared, src, dst, (out, inp), pushes=True)

    def group(self, ranks: Sequence[int]) -> Communicator:
        """A new communicator of `ranks` of this one, in that order. Collective over them; others do not call it.

        Its calls and this one's are independent of each other; issue them in the same order on all ranks that share
        several. Close it when it is no longer needed. Raises `UsageError` where `ranks` are not different ranks of
        this communicator with this one among them, `TimeoutError` naming members that did not call it.
        """
        try:
            members = tuple(ranks)
        except TypeError:
            raise UsageError(f"group: ranks must be a sequence of ranks, not {ranks!r}") from None
        if not members or len(set(members)) < len(members) or not set(members) <= set(range(self.size)):
            raise UsageError(f"group: ranks must be different ranks, 0 to {self.size - 1}, not {list(members)}")
        if self.rank not in members:
            raise UsageError(f"group: rank {self.rank} is not among {list(members)}: only members call it")
        self._check_open("group()")
        self._engine.check()
        with self._rendezvous.subset(members, ",".join(map(str, members))) as meeting:
            meeting.watch(self._engine.check)  # Who waits for a member that this communicator has lost, is told.
            return Communicator(meeting, self._given_s, self)

    def stats(self) -> dict[str, int]:
        """Counts of this rank since the communicator began.

        calls; copies, copy_nbytes (by the device); reduces, reduce_nbytes (of results); puts, put_nbytes (payload to
        other nodes); wire_sent_nbytes (to other nodes as the network counts: payload and headers).
        """
        stats = dict(self._engine.stats())
        if self._gpu is not None:
            there = self._gpu.engine.stats()
            stats |= {name: stats[name] + count for name, count in there.items() if name != "calls"}
        return stats

    def _empty(self, nbytes: int, index: int, what: str) -> _core.Allocation:
        """Symmetric memory on GPU `index`; see `hdma.empty`."""
        self._check_open("empty()")
        side = self._on_gpu(index)
        with self._meet("empty") as meeting:
            return side.allocate(meeting, nbytes, what)

    def _on_gpu(self, index: int) -> GpuSide:
        if self._gpu is None:
            self._check_open("the first call on a GPU")
            self._engine.check()
            with self._meet("gpu") as meeting:
                assert isinstance(self._engine, _core.Engine)
                self._gpu = GpuSide(meeting, self._peers, index, self._engine, self._timeout_s, self._limit)
        if self._gpu.index != index:
            raise UsageError(
                f"the tensor is on GPU {index}, but rank {self.rank} of this communicator uses GPU {self._gpu.index}: "
                "one GPU a rank; make another communicator (group) for another"
            )
        return self._gpu

    def _meet(self, what: str) -> Any:
        """All ranks of this communicator, to agree on something new."""
        # Numbered: of one that failed, notes may still be there when the next one begins.
        self._meetings += 1
        meeting = self._rendezvous.subset(tuple(range(self.size)), f"{what} {self._meetings}")
        meeting.watch(self._engine.check)
        return meeting

    def close(self) -> None:
        """Finishes the calls in flight and says goodbye to the peers, within the time-out; then no call is possible.

        Raises the `hdma.Error` of a call in flight that failed, if none was raised before; the communicator is closed
        all the same.
        """
        with self._closing:  # Who calls second, also at exit, waits until the first is through.
            if not self._closed:
                self._closed = True
                clean, side = not self._engine.fault(), self._gpu
                interrupts: list[BaseException] = []

                def run(step: Callable[[], None]) -> None:
                    try:
                        step()
                    except UsageError:
                        raise
                    except BaseException as interrupt:  # Ctrl-C: the step is through all the same.
                        interrupts.append(interrupt)

                try:
                    run(self._engine.drain)
                except UsageError:  # From a signal handler within a call, which is told so and goes on.
                    self._closed = False
                    raise
                if side is not None:
                    run(side.drain)
                run(self._engine.close)
                _open.discard(self)
                # Its memory and descriptors go with it, as soon as no thread is in a call.
                ended = _Ended(self._engine.fault(), self.stats())
                try:
                    if clean and not interrupts:
                        self._engine.check()
                finally:
                    self._engine = ended
                    if side is not None:
                        run(side.close)
                        if side.busy():
                            _never_freed.extend((self._in_flight, self._failed))
                        self._gpu = None
                    self._in_flight, self._failed = deque(), []
                if interrupts:
                    raise interrupts[0]

    def abort(self, reason: str) -> None:
        """Ends the communicator on all ranks now: every call, there and here, raises an `Error` with the reason."""
        if not self._closed:
            self._engine.abort(0, f"rank {self.rank} ended the communicator: {reason}")

    @property
    def closed(self) -> bool:
        """Whether close() was called, or an error has ended the communicator."""
        return self._closed or bool(self._engine.fault())

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self.abort(f"it ended with {kind.__name__}: look at its output")
        try:
            self.close()
        except Error:
            if kind is None:  # What brought the caller here says more than what it led to.
                raise

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.size}, {self.topology} nodes x ranks"
        return f"<hdma.Communicator {where}{', closed' if self.closed else ''}>"

    def _reduction(
        self, operation: str, inp: _core.Buffer, nbytes: int, op: Any, wire_dtype: Any, started: bool = False
    ) -> Prepared:
        if op not in OPS:
            op = (op if isinstance(op, str) else str(getattr(op, "name", op)).rpartition(".")[2]).lower()
        wire = inp.dtype if wire_dtype is None else dtype_name(wire_dtype)
        if inp.gpu < 0:
            return self._requests.reduced(operation, inp.dtype, inp.itemsize, nbytes, op, wire, started)
        if inp.address % inp.itemsize:
            raise UsageError(
                f"{operation}: the tensor on the GPU is not aligned to its elements of {inp.itemsize} bytes"
            )
        return self._on_gpu(inp.gpu).requests.reduced(operation, inp.dtype, inp.itemsize, nbytes, op, wire, started)

    def _moved(self, operation: str, inp: _core.Buffer, nbytes: int, root: int = 0, started: bool = False) -> Prepared:
        if inp.gpu < 0:
            return self._requests.moved(operation, inp.dtype, inp.itemsize, nbytes, root, started)
        side = self._on_gpu(inp.gpu)
        symmetric = side.symmetric(inp, in_place=False) if self.nodes == 1 else None
        return side.requests.moved(operation, inp.dtype, inp.itemsize, nbytes, root, started, symmetric)

    def _gather(self, out: _core.Buffer, inp: _core.Buffer, started: bool = False) -> tuple[Prepared, _core.Buffer]:
        """The request of an all_gather, and its input: of one in place in symmetric memory, the whole output."""
        if inp.gpu >= 0 and inp.address == out.address + self.rank * inp.nbytes:
            side = self._on_gpu(inp.gpu)
            symmetric = side.symmetric(out, in_place=True)
            if symmetric and self.nodes == 1:
                prepared = side.requests.moved("all_gather", inp.dtype, inp.itemsize, inp.nbytes, 0, started, symmetric)
                return prepared, out
        return self._moved("all_gather", inp, inp.nbytes, started=started), inp

    def _check_places(self, call: str, out: _core.Buffer, inp: _core.Buffer) -> None:
        if out.gpu != inp.gpu:
            where = ["in host memory" if each.gpu < 0 else f"on GPU {each.gpu}" for each in (out, inp)]
            raise UsageError(f"{call}: out is {where[0]} but inp is {where[1]}: they must be in the same place")

    def _check(self, call: str, out: _core.Buffer, inp: _core.Buffer, whole: _core.Buffer, part: _core.Buffer) -> None:
        apart = inp.address >= out.address + out.nbytes or out.address >= inp.address + inp.nbytes
        in_place = part.address == whole.address + self.rank * part.nbytes
        if (
            out.dtype == inp.dtype
            and whole.numel == self.size * part.numel
            and (apart or in_place)
            and out.gpu == inp.gpu
        ):
            return
        self._check_places(call, out, inp)
        if out.dtype != inp.dtype:
            raise UsageError(f"{call}: out is {out.dtype} but inp is {inp.dtype}: they must have the same dtype")
        if whole.numel != self.size * part.numel:
            big, small = ("out", "inp") if whole is out else ("inp", "out")
            raise UsageError(
                f"{call}: {big} must have {self.size} (the ranks) times the {part.numel} elements of {small}, that is "
                f"{self.size * part.numel}, but has {whole.numel}"
            )
        raise UsageError(
            f"{call}: out and inp overlap, but not in place: the smaller must be part {self.rank} (this rank's) of the "
            "larger, or share no byte with it"
        )

    def _issue(
        self, prepared: Prepared, inp: _core.Buffer, out: _core.Buffer, tensors: tuple[Any, ...], async_op: bool
    ) -> Work | None:
        if self._closed or self._trace:
            self._check_open(prepared.text)
        if inp.gpu >= 0:
            return self._issue_on_gpu(prepared, inp, out, tensors, async_op)
        if not async_op:
            self._engine.run(prepared.request, inp.address, out.address, 0)
            return None
        return self._keep(Work(self._engine.submit(prepared.request, inp.address, out.address, 0), tensors))

    def _issue_on_gpu(
        self, prepared: Prepared, inp: _core.Buffer, out: _core.Buffer, tensors: tuple[Any, ...], async_op: bool
    ) -> Work | None:
        side = self._on_gpu(inp.gpu)
        streams = partial(current_streams, tensors, inp.gpu)
        stream, *others = streams()
        try:
            for other in others:
                side.engine.follow(stream, other)
            if not async_op:
                side.engine.run(prepared.request, inp.address, out.address, stream)
                for other in others:
                    side.engine.follow(other, stream)
                return None
            ticket = side.engine.submit(prepared.request, inp.address, out.address, stream)
        except BaseException:
            self._keep_failed(tensors)
            raise
        return self._keep(Work(ticket, tensors, streams))

    def _start(
        self, prepared: Prepared, inp: _core.Buffer, out: _core.Buffer, tensors: tuple[Any, ...], pushes: bool
    ) -> StartedCall:
        self._check_open(prepared.text)
        engine: Any = self._engine
        streams: Callable[[], tuple[int, ...]] | None = None
        stream = 0
        if inp.gpu >= 0:
            engine, streams = self._on_gpu(inp.gpu).engine, partial(current_streams, tensors, inp.gpu)
            stream, *others = streams()
            for other in others:
                engine.follow(stream, other)
        try:
            ticket = engine.submit(prepared.request, inp.address, out.address, stream)
        except BaseException:
            self._keep_failed(tensors)
            raise
        work, push = self._keep(Work(ticket, tensors, streams)), engine.push if pushes else None
        return StartedCall(work, ticket, prepared.order, prepared.bounds, self._timeout_s, push, streams)

    def _check_open(self, text: str) -> None:
        if self._trace:
            env.debug("TRACE", f"rank {self.rank}: {text}")
        if self._closed:
            forked = "belongs to the parent of this forked process" if self._pid != os.getpid() else "is closed"
            raise Error(f"this communicator {forked}: make a new one with hdma.init()")

    def _keep_failed(self, tensors: tuple[Any, ...]) -> None:
        """Until close(): of a call that failed in the middle some steps may be on the GPU."""
        if self._engine.fault():
            self._failed.append(tensors)

    def _keep(self, work: Work) -> Work:
        """Holds the call's tensors until it is done, also where the caller drops the Work."""
        with self._lock:
            # After an error a call's steps may still be on the GPU.
            while self._in_flight and self._in_flight[0].done() and not self._engine.fault():
                self._in_flight.popleft()
            self._in_flight.append(work)
        return work


def _close_all() -> None:
    failure = getattr(sys, "last_value", None)  # What ends the interpreter, where it is an exception.
    for comm in list(_open):
        try:
            if failure is not None:
                comm.abort(f"it ended with {type(failure).__name__}: look at its output")
            comm.close()
        except Error:
            pass


def _forget_all() -> None:
    """In a forked child: the threads are the parent's, and links held open here would hide the parent's death."""
    for comm in list(_open):
        comm._closed = True
        if comm._gpu is not None:
            comm._gpu.forget()
        comm._engine.forget()
        # Another thread of the parent may hold them for ever.
        comm._lock, comm._closing = threading.RLock(), threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
