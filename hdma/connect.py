"""Start-up of a communicator: who the ranks are, which share a node, and the sockets and shared memory between them.

Node mates connect by abstract Unix sockets and pass their memory (memfd) over them, so nothing is ever left in a file
system. The secret of a communicator only travels through the rendezvous.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from hdma.errors import DeviceError, Error, UsageError
from hdma.handshake import Acceptor, call, left_s
from hdma.plan import LANES, PROXY_LANES
from hdma.rendezvous import Rendezvous
from hdma.topology import Topology, from_hosts

CONTROL = len(LANES)  # the purpose of a control link; the lanes of the wire are numbered below it


@dataclass
class Peers:
    """What start-up yields; the file descriptors belong to who takes it."""

    topology: Topology
    names: list[str]
    host_ranks: int
    host_cpus: int  # that the ranks of this host may use together
    control: dict[int, int] = field(default_factory=dict)
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)  # (rail peer, lane number)
    memory: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # rank: flags, window, doorbell


def discover(
    rendezvous: Rendezvous, agreed: dict[str, Any], ranks_per_node: int | None, node: int | None, timeout_s: float
) -> Peers:
    """Exchanges who is where. `node`: where it is settled already which ranks make a node.

    Raises `UsageError` where the ranks' settings (`agreed`) differ, naming both sides.
    """
    hello = {"pid": os.getpid(), "host": socket.gethostname(), "id": _host_id(), "node": node, "agreed": agreed}
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
    if node is None:
        topology = from_hosts(hosts, ranks_per_node)
    else:
        topology = from_hosts([f"{other['node']} of {other['id']}" for other in hellos])
    return Peers(topology, names, len(mates), len(cpus))


def connect(rendezvous: Rendezvous, peers: Peers, flags_nbytes: int, timeout_s: float) -> None:
    """Fills `peers` with connected sockets and the memory of this rank and its mates.

    Raises `TimeoutError` naming the ranks that did not connect, `DeviceError` where memory or descriptors run out.
    """
    deadline = time.monotonic() + timeout_s
    rank, topology = rendezvous.rank, peers.topology
    mates, rail = topology.mates(rank), topology.rail(rank)
    try:
        peers.memory[rank] = _own_memory(flags_nbytes)
        with Acceptor(rank, loopback=peers.host_ranks == topology.size) as acceptor:
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
                links[peer, purpose] = call(addresses, secret, rank, peer, purpose, deadline)
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
    except BaseException as error:
        for fd in (fd for fds in peers.memory.values() for fd in fds):
            os.close(fd)
        peers.memory.clear()
        if isinstance(error, OSError) and not isinstance(error, Error):
            raise DeviceError(f"rank {rank} could not set up its connections: {error}") from error
        raise


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
    sock.settimeout(left_s(deadline))
    socket.send_fds(sock, [b"m"], list(own))
    data, fds, _, _ = socket.recv_fds(sock, 1, len(own))
    if data != b"m" or len(fds) != len(own):
        raise DeviceError(f"{name} passed {len(fds)} of {len(own)} memory handles: is its descriptor limit too low?")
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds[0], fds[1], fds[2]
