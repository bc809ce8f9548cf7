"""Start-up of a communicator: who the ranks are, which share a node, and the sockets and shared memory between them.

Every connection begins with a mutual proof that both sides know the communicator's secret, which only travels through
the rendezvous: strangers and garbage are dropped and accepting goes on. Node mates connect by abstract Unix sockets
and pass their memory (memfd) over them, so nothing is ever left in a file system.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from hdma.errors import DeviceError, Error, TimeoutError, UsageError, WireError
from hdma.plan import LANES, PROXY_LANES
from hdma.rendezvous import Rendezvous
from hdma.topology import Topology, from_hosts

_MAGIC = b"hdma\x00\x01"
_HELLO = struct.Struct("!6sIB16s32s")
# A stranger who connects and says nothing holds a thread this long.
_HANDSHAKE_S = 10.0
CONTROL = len(LANES)  # the purpose of a control link; the lanes of the wire are numbered below it


@dataclass
class Peers:
    """What start-up yields; the file descriptors belong to who takes it."""

    topology: Topology
    names: list[str]
    host_ranks: int
    control: dict[int, int] = field(default_factory=dict)
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)  # (rail peer, lane number)
    memory: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # rank: flags, window, doorbell


def discover(rendezvous: Rendezvous, agreed: dict[str, Any], ranks_per_node: int | None, timeout_s: float) -> Peers:
    """Exchanges who is where. Raises `UsageError` where the ranks' settings (`agreed`) differ, naming both sides."""
    hello = {"pid": os.getpid(), "host": socket.gethostname(), "id": _host_id(), "agreed": agreed}
    hellos = _exchange(rendezvous, "hello", hello, timeout_s)
    for rank, other in enumerate(hellos):
        for key in sorted({*hellos[0]["agreed"], *other["agreed"]}):
            first, mine = hellos[0]["agreed"].get(key), other["agreed"].get(key)
            if mine != first:
                raise UsageError(f"{key} is {mine!r} on rank {rank} but {first!r} on rank 0: set it equal on all ranks")
    hosts = [other["id"] for other in hellos]
    names = [f"rank {rank} (pid {other['pid']} on {other['host']})" for rank, other in enumerate(hellos)]
    return Peers(from_hosts(hosts, ranks_per_node), names, hosts.count(hosts[rendezvous.rank]))


def connect(rendezvous: Rendezvous, peers: Peers, flags_nbytes: int, timeout_s: float) -> None:
    """Fills `peers` with connected sockets and the memory of this rank and its mates.

    Raises `TimeoutError` naming the ranks that did not connect, `DeviceError` where memory or descriptors run out.
    """
    deadline = time.monotonic() + timeout_s
    rank, topology = rendezvous.rank, peers.topology
    mates, rail = topology.mates(rank), topology.rail(rank)
    try:
        peers.memory[rank] = _own_memory(flags_nbytes)
        with _Acceptor(rank, loopback=peers.host_ranks == topology.size) as acceptor:
            card = {"unix": acceptor.unix_name, "tcp": acceptor.addresses, "secret": secrets.token_hex(32)}
            cards = _exchange(rendezvous, "connect", card, timeout_s)
            # Bound to this start-up by the cards of all, so that no two communicators share it.
            secret = hashlib.sha256("".join(c["secret"] for c in cards).encode()).digest()
            wanted = {(peer, CONTROL) for peer in (*mates, *rail)}
            wanted |= {(peer, LANES.index(lane)) for peer in rail for lane in PROXY_LANES}
            acceptor.start(secret, {link for link in wanted if link[0] < rank})
            links = {}
            for peer, purpose in sorted(link for link in wanted if link[0] > rank):
                addresses = [cards[peer]["unix"]] if peer in mates else cards[peer]["tcp"]
                links[peer, purpose] = _call(addresses, secret, rank, peer, purpose, deadline)
            links |= acceptor.finish(deadline)
        for (peer, purpose), sock in sorted(links.items()):
            if purpose == CONTROL and peer in mates:
                peers.memory[peer] = _swap_memory(sock, peers.memory[rank], peers.names[peer], deadline)
        for (peer, purpose), sock in links.items():
            sock.settimeout(None)
            if purpose == CONTROL:
                peers.control[peer] = sock.detach()
            else:
                peers.lanes[peer, purpose] = sock.detach()
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise DeviceError(f"rank {rank} could not set up its connections: {error}") from error


def _exchange(rendezvous: Rendezvous, key: str, value: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in rendezvous.exchange(key, json.dumps(value).encode(), timeout_s)]


def _host_id() -> str:
    """Equal where a file descriptor can be passed: the same kernel, and (abstract sockets) network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_memory(flags_nbytes: int) -> tuple[int, int, int]:
    flags = os.memfd_create("hdma-flags")
    os.posix_fallocate(flags, 0, flags_nbytes)
    # Empty until the first collective (csrc/device/host.cc): many communicators never move a byte.
    window = os.memfd_create("hdma-window")
    return flags, window, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def _swap_memory(sock: socket.socket, own: tuple[int, int, int], name: str, deadline: float) -> tuple[int, int, int]:
    sock.settimeout(_left(deadline))
    socket.send_fds(sock, [b"m"], list(own))
    data, fds, _, _ = socket.recv_fds(sock, 1, len(own))
    if data != b"m" or len(fds) != len(own):
        raise DeviceError(f"{name} passed {len(fds)} of {len(own)} memory handles: is its descriptor limit too low?")
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds[0], fds[1], fds[2]


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _addresses(port: int, loopback: bool) -> list[list[Any]]:
    """Where peers may find this host, the most likely first."""
    if loopback:
        return [["127.0.0.1", port]]
    found: list[str] = []
    for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
        found.append(str(info[4][0]))
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:  # Connecting a datagram socket sends nothing; it only shows the address of the default route.
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((probe, 9))
                found.append(str(sock.getsockname()[0]))
        except OSError:
            pass
    found.sort(key=lambda a: a.startswith("127.") or a == "::1")
    return [[address, port] for address in dict.fromkeys(found)]


class _Acceptor:
    """Listens for the links that lower ranks open. Each connection is handled on a thread with a deadline of its own."""

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

    def __enter__(self) -> _Acceptor:
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
            self._changed.wait_for(lambda: len(self._links) == len(self._wanted), timeout=_left(deadline))
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
            if magic != _MAGIC or not hmac.compare_digest(proof, _proof(self._secret, b"c", nonce, theirs, rank, purpose)):
                raise WireError("not one of ours")
            with self._changed:
                if (rank, purpose) not in self._wanted or (rank, purpose) in self._links:
                    raise WireError("not expected")
                sock.sendall(_proof(self._secret, b"a", nonce, theirs, rank, purpose))
                self._links[rank, purpose] = _tuned(sock)
                self._changed.notify_all()
        except (OSError, WireError):
            sock.close()  # A stranger, or garbage: accepting goes on.


def _call(addresses: list[Any], secret: bytes, rank: int, peer: int, purpose: int, deadline: float) -> socket.socket:
    """Connects to `peer` at one of its addresses and proves who calls; tries again until the deadline."""
    reasons: list[str] = []
    while True:
        for address in addresses:
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(min(_HANDSHAKE_S, _left(deadline)))
                sock.connect(address if isinstance(address, str) else tuple(address))
                theirs, nonce = _receive(sock, 16), secrets.token_bytes(16)
                sock.sendall(_HELLO.pack(_MAGIC, rank, purpose, nonce, _proof(secret, b"c", theirs, nonce, rank, purpose)))
                if not hmac.compare_digest(_receive(sock, 32), _proof(secret, b"a", theirs, nonce, rank, purpose)):
                    raise WireError("the peer does not know the communicator's secret")
                return _tuned(sock)
            except (OSError, WireError) as error:
                sock.close()
                reasons = [*reasons[-3:], f"{address!r}: {error}"]
        if time.monotonic() >= deadline:
            raise TimeoutError(f"rank {rank} could not connect to rank {peer}: {'; '.join(reasons)}")
        time.sleep(0.05)


def _proof(secret: bytes, side: bytes, acceptor: bytes, caller: bytes, rank: int, purpose: int) -> bytes:
    return hmac.digest(secret, side + acceptor + caller + struct.pack("!IB", rank, purpose), "sha256")


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
