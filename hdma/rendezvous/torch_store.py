"""Ranks meet in a torch Store: that of torch.distributed, torchrun's, or one that rank 0 hosts at MASTER_ADDR."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hdma.errors import UsageError, WireError
from hdma.launch import Launch
from hdma.rendezvous.base import Deadline, Rendezvous, SingleProcess, missing_error, twice_error

# The host waits no longer than this for others to have read, and stays this long after it has given up.
_READ_S, _LINGER_S = 5.0, 0.2

# What this process hosts lives as long as it does: another rank may already use the port for torch.distributed.
_hosted: list[Any] = []


def from_environment(launch: Launch, meeting: int, timeout_s: float) -> TorchStore:
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
        _hosted.append(store)
    return TorchStore(launch, store, meeting, where, host)


def _listens(address: str, port: int, left_s: float) -> bool:
    try:
        socket.create_connection((address, port), max(0.01, min(left_s, 5.0))).close()
        return True
    except OSError:
        return False


class TorchStore(Rendezvous):
    """Ranks meet in `store`, under keys of the prefix hdma/. Raises `UsageError` if this rank is there already."""

    def __init__(
        self, launch: Launch, store: Any, meeting: int | str, where: str = "torch's store", host: bool = False
    ) -> None:
        self.rank, self.size = launch.rank, launch.size
        self._launch, self._meeting, self._closed = launch, meeting, False
        self._store, self._where, self._host, self._count = store, where, host, 0
        # A restarted job finds the keys of its last life in torchrun's store.
        self._prefix = f"hdma/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{meeting}"
        try:
            claims = store.add(f"{self._prefix}/joined/{self.rank}", 1)
        except RuntimeError as error:
            raise self._lost("join", error) from error
        if claims > 1:
            raise twice_error(self.rank, f"{where} has seen it", "give each process a RANK of its own")

    def exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        if self._closed:
            raise UsageError(f"rank {self.rank} has left {self._where}: no exchange of {key!r} after close()")
        try:
            return self._exchange(key, payload, timeout_s)
        except RuntimeError as error:
            if type(error).__module__.startswith("hdma"):
                raise
            raise self._lost(key, error) from error

    def close(self) -> None:
        self._closed = True

    def subset(self, ranks: Sequence[int], label: str) -> Rendezvous:
        if len(ranks) == 1:
            return SingleProcess()
        launch = replace(self._launch, rank=ranks.index(self.rank), size=len(ranks))
        return TorchStore(launch, self._store, f"{self._meeting}/{label}", self._where, self._host)

    def _exchange(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        store, deadline = self._store, Deadline(timeout_s)
        self._count += 1
        stem = f"{self._prefix}/{self._count}.{key}"
        names = [f"{stem}/{rank}" for rank in range(self.size)]
        store.set(names[self.rank], payload)
        # The last to come tells the others, so that a look costs one key however many ranks there are.
        if store.add(f"{stem}/here", 1) == self.size:
            store.set(f"{stem}/all", b"1")
        gave_up = False

        def decided() -> bool:
            nonlocal gave_up
            gave_up = store.check([f"{stem}/gave_up"])
            return bool(gave_up or store.check([f"{stem}/all"]))

        if not deadline.until(decided) or gave_up:
            missing = [rank for rank, name in enumerate(names) if not store.check([name])]
            if self._host:
                # The store goes when the host does: let the others learn why first.
                store.set(f"{stem}/gave_up", b"1")
                time.sleep(_LINGER_S)
            raise missing_error(self._where, key, self.rank, missing, self.size, timeout_s)
        payloads = store.multi_get(names) if store.has_extended_api() else [store.get(name) for name in names]
        read = store.add(f"{stem}/read", 1)
        if self._host and read < self.size:
            Deadline(min(_READ_S, deadline.left_s)).until(lambda: store.add(f"{stem}/read", 0) == self.size)
        return [bytes(payload) for payload in payloads]

    def _lost(self, key: str, error: RuntimeError) -> WireError:
        reason = str(error).splitlines()[0]
        return WireError(
            f"rank {self.rank} lost {self._where} while meeting the others ({key!r}): {reason}. The process that hosts "
            "the store has ended: look at its output first"
        )
