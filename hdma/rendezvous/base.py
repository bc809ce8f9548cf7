"""What every meeting place does, and how missing ranks are named."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from hdma.errors import TimeoutError, UsageError


class Rendezvous(ABC):
    """A place where `size` ranks meet; this process is `rank`. Also a context manager that closes it."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Everyone's `payload`, by rank. All ranks call it with the same keys in the same order.

        Raises hdma's `TimeoutError` that names the ranks which did not come within `timeout_s`, and as `check` does.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises the error that another rank told, or a `WireError` if its process has ended. Never waits."""

    def watch(self, check: Callable[[], None]) -> None:  # noqa: B027
        """Asks `check` too, whenever it looks whether another rank has failed: it raises if so."""

    @abstractmethod
    def tell(self, error: BaseException) -> None:
        """Tells the others that this rank cannot start, and why, so that they need not wait for it. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Leaves, and removes what was left at the meeting place. Called again, it does nothing."""

    @abstractmethod
    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        """A place for `ranks` of this one, this rank among them, in that order; also after this one's close().

        All of them give the same `label`, another one for each meeting.
        """

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SingleProcess(Rendezvous):
    """One rank: nobody to meet."""

    rank, size = 0, 1

    def exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        return [payload]

    def check(self) -> None:
        pass

    def tell(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        return self


class Deadline:
    """A time to give up, and a pause between looks that grows from a millisecond to 50."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._pause_s = 0.001

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def pause(self) -> bool:
        """Sleeps a little, never beyond the deadline; False once it has passed."""
        left_s = self.left_s
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._pause_s * 1.5, 0.05)
        return left_s > 0.0

    def until(self, done: Callable[[], bool]) -> bool:
        """Looks until `done()`; False if the deadline passes first. Looks once more after it."""
        while not done():
            if not self.pause():
                return False
        return True


def missing_error(where: str, key: str, rank: int, missing: Iterable[int], size: int, timeout_s: float) -> TimeoutError:
    """The error of a rank that waited in vain."""
    missing = sorted(missing)
    names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
    return TimeoutError(
        f"rank {rank} waited {timeout_s:g} s for all {size} ranks at start-up ({where}, {key!r}), but {names} missing. "
        "Look there first: it did not start, failed earlier, or does not call hdma.init(). A longer HDMA_TIMEOUT_S "
        "helps only where ranks are slow to start"
    )


def twice_error(rank: int, where: str, remedy: str) -> UsageError:
    """The error of a process that found its rank taken."""
    return UsageError(f"rank {rank} joined twice: {where}. Two processes claim the same rank; {remedy}")
