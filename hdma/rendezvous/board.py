"""A meeting at a board: each rank pins notes under names, and all can read them. Kinds of boards only pin and read.

    joined              who the rank is now: its process, and a token that is new with every attempt to start
    <session>.<n>.<key> its payload in the n-th exchange; a session is the digest of what all have joined with
    told                why it gave up

Nothing counts attempts, for ranks need not fail equally often: a rank that starts anew joins with another token. Who
has not finished the first exchange takes that up as a new session; who is beyond it knows that this start has failed.
What an earlier job or attempt left behind belongs to other sessions and is never read.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from hdma.errors import BY_CODE, Error, TimeoutError, UsageError, WireError
from hdma.rendezvous.base import Deadline, Rendezvous, missing_error
from hdma.rendezvous.process import Process

# Looking whether the processes of this host live costs a system call or two for each.
_LOOK_S = 0.3
# Notes of several ranks need not arrive in the order in which they were pinned: who has all that it needs may leave,
# and even start anew, before another has seen the last of it.
_GRACE_S = 0.7

# Of attempts that have failed here, by own rank: what is told about them is no news to a later one.
_known_failures: set[tuple[int, str]] = set()
# The tokens with which this process has joined, or is about to, and not left.
_live: set[str] = set()


class Board(Rendezvous):
    """`where` names the place in errors. A subclass calls `_enter()` when it is ready to join."""

    def __init__(self, rank: int, size: int, where: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._where, self._timeout_s = where, timeout_s
        self._process = Process.this()
        self._token = secrets.token_hex(16)
        self.record = json.dumps({"token": self._token, "process": self._process.as_dict()}).encode()
        self.session, self.count = "", 0
        self._records: dict[int, bytes] = {}
        self._seen: object = None
        self._looked_s = 0.0
        self._doubt: Error | None = None
        self._doubt_s = 0.0
        self._watched: Callable[[], None] | None = None
        self._told = self._closed = self.failed = False
        # Gave up before all had joined: what was told must outlive this rank's stay.
        self.early = False

    def _enter(self) -> None:
        _live.add(self._token)  # Before its record is there to be seen: another thread may want the same place.
        try:
            self._join()
        except BaseException:
            _live.discard(self._token)
            raise

    def _join(self) -> None:
        """A subclass where a place may be taken looks whether the record there is left behind, and raises if not."""
        self._pin("joined", self.record)

    @abstractmethod
    def _pin(self, name: str, content: bytes) -> None:
        """Makes a note of this rank appear whole, in the place of its last one of this name."""

    @abstractmethod
    def _read(self, name: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The notes of this name, of those of `ranks` that have pinned one. Never waits."""

    @abstractmethod
    def _changes(self) -> tuple[object, object]:
        """Of what has been joined with, and of what was told, another value whenever it may have changed.

        The second is false while nobody has told anything.
        """

    def _complete(self, name: str) -> bool:
        """Whether all ranks have pinned this name; cheaper than reading where that is possible."""
        return True

    def _finished(self, name: str, deadline: Deadline) -> None:
        """After an exchange, before its payloads are handed over."""

    def watch(self, check: Callable[[], None]) -> None:
        self._watched = check

    def _leave(self) -> None:
        """On close()."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watched = self._doubt = None  # What they hold must not wait for the garbage collector.
            try:
                self._leave()
            finally:
                _live.discard(self._token)

    def exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        if self._closed:
            raise UsageError(f"rank {self.rank} has left {self._where}: no exchange of {key!r} after close()")
        try:
            return self._exchange(key, payload, timeout_s)
        except BaseException as error:
            self.tell(error)
            raise

    def _exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        self.count += 1
        found: dict[int, bytes] = {}
        pinned = ""

        def read() -> bool:
            if pinned and self._complete(pinned):
                found.update(self._read(pinned, set(range(self.size)) - set(found)))
            return len(found) == self.size

        def done() -> bool:
            nonlocal pinned
            if read():
                return True
            try:
                self.check()
            except Error:
                if read():  # Who has all that it needs may have left in the meantime.
                    self._seen = None  # Found again in the next exchange, if there is one.
                    return True
                raise
            name = f"{self.session}.{self.count}.{re.sub('[^A-Za-z0-9_-]', '_', key)}"
            if self.session and name != pinned:
                found.clear()
                self._pin(name, payload)
                pinned = name
                return read()
            return False

        if not deadline.until(done):
            found = self._read(pinned or "joined", range(self.size))
            missing = {r for r in range(self.size) if r not in found or not (pinned or self._usable(found[r]))}
            raise missing_error(self._where, key, self.rank, missing, self.size, timeout_s)
        self._finished(pinned, deadline)
        return [found[rank] for rank in range(self.size)]

    def check(self) -> None:
        changes = self._changes()
        if changes != self._seen or not self.session:
            self._seen = changes
            if self._complete("joined"):
                self._look_at_joined()
            if changes[1]:
                self._look_at_told()
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self._look_at_processes()
        if self._watched is not None:
            try:
                self._watched()
            except Error as error:
                self._suspect(error)  # The rank that has failed may tell more of it.
        if self._doubt is not None and time.monotonic() - self._doubt_s > _GRACE_S:
            raise self._doubt

    def tell(self, error: BaseException) -> None:
        _known_failures.update((self.rank, _parse(record)["token"]) for record in self._records.values())
        if self._told:
            return
        token = getattr(error, "token", None)
        first = token is None
        if token:
            _known_failures.add((self.rank, token))
        kind = next((code for code, cls in reversed([*enumerate(BY_CODE)]) if isinstance(error, cls)), 0)
        text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}".rstrip(": ")
        note = {"token": self._token, "process": self._process.as_dict(), "kind": kind, "text": text}
        self.failed = True
        self.early = len(self._records) < self.size and not isinstance(error, TimeoutError)
        try:
            if first:  # What this rank was told itself, the others are told by the same.
                self._pin("told", json.dumps(note).encode())
            self._told = True
        except (Error, OSError):
            pass  # Without a descriptor left, for one, it works once this rank has closed what it had opened.

    def _usable(self, record: bytes) -> bool:
        return not _process(_parse(record)).predates(self._timeout_s)

    def _look_at_joined(self) -> None:
        found = {
            rank: record for rank, record in self._read("joined", range(self.size)).items() if self._usable(record)
        }
        anew = [rank for rank, record in found.items() if self._records.get(rank, record) != record]
        if anew and self.count > 1:
            text = f"rank {anew[0]} failed at start-up and has started anew: look at its output"
            self._suspect(_told(WireError, "", text))
            return
        if anew or not self.session:
            self._records |= found
            if len(self._records) == self.size:
                self.session = hashlib.sha256(b"\0".join(self._records[r] for r in range(self.size))).hexdigest()[:16]

    def _look_at_told(self) -> None:
        for rank, raw in sorted(self._read("told", set(range(self.size)) - {self.rank}).items()):
            note = _parse(raw)
            record = self._records.get(rank)
            ours = record is None or _parse(record)["token"] == note["token"]
            if (
                ours
                and (self.rank, note["token"]) not in _known_failures
                and not _process(note).predates(self._timeout_s)
            ):
                text = note.get("text", "it had no room to say why")
                raise _told(BY_CODE[note.get("kind", 0)], note["token"], f"rank {rank} could not start: {text}")

    def _look_at_processes(self) -> None:
        for rank, record in self._records.items():
            process = _process(_parse(record))
            if rank != self.rank and process.is_gone:
                text = "is gone: it was killed, crashed or exited at start-up. Look at its output"
                self._suspect(WireError(f"rank {rank} ({process}) {text}"))

    def _suspect(self, error: Error) -> None:
        if self._doubt is None:
            self._doubt, self._doubt_s = error, time.monotonic()


def _parse(note: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(note)
    return found


def _process(note: dict[str, Any]) -> Process:
    return Process(**note["process"])


def is_left_behind(record: bytes) -> bool:
    """Whether who wrote a record is known to have ended, or is this process and has left."""
    process = process_of(record)
    if process is None:
        return False
    return _parse(record).get("token") not in _live if process.is_this else process.is_gone


def process_of(record: bytes) -> Process | None:
    """Who wrote a record; None where it is not one of ours."""
    try:
        return _process(_parse(record))
    except (ValueError, TypeError, KeyError):
        return None


def _told(kind: type[Error], token: str, text: str) -> Error:
    """The error of a rank that fails since another, which joined with `token`, has failed."""
    error = kind(text)
    error.token = token  # type: ignore[attr-defined]
    return error
