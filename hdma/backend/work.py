"""What an operation of the group returns, and the thread that completes what nobody waits for."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from hdma.backend.options import c10d
from hdma.errors import Error, TimeoutError, UsageError

_SUCCESS, _FAILURE = 0, 2  # of c10d::WorkResult


class Handle(Protocol):
    """A call under way, such as `hdma.Work`."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def done(self) -> bool: ...


class Owner(Protocol):
    """What a work needs of its group."""

    def explain(self, error: Error) -> Error:
        """The error that the caller gets."""

    def expire(self, limit_s: float) -> Error:
        """Ends the group, since an operation took longer than the time it was given."""

    def watch(self, work: Any, forwarded: bool) -> None:
        """Completes `work` soon, also where nobody waits for it."""


class GroupWork(c10d.Work):  # type: ignore[misc]
    """An operation; complete when all of `handles` are and `after` (copies to where the caller wants them) has run.

    Without handles it is complete from the start. `limit_s` is the time that the operation may take, where it is not
    the communicator's.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        owner: Owner | None = None,
        handles: Sequence[Handle] = (),
        after: Callable[[], None] | None = None,
        sequence: int = 0,
        limit_s: float | None = None,
        forwarded: bool = False,
    ) -> None:
        super().__init__()
        self._outputs, self._owner, self._handles, self._after = outputs, owner, handles, after
        self._sequence, self._limit_s, self._forwarded = sequence, limit_s, forwarded
        self._joined = [handle for handle in handles if isinstance(handle, JoinedHandle)] if forwarded else []
        self._future: Any = None
        self._exception: BaseException | None = None
        self._complete = not handles
        if handles:
            self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until complete; True. Raises the operation's error, or `TimeoutError` after `timeout` (0: the group's)."""
        if not self._complete:
            wanted_s = timeout.total_seconds() if timeout else 0.0
            self.finish(wanted_s if wanted_s > 0 else None)
        if self._exception is not None:
            raise self._exception
        return True

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits and completes, in success or failure. Raises only where `timeout_s` passes first."""
        failure: BaseException | None = None
        handles = self._handles
        try:
            for handle in handles:
                handle.wait(self._limit_s if timeout_s is None else timeout_s)
        except TimeoutError as error:
            failure = error
            if not all(handle.done() for handle in handles):
                if timeout_s is not None:
                    raise TimeoutError(
                        f"the operation is still running after {timeout_s:g} s; it goes on, and may be waited for again"
                    ) from None
                if self._limit_s is not None and self._owner is not None:
                    failure = self._owner.expire(self._limit_s)
        except Exception as error:  # gloo's too, which are of many classes.
            failure = error
        if isinstance(failure, Error) and self._owner is not None:
            failure = self._owner.explain(failure)
        with self._lock:
            if self._complete:
                return
            try:
                if failure is None and self._after is not None:
                    self._after()
            except Exception as error:
                failure = error
            self._exception, self._after, self._handles = failure, None, ()
            self._complete = True

    def is_completed(self) -> bool:
        if not self._complete and all(handle.done() for handle in self._handles):
            self.finish()
        return self._complete

    def state(self) -> str:
        """For messages; completes nothing, since it is asked for while a work completes."""
        if self._complete:
            return "done" if self._exception is None else "failed"
        return "ended" if all(handle.done() for handle in self._handles) else "not done"

    def is_success(self) -> bool:
        return self.is_completed() and self._exception is None

    def exception(self) -> BaseException | None:
        return self._exception if self.is_completed() else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def source_rank(self) -> int:
        """Of a receive without a source: the rank that sent. Raises `UsageError` for other operations."""
        for handle in self._joined:
            return int(handle.work._source_rank())
        raise UsageError("only a receive without a source has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_sequence_number(self) -> int:
        return self._sequence

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the list of output tensors."""
        if self._future is None:
            self._future = self._promise(self._value)
        return self._future

    def get_future_result(self) -> Any:
        """A `torch.futures.Future` of the result's number: 0 for success, 2 for failure."""
        return self._promise(lambda: _SUCCESS if self._exception is None else _FAILURE)

    def _value(self) -> list[torch.Tensor]:
        if self._exception is not None:
            raise self._exception
        return list(self._outputs)

    def _promise(self, value: Callable[[], Any]) -> Any:
        start: Any = torch.futures.Future()
        # Through then(): only what a callback raises is an error for waiters in C++, such as DDP.
        future = start.then(lambda _: value())
        if self.is_completed() or self._owner is None:
            start.set_result(None)
        else:
            self._owner.watch(_Promise(self, start), self._forwarded)
        return future


class _Promise:
    """For the watcher: complete the work, then its future."""

    def __init__(self, work: GroupWork, start: Any) -> None:
        self._work, self._start = work, start

    def finish(self) -> None:
        self._work.finish()
        self._start.set_result(None)


class JoinedHandle:
    """A work of gloo or of this group as a handle. Waited for once: gloo's sends hang when asked again."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self._lock, self._over = threading.Lock(), False

    def wait(self, timeout: float | None = None) -> bool:
        with self._lock:
            if not self._over:
                limit = () if timeout is None else (timedelta(seconds=timeout),)
                try:
                    self.work.wait(*limit)
                except Exception:
                    if limit and not self.work.is_completed():
                        raise TimeoutError(f"still running after {timeout} s") from None
                    self._over = True
                    raise
                self._over = True
        return True

    def done(self) -> bool:
        return self._over or bool(self.work.is_completed())


class Watcher:
    """A thread, started when first needed, that completes works in order: for futures and dropped works."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def watch(self, work: Any) -> None:
        if self._thread is threading.current_thread():
            # A callback of a future that makes and awaits another one: nobody else would complete it.
            work.finish()
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=_complete, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
                _watchers.add(self)
        self._queue.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Completes what is waiting; then the thread ends. False where that takes longer than `timeout_s`."""
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()


def _complete(works: queue.SimpleQueue[Any]) -> None:
    while (work := works.get()) is not None:
        work.finish()
        # The last reference may hold large tensors: not until the next work comes.
        del work


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _stop_all() -> None:
    for watcher in list(_watchers):
        watcher.stop(timeout_s=1.0)


# A daemon thread that waits inside C++ while the interpreter goes ends the process with a message.
atexit.register(_stop_all)
