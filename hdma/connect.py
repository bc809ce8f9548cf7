"""Start-up of a communicator: who the ranks are, which share a node, and the sockets and shared memory between them.

Node mates connect by abstract Unix sockets and pass their memory (memfd) over them, so nothing is ever left in a file
system. The secret of a communicator only travels through the rendezvous.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hdma import _core, env, nics
from hdma.errors import DeviceError, Error, TimeoutError, UsageError, WireError
from hdma.handshake import Switchboard
from hdma.plan import LANES, PROXY_LANES
from hdma.rendezvous import Rendezvous
from hdma.topology import Topology, from_hosts, node_sizes

CONTROL = len(LANES)  # the purpose of a control link; the lanes of the wire are numbered below it

# How often to ask whether another rank has failed, and how long the reason of one that is gone may take to come.
_LOOK_MS = 100
_REASON_S = 1.0


@dataclass
class Peers:
    """What start-up yields; the file descriptors belong to who takes it."""

    topology: Topology
    names: list[str]
    host_ranks: int
    host_cpus: int  # that the ranks of this host may use together
    split: str = ""  # why nodes are smaller than could be
    ports: list[nics.Offer] = field(default_factory=list)  # by rank, for RDMA between nodes; empty: TCP
    control: dict[int, int] = field(default_factory=dict)
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)  # (rail peer, lane number)
    memory: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # rank: flags, window, doorbell


def discover(
    rendezvous: Rendezvous,
    agreed: dict[str, Any],
    ranks_per_node: int | None,
    node: int | None,
    card: nics.Card,
    timeout_s: float,
) -> Peers:
    """Exchanges who is where. `node`: where it is settled already which ranks make a node. `card`: of `nics.card()`.

    Raises `UsageError` where the ranks' settings (`agreed`) differ, naming both sides, and as `nics.decide()` does.
    """
    hello = {"pid": os.getpid(), "host": socket.gethostname(), "id": _host_id(), "node": node, "agreed": agreed}
    hello["nic"] = card
    hello["cpus"] = sorted(os.sched_getaffinity(0))
    hellos = _exchange(rendezvous, "hello", hello, timeout_s)
    for rank, other in enumerate(hellos):
        for key in sorted({*hellos[0]["agreed"], *other["agreed"]}):
            first, mine = hellos[0]["agreed"].get(key), other["agreed"].get(key)
            if mine != first:
                raise UsageError(f"{key} is {mine!r} on rank {rank} but {first!r} on rank 0: set it equal on all ranks")
    hosts = [other["id"] for other in hellos]
    names = [f"rank {rank} (pid {other['pid']} on {other['host']})" for rank, other in enumerate(hellos)]
    mates = [other for other in hellos if other["id"] == hosts[rendezvous.rank]]
    cpus = {cpu for other in mates for cpu in other["cpus"]}
    split = ""
    if node is None:
        topology, sizes = from_hosts(hosts, ranks_per_node), node_sizes(hosts, ranks_per_node)
        if len(set(sizes)) > 1:
            split = f"the nodes have unequal numbers of ranks ({', '.join(map(str, sizes))})"
    else:
        topology = from_hosts([f"{other['node']} of {other['id']}" for other in hellos])
    ports = nics.decide([other["nic"] for other in hellos], topology, names, env.WIRE.read())
    return Peers(topology, names, len(mates), len(cpus), split, ports)


def connect(rendezvous: Rendezvous, peers: Peers, flags_nbytes: int, timeout_s: float) -> None:
    """Fills `peers` with connected sockets and the memory of this rank and its mates.

    Raises `TimeoutError` naming the ranks that did not connect, `WireError` where one is gone, `DeviceError` where
    memory or descriptors run out, and what another rank tells as it fails; then nothing is left open.
    """
    deadline = time.monotonic() + timeout_s
    rank, topology = rendezvous.rank, peers.topology
    mates, rail = topology.mates(rank), topology.rail(rank)
    with ExitStack() as opened:
        try:
            opened.callback(_close_memory, peers)
            peers.memory[rank] = _own_memory(rank, flags_nbytes, peers.host_ranks)
            board = opened.enter_context(Switchboard(rank, loopback=peers.host_ranks == topology.size))
            card = {"unix": board.unix_name, "tcp": board.addresses, "secret": secrets.token_hex(32)}
            cards = _exchange(rendezvous, "connect", card, timeout_s)
            # Bound to this start-up by the cards of all, so that no two communicators share it.
            secret = hashlib.sha256("".join(c["secret"] for c in cards).encode()).digest()
            wanted = {(peer, CONTROL) for peer in (*mates, *rail)}
            wanted |= {(peer, LANES.index(lane)) for peer in rail for lane in PROXY_LANES}
            callees = {
                link: [cards[link[0]]["unix"]] if link[0] in mates else cards[link[0]]["tcp"]
                for link in wanted
                if link[0] > rank
            }
            links = board.connect(secret, callees, wanted - set(callees), deadline, rendezvous.check)
            for sock in links.values():
                opened.callback(sock.close)
            _swap_memory(peers, {peer: links[peer, CONTROL] for peer in mates}, rank, deadline, rendezvous.check)
        except OSError as error:
            if isinstance(error, Error):
                rendezvous.tell(error)
                raise
            text = f"rank {rank} could not set up its connections: {error}. {_remedy(error)}"
            rendezvous.tell(DeviceError(text))
            raise DeviceError(text) from error
        except BaseException as error:
            rendezvous.tell(error)  # Before it closes anything: the reason before its consequence.
            raise
        for (peer, purpose), sock in links.items():
            sock.settimeout(None)
            if purpose == CONTROL:
                peers.control[peer] = sock.detach()
            else:
                peers.lanes[peer, purpose] = sock.detach()
        opened.pop_all()
        board.__exit__()


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


def _own_memory(rank: int, flags_nbytes: int, host_ranks: int) -> tuple[int, int, int]:
    with ExitStack() as opened:

        def owned(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        flags = owned(os.memfd_create("hdma-flags"))
        _core.reserve_memory(flags, flags_nbytes, host_ranks, f"rank {rank} cannot allocate its flags")
        # Empty until the first collective (csrc/device/host.cc): many communicators never move a byte.
        window = owned(os.memfd_create("hdma-window"))
        doorbell = owned(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        opened.pop_all()
        return flags, window, doorbell


def _swap_memory(
    peers: Peers, links: dict[int, socket.socket], rank: int, deadline: float, look: Callable[[], None]
) -> None:
    """Gives this rank's memory handles to its mates and takes theirs."""
    own = peers.memory[rank]
    for peer, sock in links.items():
        try:
            socket.send_fds(sock, [b"m"], list(own))  # Fits the empty buffer.
        except ConnectionError:
            raise _gone(peers.names[peer], rank, look) from None
    for peer, sock in links.items():
        name = peers.names[peer]
        ready = select.poll()
        ready.register(sock, select.POLLIN)
        while not ready.poll(_LOOK_MS):
            look()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{name} did not pass its memory to rank {rank} within the time-out")
        try:
            data, fds, _, _ = socket.recv_fds(sock, 1, len(own))
        except ConnectionError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        if len(fds) == len(own):
            peers.memory[peer] = fds[0], fds[1], fds[2]
            continue
        for fd in fds:
            os.close(fd)
        if data != b"m":
            raise _gone(name, rank, look)
        raise DeviceError(
            f"rank {rank} could take only {len(fds)} of {len(own)} memory handles of {name}: too many open files. "
            f"{_remedy(OSError(errno.EMFILE, ''))}"
        )


def _gone(name: str, rank: int, look: Callable[[], None]) -> WireError:
    """The error where a connection has ended, unless `look` raises the reason, which may come a little later."""
    until = time.monotonic() + _REASON_S
    while time.monotonic() < until:
        look()
        time.sleep(_LOOK_MS / 1000)
    return WireError(f"{name} is gone: it closed its connection to rank {rank} at start-up")


def _close_memory(peers: Peers) -> None:
    for fd in (fd for fds in peers.memory.values() for fd in fds):
        os.close(fd)
    peers.memory.clear()


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"Raise the limit of open files, {soft} for this process (hard limit {hard}): ulimit -n"
    return "Look at the limits of this process: ulimit -a"
