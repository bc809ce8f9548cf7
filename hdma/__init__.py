"""hdma: collectives that leave the compute units alone, by copy engines inside a node and RDMA between nodes."""

from __future__ import annotations

from typing import Any

from hdma.algorithms import make_plan
from hdma.communicator import Communicator
from hdma.errors import DeviceError, Error, PlanError, TimeoutError, UsageError, WireError
from hdma.memory import empty
from hdma.version import VERSION
from hdma.work import StartedCall, Work
from hdma.world import init


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # The simulator is for developers: programs that only communicate do not wait for it to load.
    if name == "simulate":
        from hdma.simulator import simulate

        return simulate
    raise AttributeError(f"module 'hdma' has no attribute {name!r}")


__version__ = VERSION
__all__ = [
    "Communicator",
    "DeviceError",
    "Error",
    "PlanError",
    "StartedCall",
    "TimeoutError",
    "UsageError",
    "WireError",
    "Work",
    "empty",
    "init",
    "make_plan",
    "simulate",
]
