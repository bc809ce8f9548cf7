"""Rivals on GPUs: NCCL as torch.distributed has it, NCCL on copy engines, torch's low-contention collectives."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from backends import REGISTERED_ALIGN_NBYTES, Gloo


class Registered:
    """Tensors out of one buffer that a library has registered; `reset` gives them all back."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole, self._used = whole, 0

    def reset(self) -> None:
        self._used = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        start, self._used = self._used, self._used + -(-nbytes // REGISTERED_ALIGN_NBYTES) * REGISTERED_ALIGN_NBYTES
        if self._used > self._whole.numel():
            raise SystemExit(
                f"the registered buffer has {self._whole.numel()} bytes, of which {self._used} are asked for"
            )
        return self._whole[start : start + nbytes].view(dtype)


class Window:
    """Memory of NCCL's own that is registered with a communicator as symmetric; as long as the process lives.

    By NCCL's own calls: torch's pools (register_mem_pool) ask for NVLink multicast, which not every machine has.
    """

    _SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC of nccl.h, 2.27 and later

    def __init__(self, comm: int, nbytes: int) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        at, window = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(nbytes)
        self._call("ncclMemAlloc", ctypes.byref(at), size)
        self._call("ncclCommWindowRegister", ctypes.c_void_p(comm), at, size, ctypes.byref(window), self._SYMMETRIC)
        self.__cuda_array_interface__ = {"data": (at.value, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._library, name)(*args)
        if error:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise SystemExit(f"{name}: {self._library.ncclGetErrorString(error).decode()} ({error})")


class Nccl(Gloo):
    """torch.distributed with NCCL."""

    name = "NCCL"

    def __init__(self) -> None:
        super().__init__()
        self.library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {self.library}"
        self._registered: Registered | None = None

    def _make_group(self) -> Any:
        return dist.new_group(backend="nccl")

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def registered(self, nbytes: int) -> Registered:
        if self._registered is None:
            # A communicator is made by its first call.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self._group)
            comm = self._group._get_backend(torch.device("cuda"))._comm_ptr()
            self._registered = Registered(torch.as_tensor(Window(comm, nbytes), device="cuda"))
        return self._registered


class NcclZero(Nccl):
    """NCCL that takes no compute units where it can: AllGather of registered memory, by copy engines."""

    name = "NCCL with NCCL_CTA_POLICY_ZERO"

    def _make_group(self) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        if not hasattr(options.config, "cta_policy"):
            raise SystemExit(f"-B nccl-zero: the NCCL of torch {torch.__version__} has no CTA policy")
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        return dist.new_group(backend="nccl", pg_options=options)


class LowContention(Gloo):
    """torch's `_low_contention_all_gather` and `_low_contention_reduce_scatter`: copies by copy engines and barriers by
    small kernels. They return their result; `out` is made to be it, without a copy."""

    name = "low-contention"

    def _make_group(self) -> Any:
        import torch.distributed._symmetric_memory as symmetric

        self._symmetric = symmetric
        group = dist.new_group(backend="nccl")
        symmetric.enable_symm_mem_for_group(group.group_name)
        return group

    def refusal(self, collective: str, op: str | None, dtype: torch.dtype, in_place: bool) -> str:
        if collective not in ("all_gather", "reduce_scatter") or op not in (None, "sum", "avg"):
            return "torch has it only of all_gather, and of reduce_scatter by sum and avg"
        return "it makes its own result" if in_place else ""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, async_op: bool = False) -> Any:
        self._deliver(out, torch.ops.symm_mem._low_contention_all_gather(inp, self._group.group_name))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        self._deliver(out, torch.ops.symm_mem._low_contention_reduce_scatter(inp, op, self._group.group_name))

    def _deliver(self, out: torch.Tensor, result: torch.Tensor) -> None:
        out.set_(torch.ops._c10d_functional.wait_tensor(result))

    def registered(self, nbytes: int) -> Any:
        return self

    def reset(self) -> None:
        pass

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made: torch.Tensor = self._symmetric.empty(numel, dtype=dtype, device=torch.device("cuda"))
        self._symmetric.rendezvous(made, self._group.group_name)
        return made

    def close(self) -> None:
        dist.destroy_process_group(self._group)
