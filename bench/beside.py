"""One GEMM and one collective of one backend, alone and side by side, on the host and on a GPU.

`function` is the backend's, `sets` are the tensors that its calls take in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from operations import Call
from places import Gpu, events
from ranks import Ranks

# Of a turn, in order: seconds, and the part of its bandwidth alone that the collective lost beside the GEMM (1: it was
# over before the GEMM), which is known on GPUs.
FIGURES = ("gemm_s", "collective_s", "both_s", "gemm_beside_s", "lost")
# GEMMs of a turn on a GPU take about so long, and collectives that cover them so many times as long.
WINDOW_S, COVER = 2e-3, 1.5


class HostCase:
    """One of each: the collective is started, the GEMM runs, the collective is waited for."""

    calls = 1

    def __init__(
        self, ranks: Ranks, function: Callable[..., Any], sets: list[Call], gemm: tuple[int, int, int]
    ) -> None:
        self._ranks, self._call, self._args = ranks, function, sets[0].args
        self._left, self._right, self._product = matrices(ranks, sets[0].case.dtype, gemm)

    def _gemm(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    def turn(self) -> list[float]:
        beside_s = 0.0

        def both() -> None:
            nonlocal beside_s
            work = self._call(*self._args, async_op=True)
            start = time.perf_counter()
            self._gemm()
            beside_s = time.perf_counter() - start
            work.wait()

        timed = self._ranks.timed
        alone = [timed(self._gemm), timed(lambda: self._call(*self._args))]
        return [*alone, timed(both), beside_s, 0.0]


class GpuCase:
    """As many GEMMs as fill the window, and as many collectives as take about as long alone, on streams of their own.

    The GEMM's slowdown is measured apart, beside so many collectives that they go on until after the last GEMM.
    """

    def __init__(
        self, ranks: Ranks, function: Callable[..., Any], sets: list[Call], gemm: tuple[int, int, int]
    ) -> None:
        assert isinstance(ranks.place, Gpu)
        self._ranks, self._side, self._main = ranks, ranks.place.stream, torch.cuda.Stream()
        self._left, self._right, self._product = matrices(ranks, sets[0].case.dtype, gemm)
        self._call, self._sets, self._next = function, [call.args for call in sets], 0
        self._gemms = self.calls = self._covering = 1
        gemm_s, collective_s = self._alone()[:2]
        for _ in range(3):  # The first were slow.
            gemm_s, collective_s = ranks.maxima([min(a, b) for a, b in zip(self._alone(), (gemm_s, collective_s))])
        self._gemms = max(1, round(WINDOW_S / gemm_s))
        self.calls = max(1, round(self._gemms * gemm_s / collective_s))
        self._covering = math.ceil(COVER * self._gemms * gemm_s / collective_s) + 1

    def _alone(self) -> list[float]:
        return [self._region(self._gemms, 0)[0], self._region(0, self.calls)[0]]

    def turn(self) -> list[float]:
        gemm_s, collective_s = self._alone()
        both_s, _, _ = self._region(self._gemms, self.calls)
        whole_s, gemm_beside_s, covered = self._region(self._gemms, self._covering)
        # The rest after the GEMMs runs as alone.
        each_s = collective_s / self.calls
        beside = self._covering - max(0.0, whole_s - gemm_beside_s) / each_s
        return [gemm_s, collective_s, both_s, gemm_beside_s, 1 - beside * each_s / gemm_beside_s if covered else 1.0]

    def _region(self, gemms: int, calls: int) -> tuple[float, float, bool]:
        """Seconds of all, and of the GEMMs in there; whether a collective ran until after the GEMMs."""
        begin, gemm_begin, gemm_end, calls_end, end = events(5)
        main, side = self._main, self._side
        torch.cuda.synchronize()
        self._ranks.barrier()
        begin.record(main)
        side.wait_event(begin)
        # One collective first, so that it is there when the GEMMs begin; the others while they run.
        self._collectives(min(calls, 1))
        with torch.cuda.stream(main):
            gemm_begin.record()
            for _ in range(gemms):
                torch.mm(self._left, self._right, out=self._product)
            gemm_end.record()
        self._collectives(calls - 1)
        calls_end.record(side)
        main.wait_event(calls_end)
        end.record(main)
        end.synchronize()
        covered = gemm_end.elapsed_time(calls_end) >= 0
        return begin.elapsed_time(end) * 1e-3, gemm_begin.elapsed_time(gemm_end) * 1e-3, covered

    def _collectives(self, count: int) -> None:
        with torch.cuda.stream(self._side):
            for _ in range(count):
                self._call(*self._sets[self._next])
                self._next = (self._next + 1) % len(self._sets)


def matrices(ranks: Ranks, dtype: torch.dtype, gemm: tuple[int, int, int]) -> list[torch.Tensor]:
    """Left, right and product of m x n x k."""
    m, n, k = gemm
    made = [ranks.place.empty(rows * columns, dtype).view(rows, columns) for rows, columns in ((m, k), (k, n), (m, n))]
    for matrix in made:
        matrix.normal_()
    return made


CASES: dict[str, Callable[..., Any]] = {"host": HostCase, "gpu": GpuCase}
