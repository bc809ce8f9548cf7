"""Sockets between ranks that have proved to each other that they know the communicator's secret.

    acceptor --nonce--> caller
    acceptor <--magic, rank, purpose, nonce, HMAC(secret, "c", both nonces, rank, callee, purpose)-- caller
    acceptor --HMAC(secret, "a", both nonces, rank, callee, purpose)--> caller

Neither side learns the secret from the other. Strangers and garbage are dropped, and accepting goes on.
"""

from __future__ import annotations

import fcntl
import hmac
import secrets
import socket
import struct
import threading
import time
from typing import Any

from hdma.errors import TimeoutError, WireError

_MAGIC = b"hdma\x00\x01"
_HELLO = struct.Struct("!6sIB16s32s")
# An address that answers nothing, such as that of another host's private bridge, is given up this soon.
_CONNECT_S = 2.0
# linux/sockios.h: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
# A stranger who connects and says nothing holds a thread this long.
_HANDSHAKE_S = 10.0


def left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _addresses(port: int, loopback: bool) -> list[list[Any]]:
    """Where peers may find this host: the addresses of its interfaces, loopback last."""
    if loopback:
        return [["127.0.0.1", port]]
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
            except OSError:
                pass  # An interface without an IPv4 address.
    try:
        with open("/proc/net/if_inet6") as file:
            for address, _, _, scope, *_ in map(str.split, file):
                if scope == "00":  # Link-local addresses mean nothing on another host.
                    found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    except OSError:
        pass
    found.sort(key=lambda a: a.startswith("127.") or a == "::1")
    return [[address, port] for address in dict.fromkeys(found)]


class Acceptor:
    """Listens for the links that lower ranks open; each connection has a thread and a deadline of its own."""

    def __init__(self, rank: int, loopback: bool) -> None:
        self.rank = rank
        self.unix_name = f"\0hdma-{secrets.token_hex(16)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(self.unix_name)
        if loopback or not socket.has_dualstack_ipv6():
            self._tcp = socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=512)
        else:
            self._tcp = socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
        self.addresses = _addresses(self._tcp.getsockname()[1], loopback)
        self._unix.listen(512)
        self._links: dict[tuple[int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __enter__(self) -> Acceptor:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        for listener in (self._unix, self._tcp):
            try:  # Wakes the accept() that a bare close() would leave asleep.
                listener.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            listener.close()

    def start(self, secret: bytes, wanted: set[tuple[int, int]]) -> None:
        self._secret, self._wanted = secret, wanted
        for listener in (self._unix, self._tcp):
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="hdma-accept").start()

    def finish(self, deadline: float) -> dict[tuple[int, int], socket.socket]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._links) == len(self._wanted), timeout=left_s(deadline))
            missing = sorted({rank for rank, _ in self._wanted - set(self._links)})
            if missing:
                raise TimeoutError(f"rank {self.rank} was not connected to by ranks {missing} within the time-out")
            return self._links

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(sock,), daemon=True, name="hdma-admit").start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(16)
            sock.sendall(nonce)
            magic, rank, purpose, theirs, proof = _HELLO.unpack(_receive(sock, _HELLO.size))
            if magic != _MAGIC or not hmac.compare_digest(
                proof, _proof(self._secret, b"c", nonce, theirs, rank, self.rank, purpose)
            ):
                raise WireError("not one of ours")
            with self._changed:
                if (rank, purpose) not in self._wanted or (rank, purpose) in self._links:
                    raise WireError("not expected")
                sock.sendall(_proof(self._secret, b"a", nonce, theirs, rank, self.rank, purpose))
                self._links[rank, purpose] = _tuned(sock)
                self._changed.notify_all()
        except (OSError, WireError):
            sock.close()  # A stranger, or garbage: accepting goes on.


def call(addresses: list[Any], secret: bytes, rank: int, peer: int, purpose: int, deadline: float) -> socket.socket:
    """Connects to `peer` at one of its addresses and proves who calls; tries again until the deadline."""
    reasons: list[str] = []
    while True:
        for address in addresses:
            family = (
                socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            )
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(min(_CONNECT_S, left_s(deadline)))
                sock.connect(address if isinstance(address, str) else tuple(address))
                sock.settimeout(min(_HANDSHAKE_S, left_s(deadline)))
                theirs, nonce = _receive(sock, 16), secrets.token_bytes(16)
                sock.sendall(
                    _HELLO.pack(_MAGIC, rank, purpose, nonce, _proof(secret, b"c", theirs, nonce, rank, peer, purpose))
                )
                if not hmac.compare_digest(
                    _receive(sock, 32), _proof(secret, b"a", theirs, nonce, rank, peer, purpose)
                ):
                    raise WireError("the peer does not know the communicator's secret")
                return _tuned(sock)
            except (OSError, WireError) as error:
                sock.close()
                reasons = [*reasons[-3:], f"{address!r}: {error}"]
        if time.monotonic() >= deadline:
            raise TimeoutError(f"rank {rank} could not connect to rank {peer}: {'; '.join(reasons)}")
        time.sleep(0.05)


def _proof(secret: bytes, side: bytes, acceptor: bytes, caller: bytes, rank: int, callee: int, purpose: int) -> bytes:
    """Names the callee too: an address such as a private bridge's may lead to another rank than was meant."""
    return hmac.digest(secret, side + acceptor + caller + struct.pack("!IIB", rank, callee, purpose), "sha256")


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise WireError("connection closed in the handshake")
        data += more
    return data


def _tuned(sock: socket.socket) -> socket.socket:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that lost power says nothing: find it within half a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock
