"""Ranks meet in a folder that all of them share: no launcher, no port, no MPI.

A rank joins by creating `joined.<rank>` exclusively. It takes the place of a process that has ended without leaving,
never that of a live one: of two that want it, one creates `taken.<rank>.<digest of what is there>`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hdma.errors import DeviceError, Error, UsageError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline, Rendezvous, SingleProcess, twice_error
from hdma.rendezvous.board import Board, is_left_behind, process_of

# How long whoever takes a dead process's place may need for it.
_TAKE_S = 2.0

# How soon a rank that joins anew is noticed.
_STAMP_S = 0.1

_REMEDIES = {
    errno.ENOSPC: "Free space there",
    errno.EDQUOT: "Free space there",
    errno.EMFILE: "Raise the limit of open files: ulimit -n",
    errno.ENFILE: "Close files: the system has no more",
}


class Folder(Board):
    """Ranks meet in a sub-folder of `parent` that carries the launcher's job id and the name of the meeting.

    Raises `UsageError` if the folder cannot be used or this rank is there already.
    """

    def __init__(self, launch: Launch, parent: Path, meeting: str | int, timeout_s: float = 300.0) -> None:
        job = re.sub(r"[^A-Za-z0-9_.@-]", "_", launch.job_id or "job")
        self._launch, self._parent, self._meeting = launch, parent, meeting
        self._path = parent.absolute() / f"hdma-{job}-{meeting}"
        super().__init__(launch.rank, launch.size, f"folder {self._path}", timeout_s)
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._stamped_s = 0.0
        self._cache: dict[str, tuple[tuple[int, int] | None, bytes]] = {}
        try:
            self._enter()
        except OSError as error:
            if error.errno in _REMEDIES:
                raise self._lost(error) from error
            raise UsageError(
                f"rank {self.rank} cannot use {self._path} to meet the others: {error.strerror}. Set HDMA_RENDEZVOUS "
                "to a folder that every rank can write to"
            ) from error

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        if len(ranks) == 1:
            return SingleProcess()
        # Named after this meeting's session, so that no other job or communicator has the same.
        name = hashlib.sha256(f"{self.session} {self._meeting} {label}".encode()).hexdigest()[:24]
        launch = replace(self._launch, rank=ranks.index(self.rank), size=len(ranks))
        return Folder(launch, self._parent, name, self._timeout_s)

    def _leave(self) -> None:
        """The last to leave removes the folder."""
        try:
            if self._joined(self.rank) == self.record:
                self._remove(f"joined.{self.rank}")
            if self.failed:
                with suppress(OSError):
                    self._write(f"left.{self.rank}", b"")
            if self.early:
                present = self._listing()
                if any(not {f"left.{rank}", f"told.{rank}"} & present for rank in range(self.size)):
                    return  # They have yet to come and read why this start has failed.
            if any(not self._bury(rank) for rank in range(self.size)):
                return
            # Not all at once: another start of the same ranks may have begun to join.
            for name in os.listdir(self._path):
                if not name.startswith("joined."):
                    self._remove(name)
            self._path.rmdir()
        except (Error, OSError):
            pass  # Another rank, also the last as it saw it, has removed the folder; or somebody is there again.

    def _join(self) -> None:
        deadline = Deadline(_TAKE_S)
        while True:
            try:
                # The payloads hold the communicator's secret: for this user only.
                self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(f"joined.{self.rank}", self.record, exclusive=True)
                break
            except FileNotFoundError:
                pass  # Removed by the last rank of an earlier start.
            except FileExistsError:
                old = self._joined(self.rank)
                if old is not None and self._replaceable(old) and self._take(old):
                    self._write(f"joined.{self.rank}", self.record)
                    break
                if old is not None and not self._replaceable(old):
                    raise self._twice(old) from None
            if not deadline.pause():
                raise self._twice(self._joined(self.rank)) from None

    def _replaceable(self, record: bytes) -> bool:
        process = process_of(record)
        return is_left_behind(record) or (process is not None and process.predates(self._timeout_s))

    def _take(self, record: bytes) -> bool:
        """Whether this process, and no other, may replace or remove a record."""
        name = f"taken.{self.rank}.{hashlib.sha256(record).hexdigest()[:16]}"
        try:
            self._write(name, b"", exclusive=True)
        except FileExistsError:
            return False
        return True

    def _bury(self, rank: int) -> bool:
        """Whether nobody is joined as `rank`; removes what a dead process of this host left there."""
        record = self._joined(rank)
        if record is None:
            return True
        process = process_of(record)
        if process is None or not process.is_gone or not self._take(record):
            return False
        self._remove(f"joined.{rank}")
        return True

    def _twice(self, record: bytes | None) -> UsageError:
        holder = process_of(record) if record is not None else None
        where = f"{self._path} holds {holder}" if holder else f"it is in {self._path}"
        return twice_error(self.rank, where, f"if that is an earlier job's, remove {self._path}")

    def _pin(self, name: str, content: bytes) -> None:
        try:
            self._write(f"{name}.{self.rank}", content)
        except OSError as error:
            if name == "told" and error.errno in (errno.ENOSPC, errno.EDQUOT):
                # That it has failed, if not why: this needs no room.
                os.rename(self._path / f"joined.{self.rank}", self._path / f"told.{self.rank}")
            else:
                raise self._lost(error) from error

    def _read(self, name: str, ranks: Iterable[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        present = self._listing()
        for rank in ranks:
            file = f"{name}.{rank}"
            if file not in present:
                continue
            stamp = self._stamps.get(file)
            if stamp is None or self._cache.get(file, (None, b""))[0] != stamp:
                try:
                    self._cache[file] = stamp, (self._path / file).read_bytes()
                except FileNotFoundError:
                    continue  # Its rank has left since the listing.
                except OSError as error:
                    raise self._lost(error) from error
            found[rank] = self._cache[file][1]
        return found

    def _changes(self) -> tuple[object, object]:
        listing = self._listing()
        joined, told = (sorted(name for name in listing if name.startswith(stem)) for stem in ("joined.", "told."))
        # Who joins anew puts another file in the place of the last. Looking at each costs a network file system more
        # than a listing does.
        if time.monotonic() - self._stamped_s > _STAMP_S:
            self._stamped_s = time.monotonic()
            self._stamps = {name: self._stamp(name) for name in (*joined, *told)}
        stamps = self._stamps
        return (joined, [stamps.get(name) for name in joined]), [(name, stamps.get(name)) for name in told]

    def _stamp(self, name: str) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path / name)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _listing(self) -> set[str]:
        # Listing first: network file systems cache that a name is absent, but refresh a listing.
        try:
            return set(os.listdir(self._path))
        except OSError as error:
            raise self._lost(error) from error

    def _joined(self, rank: int) -> bytes | None:
        try:
            return (self._path / f"joined.{rank}").read_bytes()
        except OSError:
            return None

    def _write(self, name: str, content: bytes, exclusive: bool = False) -> None:
        """Makes the file appear whole: written under another name first."""
        draft = self._path / f".{name}.{secrets.token_hex(8)}"
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
            if exclusive:
                os.link(draft, self._path / name)
            else:
                os.rename(draft, self._path / name)
        finally:
            draft.unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def _lost(self, error: OSError) -> DeviceError:
        remedy = _REMEDIES.get(
            error.errno or 0, "Set HDMA_RENDEZVOUS to a folder that every rank can read and write, and leave it alone"
        )
        return DeviceError(f"rank {self.rank} cannot meet the others in {self._path}: {error.strerror}. {remedy}")
