"""Which process wrote a record, and whether it still lives: so that what a killed one left behind is known as such."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache

# Clocks of different hosts may differ by this much.
_CLOCKS_S = 60.0
# Start-up waits several times, each at most the time-out.
_WAITS = 4


@dataclass(frozen=True)
class Process:
    """`space` is equal where process ids mean the same processes; `started` tells apart those that had the same id."""

    pid: int
    host: str
    space: str
    started: int
    wrote_s: float  # wall clock

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(pid, socket.gethostname(), _space(), _started(pid) or 0, time.time())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def is_this(self) -> bool:
        return self.is_near and self.pid == os.getpid() and self.started == _started(self.pid)

    @property
    def is_near(self) -> bool:
        return self.space == _space()

    @property
    def is_gone(self) -> bool:
        """Known to have ended; False where this process cannot know."""
        if not self.is_near:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        started = _started(self.pid)
        return started is not None and started != self.started

    def predates(self, timeout_s: float) -> bool:
        """Whether what it wrote cannot be meant for this process: an earlier job's."""
        if self.is_near:
            return self.is_gone and self.wrote_s < _own_start_s()
        return self.wrote_s < time.time() - _WAITS * timeout_s - _CLOCKS_S


@cache
def _space() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """When a process started, in ticks since boot: 0 for one that has ended (a zombie), None if that is not shown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _own_start_s() -> float:
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (_started(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
