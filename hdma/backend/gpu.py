"""Operations on GPU tensors: works that order streams, and the inner NCCL (RCCL) group for what hdma does not do.

What is copied at the end of an operation, for tensors with gaps or in lists, is put on a side stream of the group as
the operation is issued, so that it also happens where nobody waits for the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from hdma.backend.options import c10d
from hdma.backend.work import GroupWork, Handle, Owner
from hdma.errors import Error, UsageError


class Side:
    """A group's side stream on its GPU, and the tensors that its copies still need."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._kept: deque[tuple[Any, Any]] = deque()

    def after(self, handles: Sequence[Handle], after: Callable[[], None]) -> Any:
        """Runs `after` on the side stream, behind the handles; the event of its end."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        # What NCCL does synchronously is on the current stream itself, and its work orders nothing.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for handle in handles:
                handle.wait()
            after()
            event = torch.cuda.Event()
            event.record()
        # Their memory belongs to another stream, which must not use it again before.
        self._kept.append((event, (handles, after)))
        return event


class GpuWork(c10d.Work):  # type: ignore[misc]
    """An operation on a GPU: wait() makes the current stream wait for it."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        owner: Owner | None = None,
        handles: Sequence[Handle] = (),
        side: Side | None = None,
        after: Callable[[], None] | None = None,
        sequence: int = 0,
    ) -> None:
        super().__init__()
        self._outputs, self._owner, self._handles, self._sequence = outputs, owner, handles, sequence
        self._event = side.after(handles, after) if side is not None and after is not None else None
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Orders the current stream behind the operation; True. Raises what has gone wrong by now."""
        wanted_s = timeout.total_seconds() if timeout else 0.0
        try:
            for handle in self._handles:
                handle.wait(wanted_s if wanted_s > 0 else None)
        except Error as error:
            raise (error if self._owner is None else self._owner.explain(error)) from error.__cause__
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return all(handle.done() for handle in self._handles) and (self._event is None or self._event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        for handle in self._handles:
            error = handle.exception() if hasattr(handle, "exception") else None
            if isinstance(error, BaseException):
                return error
        return None

    def state(self) -> str:
        """For messages."""
        return "not done" if not self.is_completed() else "done" if self.exception() is None else "failed"

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def source_rank(self) -> int:
        raise UsageError("only a receive without a source has a source rank, and on GPUs there is none")

    _source_rank = source_rank

    def get_sequence_number(self) -> int:
        return self._sequence

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the list of output tensors, complete for whatever stream asks for them."""
        if self._future is None:
            device = self._outputs[0].device if self._outputs else torch.device("cuda", torch.cuda.current_device())
            future: Any = torch.futures.Future(devices=[device])
            with torch.cuda.stream(torch.cuda.Stream(device)):
                self.wait()
                future.set_result(list(self._outputs))
            self._future = future
        return self._future

    def get_future_result(self) -> Any:
        """A `torch.futures.Future` of the result's number: 0 for success, 2 for failure."""
        result: Any = torch.futures.Future()
        result.set_result(0 if self.exception() is None else 2)
        return result


AnyWork: TypeAlias = "GroupWork | GpuWork"


class Forwarded:
    """A work of the inner group as a handle. May be waited for by several streams."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._work.wait(*(() if timeout is None else (timedelta(seconds=timeout),))))

    def done(self) -> bool:
        return bool(self._work.is_completed())


def make_inner(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """An NCCL group, whose ranks meet when they first call it."""
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    if nccl is None:
        raise UsageError("hdma forwards this call to NCCL, but this torch was built without NCCL")
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(c10d.PrefixStore("nccl", store), rank, size, options)
