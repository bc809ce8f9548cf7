"""Sockets between ranks that have proved to each other that they know the communicator's secret.

    acceptor --nonce--> caller
    acceptor <--magic, rank, purpose, nonce, HMAC(secret, "c", both nonces, rank, callee, purpose)-- caller
    acceptor --HMAC(secret, "a", both nonces, rank, callee, purpose)--> caller

Neither side learns the secret from the other. One thread accepts and calls. A stranger costs it a descriptor for a
time; where there are too many, the oldest is closed, and the right peers call again. Links that stand are watched while
others are made.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from hdma.errors import TimeoutError, WireError

# Peer and purpose.
Link = tuple[int, int]
# Yields bytes to send, or how many to receive, which it is sent.
_Dialogue = Generator["bytes | int", bytes, Link]

_MAGIC = b"hdma\x00\x01"
_HELLO = struct.Struct("!6sIB16s32s")
# An address that answers nothing, such as that of another host's private bridge, is given up this soon.
_CONNECT_S = 2.0
# linux/sockios.h: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
# A stranger who connects and says nothing holds a descriptor this long, and no more of them than this are held.
_HANDSHAKE_S = 10.0
_STRANGERS = 128
# How often to ask whether another rank has failed.
_LOOK_S = 0.1
# Between calls of a peer that failed.
_AGAIN_S = 0.05
# A peer listens before it is called: refused for so long, it is gone. Its reason, if it tells one, comes meanwhile.
_GONE_S = 1.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


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


class Talk:
    """A handshake in progress on a socket."""

    def __init__(self, sock: socket.socket, dialogue: _Dialogue, callee: Link | None, until: float) -> None:
        self.sock, self.callee, self.until = sock, callee, until
        self._dialogue = dialogue
        self._out, self._want, self._got = b"", 0, b""
        self._begun = False
        self.connecting = callee is not None

    def step(self) -> Link | None:
        """Goes as far as it can; the link once it stands. Raises `OSError` or `WireError` where none can."""
        try:
            if not self._begun:
                self._begun = True
                self._take(next(self._dialogue))
            while True:
                while self._out:
                    self._out = self._out[self.sock.send(self._out) :]
                while len(self._got) < self._want:
                    more = self.sock.recv(self._want - len(self._got))
                    if not more:
                        raise WireError("connection closed in the handshake")
                    self._got += more
                got, self._got, self._want = self._got, b"", 0
                self._take(self._dialogue.send(got))
        except BlockingIOError:
            return None
        except StopIteration as end:
            link: Link = end.value
            return link

    @property
    def events(self) -> int:
        return selectors.EVENT_WRITE if self.connecting or self._out else selectors.EVENT_READ

    def _take(self, ask: bytes | int) -> None:
        if isinstance(ask, bytes):
            self._out = ask
        else:
            self._want = ask


class Call:
    """A peer to be called: its addresses in turn, until one leads to it."""

    def __init__(self, link: Link, addresses: list[Any]) -> None:
        self.link, self.addresses = link, addresses
        self.at, self.again = 0, 0.0
        self.refused: set[int] = set()
        self.refused_since: float | None = None
        self.reasons: dict[int, str] = {}

    def failed(self, error: Exception) -> None:
        now = time.monotonic()
        self.reasons[self.at] = f"{self.addresses[self.at]!r}: {error}"
        if isinstance(error, ConnectionRefusedError):
            self.refused.add(self.at)
        else:
            self.refused.discard(self.at)
        if len(self.refused) < len(self.addresses):
            self.refused_since = None
        elif self.refused_since is None:
            self.refused_since = now
        self.at = (self.at + 1) % len(self.addresses)
        self.again = now if self.at else now + _AGAIN_S


class Switchboard:
    """The listening sockets of a rank, and the links that it makes by them and by calling others."""

    def __init__(self, rank: int, loopback: bool) -> None:
        self.rank = rank
        self.unix_name = f"\0hdma-{secrets.token_hex(16)}"
        self._listeners = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
        try:
            self._listeners[0].bind(self.unix_name)
            if loopback or not socket.has_dualstack_ipv6():
                tcp = socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=512)
            else:
                tcp = socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
            self._listeners.append(tcp)
            self.addresses = _addresses(tcp.getsockname()[1], loopback)
            self._listeners[0].listen(512)
            for listener in self._listeners:
                listener.setblocking(False)
            self._selector = selectors.DefaultSelector()
        except BaseException:
            self._close_listeners()
            raise
        self._strangers: dict[Talk, None] = {}  # in the order in which they came
        self._talks: dict[Link, Talk] = {}  # with those who are called
        self._links: dict[Link, socket.socket] = {}
        self._deaf_since: float | None = None
        self._ended: tuple[float, int] | None = None

    def __enter__(self) -> Switchboard:
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes all but the links that connect() has returned."""
        self._close_listeners()
        for talk in [*self._strangers, *self._talks.values()]:
            talk.sock.close()
        for sock in self._links.values():
            sock.close()
        self._selector.close()

    def connect(
        self,
        secret: bytes,
        callees: Mapping[Link, list[Any]],
        callers: set[Link],
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> dict[Link, socket.socket]:
        """Links to `callees`, at their addresses, and from `callers`. `look` is called often and may raise.

        Raises `TimeoutError` that names the ranks with which no link came about, `WireError` where a peer is gone,
        `OSError` where there are no descriptors.
        """
        self._secret, self._callers = secret, callers
        calls = {link: Call(link, addresses) for link, addresses in callees.items()}
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)
        looked = 0.0
        while len(self._links) < len(callees) + len(callers):
            now = time.monotonic()
            if now - looked >= _LOOK_S:
                looked = now
                look()
                self._check_ended()
            if now >= deadline:
                raise self._late(calls)
            for link, call in calls.items():
                if link not in self._links and link not in self._talks and now >= call.again:
                    self._call(call, min(deadline, now + _CONNECT_S))
            for talk in [t for t in (*self._strangers, *self._talks.values()) if now >= t.until]:
                self._drop(talk, calls, TimeoutError("no answer"))
            for key, _ in self._selector.select(min(_AGAIN_S, deadline - now)):
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif isinstance(key.data, Talk):
                    self._go_on(key.data, calls)
                else:
                    self._watch(key.data)
        links, self._links = self._links, {}
        for sock in links.values():
            sock.setblocking(True)
        return links

    def _accept(self, listener: Any) -> None:
        for _ in range(64):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS and not self._make_room():
                    # The caller may go away again, but who waits at the door without end is one of ours.
                    self._deaf_since = self._deaf_since or time.monotonic()
                    if time.monotonic() - self._deaf_since > _GONE_S:
                        raise
                    time.sleep(0.01)
                    return
                continue
            self._deaf_since = None
            sock.setblocking(False)
            if len(self._strangers) >= _STRANGERS:
                self._make_room()
            talk = Talk(sock, self._admit(sock), None, time.monotonic() + _HANDSHAKE_S)
            self._strangers[talk] = None
            self._selector.register(sock, talk.events, talk)
            self._go_on(talk, {})

    def _make_room(self) -> bool:
        """Closes the connection of who has said nothing right for the longest time."""
        for talk in self._strangers:
            self._drop(talk, {}, WireError("too many strangers"))
            return True
        return False

    def _call(self, call: Call, until: float) -> None:
        address = call.addresses[call.at]
        family = (
            socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        )
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS and self._make_room():
                return
            raise
        sock.setblocking(False)
        talk = Talk(sock, self._greet(call.link), call.link, until)
        self._talks[call.link] = talk
        try:
            try:
                sock.connect(address if isinstance(address, str) else tuple(address))
                talk.connecting = False
            except BlockingIOError as error:
                if error.errno != errno.EINPROGRESS:  # Its backlog is full.
                    raise WireError(str(error)) from error
            self._selector.register(sock, talk.events, talk)
        except (OSError, WireError) as error:
            self._drop(talk, {call.link: call}, error)

    def _go_on(self, talk: Talk, calls: dict[Link, Call]) -> None:
        try:
            if talk.connecting:
                error = talk.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise (
                        ConnectionRefusedError(error, "refused") if error == errno.ECONNREFUSED else OSError(error, "")
                    )
                talk.connecting = False
                talk.until = time.monotonic() + _HANDSHAKE_S
            link = talk.step()
            if link is None:
                self._selector.modify(talk.sock, talk.events, talk)
                return
            _tune(talk.sock)
        except (OSError, WireError) as error:
            self._drop(talk, calls, error)
            return
        self._forget(talk)
        if link in self._links:  # Its peer has given up on the first.
            old = self._links.pop(link)
            self._unwatch(old)
            old.close()
        self._links[link] = talk.sock
        self._selector.modify(talk.sock, selectors.EVENT_READ, link)

    def _watch(self, link: Link) -> None:
        sock = self._links[link]
        try:
            ended = not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        self._unwatch(sock)  # What the peer says comes later; that it has ended is seen once.
        if ended and self._ended is None:
            self._ended = time.monotonic(), link[0]

    def _check_ended(self) -> None:
        if self._ended and time.monotonic() - self._ended[0] >= _GONE_S:
            raise WireError(f"rank {self._ended[1]} is gone: it closed its connection to rank {self.rank} at start-up")

    def _late(self, calls: dict[Link, Call]) -> TimeoutError:
        callees = [call for link, call in sorted(calls.items()) if link not in self._links]
        callers = sorted({rank for rank, _ in self._callers - set(self._links)})
        reasons = [f"could not connect to rank {c.link[0]} ({'; '.join(c.reasons.values())})" for c in callees[:3]]
        if callers:
            reasons.append(f"was not connected to by ranks {callers}")
        return TimeoutError(f"rank {self.rank} {' and '.join(reasons)} within the time-out")

    def _drop(self, talk: Talk, calls: Mapping[Link, Call], error: Exception) -> None:
        self._forget(talk)
        self._unwatch(talk.sock)
        talk.sock.close()
        if talk.callee is None:
            return  # A stranger, or garbage: accepting goes on.
        call = calls[talk.callee]
        call.failed(error)
        if call.refused_since is not None and time.monotonic() - call.refused_since > _GONE_S:
            raise WireError(
                f"rank {self.rank} cannot connect to rank {talk.callee[0]}, which has listened before: "
                f"{'; '.join(call.reasons.values())}. Its process has ended, or a firewall rejects the connection"
            )

    def _forget(self, talk: Talk) -> None:
        if talk.callee is None:
            self._strangers.pop(talk, None)
        else:
            self._talks.pop(talk.callee, None)

    def _unwatch(self, sock: socket.socket) -> None:
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            pass

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _admit(self, sock: socket.socket) -> _Dialogue:
        nonce = secrets.token_bytes(16)
        yield nonce
        magic, rank, purpose, theirs, proof = _HELLO.unpack((yield _HELLO.size))
        right = _proof(self._secret, b"c", nonce, theirs, rank, self.rank, purpose)
        if magic != _MAGIC or not hmac.compare_digest(proof, right):
            raise WireError("not one of ours")
        if (rank, purpose) not in self._callers:
            raise WireError("not expected")
        yield _proof(self._secret, b"a", nonce, theirs, rank, self.rank, purpose)
        return rank, purpose

    def _greet(self, link: Link) -> _Dialogue:
        peer, purpose = link
        theirs, nonce = (yield 16), secrets.token_bytes(16)
        proof = _proof(self._secret, b"c", theirs, nonce, self.rank, peer, purpose)
        yield _HELLO.pack(_MAGIC, self.rank, purpose, nonce, proof)
        right = _proof(self._secret, b"a", theirs, nonce, self.rank, peer, purpose)
        if not hmac.compare_digest((yield 32), right):
            raise WireError("the peer does not know the communicator's secret")
        return link


def _proof(secret: bytes, side: bytes, acceptor: bytes, caller: bytes, rank: int, callee: int, purpose: int) -> bytes:
    """Names the callee too: an address such as a private bridge's may lead to another rank than was meant."""
    return hmac.digest(secret, side + acceptor + caller + struct.pack("!IIB", rank, callee, purpose), "sha256")


def _tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that lost power says nothing: find it within half a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
