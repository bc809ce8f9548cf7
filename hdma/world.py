"""The world communicator: all ranks that the launcher started."""

from __future__ import annotations

from hdma import env, launch, rendezvous
from hdma.communicator import Communicator

_world: Communicator | None = None


def init() -> Communicator:
    """The communicator of all ranks started by torchrun, mpirun or srun, or of this process alone.

    Collective; idempotent: later calls return the same communicator until it is closed.
    Raises `UsageError` where the launcher's variables or the ranks' settings contradict each other, `TimeoutError`
    naming the ranks that did not come within HDMA_TIMEOUT_S.
    """
    global _world
    if _world is None or _world.closed:
        meeting = rendezvous.make(launch.find(), env.TIMEOUT_S.read())
        try:
            _world = Communicator(meeting)
        finally:
            meeting.close()
    return _world
