"""Calls that the caller has not waited for yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdma.errors import TimeoutError, UsageError


class Work:
    """An asynchronous call. Its tensors belong to it until it is done."""

    def __init__(
        self, ticket: Any, tensors: tuple[Any, ...], streams: Callable[[], tuple[int, ...]] | None = None
    ) -> None:
        """`streams`: the caller's current ones, for tensors on a GPU: of the output, then (if another) of the input."""
        self._ticket, self._tensors, self._streams = ticket, tensors, streams

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the call is complete for this rank; True. May be called again.

        On a GPU it makes the current stream wait instead, and blocks only until that is possible; what goes wrong later
        is raised by a later wait(), call, or close().

        Raises the call's `hdma.Error`; `hdma.TimeoutError` after `timeout` seconds (None: HDMA_TIMEOUT_S rules),
        which leaves the call running.
        """
        if not self._ticket.wait(-1.0 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"the call is still running after {timeout} s; wait() again, or close the communicator")
        if self._streams is None:
            self._tensors = ()
        else:
            for stream in self._streams():
                self._ticket.order(stream)
        return True

    def done(self) -> bool:
        """Whether the call is over, in success or failure; on a GPU: executed there. Never blocks."""
        return bool(self._ticket.done())

    def exception(self) -> BaseException | None:
        """What the call raised; None if it succeeded or is still running."""
        if not self.done():
            return None
        try:
            self._ticket.check()
        except Exception as error:
            return error
        return None


class StartedCall:
    """A collective whose shards are waited for or pushed one by one.

    A long message is moved in parts: part p of every shard is elements `range(p)`. `order` lists (shard, part) in the
    order in which AllGather delivers them or ReduceScatter needs them; any order of calls is right, this one is best.
    """

    def __init__(
        self,
        work: Work,
        ticket: Any,
        order: list[tuple[int, int]],
        bounds: list[tuple[int, int]],
        timeout_s: float,
        push: Callable[[Any, int, int], None] | None,
        streams: Callable[[], tuple[int, ...]] | None,
    ) -> None:
        """`push`: of the engine, for a call that takes shards one by one. `streams`: see `Work`."""
        self.order = order
        self._work, self._ticket, self._bounds, self._timeout_s = work, ticket, bounds, timeout_s
        self._push, self._streams = push, streams
        self._pushed: set[int] = set()
        self._marks = {pair: mark for mark, pair in enumerate(order)}

    @property
    def parts(self) -> int:
        return len(self._bounds)

    def range(self, part: int) -> tuple[int, int]:
        """First element, and one past the last, of a part within each shard."""
        if not isinstance(part, int) or not 0 <= part < self.parts:
            raise UsageError(f"there is no part {part!r}: parts go from 0 to {self.parts - 1}")
        return self._bounds[part]

    def wait(self, shard: int, part: int = 0) -> None:
        """AllGather: until this part of this shard is in `out`; on a GPU: for what follows on the current stream.

        Raises the call's `hdma.Error`, or `TimeoutError`.
        """
        if self._push:
            raise UsageError("wait(shard) belongs to start_all_gather; a started reduce_scatter is ended by finish()")
        stream = self._streams()[0] if self._streams else 0
        if not self._ticket.wait_given(self._mark(shard, part), stream, self._timeout_s):
            raise TimeoutError(f"part {part} of shard {shard} did not land within {self._timeout_s:g} s")

    def push(self, shard: int, part: int = 0) -> None:
        """ReduceScatter: this part of this shard of `inp` may be read; on a GPU: after the current stream's work.

        Raises the call's `hdma.Error`.
        """
        if not self._push:
            raise UsageError("push(shard) belongs to start_reduce_scatter; an all_gather's input is ready at its start")
        mark = self._mark(shard, part)
        if mark in self._pushed:
            raise UsageError(f"(shard, part) = ({shard}, {part}) was pushed before")
        self._pushed.add(mark)
        self._push(self._ticket, mark, self._streams()[-1] if self._streams else 0)

    def finish(self) -> None:
        """Until the call is complete for this rank, as `Work.wait()`. Raises the call's `hdma.Error`."""
        if self._push and self._streams and len(self._pushed) < len(self.order):
            missing = [pair for pair in self.order if self._marks[pair] not in self._pushed]
            raise UsageError(
                f"(shard, part) = {missing[0]} was not pushed (and {len(missing) - 1} others): push all first"
            )
        self._work.wait()

    def _mark(self, shard: int, part: int) -> int:
        try:
            return self._marks[shard, part]
        except KeyError:
            shards = len({s for s, _ in self.order})
            raise UsageError(
                f"there is no (shard, part) = ({shard}, {part}): {shards} shards, {self.parts} parts"
            ) from None
