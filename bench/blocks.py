"""How many blocks of the reduction kernel: its speed, and what it costs a GEMM that runs beside it, on one GPU.

    python bench/blocks.py --json blocks.jsonl

A large GEMM of cuBLAS on Hopper keeps one block on each SM until it ends (384 threads of 168 registers, as a profiler
says). Another kernel, of whatever size and priority, starts when such a GEMM ends, and delays the blocks of the next
GEMM that wait for its SMs, for as long as it runs.
"""

from __future__ import annotations

import argparse
import ctypes
from statistics import median

import record
import report_blocks
import torch
from cuda_driver import Arguments, call
from places import events
from record import Record

from hdma import _core, kernels

NBYTES = 32 << 20  # of a result: a chunk of a large message
BUFFERS = 6  # taken in turn, so that the caches hold none
BLOCKS = (4, 8, 16, 32, 64, 132)
# Sources, and whether there is a second destination.
WORK = {"copy": (1, False), "copy to two": (1, True), "sum of 2": (2, False), "sum of 8": (8, False)}
THREADS = 512
GEMM, GEMMS = 8192, 3
MOST_KERNELS = 1 << 14


class Kernel:
    """One piece of work, launched by the driver's own call as csrc/device/card.cc does it."""

    _module = ctypes.c_void_p()

    def __init__(self, work: str) -> None:
        sources, second = WORK[work]
        name = "hdma_copy" if sources == 1 else "hdma_reduce_bfloat16_bfloat16"
        if not Kernel._module:
            code = kernels.code("cuda", _core.gpu_info("cuda", torch.cuda.current_device())[2])
            call("cuModuleLoadData", ctypes.byref(Kernel._module), code)
        self._function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(self._function), Kernel._module, name.encode())
        self._tensors = [torch.ones(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(max(BUFFERS, sources + 2))]
        at = [tensor.data_ptr() for tensor in self._tensors]
        self._arguments = []
        for first in range(len(at)):
            turned = at[first:] + at[:first]
            pointers = (ctypes.c_void_p * 64)(*turned[2 : 2 + sources])
            numel = NBYTES // (1 if sources == 1 else 2)
            also = turned[1] if second else None
            self._arguments.append(Arguments(turned[0], also, pointers, sources, 0, 1, 0, numel))
        self._next = 0

    def launch(self, stream: torch.cuda.Stream, blocks: int) -> None:
        self._next = (self._next + 1) % len(self._arguments)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._arguments[self._next]))
        handle = ctypes.c_void_p(stream.cuda_stream)
        call("cuLaunchKernel", self._function, blocks, 1, 1, THREADS, 1, 1, 0, handle, parameters, None)


class Beside:
    """GEMMs on the current stream, kernels on another one of the given priority."""

    def __init__(self, priority: int) -> None:
        self._left, self._right = (torch.randn(GEMM, GEMM, device="cuda").bfloat16() for _ in range(2))
        self._product = torch.empty_like(self._left)
        self._side = torch.cuda.Stream(priority=priority)

    def gemms_s(self) -> float:
        begin, end = events(2)
        begin.record()
        for _ in range(GEMMS):
            torch.mm(self._left, self._right, out=self._product)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def kernels_s(self, kernel: Kernel, blocks: int, count: int) -> float:
        """Of one of them."""
        begin, end = events(2)
        begin.record(self._side)
        for _ in range(count):
            kernel.launch(self._side, blocks)
        end.record(self._side)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / count

    def both(self, kernel: Kernel, blocks: int, count: int) -> tuple[float, float]:
        """Seconds of the GEMMs, and how many kernels were done by then. The kernels begin first, and end last."""
        passed = events(count + 1)
        begin, end = events(2)
        passed[0].record(self._side)
        for event in passed[1:3]:
            kernel.launch(self._side, blocks)
            event.record(self._side)
        begin.record()
        for _ in range(GEMMS):
            torch.mm(self._left, self._right, out=self._product)
        end.record()
        for event in passed[3:]:
            kernel.launch(self._side, blocks)
            event.record(self._side)
        torch.cuda.synchronize()
        ends = [begin.elapsed_time(event) for event in passed]
        gemm_ms = begin.elapsed_time(end)
        if ends[-1] < gemm_ms:
            return gemm_ms * 1e-3, 0.0  # Not enough of them: the caller doubles the count.
        done = sum(0 < at <= gemm_ms for at in ends)
        last = max((at for at in ends if at <= gemm_ms), default=0.0)
        following = min(at for at in ends if at > gemm_ms)
        return gemm_ms * 1e-3, done + (gemm_ms - last) / (following - last)


def measure(beside: Beside, work: str, blocks: int, priority: str, turns: int) -> Record:
    kernel = Kernel(work)
    count = 16
    alone_s = median(beside.kernels_s(kernel, blocks, count) for _ in range(5))
    count = max(4, int(1.3 * beside.gemms_s() / alone_s))
    while not beside.both(kernel, blocks, count)[1]:
        count *= 2
        if count > MOST_KERNELS:
            raise SystemExit(f"{MOST_KERNELS} kernels are over before the GEMMs: there is nothing to measure")
    gemm_s, gemm_beside_s, done = [], [], []
    for _ in range(turns):
        gemm_s.append(beside.gemms_s())
        took_s, kernels_done = beside.both(kernel, blocks, count)
        gemm_beside_s.append(took_s)
        done.append(kernels_done)
    about = {"kind": "blocks", "work": work, "blocks": blocks, "priority": priority, "nbytes": NBYTES}
    return {**about, "kernel_s": alone_s, "gemm_s": gemm_s, "gemm_beside_s": gemm_beside_s, "kernels_beside": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="pairs of GEMMs alone and beside the kernels (20)")
    parser.add_argument("--json", metavar="FILE", help="also write JSON lines there")
    args = parser.parse_args()
    records = [record.header(1, 1, "gpu")]
    for priority, number in (("high", -5), ("low", 0)):
        beside = Beside(number)
        for _ in range(50):  # Until the clocks have settled under load.
            beside.gemms_s()
        for work in WORK if priority == "high" else ["sum of 2"]:
            records += [measure(beside, work, blocks, priority, args.turns) for blocks in BLOCKS]
    print(report_blocks.table(records), flush=True)
    if args.json:
        record.write(args.json, records)


if __name__ == "__main__":
    main()
