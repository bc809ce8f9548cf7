"""Where the tensors of a benchmark are, and by which clock it is measured there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Many times what a GPU's last cache holds.
BEYOND_CACHES_NBYTES = 1 << 30


class Place(Protocol):
    memory: str  # as in the header of a record

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor: ...

    def sets(self, nbytes: int) -> int:
        """How many sets of tensors calls take in turn, so that the caches hold none of a large one."""

    def timed(self, region: Callable[[], Any]) -> float:
        """Seconds that the region takes, with all that it has started, after what was started before."""

    def tidy(self) -> None:
        """Gives back the memory of tensors that are gone, which backends may need."""


class Host:
    memory = "host"

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def sets(self, nbytes: int) -> int:
        return 1

    def timed(self, region: Callable[[], Any]) -> float:
        start = time.perf_counter()
        region()
        return time.perf_counter() - start

    def tidy(self) -> None:
        pass


class Gpu:
    """The GPU of this local rank; ranks may share one.

    Regions run on a stream of their own: NCCL uses no copy engines on the default stream
    (https://github.com/pytorch/pytorch/pull/170265).
    """

    memory = "gpu"

    def __init__(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        self.stream = torch.cuda.Stream()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cuda")

    def sets(self, nbytes: int) -> int:
        return max(1, min(3, BEYOND_CACHES_NBYTES // max(1, nbytes)))

    def timed(self, region: Callable[[], Any]) -> float:
        begin, end = events(2)
        # After what made the region's tensors, on the caller's stream.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            begin.record()
            region()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def tidy(self) -> None:
        torch.cuda.empty_cache()


def events(count: int) -> list[torch.cuda.Event]:
    """Events that know when they passed."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


PLACES: dict[str, Callable[[int], Place]] = {"host": lambda local_rank: Host(), "gpu": Gpu}
