"""Only who knows the secret is let in; everybody else is dropped, and accepting goes on."""

from __future__ import annotations

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hdma.errors import TimeoutError
from hdma.handshake import Acceptor, call


def stranger(address: list[Any], data: bytes) -> bytes:
    with socket.create_connection(tuple(address), timeout=5) as sock:
        sock.recv(16)
        try:
            sock.sendall(data)
            return sock.recv(32)
        except ConnectionError:
            return b""


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_two_ranks_meet(over: str) -> None:
    secret = secrets.token_bytes(32)
    with Acceptor(1, loopback=True) as acceptor, ThreadPoolExecutor() as pool:
        acceptor.start(secret, {(0, 4), (0, 2)})
        addresses = [acceptor.unix_name] if over == "unix" else acceptor.addresses
        deadline = time.monotonic() + 10
        calls = {purpose: pool.submit(call, addresses, secret, 0, 1, purpose, deadline) for purpose in (4, 2)}
        links = acceptor.finish(deadline)
        for purpose, started in calls.items():
            started.result().sendall(bytes([purpose]))
            assert links[0, purpose].recv(1) == bytes([purpose])


def test_strangers_are_dropped() -> None:
    secret = secrets.token_bytes(32)
    with Acceptor(1, loopback=True) as acceptor:
        acceptor.start(secret, {(0, 4)})
        idle = socket.create_connection(tuple(acceptor.addresses[0]))
        right_magic = b"hdma\x00\x01" + b"\0" * 53
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 8, b"\xff" * 200, secrets.token_bytes(59), right_magic):
            assert stranger(acceptor.addresses[0], garbage) == b""
        with pytest.raises(TimeoutError, match="could not connect to rank 1"):
            call(acceptor.addresses, b"another secret", 0, 1, 4, time.monotonic() + 0.3)
        with pytest.raises(TimeoutError):  # Knows the secret, but nobody waits for this link.
            call(acceptor.addresses, secret, 5, 1, 4, time.monotonic() + 0.3)
        deadline = time.monotonic() + 10
        ours = call(acceptor.addresses, secret, 0, 1, 4, deadline)
        assert set(acceptor.finish(deadline)) == {(0, 4)}
        ours.close()
        idle.close()


def test_missing_ranks_are_named() -> None:
    with Acceptor(3, loopback=True) as acceptor:
        acceptor.start(b"secret", {(0, 4), (2, 4), (2, 3)})
        call(acceptor.addresses, b"secret", 0, 3, 4, time.monotonic() + 10)
        with pytest.raises(TimeoutError, match=r"rank 3 was not connected to by ranks \[2\]"):
            acceptor.finish(time.monotonic() + 0.2)
