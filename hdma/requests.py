"""From a checked call to the request that the engine runs: pieces of plans, made once and kept.

A message longer than one plan is the longest plan as often as it fits, then one for the rest. All decisions here are
functions of what all ranks share: sizes, dtypes, the layout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from hdma import _core
from hdma.algorithms import DIRECT, build, max_shard_nbytes
from hdma.compile import compile_rank
from hdma.errors import UsageError
from hdma.layout import Layout
from hdma.plan import Variant

# The numbers of Dtype and Op in csrc/plan.h; all other dtypes are moved as bytes, not reduced.
REDUCED = (
    *("bytes", "float32", "bfloat16", "float16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2"),
)
OPS = ("sum", "avg", "max", "min", "prod")
FLOATS = tuple(name for name in REDUCED if "float" in name)
# All-reduces go in one shot up to this size, divided among the peers that each rank sends all of it to. Measured on the
# host: above, the bytes cost more than the second round of flags.
ONCE_NBYTES = 64 << 10
# Shards that a node mate reads where they are. Measured likewise: shorter ones do not earn a system call, longer ones
# and those with several readers go quicker through windows that stay in the caches.
DIRECT_NBYTES = range(32 << 10, (8 << 20) + 1)
# What one launch of the reduction kernel takes (csrc/device/card.cc).
GPU_SOURCES = 64
_CACHED = 256


class Prepared(NamedTuple):
    """`order` and `bounds`: the (shard, part) pairs of a started call, and the elements of each part."""

    request: _core.Request
    text: str
    order: list[tuple[int, int]]
    bounds: list[tuple[int, int]]


class _Piece(NamedTuple):
    plan: _core.Plan
    repeats: int
    nbytes: int
    offset: int
    input_stride: int
    output_stride: int


class Requests:
    """The requests of one rank on one layout. Raises `UsageError` for dtypes and operations that there are not."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        direct: bool = False,
        gpu: str = "",
        host_wire: bool = False,
        step_nbytes: int = 0,
    ) -> None:
        """`direct`: node mates may read each other's tensors. `gpu`: its runtime, where the tensors are on one.

        `host_wire`: the wire takes host memory only. `step_nbytes`: what the step that trails the copies moves in the
        time that a chunk more costs, from which follows how many chunks are best; 0: as few as fit the slots.
        """
        self._direct, self._where, self._step_nbytes = direct, f" on {gpu}" if gpu else "", step_nbytes
        self._base = Variant(batched=bool(gpu), host_wire=host_wire)
        self._layout, self._rank, self._size = layout, rank, layout.topology.size
        # The C cache: as quick as a dictionary, and threads may share it.
        self.moved = lru_cache(_CACHED)(self._moved)
        self.reduced = lru_cache(_CACHED)(self._reduced)
        self._plan = lru_cache(_CACHED)(self._make_plan)

    def _moved(
        self,
        operation: str,
        dtype: str,
        itemsize: int,
        nbytes: int,
        root: int = 0,
        started: bool = False,
        symmetric: tuple[int, int, bool] | None = None,
    ) -> Prepared:
        """all_gather, all_to_all (`nbytes` of a shard), broadcast (of the tensor), barrier (0).

        `symmetric`: number and offset of the symmetric memory that the input lies in, or (true) the output, in place.
        """
        text = (
            f"{operation}({dtype}, {nbytes} bytes{', root ' + str(root) if operation == 'broadcast' else ' a shard'})"
        )
        if operation == "barrier":
            # An AllGather of nothing: complete when a flag has come from every rank.
            operation, text = "all_gather", "barrier()"
        text += self._where
        if symmetric:
            number, offset, in_place = symmetric
            text += f"{' in place in' if in_place else ' from'} symmetric memory {number} + {offset}"
            direct = operation in DIRECT and self._layout.topology.nodes == 1
        else:
            in_place, one_reader = False, self._size == 2 or operation == "all_to_all"
            direct = self._direct and operation in DIRECT and one_reader and not started and nbytes in DIRECT_NBYTES
        variant = replace(
            self._base,
            element_nbytes=itemsize,
            shard_major=started and not direct,
            root=root,
            direct=direct,
            in_place=direct and in_place,
            chunk_nbytes=self._chunk_nbytes(nbytes, started),
        )
        pieces, orders = self._pieces(operation, nbytes, variant, 0, nbytes, nbytes)
        return self._prepared(f"start_{text}" if started else text, pieces, orders, itemsize, (0, 0, 0), started, False)

    def _reduced(
        self, operation: str, dtype: str, itemsize: int, nbytes: int, op: str, wire: str, started: bool = False
    ) -> Prepared:
        """reduce_scatter (`nbytes` of a shard), all_reduce (of the tensor)."""
        if op not in OPS:
            raise UsageError(f"{operation}: op must be one of {', '.join(OPS)}, not {op!r}")
        if dtype not in REDUCED[1:]:
            raise UsageError(f"{operation}: dtype must be one of {', '.join(REDUCED[1:])}, not {dtype}")
        if op == "avg" and dtype not in FLOATS:
            raise UsageError(f"{operation}: {dtype} has no average: sum, then divide as you mean it")
        if wire != dtype and (wire != "float32" or dtype not in ("bfloat16", "float16")):
            wider = " or float32" if dtype in ("bfloat16", "float16") else ""
            raise UsageError(f"{operation}: wire_dtype of {dtype} is {dtype}{wider}, not {wire}")
        topology = self._layout.topology
        if self._where and max(topology.nodes, topology.ranks_per_node) > GPU_SOURCES:
            raise UsageError(
                f"{operation}: on GPUs at most {GPU_SOURCES} nodes and {GPU_SOURCES} ranks a node, not {topology}"
            )
        numbers = (REDUCED.index(dtype), REDUCED.index(wire), OPS.index(op))
        variant = replace(
            self._base,
            element_nbytes=itemsize,
            wire_nbytes=4 if wire != dtype else itemsize,
            shard_major=started,
            chunk_nbytes=self._chunk_nbytes(nbytes, started),
        )
        unit = "a shard" if operation == "reduce_scatter" else "in all"
        text = f"{operation}({op}, {dtype}, {nbytes} bytes {unit}, {wire} on the wire){self._where}"
        if operation == "reduce_scatter":
            pieces, orders = self._pieces(operation, nbytes, variant, 0, nbytes, nbytes)
        else:
            pieces, orders = self._all_reduce(nbytes, variant), []
        return self._prepared(f"start_{text}" if started else text, pieces, orders, itemsize, numbers, started, started)

    def _chunk_nbytes(self, nbytes: int, started: bool) -> int:
        """Of a chunk of a shard, at most; 0: what fits a slot.

        n chunks cost n times what one costs apart from its bytes, and the step behind the last copy takes as long as
        nbytes / n; the sum is least at n = sqrt(nbytes / step_nbytes). A started call has as few parts as it can.
        """
        if not self._step_nbytes:
            return 0
        return max(math.isqrt(nbytes * self._step_nbytes), -(-nbytes // self._layout.slots) if started else 1)

    def _all_reduce(self, nbytes: int, variant: Variant) -> list[_Piece]:
        """Equal shards, and in one shot what is left over: less than an element a rank."""
        shard = nbytes // (self._size * variant.element_nbytes) * variant.element_nbytes
        topology = self._layout.topology
        peers = max(topology.ranks_per_node - 1, topology.nodes - 1, 1)
        if nbytes <= ONCE_NBYTES // peers or not shard:
            shard = 0
        body, rest = self._size * shard, nbytes - self._size * shard
        pieces = self._pieces("all_reduce", shard, variant, 0, shard, shard)[0] if body else []
        if rest or not body:
            pieces += self._pieces("all_reduce_once", rest, variant, body, rest, rest)[0]
        return pieces

    def _pieces(
        self, operation: str, nbytes: int, variant: Variant, offset: int, input_stride: int, output_stride: int
    ) -> tuple[list[_Piece], list[tuple[int, ...]]]:
        """The longest plan as often as it fits, then one for the rest; and the order of shards of each run."""
        longest = max_shard_nbytes(self._layout, variant)
        full, rest = divmod(nbytes, longest)
        pieces, orders = [], []
        if full:
            plan, order = self._plan(operation, longest, variant)
            pieces.append(_Piece(plan, full, longest, offset, input_stride, output_stride))
            orders += [order] * full
        if rest or not full:
            plan, order = self._plan(operation, rest, variant)
            pieces.append(_Piece(plan, 1, rest, offset + full * longest, input_stride, output_stride))
            orders.append(order)
        return pieces, orders

    def _prepared(
        self,
        text: str,
        pieces: list[_Piece],
        orders: list[tuple[int, ...]],
        itemsize: int,
        numbers: tuple[int, int, int],
        started: bool,
        pushes: bool,
    ) -> Prepared:
        order = [(shard, part) for part, shards in enumerate(orders) for shard in shards] if started else []
        bounds, at = [], 0
        for nbytes in (piece.nbytes for piece in pieces for _ in range(piece.repeats if started else 0)):
            bounds.append((at // itemsize, (at + nbytes) // itemsize))
            at += nbytes
        return Prepared(_core.Request(text, pieces, *numbers, len(order), pushes), text, order, bounds)

    def _make_plan(self, operation: str, nbytes: int, variant: Variant) -> tuple[Any, tuple[int, ...]]:
        compiled = compile_rank(build(operation, self._layout, nbytes, variant), self._rank)
        return _core.Plan(compiled.steps, compiled.sources, compiled.spans), compiled.order
