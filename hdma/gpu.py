"""What a communicator has on a GPU: the engine of its calls there, and symmetric memory. Made with the first such call.

The runtime (CUDA or HIP) is found by what torch was built for, or HDMA_DEVICE. The ranks meet over each step, so that
what fails on one of them is an error on all, and the communicator goes on without the GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import chain
from typing import Any

from hdma import _core, connect, env, kernels, nics
from hdma.connect import Peers
from hdma.errors import UsageError
from hdma.layout import Layout
from hdma.rendezvous import Rendezvous
from hdma.requests import Requests
from hdma.tensors import runtime
from hdma.topology import Topology

SLOTS = 4
# Between nodes as much of the host's memory is pinned, and chunks are short. In a node AllGather and ReduceScatter of
# 256 MiB a rank on eight H200 reach 95 and 94 % of their links' bandwidth in 512 MiB, 90 % in half of that: on paper.
DEFAULT_WINDOW_NBYTES, DEFAULT_WINDOW_NBYTES_BY_NIC = 512 << 20, 256 << 20
# Slots of this length in a window of a few ranks; Requests makes chunks shorter where that is better.
DEFAULT_CHUNK_NBYTES = 32 << 20
# Measured on an H200 (bench/blocks.py): of what is as fast as the links, 16 blocks and more, about 128 cost a GEMM
# beside it least. On AMD nothing has been measured.
REDUCE_BLOCKS = {"cuda": 128, "hip": 16}
# What Requests calls step_nbytes. On an H200 a chunk costs about 6 us of flags, in which the kernel sums or copies 6
# MB; a NIC of 50 GB/s sends 0.5 MB in 10 us (reckoned: no NIC has been measured).
STEP_NBYTES, STEP_NBYTES_BY_NIC = 6 << 20, 512 << 10


def layout_of(topology: Topology) -> Layout:
    """Of a communicator's window on a GPU. Raises `UsageError` where HDMA_WINDOW_BYTES is too small for it."""
    default_nbytes = DEFAULT_WINDOW_NBYTES if topology.nodes == 1 else DEFAULT_WINDOW_NBYTES_BY_NIC
    window_nbytes = env.WINDOW_NBYTES.read() or default_nbytes
    return Layout.for_window(topology, SLOTS, window_nbytes, env.CHUNK_NBYTES.read() or DEFAULT_CHUNK_NBYTES)


class GpuSide:
    """The calls of one communicator on GPU `index` of this process."""

    def __init__(
        self,
        meeting: Rendezvous,
        peers: Peers,
        index: int,
        first: Any,
        timeout_s: float,
        limit: str,
    ) -> None:
        """Collective over `meeting`. Raises `DeviceError` on all ranks where any has no driver, memory or link."""
        self.index = index
        self._topology, self._timeout_s, self._rank = peers.topology, timeout_s, meeting.rank
        self._has_symmetric = False
        topology, rank = peers.topology, meeting.rank
        again = Peers(topology, peers.names, peers.host_ranks, peers.host_cpus)
        try:
            self.runtime = runtime()
            layout = layout_of(topology)
            self._memory = _core.Gpu(
                runtime=self.runtime,
                ordinal=index,
                code=kernels.code(self.runtime, _core.gpu_info(self.runtime, index)[2]),
                rank=rank,
                size=topology.size,
                high_priority=env.STREAM_PRIORITY.read() == "high",
                blocks=env.REDUCE_BLOCKS.read() or REDUCE_BLOCKS[self.runtime],
                amd_copy=env.AMD_COPY.read(),
                amd_flag=env.AMD_FLAG.read(),
            )
            window = self._memory.allocate(layout.window_nbytes, f"rank {rank} cannot allocate its window")
            self._share(meeting, window, {"runtime": self.runtime})
            nic = self._nic(meeting, peers) if peers.ports else None
            dma_buf = nic is not None and self._reached(meeting, nic, layout.window_nbytes)
            host_wire = topology.nodes > 1 and not dma_buf
            step_nbytes = STEP_NBYTES if topology.nodes == 1 else STEP_NBYTES_BY_NIC
            if env.CHUNK_NBYTES.read():
                step_nbytes = 0
            self.requests = Requests(layout, rank, gpu=self.runtime, host_wire=host_wire, step_nbytes=step_nbytes)
            connect.connect(meeting, again, _core.flags_nbytes(layout.flag_count), timeout_s)
            # The first engine's control links serve all.
            _close(again.control.values())
            again.control = {}
            memory = [(peer, *fds, 0) for peer, fds in again.memory.items()]
            lanes = [(peer, lane, fd) for (peer, lane), fd in again.lanes.items()]
            again.memory, again.lanes = {}, {}  # The engine's, also where it cannot be made.
            self.engine = _core.Engine(
                rank=rank,
                size=topology.size,
                flag_count=layout.flag_count,
                ring_count=layout.base_count,
                window_nbytes=layout.window_nbytes,
                timeout_s=timeout_s,
                limit=limit,
                spin_s=0.0,
                flag_names=layout.flag_names(rank),
                peers=memory,
                control=[],
                links=lanes,
                nic=nic,
                first=first,
                gpu=self._memory,
                dma_buf=dma_buf,
            )
            meeting.exchange("ready", b"", timeout_s)
        except BaseException as error:
            meeting.tell(error)
            _close([*again.control.values(), *again.lanes.values(), *chain(*again.memory.values())])
            if hasattr(self, "engine"):
                self.engine.close()
                del self.engine  # Its descriptors go now, though the error holds this frame.
            if hasattr(self, "_memory"):
                self._memory.close(agreed=False)
                del self._memory
            raise
        polls = f", its waits polled by a thread ({self._memory.polls})" if self._memory.polls else ""
        slot = f"{SLOTS} slots of {layout.slot_nbytes} bytes a ring"
        env.debug("INFO", f"{peers.names[rank]}: GPU {index} ({self._memory.pci}): {slot}{polls}")

    def _nic(self, meeting: Rendezvous, peers: Peers) -> nics.Settings:
        """The port for what is on this GPU: the nearest to it, not the one for host memory."""
        card = json.dumps(nics.card(self._memory.pci)).encode()
        cards = [json.loads(each) for each in meeting.exchange("nic", card, self._timeout_s)]
        ports = nics.decide(cards, self._topology, peers.names, env.WIRE.read())
        return nics.settings(ports[self._rank], self._timeout_s)

    def _reached(self, meeting: Rendezvous, nic: nics.Settings, window_nbytes: int) -> bool:
        """Whether the ranks' NICs reach their windows by dma-buf: all, or none uses it."""
        if env.GPU_RDMA.read() == "off":
            return False
        why_not = self._memory.no_dma_buf(nic, self._rank, window_nbytes)
        reasons = [raw.decode() for raw in meeting.exchange("dma-buf", why_not.encode(), self._timeout_s)]
        reason = next(filter(None, reasons), "")
        if reason and self._rank == 0:
            env.debug("WARN", f"what is on GPUs goes to other nodes by way of host memory: {reason}")
        return not reason

    def symmetric(self, buffer: _core.Buffer, in_place: bool) -> tuple[int, int, bool] | None:
        """Number and offset of the symmetric memory that holds the buffer, with what it is to the call."""
        if not self._has_symmetric:
            return None
        number, offset = self._memory.find(buffer.address, buffer.nbytes)
        return (number, offset, in_place) if number else None

    def allocate(self, meeting: Rendezvous, nbytes: int, what: str) -> _core.Allocation:
        """Symmetric memory, collective. Raises `UsageError` where the ranks ask for different things."""
        own = None
        try:
            own = self._memory.allocate(nbytes, f"rank {self._rank} cannot allocate {what}")
            self._share(meeting, own, {"what": what})
            meeting.exchange("mapped", b"", self._timeout_s)
        except BaseException as error:
            meeting.tell(error)
            if own is not None:  # Its number is the next one's, on all ranks.
                self._memory.drop(own)
            raise
        self._has_symmetric = True
        return own

    def _share(self, meeting: Rendezvous, own: _core.Allocation, agreed: dict[str, str]) -> None:
        """Maps the node mates' counterparts of `own`, and lets them map it."""
        card = {"handle": own.handle.hex(), "pci": self._memory.pci, "pid": os.getpid(), "pids": _pid_namespace()}
        raw = meeting.exchange("memory", json.dumps(card | agreed).encode(), self._timeout_s)
        cards = [json.loads(each) for each in raw]
        for key, value in agreed.items():
            for rank, other in enumerate(cards):
                if other[key] != value:
                    raise UsageError(f"rank {rank} has {other[key]}, rank {self._rank} {value}: all must have the same")
        for mate in self._topology.mates(self._rank):
            other = cards[mate]
            pid = other["pid"] if other["pids"] == card["pids"] else 0
            self._memory.map(own, mate, other["pci"], pid, bytes.fromhex(other["handle"]))

    def drain(self) -> None:
        self.engine.drain()

    def busy(self) -> bool:
        """Whether calls are on the GPU still, and with them their tensors."""
        return self.engine.busy()

    def close(self) -> None:
        """After the first engine's close()."""
        self.engine.close()
        self._memory.close()

    def forget(self) -> None:
        """In a forked child."""
        self.engine.forget()
        self._memory.forget()


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
