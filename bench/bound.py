"""The copy bound: all ranks, all at once, copy out of the others' shared memory what the collective must bring them.

Nobody waits for anybody and nothing is added up, so no collective of one host that copies with the C library's memmove
can be faster. (One that copies with streaming stores can, where sizes are beyond the caches.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from operations import Case, copies
from ranks import Ranks


class Bound:
    """`reason` says why there is none: the ranks are not on one host, or may not open each other's memory."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        # A memfd, opened by the others through /proc: it is gone with the last process, however that ends.
        fd = os.memfd_create("bench-bound")
        os.posix_fallocate(fd, 0, max(nbytes, 1))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        cards = ranks.gather((boot, os.readlink("/proc/self/ns/pid"), os.getpid(), fd))
        self.reason = ""
        self._maps: list[mmap.mmap] = []
        if len({card[:2] for card in cards}) > 1:
            self.reason = "the ranks are not on one host"
        else:
            try:
                self._maps = [_map(pid, number, nbytes) for _, _, pid, number in cards]
            except OSError as error:
                self.reason = f"a rank's shared memory cannot be opened: {error}"
        self.reason = next((reason for reason in ranks.gather(self.reason) if reason), "")
        os.close(fd)
        if not self.reason:
            self._arrays = [np.frombuffer(memory, np.uint8) for memory in self._maps]
            self._arrays[self._rank].fill(1)
            self._own = np.ones(nbytes, np.uint8)

    def call(self, case: Case) -> Callable[[], None] | None:
        """The copies as a function, if there is a bound."""
        if self.reason or self._size == 1 or case.collective == "barrier":
            return None
        moves = [
            (self._own.ctypes.data + here, self._arrays[other].ctypes.data + there, nbytes)
            for here, other, there, nbytes in copies(case, self._rank, self._size)
        ]
        move = ctypes.memmove

        def copy() -> None:
            for to, source, nbytes in moves:
                move(to, source, nbytes)

        return copy


def _map(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, max(nbytes, 1))
    finally:
        os.close(opened)
