"""The libraries under test behind one face.

To add a backend: a class and a row in BACKENDS. Its methods take what those of hdma's communicator take: `op` or `root`
after the tensors, and all_gather and reduce_scatter `async_op`, where they return something to wait for.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

import hdma
from hdma import launch

REGISTERED_ALIGN_NBYTES = 512
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Backend(Protocol):
    """Has a method for each collective that it offers, by its name in operations.COLLECTIVES."""

    nodes: int | None  # that it made of the ranks, if it knows
    library: str  # and version

    def refusal(self, collective: str, op: str | None, dtype: torch.dtype, in_place: bool) -> str:
        """Why this call cannot be made, or nothing."""

    def close(self) -> None: ...


class Mpi:
    """Blocking calls of the MPI that mpi4py loads. Must be made before hdma, which else starts MPI for many threads."""

    nodes: int | None = None

    def __init__(self) -> None:
        me = launch.find()
        if me.launcher not in ("mpirun", "mpiexec", "srun"):
            # Not tried: a process that Open MPI did not start leaves a file in /dev/shm.
            raise SystemExit(f"-B mpi: {me}. Start the benchmark with the mpirun of the MPI that mpi4py loads")
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (me.rank, me.size):
            raise SystemExit(
                f"-B mpi: {me}, but {self._name(MPI)} sees rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}. Start "
                "the benchmark with that MPI's mpirun, or set MPI4PY_LIBMPI to the libmpi.so of the mpirun that you use"
            )
        self._comm, self._mpi = MPI.COMM_WORLD.Dup(), MPI
        self.library: str = self._name(MPI)
        self._types = {
            torch.float32: MPI.FLOAT,
            torch.float64: MPI.DOUBLE,
            torch.int8: MPI.INT8_T,
            torch.uint8: MPI.UINT8_T,
            torch.int32: MPI.INT32_T,
            torch.int64: MPI.INT64_T,
        }
        self._ops = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}

    def refusal(self, collective: str, op: str | None, dtype: torch.dtype, in_place: bool) -> str:
        if op == "avg":
            return "MPI has no average"
        if op and dtype not in self._types:
            return f"MPI has no {op} of {str(dtype).removeprefix('torch.')}"
        if collective == "reduce_scatter" and in_place:
            return "in place, MPI leaves every rank's result at the start of its buffer"
        return ""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, async_op: bool = False) -> Any:
        inside = out.data_ptr() <= inp.data_ptr() < out.data_ptr() + out.nbytes
        sent = self._mpi.IN_PLACE if inside else self._bytes(inp)
        if async_op:
            return _MpiWork(self._comm.Iallgather(sent, self._bytes(out)))
        return self._comm.Allgather(sent, self._bytes(out))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        sent, received = self._typed(inp), self._typed(out)
        if async_op:
            return _MpiWork(self._comm.Ireduce_scatter_block(sent, received, self._ops[op]))
        return self._comm.Reduce_scatter_block(sent, received, self._ops[op])

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, self._typed(x), self._ops[op])

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        self._comm.Bcast(self._bytes(x), root)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        self._comm.Alltoall(self._bytes(inp), self._bytes(out))

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        self._comm.Free()

    def abort(self) -> None:
        """Ends all ranks: MPI_Finalize of one that failed would wait for the others."""
        self._mpi.COMM_WORLD.Abort(1)

    def _bytes(self, tensor: torch.Tensor) -> Any:
        return self._buffer(tensor.data_ptr(), tensor.nbytes, None)

    def _typed(self, tensor: torch.Tensor) -> Any:
        return self._buffer(tensor.data_ptr(), tensor.nbytes, tensor.dtype)

    # Kept, since looking at a tensor takes as long as a small call. Only addresses are: nothing can go stale.
    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _buffer(self, address: int, nbytes: int, dtype: torch.dtype | None) -> Any:
        # Without a count, which mpi4py would take for that of one rank's part.
        datatype = self._types[dtype] if dtype else self._mpi.BYTE
        return [self._mpi.buffer.fromaddress(address, nbytes), datatype]

    @staticmethod
    def _name(mpi: Any) -> str:
        name, version = mpi.get_vendor()
        return f"{name} {'.'.join(map(str, version))}"


class _MpiWork:
    def __init__(self, request: Any) -> None:
        self.wait = request.Wait


class Hdma:
    """The world communicator of hdma itself, so that nothing stands between the clock and the call."""

    def __init__(self) -> None:
        self._comm = hdma.init()
        self._registered: Any = None
        self.nodes: int | None = self._comm.nodes
        self.library = f"hdma {hdma.__version__}"
        self.close = self._comm.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def registered(self, nbytes: int) -> Any:
        """Symmetric memory: `empty` and `reset` of one buffer of so many bytes."""
        from gpu_backends import Registered

        if self._registered is None:
            self._registered = Registered(hdma.empty(nbytes, torch.uint8, device="cuda", comm=self._comm))
        return self._registered

    def refusal(self, collective: str, op: str | None, dtype: torch.dtype, in_place: bool) -> str:
        return "" if hasattr(self._comm, collective) else f"this version of hdma has no {collective}"


# The first names are those of torch from 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gloo:
    """torch.distributed with gloo, which the ranks have started already to agree on sizes and clocks."""

    name = "gloo"

    def __init__(self) -> None:
        self.nodes: int | None = None
        self.library = f"{self.name} of torch {torch.__version__}"
        self._group = self._make_group()
        op = dist.ReduceOp
        self._ops: dict[str, Any] = {"sum": op.SUM, "prod": op.PRODUCT, "max": op.MAX, "min": op.MIN, "avg": op.AVG}

    def _make_group(self) -> Any:
        return dist.group.WORLD

    def refusal(self, collective: str, op: str | None, dtype: torch.dtype, in_place: bool) -> str:
        return ""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, async_op: bool = False) -> Any:
        return _all_gather(out, inp, group=self._group, async_op=async_op)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        return _reduce_scatter(out, inp, op=self._ops[op], group=self._group, async_op=async_op)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> None:
        dist.all_reduce(x, op=self._ops[op], group=self._group)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        dist.broadcast(x, src=root, group=self._group)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        dist.all_to_all_single(out, inp, group=self._group)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        pass


class Torch(Gloo):
    """hdma as a backend of torch.distributed."""

    name = "hdma through torch.distributed"

    def _make_group(self) -> Any:
        import hdma.backend  # noqa: F401

        return dist.new_group(backend="hdma")

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def _nccl(kind: str) -> Backend:
    import gpu_backends

    made: Backend = getattr(gpu_backends, kind)()
    return made


# Those of torch.distributed start in the group that the ranks of the benchmark share; the others before it.
IN_TORCH: dict[str, Callable[[], Backend]] = {
    "gloo": Gloo,
    "torch": Torch,
    "nccl": lambda: _nccl("Nccl"),
    "nccl-zero": lambda: _nccl("NcclZero"),
    "low": lambda: _nccl("LowContention"),
}
# What moves tensors that are on GPUs, and what does only that.
ON_GPU, ON_GPU_ALONE = ("hdma", "torch", "nccl", "nccl-zero", "low"), ("nccl", "nccl-zero", "low")
# What has memory of its own to make tensors in: a method `registered(nbytes)`, always called with the same number.
REGISTERING = ("hdma", "nccl", "nccl-zero", "low")
# In the order in which they must be made.
BACKENDS: dict[str, Callable[[], Backend]] = {"mpi": Mpi, "hdma": Hdma, **IN_TORCH}


def add_register(parser: argparse.ArgumentParser) -> None:
    text = "0, or 2: in memory that the backend has registered, symmetric on all ranks; on GPUs (0)"
    parser.add_argument("-R", "--register", type=int, choices=[0, 2], default=0, help=text)


def check_places(parser: argparse.ArgumentParser, names: list[str], memory: str, register: int) -> None:
    """Ends the program where a backend does not move what is in that memory (places.PLACES), cannot register it, or
    would not be measured as it is."""
    if register and memory == "host":
        parser.error("-R 2 is for -D gpu")
    for name in names:
        if memory == "gpu" and name not in ON_GPU:
            parser.error(f"-B {name}: it does not move tensors on GPUs (-D gpu), as {','.join(ON_GPU)} do")
        if memory == "host" and name in ON_GPU_ALONE:
            parser.error(f"-B {name}: it moves tensors on GPUs only: add -D gpu")
        if name == "low" and os.environ.get("TORCH_CPP_LOG_LEVEL") != "ERROR":
            # torch reads it as it is loaded.
            parser.error(
                "-B low: start with TORCH_CPP_LOG_LEVEL=ERROR, or torch warns, and takes its time, at each call"
            )
        if register and name not in REGISTERING:
            parser.error(f"-B {name} -R 2: it has no memory to register, as {','.join(REGISTERING)} have")
