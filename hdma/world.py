"""The world communicator: all ranks that the launcher started."""

from __future__ import annotations

from hdma import env, launch, rendezvous
from hdma.communicator import Communicator
from hdma.errors import UsageError

_world: Communicator | None = None


def init() -> Communicator:
    """The communicator of all ranks started by torchrun, mpirun or srun, or of this process alone.

    Collective; idempotent: later calls return the same communicator until it is closed.
    Raises `UsageError` where the launcher's variables or the ranks' settings contradict each other, `TimeoutError`
    naming the ranks that did not come within HDMA_TIMEOUT_S. It fails on all ranks or on none, and may be called again.
    """
    global _world
    if _world is None or _world.closed:
        try:
            timeout_s = env.TIMEOUT_S.read()
        except UsageError:  # Raised again where the others can be told.
            timeout_s = env.TIMEOUT_S.default
        with rendezvous.make(launch.find(), timeout_s) as meeting:
            _world = Communicator(meeting)
    return _world
