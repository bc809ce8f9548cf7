"""Only who knows the secret is let in; everybody else is dropped, and accepting goes on."""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from hdma import handshake
from hdma.errors import TimeoutError, WireError
from hdma.handshake import Link, Switchboard

SECRET = secrets.token_bytes(32)
Links = dict[Link, socket.socket]


@contextmanager
def boards(*ranks: int) -> Iterator[list[Switchboard]]:
    made = [Switchboard(rank, loopback=True) for rank in ranks]
    try:
        yield made
    finally:
        for board in made:
            board.__exit__()


def stranger(address: list[Any], data: bytes) -> bytes:
    with socket.create_connection(tuple(address), timeout=5) as sock:
        sock.recv(16)
        try:
            sock.sendall(data)
            return sock.recv(32)
        except ConnectionError:
            return b""


def accept(pool: ThreadPoolExecutor, board: Switchboard, callers: set[Link], limit_s: float = 10.0) -> Future[Links]:
    return pool.submit(board.connect, SECRET, {}, callers, time.monotonic() + limit_s)


def call(
    board: Switchboard, link: Link, addresses: list[Any], secret: bytes = SECRET, limit_s: float = 10.0
) -> socket.socket:
    return board.connect(secret, {link: addresses}, set(), time.monotonic() + limit_s)[link]


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_two_ranks_meet(over: str) -> None:
    with boards(0, 1) as (low, high), ThreadPoolExecutor() as pool:
        accepted = accept(pool, high, {(0, 4), (0, 2)})
        addresses: list[Any] = [high.unix_name] if over == "unix" else high.addresses
        called = low.connect(SECRET, {(1, 4): addresses, (1, 2): addresses}, set(), time.monotonic() + 10)
        for purpose in (4, 2):
            called[1, purpose].sendall(bytes([purpose]))
            assert accepted.result()[0, purpose].recv(1) == bytes([purpose])
        for sock in (*called.values(), *accepted.result().values()):
            sock.close()


def test_strangers_are_dropped() -> None:
    with boards(0, 1, 5) as (low, board, other), ThreadPoolExecutor() as pool:
        accepted = accept(pool, board, {(0, 4)})
        idle = socket.create_connection(tuple(board.addresses[0]))
        right_magic = b"hdma\x00\x01" + b"\0" * 53
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 8, b"\xff" * 200, secrets.token_bytes(59), right_magic):
            assert stranger(board.addresses[0], garbage) == b""
        with pytest.raises(TimeoutError, match="could not connect to rank 1"), boards(0) as (liar,):
            call(liar, (1, 4), board.addresses, b"another secret", 0.3)
        with pytest.raises(TimeoutError):  # Knows the secret, but nobody waits for this link.
            call(other, (1, 4), board.addresses, limit_s=0.3)
        ours = call(low, (1, 4), board.addresses)
        assert set(accepted.result()) == {(0, 4)}
        for sock in (ours, idle, accepted.result()[0, 4]):
            sock.close()


def flood(address: list[Any], unix_name: str, stop: threading.Event) -> None:
    """Hundreds of connections at once, and on."""
    held: list[socket.socket] = []
    kinds: list[Callable[[], bytes]] = [
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: random.randbytes(200),
        lambda: b"\xff" * 4096,
        lambda: b"\x7f\xff\xff\xff" * 16,
        lambda: b"",
    ]
    while not stop.is_set():
        sock = socket.socket(socket.AF_UNIX if len(held) % 4 == 0 else socket.AF_INET)
        sock.settimeout(0.2)
        try:
            sock.connect(unix_name if sock.family == socket.AF_UNIX else tuple(address))
            sock.sendall(random.choice(kinds)())
        except OSError:
            pass
        held.append(sock)
        if len(held) > 600:
            held.pop(random.randrange(600)).close()
    for sock in held:
        sock.close()


def test_flood_of_strangers() -> None:
    stop = threading.Event()
    with boards(0, 1) as (low, board), ThreadPoolExecutor() as pool:
        # Before it even listens to them, for strangers need not wait for the secret.
        floods = [pool.submit(flood, board.addresses[0], board.unix_name, stop) for _ in range(2)]
        time.sleep(0.5)
        threads = threading.active_count()
        accepted = accept(pool, board, {(0, purpose) for purpose in range(8)}, 20.0)
        callees: dict[Link, list[Any]] = {(1, p): [board.unix_name] if p % 2 else board.addresses for p in range(8)}
        try:
            called = low.connect(SECRET, callees, set(), time.monotonic() + 20)
            assert len(accepted.result()) == 8
            assert len(board._strangers) <= handshake._STRANGERS
            assert threading.active_count() <= threads + 1
        finally:
            stop.set()
        for each in floods:
            each.result()
        for sock in (*called.values(), *accepted.result().values()):
            sock.close()


def test_missing_ranks_are_named() -> None:
    with boards(0, 3) as (low, board), ThreadPoolExecutor() as pool:
        accepted = accept(pool, board, {(0, 4), (2, 4), (2, 3)}, 0.6)
        ours = call(low, (3, 4), board.addresses)
        with pytest.raises(TimeoutError, match=r"rank 3 was not connected to by ranks \[2\]"):
            accepted.result()
        ours.close()


def test_a_peer_that_is_gone_is_found_before_the_deadline() -> None:
    with boards(1, 2) as (middle, gone), ThreadPoolExecutor() as pool:
        gone.__exit__()
        started = time.monotonic()
        for addresses in ([gone.unix_name], gone.addresses):
            refused = "rank 0 cannot connect to rank 2, which has listened before"
            with boards(0) as (low,), pytest.raises(WireError, match=refused):
                call(low, (2, 4), addresses)
        # One that has called and closed, while another is awaited.
        accepted = accept(pool, middle, {(0, 4), (0, 2)})
        with boards(0) as (short,):
            call(short, (1, 4), middle.addresses).close()
        with pytest.raises(WireError, match="rank 0 is gone: it closed its connection to rank 1"):
            accepted.result()
        assert time.monotonic() - started < 6.0


def test_what_a_look_raises_ends_it() -> None:
    def look() -> None:
        raise KeyError("rank 2 has failed")

    with boards(1) as (board,), pytest.raises(KeyError):
        board.connect(SECRET, {}, {(0, 4)}, time.monotonic() + 10, look)
