"""A group's life: its names and settings, how it connects, how it ends."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import Counter, deque
from datetime import timedelta
from typing import Any

import torch

from hdma import rendezvous
from hdma.backend import gloo, gpu
from hdma.backend.history import History
from hdma.backend.options import c10d
from hdma.backend.work import GroupWork, Watcher
from hdma.communicator import Communicator
from hdma.errors import Error, TimeoutError, UsageError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline
from hdma.rendezvous.torch_store import TorchStore

# From 2.14 on a Python class can be a Backend. Before, only a ProcessGroup, which takes the place of torch's own.
IS_BACKEND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
_Parent: Any = c10d.Backend if IS_BACKEND else c10d.ProcessGroup
# The longest that shutdown() waits for calls in flight.
_SHUTDOWN_S = 10.0

# The store of a launcher outlives a group: a second group of the same name would find what the first left behind.
# All ranks make the default group equally often, and the members of any other group make that one equally often.
_generations = itertools.count()
_generation = -1
_meetings: Counter[str] = Counter()


class Life(_Parent):  # type: ignore[misc]
    """A group without operations. Errors are hdma's; the first that ends the group is kept."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, name: str, default: bool) -> None:
        super().__init__(rank, size)
        self._me = Launch(rank, size, None, None, "torch.distributed", None)
        self._name, self._timeout_s = name, timeout_s
        self._store = c10d.PrefixStore(_meeting(name, default), store)
        self._history = History()
        self._comm: Communicator | None = None
        self._inner: Any = None  # gloo
        self._inner_gpu: Any = None  # NCCL
        self._side: gpu.Side | None = None
        self._error: Error | None = None
        self._ended = ""
        self._limit_s: float | None = None
        self._making = threading.Lock()
        self._watchers = [Watcher(f"hdma {name} {kind}") for kind in ("works", "forwarded")]
        self._unfinished: deque[weakref.ref[GroupWork]] = deque()
        self._coalesced: list[GroupWork] | None = None
        if default:
            # Who is missing is said where the program starts; other groups connect when first used: many never are.
            self._connect()

    # Names and settings

    def getBackendName(self) -> str:
        return "hdma"

    _get_backend_name = getBackendName

    def get_group_store(self) -> Any:
        return self._store

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: Any) -> Any:
        """This group, which is its own backend. Raises `UsageError` for other devices than CPU and GPU."""
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            raise UsageError(f"the hdma group {self._name!r} has no backend for {kind}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._history.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the numbers begin at 0 on every rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """The longest that an operation may take from now on. Cannot be lengthened once the group is connected."""
        wanted_s = timeout.total_seconds()
        if self._comm is None:
            self._timeout_s = wanted_s
        elif wanted_s <= self._timeout_s:
            self._limit_s = wanted_s
        else:
            self._limit_s = None
            text = f"hdma: group {self._name!r} keeps its time-out of {self._timeout_s:g} s: it is already connected"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        for inner in (self._inner, self._inner_gpu):
            if inner is not None:
                inner._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def get_error(self) -> Any:
        """`ErrorType` of what ended the group; SUCCESS while it is usable."""
        if self._error is None and (self._comm is None or not self._comm.closed):
            return c10d.ErrorType.SUCCESS
        return c10d.ErrorType.TIMEOUT if isinstance(self._error, TimeoutError) else c10d.ErrorType.COMM_ERROR

    @property
    def options(self) -> Any:
        return c10d.Backend.Options("hdma", timedelta(seconds=self._timeout_s))

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    if not IS_BACKEND:

        @property
        def _device_types(self) -> list[Any]:
            return [torch.device("cpu"), torch.device("cuda")]

    # Connecting

    def _connect(self) -> Communicator:
        with self._making:
            if self._ended:
                raise Error(f"the process group {self._name!r} was ended by {self._ended}()")
            if self._comm is None:
                if self._error is not None:
                    raise self._error
                if self._me.size == 1:
                    place: rendezvous.Rendezvous = rendezvous.SingleProcess()
                else:
                    place = TorchStore(self._me, self._store, 0, f"the store of process group {self._name!r}")
                try:
                    with place:
                        self._comm = Communicator(place, self._timeout_s)
                except Error as error:
                    self._error = self.explain(error)
                    raise self._error from error.__cause__
            return self._comm

    def _make_inner(self) -> Any:
        with self._making:
            if self._ended:
                raise Error(f"the process group {self._name!r} was ended by {self._ended}()")
            if self._inner is None:
                self._inner = gloo.make(self._store, self._me.rank, self._me.size, self._limit_s or self._timeout_s)
            return self._inner

    def _make_inner_gpu(self) -> Any:
        with self._making:
            if self._ended:
                raise Error(f"the process group {self._name!r} was ended by {self._ended}()")
            if self._inner_gpu is None:
                limit_s = self._limit_s or self._timeout_s
                self._inner_gpu = gpu.make_inner(self._store, self._me.rank, self._me.size, limit_s)
            return self._inner_gpu

    def _side_of(self, tensor: Any) -> gpu.Side:
        if self._side is None:
            self._side = gpu.Side(tensor.device)
        return self._side

    # The end

    def shutdown(self) -> None:
        """Finishes the calls in flight, for some seconds at most, and leaves. Never raises: it warns."""
        self._end("shutdown", _SHUTDOWN_S)

    def abort(self) -> None:
        """Ends the group on all its ranks at once; who waits gets an error."""
        if self._comm is not None:
            self._comm.abort("abort() of its process group")
        self._end("abort", 0.0)

    def _end(self, how: str, patience_s: float) -> None:
        if self._ended:
            return
        self._ended = how
        try:
            if self._comm is not None:
                self._leave(self._comm, min(patience_s, self._timeout_s))
        except Exception as error:
            text = f"hdma: group {self._name!r} ended with an operation that had failed: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        self._comm = None
        works, forwarded = self._watchers
        works.stop(patience_s)
        waiting = not forwarded.stop(min(patience_s, 1.0))
        if self._inner is not None:
            # abort() also drops what has been sent and not yet received.
            (self._inner.abort if how == "abort" or waiting else self._inner.shutdown)()
            self._inner = None
        if self._inner_gpu is not None:
            (self._inner_gpu.abort if how == "abort" else self._inner_gpu.shutdown)()
            self._inner_gpu = None

    def _leave(self, comm: Communicator, patience_s: float) -> None:
        if not comm.closed:
            deadline = Deadline(patience_s)
            try:
                for handle in list(comm._in_flight):
                    handle.wait(deadline.left_s)
            except TimeoutError:
                comm.abort("its process group's destruction while a call was in flight")
        failed_before = self._error is not None
        try:
            comm.close()
        except Error:
            if not failed_before:
                raise

    def __repr__(self) -> str:
        return f"<hdma group {self._name!r}, rank {self._me.rank} of {self._me.size}{', ended' if self._ended else ''}>"

    # What works ask of their group

    def explain(self, error: Error) -> Error:
        """The error for the caller; what ends the group is kept, a time-out shows what was under way."""
        if self._comm is not None and self._comm.closed and self._error is None:
            self._error = error
        if isinstance(error, TimeoutError) and "last operations" not in str(error):
            return TimeoutError(f"{error}\n{self._history}")
        return error

    def expire(self, limit_s: float) -> Error:
        if self._comm is not None:
            self._comm.abort(f"an operation that took longer than the {limit_s:g} s it was given")
        return TimeoutError(f"rank {self._me.rank}: an operation took longer than the {limit_s:g} s it was given")

    def watch(self, work: Any, forwarded: bool) -> None:
        self._watchers[forwarded].watch(work)


def _meeting(name: str, default: bool) -> str:
    global _generation
    if default:
        _generation = next(_generations)
        _meetings.clear()
    _meetings[name] += 1
    return f"{_generation}.{_meetings[name]}"
