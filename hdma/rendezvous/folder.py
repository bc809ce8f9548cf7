"""Ranks meet in a folder that all of them share: no launcher, no port, no MPI.

A rank joins by creating `joined.<rank>` exclusively, with a token in it. The digest of all tokens is part of every
later file name, so that nothing which an earlier job left behind can be taken for a member of this one.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hdma.errors import TimeoutError, UsageError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline, Rendezvous, SingleProcess, missing_error, twice_error


class Folder(Rendezvous):
    """Ranks meet in a sub-folder of `parent` that carries the launcher's job id and the number of the meeting.

    Raises `UsageError` if the folder cannot be used or this rank is there already.
    """

    def __init__(self, launch: Launch, parent: Path, meeting: int | str) -> None:
        self.rank, self.size = launch.rank, launch.size
        self._launch, self._parent, self._meeting = launch, parent, meeting
        job = re.sub(r"[^A-Za-z0-9_.@-]", "_", launch.job_id or "job")
        self._path = parent / f"hdma-{job}-{meeting}"
        self._session, self._count, self._closed = "", 0, False
        token = f"{secrets.token_hex(16)} process {os.getpid()} on {socket.gethostname()}"
        try:
            # The payloads hold the communicator's secret: for this user only.
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._publish(f"joined.{self.rank}", token.encode(), exclusive=True)
        except FileExistsError:
            raise twice_error(self.rank, self._who(), f"if that is an earlier job's, remove {self._path}") from None
        except OSError as error:
            raise UsageError(
                f"rank {self.rank} cannot use {self._path} to meet the others: {error.strerror}. Set HDMA_RENDEZVOUS "
                "to a folder that every rank can write to"
            ) from error

    def exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        try:
            return self._exchange(key, payload, timeout_s)
        except TimeoutError:
            self.close()
            raise

    def _exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        if not self._session:
            tokens = self._gather("joined", key, deadline)
            self._session = hashlib.sha256(b"\0".join(tokens)).hexdigest()[:16]
        self._count += 1
        stem = f"{self._session}.{self._count}.{re.sub('[^A-Za-z0-9_-]', '_', key)}"
        self._publish(f"{stem}.{self.rank}", payload)
        return self._gather(stem, key, deadline)

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        if len(ranks) == 1:
            return SingleProcess()
        # Named after this meeting's session, so that no other job or communicator has the same.
        name = hashlib.sha256(f"{self._session} {self._meeting} {label}".encode()).hexdigest()[:24]
        return Folder(replace(self._launch, rank=ranks.index(self.rank), size=len(ranks)), self._parent, name)

    def close(self) -> None:
        """The last to leave removes the folder. A rank that leaves early removes what says that it is there."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._count:
                self._publish(f"left.{self.rank}", b"")
            else:
                (self._path / f"joined.{self.rank}").unlink()
            present = set(os.listdir(self._path))
        except OSError:
            return  # another rank, also the last as it saw it, has removed the folder
        if not self._count:
            if not present:
                shutil.rmtree(self._path, ignore_errors=True)
        elif all(f"left.{rank}" in present for rank in range(self.size)):
            shutil.rmtree(self._path, ignore_errors=True)

    def _publish(self, name: str, content: bytes, exclusive: bool = False) -> None:
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

    def _gather(self, stem: str, key: str, deadline: Deadline) -> list[bytes]:
        found: dict[int, bytes] = {}

        def all_found() -> bool:
            # Listing first: network file systems cache that a name is absent, but refresh a listing.
            present = set(os.listdir(self._path))
            for rank in range(self.size):
                name = f"{stem}.{rank}"
                if rank not in found and name in present:
                    found[rank] = (self._path / name).read_bytes()
            return len(found) == self.size

        if not deadline.until(all_found):
            missing = set(range(self.size)) - set(found)
            raise missing_error(f"folder {self._path}", key, self.rank, missing, self.size, deadline.timeout_s)
        return [found[rank] for rank in range(self.size)]

    def _who(self) -> str:
        try:
            return f"{self._path} holds " + (self._path / f"joined.{self.rank}").read_text().split(" ", 1)[1]
        except OSError:
            return f"it is in {self._path}"
