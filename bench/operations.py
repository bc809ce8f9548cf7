"""What each collective is called with, what exactly must come out, and how a time becomes a bandwidth.

Sizes, counts and busbw are those of nccl-tests (its doc/PERFORMANCE.md): the size is that of the whole, the larger of
what a rank gives and what it gets, so for all_gather and reduce_scatter the shards of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def numels(case: Case, in_place: bool, size: int) -> list[int]:
    """Elements of each tensor of a call, the result first but for collectives that work in place."""
    if case.collective == "barrier":
        return []
    if not COLLECTIVES[case.collective].parts:
        return [case.count]
    whole = case.count * size
    if case.collective == "all_to_all":
        return [whole, whole]
    if in_place:
        return [whole]
    return [whole, case.count] if case.collective == "all_gather" else [case.count, whole]


Empty = Callable[[int, torch.dtype], torch.Tensor]


class Call:
    """The tensors of one rank: `args` for the backend's method, of which `result` is checked."""

    def __init__(
        self, case: Case, in_place: bool, rank: int, size: int, unalign: int = 0, empty: Empty | None = None
    ) -> None:
        """`empty(numel, dtype)`: makes the tensors, which are in host memory otherwise."""
        make = empty or (lambda numel, dtype: torch.empty(numel, dtype=dtype))
        self.case, self._rank, self._size = case, rank, size
        self.result = self._inp = torch.empty(0, dtype=case.dtype)
        self.args: tuple[Any, ...] = ()
        made = [make(numel + unalign, case.dtype)[unalign:] for numel in numels(case, in_place, size)]
        if not made:
            return
        self.result, self._inp = made[0], made[-1]
        mine = slice(rank * case.count, (rank + 1) * case.count)
        if COLLECTIVES[case.collective].parts:
            if in_place and case.collective == "all_gather":
                self._inp = self.result[mine]
            elif in_place:
                self.result = self._inp[mine]
            self.args = (self.result, self._inp, *([case.op] if case.op else []))
        else:
            self.args = (self.result, case.op if case.op else case.root)

    def reset(self) -> None:
        """Fresh input, and an output that is wrong everywhere."""
        self.result.fill_(_POISON)
        self._inp.copy_(values(self.case, self._rank, 0, self._inp.numel(), self._size, self._inp.device))

    def wrong(self) -> int:
        """Elements of the result that are not exactly as expected."""
        return sum(int((found != wanted).sum()) for _, found, wanted in self._parts())

    def first_wrong(self) -> str:
        """The first such element, in words; nothing if there is none."""
        for start, found, wanted in self._parts():
            differ = (found != wanted).nonzero()
            if len(differ):
                at = int(differ[0])
                return f"the first at {start + at}: {found[at]} instead of {wanted[at]}"
        return ""

    def _parts(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for start, wanted in expected(self.case, self._rank, self._size, self.result.device):
            yield start, self.result[start : start + len(wanted)], wanted

    def settle(self) -> None:
        """Before calls are repeated: what is reduced into its own input must not grow beyond all bounds."""
        if self.case.op and self.result.data_ptr() == self._inp.data_ptr():
            self._inp.zero_()


def values(
    case: Case, rank: int, start: int, numel: int, size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Elements start .. start + numel of a rank's input: small whole numbers, reduced exactly in any order."""
    seed = torch.Generator().manual_seed(rank)
    low = 0 if case.dtype == torch.uint8 else -8
    pattern = torch.randint(low, 9, (_PERIOD,), generator=seed)
    if case.op == "prod":
        pattern = torch.where(pattern > 4, 2, torch.where(pattern > 0, 1, -1 if low else 1))
    elif case.op == "avg":
        pattern = pattern * size
    first = start % _PERIOD
    return pattern.to(case.dtype).to(device).repeat(-(-(first + numel) // _PERIOD))[first : first + numel]


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


def expected(
    case: Case, rank: int, size: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, torch.Tensor]]:
    """What must come out, in parts that follow each other: (first element, elements)."""
    count = case.count
    part = rank * count if COLLECTIVES[case.collective].parts else 0
    if case.collective == "barrier":
        return
    if case.collective == "broadcast":
        yield 0, values(case, case.root or 0, 0, count, size, device)
        return
    if case.collective in ("all_gather", "all_to_all"):
        start = 0 if case.collective == "all_gather" else part
        for r in range(size):
            yield r * count, values(case, r, start, count, size, device)
        return
    total = values(case, 0, part, count, size, device)
    for r in range(1, size):
        inp = values(case, r, part, count, size, device)
        if case.op in ("sum", "avg"):
            total += inp
        elif case.op == "prod":
            total *= inp
        elif case.op:
            total = torch.maximum(total, inp) if case.op == "max" else torch.minimum(total, inp)
    yield 0, total // size if case.op == "avg" else total
