"""The copy bound on GPUs: copy engines push to the peers what the collective must bring them, all ranks at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from cuda_driver import call, library
from operations import Case, copies
from ranks import Ranks

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


class PeerCopy:
    """`reason` says why there is none."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self._rank, self._size, self.reason = ranks.rank, ranks.size, ""
        torch.cuda.synchronize()  # The driver's calls below need the context that torch has made.
        self._own, self._theirs = self._allocate(nbytes), self._allocate(nbytes)
        handle = _Handle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._theirs))
        self._peers = []
        for rank, raw in enumerate(ranks.gather(bytes(handle))):
            at = ctypes.c_uint64(self._theirs)
            if rank != ranks.rank and not self.reason:
                peer = _Handle.from_buffer_copy(raw)
                error = library().cuIpcOpenMemHandle_v2(ctypes.byref(at), peer, _LAZY_PEER_ACCESS)
                self.reason = f"rank {rank}'s memory cannot be mapped (error {error})" if error else ""
            self._peers.append(at.value)
        self.reason = next((reason for reason in ranks.gather(self.reason) if reason), "")

    def call(self, case: Case) -> Callable[[], None] | None:
        """The copies as a function that puts them on the current stream, if there is a bound."""
        if self.reason or self._size == 1 or case.collective == "barrier":
            return None
        # What each rank takes from others, turned round: what this one gives them.
        moves = [
            (self._peers[to] + here, self._own + there, nbytes)
            for to in range(self._size)
            for here, source, there, nbytes in copies(case, to, self._size)
            if source == self._rank
        ]

        def copy() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            for to, source, nbytes in moves:
                call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream)

        return copy

    def _allocate(self, nbytes: int) -> int:
        at = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(nbytes, 1)))
        return at.value
