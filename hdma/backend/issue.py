"""How an operation is issued to the communicator or forwarded to gloo, in the caller's thread or behind it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hdma.backend.gpu import Forwarded, GpuWork
from hdma.backend.life import Life
from hdma.backend.shapes import After
from hdma.backend.work import GroupWork, Handle, JoinedHandle
from hdma.communicator import Communicator
from hdma.errors import Error

# Options in which torch has set no time-out.
UNSET = timedelta(milliseconds=-1)
# One call of the communicator; the flag: asynchronous.
Call = Callable[[Communicator, bool], Any]


class Issue(Life):
    """A group that can issue operations, and has none yet."""

    def _at_once(self, opts: Any) -> Communicator | None:
        """The communicator, where the call is synchronous and needs nothing but one call of it."""
        if opts is None or getattr(opts, "asyncOp", True) or opts.timeout != UNSET:
            return None
        return None if self._unfinished or self._limit_s is not None else self._comm

    def _issue(
        self,
        operation: str,
        tensor: Tensor | None,
        calls: Sequence[Call],
        outputs: Sequence[Tensor],
        opts: Any,
        after: After = None,
    ) -> GroupWork | GpuWork:
        """Makes `calls` of the communicator, then (when they are complete) `after`. `tensor` is for messages."""
        async_op, limit_s = (True, None) if opts is None else (opts.asyncOp, self._limit(opts))
        comm = self._comm or self._connect()
        history = self._history
        row = history.begin(operation, tensor)
        if tensor is not None and tensor.is_cuda:
            return self._issue_on_gpu(row, tensor, calls, outputs, async_op, after)
        try:
            if self._unfinished:
                self._catch_up(wait=not async_op)
            if not async_op and limit_s is None:
                for call in calls:
                    call(comm, False)
                if after is not None:
                    after()
                history.end()
                return GroupWork(outputs, sequence=row[0])
            handles: list[Handle] = [call(comm, True) for call in calls]
        except Error as error:
            raise self.explain(error) from error.__cause__
        work = GroupWork(outputs, self, handles, after, row[0], limit_s)
        history.follow(row, work)
        if not async_op:
            work.wait()
            return work
        if after is not None:
            self._unfinished.append(weakref.ref(work))
            self.watch(work, forwarded=False)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _issue_on_gpu(
        self, row: Any, tensor: Tensor, calls: Sequence[Call], outputs: Sequence[Tensor], async_op: bool, after: After
    ) -> GpuWork:
        comm = self._comm or self._connect()
        try:
            if not async_op:
                for call in calls:
                    call(comm, False)
                if after is not None:
                    after()
                self._history.end()
                return GpuWork(outputs, sequence=row[0])
            handles: list[Handle] = [call(comm, True) for call in calls]
        except Error as error:
            raise self.explain(error) from error.__cause__
        return self._on_gpu(row, tensor, handles, outputs, after)

    def _on_gpu(
        self, row: Any, tensor: Tensor, handles: list[Handle], outputs: Sequence[Tensor], after: After
    ) -> GpuWork:
        side = None if after is None else self._side_of(tensor)
        work = GpuWork(outputs, self, handles, side, after, row[0])
        self._history.follow(row, work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _finish_on_gpu(self) -> None:
        """Waits for the current stream, and for calls that nobody waited for."""
        if self._comm is not None:
            for handle in list(self._comm._in_flight):
                handle.wait()
        if self._side is not None:
            self._side.stream.synchronize()
        torch.cuda.current_stream().synchronize()

    def _forward(
        self,
        operation: str,
        tensor: Tensor | None,
        call: Callable[[Any], Any],
        outputs: Sequence[Tensor],
        after: After = None,
    ) -> GroupWork | GpuWork:
        """The same by the inner gloo or NCCL group."""
        row = self._history.begin(operation, tensor)
        if tensor is not None and tensor.is_cuda:
            done = call(self._inner_gpu or self._make_inner_gpu())
            return self._on_gpu(row, tensor, [] if done is None else [Forwarded(done)], outputs, after)
        inner = self._inner or self._make_inner()
        done = call(inner)
        handles = [] if done is None else [JoinedHandle(done)]
        if after is not None and not handles:
            after()
        work = GroupWork(outputs, self, handles, after, row[0], forwarded=True)
        self._history.follow(row, work)
        if after is not None and handles:
            self.watch(work, forwarded=True)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(
        self, works: Sequence[GroupWork | GpuWork], outputs: Sequence[Tensor], after: After = None
    ) -> GroupWork | GpuWork:
        """Several works of this group as one."""
        if outputs and outputs[0].is_cuda:
            side = None if after is None else self._side_of(outputs[0])
            return GpuWork(outputs, self, works, side, after, self._history.sequence)
        handles = [JoinedHandle(work) for work in works]
        joined = GroupWork(outputs, self, handles, after, self._history.sequence, forwarded=True)
        if after is not None:
            self.watch(joined, forwarded=True)
        return joined

    def _catch_up(self, wait: bool) -> None:
        """Completes works that copy at their end: what the caller dropped is then as if it had been waited for."""
        while self._unfinished:
            work = self._unfinished[0]()
            if work is not None and not wait and not work.is_completed():
                return
            if work is not None:
                work.finish()
            self._unfinished.popleft()

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> GroupWork | GpuWork:
        """A work for all operations since `_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return self._together(works, [tensor for work in works for tensor in work.result()])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _limit(self, opts: Any) -> float | None:
        asked: timedelta = opts.timeout
        return self._limit_s if asked == UNSET else asked.total_seconds()
