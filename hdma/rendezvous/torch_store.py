"""Ranks meet in a torch Store: that of torch.distributed, torchrun's, or one that rank 0 hosts at MASTER_ADDR."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from hdma.errors import Error, UsageError, WireError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline, Rendezvous, SingleProcess, missing_error, twice_error
from hdma.rendezvous.board import Board, is_left_behind, process_of

# The host waits no longer than this for others to have read, and stays this long after it has given up.
_READ_S, _LINGER_S = 5.0, 0.2

# What this process hosts lives as long as it does: another rank may already use the port for torch.distributed.
_hosted: dict[tuple[str, str], Any] = {}


def from_environment(launch: Launch, meeting: str, timeout_s: float) -> TorchStore:
    """Joins the store at MASTER_ADDR:MASTER_PORT, as torch's env:// does: torchrun's, else rank 0 hosts it.

    Raises `UsageError` if the address cannot be used, hdma's `TimeoutError` if nobody listens there for `timeout_s`.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where = f"the store at MASTER_ADDR={address}, MASTER_PORT={port}"
    if not port.isdecimal():
        raise UsageError(f"rank {launch.rank} cannot join {where}: the port is not a number")
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise UsageError(
            f"{launch}: MASTER_ADDR is set, so the ranks meet in torch's store, but torch cannot be imported "
            f"({error}). Install hdma[torch], or set HDMA_RENDEZVOUS to a folder that all ranks share"
        ) from error
    host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = Deadline(timeout_s)
    if not host and not deadline.until(lambda: _listens(address, int(port), deadline.left_s)):
        # torch's client would take twice its time-out, print a page and name nobody.
        raise missing_error(f"{where}, hosted by rank 0", "join", launch.rank, [0], launch.size, timeout_s)
    wait = timedelta(seconds=timeout_s)
    try:
        # Multi-tenant, so that a later init_process_group of the same process shares the port.
        store = dist.TCPStore(address, int(port), launch.size, host, wait, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if host and "EADDRINUSE" in reason:
            remedy = "or another program uses the port: choose another MASTER_PORT"
            raise twice_error(0, f"{where} is taken", remedy) from error
        raise WireError(f"rank {launch.rank} cannot {'host' if host else 'join'} {where}: {reason}") from error
    if host:
        _hosted[address, port] = store
    return TorchStore(launch, store, meeting, where, host, timeout_s)


def _listens(address: str, port: int, left_s: float) -> bool:
    try:
        socket.create_connection((address, port), max(0.01, min(left_s, 5.0))).close()
        return True
    except OSError:
        return False


class TorchStore(Board):
    """Ranks meet in `store`, under keys of the prefix hdma/. Raises `UsageError` if this rank is there already."""

    def __init__(
        self,
        launch: Launch,
        store: Any,
        meeting: str | int,
        where: str = "torch's store",
        host: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(launch.rank, launch.size, where, timeout_s)
        self._launch, self._meeting, self._store, self._host = launch, meeting, store, host
        # A restarted job finds the keys of its last life in torchrun's store.
        self._prefix = f"hdma/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{meeting}"
        with self._reachable():
            self._enter()

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        if len(ranks) == 1:
            return SingleProcess()
        launch = replace(self._launch, rank=ranks.index(self.rank), size=len(ranks))
        name = f"{self._meeting}/{self.session}/{label}"
        return TorchStore(launch, self._store, name, self._where, self._host, self._timeout_s)

    def tell(self, error: BaseException) -> None:
        super().tell(error)
        if self._host and not self._closed:
            time.sleep(_LINGER_S)  # The store goes when the host does: let the others learn why first.

    def _join(self) -> None:
        key, old = self._name("joined", self.rank), b""
        while True:
            found = bytes(self._store.compare_set(key, old.decode(), self.record.decode()))
            if found == self.record:
                break
            if found == old:  # Somebody else was faster.
                raise self._twice(found)
            if not is_left_behind(found):
                raise self._twice(found)
            old = found
        if not old:
            self._count_in("joined")
        # Last: who sees it looks at the rest.
        self._count_change("joins")

    def _twice(self, found: bytes) -> UsageError:
        holder = process_of(found) or "another process"
        return twice_error(self.rank, f"{self._where} holds {holder}", "give each process a RANK of its own")

    def _pin(self, name: str, content: bytes) -> None:
        with self._reachable():
            self._store.set(self._name(name, self.rank), content)
            if name == "told":
                self._count_change("tells")
            else:
                self._count_in(name)

    def _read(self, name: str, ranks: Iterable[int]) -> dict[int, bytes]:
        with self._reachable():
            ranks = sorted(ranks)
            names = [self._name(name, rank) for rank in ranks]
            if not names or self._store.check(names):
                return dict(zip(ranks, map(bytes, self._get(names))))
            there = [rank for rank, one in zip(ranks, names) if self._store.check([one])]
            return {rank: bytes(self._store.get(self._name(name, rank))) for rank in there}

    def _changes(self) -> tuple[object, object]:
        with self._reachable():
            return self._store.add(f"{self._prefix}/joins", 0), self._store.add(f"{self._prefix}/tells", 0)

    def _complete(self, name: str) -> bool:
        with self._reachable():
            return bool(self._store.check([f"{self._prefix}/{name}/all"]))

    def _finished(self, name: str, deadline: Deadline) -> None:
        with self._reachable():
            read = self._store.add(f"{self._prefix}/{name}/read", 1)
            if self._host and read < self.size:
                all_read = partial(self._store.add, f"{self._prefix}/{name}/read", 0)
                Deadline(min(_READ_S, deadline.left_s)).until(lambda: all_read() == self.size)

    def _name(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _get(self, names: list[str]) -> list[bytes]:
        store = self._store
        found: list[bytes] = store.multi_get(names) if store.has_extended_api() else [store.get(name) for name in names]
        return found

    def _count_in(self, name: str) -> None:
        # The last to come tells the others, so that a look costs one key however many ranks there are.
        if self._store.add(f"{self._prefix}/{name}/here", 1) == self.size:
            self._store.set(f"{self._prefix}/{name}/all", b"1")

    def _count_change(self, kind: str) -> None:
        self._store.add(f"{self._prefix}/{kind}", 1)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except Error:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WireError(
                f"rank {self.rank} lost {self._where} while meeting the others: {reason}. The process that hosts the "
                "store has ended: look at its output first"
            ) from error
