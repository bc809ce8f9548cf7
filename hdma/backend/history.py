"""The last operations of a group, for messages: torch's flight recorder knows its own backends only (up to 2.14)."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

_KEPT, _SHOWN = 64, 8


class History:
    """A ring of the last operations. `begin` and `end` are on the path of every call, so they only store."""

    def __init__(self) -> None:
        self.sequence = 0
        self._ended = 0
        self._rows: deque[list[Any]] = deque(maxlen=_KEPT)

    def begin(self, operation: str, tensor: Any) -> list[Any]:
        """A new operation; `tensor` (None: without data) is described by its elements and dtype."""
        self.sequence += 1
        row = (
            [self.sequence, operation, 0, None, None]
            if tensor is None
            else [self.sequence, operation, tensor.numel(), tensor.dtype, None]
        )
        self._rows.append(row)
        return row

    def end(self) -> None:
        """The operation begun last is over: it ran in the caller's thread."""
        self._ended = self.sequence

    def follow(self, row: list[Any], work: Any) -> None:
        """The operation goes on; `work` (not kept alive) tells its state."""
        row[4] = weakref.ref(work)

    def __str__(self) -> str:
        lines = [f"  {row[0]}: {self._text(row)}" for row in list(self._rows)[-_SHOWN:]]
        return "\n".join(["this rank's last operations in the group before the timeout were:", *(lines or ["  none"])])

    def _text(self, row: list[Any]) -> str:
        sequence, operation, numel, dtype, follow = row
        what = operation if dtype is None else f"{operation}, {numel} x {str(dtype).removeprefix('torch.')}"
        return f"{what}, {self._state(sequence, follow)}"

    def _state(self, sequence: int, follow: Any) -> str:
        if follow is None:
            return "done" if sequence <= self._ended else "not done"
        work = follow()
        return "dropped by the caller" if work is None else str(work.state())
