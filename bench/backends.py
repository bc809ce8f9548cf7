"""hdma and gloo behind one face, the gate that compares their results with plain torch, and clocks that ranks share.

To add a backend: a class with the two collectives and a row in BACKENDS.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

import hdma
from hdma import launch, rendezvous

COLLECTIVES = ("all_gather", "reduce_scatter")
START_TIMEOUT_S = 120.0


class Pending(Protocol):
    def wait(self) -> Any: ...


class Backend(Protocol):
    """The collectives under test; with `async_op` they return something to wait for."""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, async_op: bool = False) -> Pending | None: ...
    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, *, async_op: bool = False) -> Pending | None: ...


# The first names are those of torch from 2.13 on.
_gloo_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_gloo_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gloo:
    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, async_op: bool = False) -> Pending | None:
        work: Pending | None = _gloo_all_gather(out, inp, async_op=async_op)
        return work

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, *, async_op: bool = False) -> Pending | None:
        work: Pending | None = _gloo_reduce_scatter(out, inp, async_op=async_op)
        return work


BACKENDS: dict[str, Callable[[], Backend]] = {"hdma": hdma.init, "gloo": Gloo}


class Ranks:
    """All ranks of the benchmark, joined by gloo: barriers and maxima that belong to no backend under test."""

    def __init__(self, names: list[str]) -> None:
        me = launch.find()
        self.rank, self.size = me.rank, me.size
        self.nodes = 1
        torch.set_num_threads(1)
        # hdma first, or it would meet in the store that gloo brings and its own way in would never be used.
        made = {name: BACKENDS[name]() for name in names if name != "gloo"}
        _start_gloo(me)
        self.backends = {name: made[name] if name in made else Gloo() for name in names}
        for backend in made.values():
            self.nodes = getattr(backend, "nodes", self.nodes)

    def barrier(self) -> None:
        dist.barrier()

    def maxima(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def timed(self, region: Callable[[], Any]) -> float:
        """Seconds that `region` takes on this rank when all ranks start together."""
        self.barrier()
        start = time.perf_counter()
        region()
        return time.perf_counter() - start

    def close(self) -> None:
        self.barrier()
        for backend in self.backends.values():
            if hasattr(backend, "close"):
                backend.close()
        dist.destroy_process_group()


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


def tensors(collective: str, shard: int, dtype: torch.dtype, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input of a collective for shards of `shard` elements. Small whole numbers: any order sums alike."""
    whole = shard * size
    seed = torch.Generator().manual_seed(rank)
    numel, out_numel = (shard, whole) if collective == "all_gather" else (whole, shard)
    inp = torch.randint(-8, 9, (numel,), generator=seed, dtype=torch.int8).to(dtype)
    return torch.full((out_numel,), -1.0, dtype=dtype), inp


def gate(ranks: Ranks, collective: str, shard: int, dtype: torch.dtype) -> None:
    """Compares every backend with torch's arithmetic on this rank alone. Ends all ranks with code 1 if one differs."""
    inputs = (tensors(collective, shard, dtype, rank, ranks.size)[1] for rank in range(ranks.size))
    if collective == "all_gather":
        expected = torch.cat(list(inputs))
    else:
        mine = slice(ranks.rank * shard, (ranks.rank + 1) * shard)
        expected = torch.zeros(shard)
        for inp in inputs:
            expected += inp[mine]
        expected = expected.to(dtype)
    for name, backend in ranks.backends.items():
        out, inp = tensors(collective, shard, dtype, ranks.rank, ranks.size)
        getattr(backend, collective)(out, inp)
        wrong = int((out != expected).sum())
        if ranks.maxima([float(wrong)])[0]:
            if wrong:
                first = int((out != expected).nonzero()[0])
                print(
                    f"equality gate failed: {name} {collective} of {shard} {dtype} a shard, rank {ranks.rank}: {wrong} "
                    f"elements differ, the first at {first}: {out[first]} instead of {expected[first]}",
                    file=sys.stderr,
                    flush=True,
                )
            sys.exit(1)
