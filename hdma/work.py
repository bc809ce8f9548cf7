"""Calls that the caller has not waited for yet."""

from __future__ import annotations

from typing import Any

from hdma.errors import TimeoutError, UsageError


class Work:
    """An asynchronous call. Its tensors belong to it until it is done."""

    def __init__(self, ticket: Any, tensors: tuple[Any, ...]) -> None:
        self._ticket, self._tensors = ticket, tensors

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the call is complete for this rank; True. May be called again.

        Raises the call's `hdma.Error`; `hdma.TimeoutError` after `timeout` seconds (None: HDMA_TIMEOUT_S rules),
        which leaves the call running.
        """
        if not self._ticket.wait(-1.0 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"the call is still running after {timeout} s; wait() again, or close the communicator")
        self._tensors = ()
        return True

    def done(self) -> bool:
        """Whether the call is over, in success or failure. Never blocks."""
        return bool(self._ticket.done())

    def exception(self) -> BaseException | None:
        """What the call raised; None if it succeeded or is still running."""
        if not self.done():
            return None
        try:
            self._ticket.wait(0.0)
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
        pushes: bool,
    ) -> None:
        self.order = order
        self._work, self._ticket, self._bounds, self._timeout_s, self._pushes = work, ticket, bounds, timeout_s, pushes
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
        """AllGather: until this part of this shard is in `out`. Raises the call's `hdma.Error`, or `TimeoutError`."""
        if self._pushes:
            raise UsageError("wait(shard) belongs to start_all_gather; a started reduce_scatter is ended by finish()")
        if not self._ticket.wait_given(self._mark(shard, part), self._timeout_s):
            raise TimeoutError(f"part {part} of shard {shard} did not land within {self._timeout_s:g} s")

    def push(self, shard: int, part: int = 0) -> None:
        """ReduceScatter: this part of this shard of `inp` is ready to be read. Raises the call's `hdma.Error`."""
        if not self._pushes:
            raise UsageError("push(shard) belongs to start_reduce_scatter; an all_gather's input is ready at its start")
        mark = self._mark(shard, part)
        if mark in self._pushed:
            raise UsageError(f"(shard, part) = ({shard}, {part}) was pushed before")
        self._pushed.add(mark)
        self._ticket.push(mark)

    def finish(self) -> None:
        """Until the call is complete for this rank. Raises the call's `hdma.Error`."""
        self._work.wait()

    def _mark(self, shard: int, part: int) -> int:
        try:
            return self._marks[shard, part]
        except KeyError:
            shards = len({s for s, _ in self.order})
            raise UsageError(
                f"there is no (shard, part) = ({shard}, {part}): {shards} shards, {self.parts} parts"
            ) from None
