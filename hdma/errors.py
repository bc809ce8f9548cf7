"""The errors of hdma: one base class, one subclass for each kind of cause. C++ raises the same classes."""

from __future__ import annotations

import builtins


class Error(RuntimeError):
    """Anything that hdma could not do. Whether it has ended the communicator, `Communicator.closed` says."""


class UsageError(Error):
    """The caller asked for something that cannot be done, alone or together with the other ranks."""


class DeviceError(Error):
    """Memory or a device (GPU runtime, host) refused: out of memory, a limit, a driver's error."""


class WireError(Error):
    """A connection to another rank failed: refused, reset, or its process is gone."""


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed (HDMA_TIMEOUT_S); also the builtin TimeoutError."""


class PlanError(Error):
    """The simulator found a plan wrong: deadlock, race, wrong bytes or too many bytes on the wire."""


# Codes shared with csrc/base.h, which sends them over control links.
BY_CODE: tuple[type[Error], ...] = (Error, UsageError, DeviceError, WireError, TimeoutError)
