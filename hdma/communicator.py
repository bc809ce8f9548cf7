"""The heart: a communicator checks a call, finds its plan, and makes one call into the engine."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import replace
from typing import Any, NamedTuple

from hdma import _core, connect, env
from hdma.algorithms import build, max_shard_nbytes
from hdma.compile import compile_rank
from hdma.errors import Error, UsageError
from hdma.layout import Layout
from hdma.plan import Variant
from hdma.rendezvous import Rendezvous
from hdma.tensors import Buffer, buffer, dtype_name, overlap
from hdma.version import VERSION
from hdma.work import StartedCall, Work

SLOTS = 4
# Measured on the host: smaller chunks pay more for flags and system calls, larger ones leave the caches.
DEFAULT_CHUNK_NBYTES = 256 << 10
_SPIN_S = 20e-6
# The numbers of Dtype and Op in csrc/plan.h; all other dtypes are moved as bytes, not reduced.
_REDUCED = ("bytes", "float32", "bfloat16", "float16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_OPS = ("sum", "avg", "max", "min", "prod")
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_CACHED_PLANS = 256


class _Request(NamedTuple):
    """A checked call: `nbytes` of one shard, `text` for the fingerprint; dtypes and operation as numbers."""

    operation: str
    text: str
    out: Buffer
    inp: Buffer
    nbytes: int
    variant: Variant
    dtype: int = 0
    wire_dtype: int = 0
    op: int = 0

    def what(self) -> tuple[int, int, int, int, int, int, int]:
        stride = self.nbytes
        return self.inp.address, self.out.address, stride, stride, self.dtype, self.wire_dtype, self.op

    def tensors(self) -> tuple[Any, Any]:
        return self.out.owner, self.inp.owner


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator:
    """Ranks that make the same collective calls in the same order. Made by `hdma.init()`.

    Tensors are torch tensors in host memory or numpy arrays, contiguous; bfloat16 arrays come from `ml_dtypes`.
    One thread issues the calls, since their order must be the same on all ranks. Works may be waited for anywhere.
    Every method may raise `hdma.Error`. Arguments that cannot be right raise `UsageError` before anything is moved,
    and the communicator stays usable. Whatever goes wrong between ranks (one is killed or late, a connection is lost,
    they disagree on a call) ends the communicator on all of them with the same first cause; see `closed`.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._timeout_s = env.TIMEOUT_S.read()
        chunk_nbytes = env.CHUNK_NBYTES.read() or DEFAULT_CHUNK_NBYTES
        agreed = env.agreed() | {"the version of hdma": VERSION}
        peers = connect.discover(rendezvous, agreed, env.RANKS_PER_NODE.read(), self._timeout_s)
        self.topology = peers.topology
        self.node, self.local_rank = self.topology.node(self.rank), self.topology.local_rank(self.rank)
        self.nodes, self.local_size = self.topology.nodes, self.topology.ranks_per_node
        self._layout = Layout.for_window(self.topology, SLOTS, env.WINDOW_NBYTES.read(), chunk_nbytes)
        flag_count = self._layout.flag_count
        connect.connect(rendezvous, peers, _core.flags_nbytes(flag_count), self._timeout_s)
        threads = peers.host_ranks * (1 if self.nodes == 1 else 2)
        self._engine = _core.Engine(
            rank=self.rank,
            size=self.size,
            flag_count=flag_count,
            ring_count=self._layout.base_count,
            window_nbytes=self._layout.window_nbytes,
            timeout_s=self._timeout_s,
            # A thread that spins on a core which the awaited one needs only makes it later.
            spin_s=_SPIN_S if threads <= peers.host_cpus else 0.0,
            flag_names=self._layout.flag_names(self.rank),
            peers=[(rank, *fds) for rank, fds in peers.memory.items()],
            control=[(rank, fd, peers.names[rank]) for rank, fd in peers.control.items()],
            tcp=[(rank, lane, fd) for (rank, lane), fd in peers.lanes.items()],
        )
        self._plans: OrderedDict[tuple[Any, ...], tuple[Any, tuple[int, ...]]] = OrderedDict()
        self._in_flight: deque[Work] = deque()
        self._closed = False
        self._pid = os.getpid()
        self._lock, self._closing = threading.Lock(), threading.Lock()
        _open.add(self)
        # The last registered runs first: goodbyes before what the launcher's library does at exit, which may wait.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self._trace = env.DEBUG.read() == "TRACE"
        if self.rank == 0:
            env.debug("VERSION", f"version {VERSION}")
        slot = f"{SLOTS} slots of {self._layout.slot_nbytes} bytes a ring"
        env.debug("INFO", f"{peers.names[self.rank]}: {self.topology} nodes x ranks, {slot}")

    def all_gather(self, out: Any, inp: Any, async_op: bool = False) -> Work | None:
        """out[r * inp.numel() : (r + 1) * inp.numel()] = inp of rank r, for any dtype.

        `inp` may be that part of `out` itself (in place). With `async_op` returns a `Work`; neither tensor may be
        touched before its `wait()`. Raises `UsageError` where sizes or dtypes do not fit, or they overlap otherwise.
        """
        return self._call(self._all_gather(out, inp), async_op)

    def reduce_scatter(
        self, out: Any, inp: Any, op: Any = "sum", wire_dtype: Any = None, async_op: bool = False
    ) -> Work | None:
        """out = the sum over ranks r of inp[rank * out.numel() : (rank + 1) * out.numel()] of r, in floating point.

        The dtypes are float32, bfloat16 and float16.

        Accumulates in float32 in fixed order (within a node by local rank, then by node), so that every run gives the
        same bits. Node sums travel in the tensors' dtype, rounded once per node and once at the end, or with
        `wire_dtype="float32"` in float32: one rounding, twice the bytes between nodes.
        `out` may be this rank's part of `inp`. Raises `UsageError` where sizes, dtypes or `op` do not fit.
        """
        return self._call(self._reduce_scatter(out, inp, op, wire_dtype), async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Returns (or its `Work` is done) after every rank has called it."""
        # An AllGather of nothing: complete when a flag has come from every rank.
        nothing = Buffer(0, 0, 1, "bytes", None)
        return self._call(_Request("all_gather", "barrier()", nothing, nothing, 0, Variant()), async_op)

    def start_all_gather(self, out: Any, inp: Any) -> StartedCall:
        """AllGather whose shards can be used as they land: see `StartedCall`."""
        return self._start(self._all_gather(out, inp), pushes=False)

    def start_reduce_scatter(self, out: Any, inp: Any, op: Any = "sum", wire_dtype: Any = None) -> StartedCall:
        """ReduceScatter whose input shards are pushed as they are made: see `StartedCall`."""
        return self._start(self._reduce_scatter(out, inp, op, wire_dtype), pushes=True)

    def stats(self) -> dict[str, int]:
        """Counts of this rank since the communicator began.

        calls; copies, copy_nbytes (by the device); reduces, reduce_nbytes (of results); puts, put_nbytes (payload to
        other nodes); wire_sent_nbytes (to other nodes as the network counts: payload and headers).
        """
        return dict(self._engine.stats())

    def close(self) -> None:
        """Finishes the calls in flight and says goodbye to the peers, within the time-out; then no call is possible.

        Raises the `hdma.Error` of a call in flight that failed, if none was raised before; the communicator is closed
        all the same.
        """
        with self._closing:  # Who calls second, also at exit, waits until the first is through.
            if not self._closed:
                self._closed = True
                clean = not self._engine.fault()
                self._engine.close()
                _open.discard(self)
                if clean:
                    self._engine.check()

    @property
    def closed(self) -> bool:
        """Whether close() was called, or an error has ended the communicator."""
        return self._closed or bool(self._engine.fault())

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self._abort(kind.__name__)
        try:
            self.close()
        except Error:
            if kind is None:  # What brought the caller here says more than what it led to.
                raise

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.size}, {self.topology} nodes x ranks"
        return f"<hdma.Communicator {where}{', closed' if self.closed else ''}>"

    def _abort(self, reason: str) -> None:
        """Ends the communicator on all ranks: this one will not make the calls that they may wait for."""
        if not self._closed:
            self._engine.abort(0, f"rank {self.rank} ended with {reason}: look at its output")

    def _all_gather(self, out: Any, inp: Any) -> _Request:
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        self._check("all_gather", dst, src, whole=dst, part=src)
        text = f"all_gather({src.dtype}, {src.nbytes} bytes a shard)"
        return _Request("all_gather", text, dst, src, src.nbytes, Variant(src.itemsize))

    def _reduce_scatter(self, out: Any, inp: Any, op: Any, wire_dtype: Any) -> _Request:
        dst, src = buffer(out, "out", writable=True), buffer(inp, "inp")
        self._check("reduce_scatter", dst, src, whole=src, part=dst)
        op_name = (op if isinstance(op, str) else str(getattr(op, "name", op)).rpartition(".")[2]).lower()
        if op_name not in _OPS:
            raise UsageError(f"reduce_scatter: op must be one of {', '.join(_OPS)}, not {op!r}")
        if src.dtype not in _REDUCED[1:]:
            raise UsageError(f"reduce_scatter: dtype must be one of {', '.join(_REDUCED[1:])}, not {src.dtype}")
        if op_name == "avg" and src.dtype not in _FLOATS:
            raise UsageError(f"reduce_scatter: {src.dtype} has no average: sum, then divide as you mean it")
        wire = src.dtype if wire_dtype is None else dtype_name(wire_dtype)
        if wire != src.dtype and (wire != "float32" or src.dtype not in ("bfloat16", "float16")):
            raise UsageError(f"reduce_scatter: wire_dtype is {src.dtype}, or float32 for 16-bit floats, not {wire}")
        text = f"reduce_scatter({op_name}, {src.dtype}, {dst.nbytes} bytes a shard, {wire} on the wire)"
        variant = Variant(src.itemsize, 4 if wire != src.dtype else src.itemsize)
        numbers = (_REDUCED.index(src.dtype), _REDUCED.index(wire), _OPS.index(op_name))
        return _Request("reduce_scatter", text, dst, src, dst.nbytes, variant, *numbers)

    def _check(self, call: str, out: Buffer, inp: Buffer, whole: Buffer, part: Buffer) -> None:
        if out.dtype != inp.dtype:
            raise UsageError(f"{call}: out is {out.dtype} but inp is {inp.dtype}: they must have the same dtype")
        if whole.numel != self.size * part.numel:
            big, small = ("out", "inp") if whole is out else ("inp", "out")
            raise UsageError(
                f"{call}: {big} must have {self.size} (the ranks) times the {part.numel} elements of {small}, that is "
                f"{self.size * part.numel}, but has {whole.numel}"
            )
        in_place = part.address == whole.address + self.rank * part.nbytes
        if overlap(out, inp) and not in_place:
            raise UsageError(
                f"{call}: out and inp overlap, but not in place: the smaller must be part {self.rank} (this rank's) of "
                "the larger, or share no byte with it"
            )

    def _call(self, request: _Request, async_op: bool) -> Work | None:
        self._check_open(request.text)
        pieces, _ = self._pieces(request.operation, request.nbytes, request.variant)
        if not async_op:
            self._engine.run(request.text, pieces, *request.what())
            return None
        ticket = self._engine.submit(request.text, pieces, *request.what(), 0, False)
        return self._keep(Work(ticket, request.tensors()))

    def _start(self, request: _Request, pushes: bool) -> StartedCall:
        text = f"start_{request.text}"
        self._check_open(text)
        variant = replace(request.variant, shard_major=True)
        pieces, orders = self._pieces(request.operation, request.nbytes, variant)
        order = [(shard, part) for part, shards in enumerate(orders) for shard in shards]
        bounds, at = [], 0
        for nbytes in (nbytes for _, repeats, nbytes in pieces for _ in range(repeats)):
            bounds.append((at // request.inp.itemsize, (at + nbytes) // request.inp.itemsize))
            at += nbytes
        ticket = self._engine.submit(text, pieces, *request.what(), len(order), pushes)
        work = self._keep(Work(ticket, request.tensors()))
        return StartedCall(work, ticket, order, bounds, self._timeout_s, pushes)

    def _check_open(self, text: str) -> None:
        if self._trace:
            env.debug("TRACE", f"rank {self.rank}: {text}")
        if self._closed:
            forked = "belongs to the parent of this forked process" if self._pid != os.getpid() else "is closed"
            raise Error(f"this communicator {forked}: make a new one with hdma.init()")

    def _keep(self, work: Work) -> Work:
        """Holds the call's tensors until it is done, also where the caller drops the Work."""
        with self._lock:
            while self._in_flight and self._in_flight[0].done():
                self._in_flight.popleft()
            self._in_flight.append(work)
        return work

    def _pieces(
        self, operation: str, nbytes: int, variant: Variant
    ) -> tuple[list[tuple[Any, int, int]], list[tuple[int, ...]]]:
        """The message as runs of plans: the longest plan as often as it fits, then one for the rest."""
        longest = max_shard_nbytes(self._layout, variant)
        full, rest = divmod(nbytes, longest)
        pieces, orders = [], []
        if full:
            plan, order = self._plan(operation, longest, variant)
            pieces.append((plan, full, longest))
            orders += [order] * full
        if rest or not full:
            plan, order = self._plan(operation, rest, variant)
            pieces.append((plan, 1, rest))
            orders.append(order)
        return pieces, orders

    def _plan(self, operation: str, nbytes: int, variant: Variant) -> tuple[Any, tuple[int, ...]]:
        key = (operation, nbytes, variant)
        found = self._plans.get(key)
        if found is None:
            compiled = compile_rank(build(operation, self._layout, nbytes, variant), self.rank)
            loaded = _core.Plan(compiled.steps, compiled.sources, compiled.spans)
            found = self._plans[key] = (loaded, compiled.order)
            if len(self._plans) > _CACHED_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return found


def _close_all() -> None:
    failure = getattr(sys, "last_value", None)  # What ends the interpreter, where it is an exception.
    for comm in list(_open):
        try:
            if failure is not None:
                comm._abort(type(failure).__name__)
            comm.close()
        except Error:
            pass


def _forget_all() -> None:
    """In a forked child: the threads are the parent's, and links held open here would hide the parent's death."""
    for comm in list(_open):
        comm._closed = True
        comm._engine.forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
