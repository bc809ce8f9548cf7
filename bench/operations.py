"""What each collective is called with, what exactly must come out, and how a time becomes a bandwidth.

Sizes, counts and busbw are those of nccl-tests (its doc/PERFORMANCE.md): the size is that of the whole, the larger of
what a rank gives and what it gets, so for all_gather and reduce_scatter the shards of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
OPS = ("sum", "prod", "max", "min", "avg")
# Inputs repeat after a prime number of elements, so that no chunk or shard of a usual size looks like another.
_PERIOD = 4093
# In no input, and no sum of the ranks that these tests run on.
_POISON = 101
_BLOCK_ALIGN_NBYTES = 16


class Collective(NamedTuple):
    """`busbw(n)`: bytes that must pass through a rank, per byte of size. `parts`: the whole has one for each rank."""

    busbw: Callable[[int], float]
    parts: bool
    in_place: tuple[bool, ...]
    reduces: bool = False
    rooted: bool = False


COLLECTIVES = {
    "all_gather": Collective(lambda n: (n - 1) / n, True, (False, True)),
    "reduce_scatter": Collective(lambda n: (n - 1) / n, True, (False, True), reduces=True),
    "all_reduce": Collective(lambda n: 2 * (n - 1) / n, False, (True,), reduces=True),
    "broadcast": Collective(lambda n: 1.0, False, (True,), rooted=True),
    "all_to_all": Collective(lambda n: (n - 1) / n, True, (False,)),
    "barrier": Collective(lambda n: 0.0, False, (False,)),
}


@dataclass(frozen=True)
class Case:
    """One row but for its backend. `count` as in nccl-tests: elements of a part where the whole is made of parts."""

    collective: str
    count: int
    dtype_name: str
    op: str | None = None
    root: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def nbytes(self, size: int) -> int:
        """Size of the whole for `size` ranks."""
        parts = size if COLLECTIVES[self.collective].parts else 1
        return self.count * parts * int(self.dtype.itemsize)


def count_for(collective: str, nbytes: int, dtype: torch.dtype, size: int) -> int:
    """Elements for a whole of about `nbytes`: parts are multiples of 16 bytes, as in nccl-tests, but never empty."""
    if collective == "barrier":
        return 0
    itemsize = int(dtype.itemsize)
    if not COLLECTIVES[collective].parts:
        return max(1, nbytes // itemsize)
    part_nbytes = nbytes // size
    aligned = part_nbytes // _BLOCK_ALIGN_NBYTES * _BLOCK_ALIGN_NBYTES or part_nbytes
    return max(1, aligned // itemsize)


Empty = Callable[[int, torch.dtype], torch.Tensor]


class Call:
    """The tensors of one rank: `args` for the backend's method, `expected` what `result` must be."""

    def __init__(
        self, case: Case, in_place: bool, rank: int, size: int, unalign: int = 0, empty: Empty | None = None
    ) -> None:
        """`empty(numel, dtype)`: makes the tensors, which are in host memory otherwise."""
        make = empty or (lambda numel, dtype: torch.empty(numel, dtype=dtype))
        self.case, self._rank, self._size = case, rank, size
        kind, count, whole = case.collective, case.count, case.count * size
        mine = slice(rank * count, (rank + 1) * count)
        self.result = self._inp = torch.empty(0, dtype=case.dtype)
        self.args: tuple[Any, ...] = ()
        self.expected = _expected(case, rank, size)
        if kind == "barrier":
            return

        def new(numel: int) -> torch.Tensor:
            return make(numel + unalign, case.dtype)[unalign:]

        if kind == "all_gather":
            self.result = new(whole)
            self._inp = self.result[mine] if in_place else new(count)
            self.args = (self.result, self._inp)
        elif kind == "reduce_scatter":
            self._inp = new(whole)
            self.result = self._inp[mine] if in_place else new(count)
            self.args = (self.result, self._inp, case.op)
        elif kind == "all_to_all":
            self._inp, self.result = new(whole), new(whole)
            self.args = (self.result, self._inp)
        else:
            self._inp = self.result = new(count)
            self.args = (self.result, case.op if case.op else case.root)

    def reset(self) -> None:
        """Fresh input, and an output that is wrong everywhere."""
        self.result.fill_(_POISON)
        self._inp.copy_(values(self.case, self._rank, 0, self._inp.numel(), self._size))

    def wrong(self) -> int:
        """Elements of the result that are not exactly as expected."""
        return int((self.result.cpu() != self.expected).sum())

    def settle(self) -> None:
        """Before calls are repeated: what is reduced into its own input must not grow beyond all bounds."""
        if self.case.op and self.result.data_ptr() == self._inp.data_ptr():
            self._inp.zero_()


def values(case: Case, rank: int, start: int, numel: int, size: int) -> torch.Tensor:
    """Elements start .. start + numel of a rank's input: small whole numbers, reduced exactly in any order."""
    seed = torch.Generator().manual_seed(rank)
    low = 0 if case.dtype == torch.uint8 else -8
    pattern = torch.randint(low, 9, (_PERIOD,), generator=seed)
    if case.op == "prod":
        pattern = torch.where(pattern > 4, 2, torch.where(pattern > 0, 1, -1 if low else 1))
    elif case.op == "avg":
        pattern = pattern * size
    first = start % _PERIOD
    return pattern.to(case.dtype).repeat(-(-(first + numel) // _PERIOD))[first : first + numel]


def copies(case: Case, rank: int, size: int) -> list[tuple[int, int, int, int]]:
    """What a rank must take from others: (offset in its memory, rank, offset there, bytes)."""
    whole = case.nbytes(size)
    others = [(rank + d) % size for d in range(1, size)]
    if case.collective == "barrier":
        return []
    if case.collective == "broadcast":
        return [] if rank == case.root else [(0, case.root or 0, 0, whole)]
    if case.collective == "all_reduce":
        # At least the others' parts of what is summed here, then the sums made elsewhere.
        part = whole // size
        scatter = [(part * other, other, part * rank, part) for other in others]
        return scatter + [(part * other, other, part * other, part) for other in others]
    part = whole // size
    start = 0 if case.collective == "all_gather" else part * rank
    return [(part * other, other, start, part) for other in others]


def _expected(case: Case, rank: int, size: int) -> torch.Tensor:
    count = case.count
    part = rank * count if COLLECTIVES[case.collective].parts else 0
    if case.collective == "broadcast":
        return values(case, case.root or 0, 0, count, size)
    if case.collective == "all_gather":
        return torch.cat([values(case, r, 0, count, size) for r in range(size)])
    inputs = (values(case, r, part, count, size) for r in range(size))
    if case.collective == "all_to_all":
        return torch.cat(list(inputs))
    total = next(inputs)
    for inp in inputs:
        if case.op in ("sum", "avg"):
            total += inp
        elif case.op == "prod":
            total *= inp
        elif case.op:
            total = torch.maximum(total, inp) if case.op == "max" else torch.minimum(total, inp)
    return total // size if case.op == "avg" else total
