"""All ranks of a benchmark, joined by gloo: barriers, clocks and agreements that belong to no backend under test."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from backends import BACKENDS, IN_TORCH, REGISTERED_ALIGN_NBYTES, Backend
from operations import COLLECTIVES, Case, numels
from places import PLACES

from hdma import launch, rendezvous

START_TIMEOUT_S = 120.0


class Ranks:
    """`backends` are the named ones, made; `place` is where tensors are, one of places.PLACES.

    As a context manager it closes them, or ends all ranks at an exception.
    """

    def __init__(self, names: list[str], memory: str = "host") -> None:
        me = launch.find()
        self.place = PLACES[memory](me.rank if me.local_rank is None else me.local_rank)
        self.rank, self.size = me.rank, me.size
        torch.set_num_threads(1)
        # hdma before gloo starts, or it would meet in gloo's store and its own way in would never be used.
        first = [name for name in BACKENDS if name in names and name not in IN_TORCH]
        made: dict[str, Backend] = {name: BACKENDS[name]() for name in first}
        _start_gloo(me)
        self.backends = {name: made[name] if name in made else BACKENDS[name]() for name in names}
        self.nodes = next((backend.nodes for backend in self.backends.values() if backend.nodes), 1)

    def barrier(self) -> None:
        dist.barrier()

    def maxima(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        return self.over_ranks(values, dist.ReduceOp.MAX)

    def over_ranks(self, values: list[float], op: Any) -> list[float]:
        """Each value reduced over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return [float(value) for value in tensor]

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def timed(self, region: Callable[[], Any]) -> float:
        """Seconds that `region` takes on this rank when all ranks start together."""
        self.barrier()
        return self.place.timed(region)

    def memories(
        self, cases: list[Case], register: int, unalign: int = 0, names: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """What makes the tensors of each backend, or of those named, for one case at a time: the place, or with
        `register` memory that the backend has registered, of which there is enough for each of the cases."""
        names = list(self.backends if names is None else names)
        self.place.tidy()
        if not register:
            return dict.fromkeys(names, self.place)
        nbytes = max(self._nbytes(case, unalign) for case in cases)
        made = {name: self.backends[name].registered(nbytes) for name in names}  # type: ignore[attr-defined]
        for memory in made.values():
            memory.reset()
        return made

    def _nbytes(self, case: Case, unalign: int) -> int:
        """Of all tensors of the case, in place and not."""
        each = [
            numel for in_place in COLLECTIVES[case.collective].in_place for numel in numels(case, in_place, self.size)
        ]
        itemsize = int(case.dtype.itemsize)
        return self.place.sets(case.nbytes(self.size)) * sum(
            (numel + unalign) * itemsize + REGISTERED_ALIGN_NBYTES for numel in each
        )

    def close(self) -> None:
        self.barrier()
        for backend in self.backends.values():
            backend.close()
        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        elif "mpi" in self.backends:
            if not isinstance(error, SystemExit):
                import traceback

                traceback.print_exception(kind, error, trace)
            self.backends["mpi"].abort()  # type: ignore[attr-defined]


def _start_gloo(me: launch.Launch) -> None:
    if dist.is_initialized():
        return
    with rendezvous.make(me, START_TIMEOUT_S) as place:
        store, address = None, ""
        if me.rank == 0:
            # Port 0: the system picks a free one, and the ranks learn it where they meet.
            address = socket.gethostname() if me.local_size != me.size else "127.0.0.1"
            store = dist.TCPStore(address, 0, me.size, is_master=True, wait_for_workers=False)
            address = f"{address}:{store.port}"
        host, port = place.exchange("gloo", address.encode(), START_TIMEOUT_S)[0].decode().rsplit(":", 1)
    store = store or dist.TCPStore(host, int(port), me.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size)
