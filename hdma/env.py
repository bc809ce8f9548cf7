"""The environment variables of hdma: one table, read at use.

`env.TIMEOUT_S.read()` gives the parsed value or the default. The first read also warns about HDMA_* names that are not
in the table, since a misspelt variable is otherwise silently without effect.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hdma.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One row of the table. `parse` raises ValueError with what it would accept; `agree`: equal on all ranks."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str
    agree: bool

    def read(self) -> T:
        """The value in force. An empty string counts as not set. Raises `UsageError` for a value that cannot be."""
        warn_unknown()
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(
                f"{self.name}={text!r} cannot be used: {error}. {self.name} is {self.meaning}; "
                f"unset it for the default ({self.default})"
            ) from None


def _number(low: float, unit: str, integer: bool = True, high: float = 1e8) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            value = int(text) if integer else float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"it must be {'a whole number' if integer else 'a number'} of {unit}, {low:g} to {high:g}")
        return value

    return parse


_UNITS = {"": 1, "K": 10, "M": 20, "G": 30}


def parse_nbytes(text: str) -> int:
    """Bytes of `4096`, `64K`, `64KiB`, `1.5M` or `2GiB`; K, M and G are powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    value = float(match[1]) * (1 << _UNITS[match[2]] if match[2] else 1) if match else -1.0
    if value < 0 or value != int(value):
        raise ValueError("it must be a whole number of bytes, such as 65536, 64K, 64KiB, 16M or 1GiB")
    return int(value)


def _window_nbytes(text: str) -> int:
    value = parse_nbytes(text)
    if value < 4096:
        raise ValueError("a window has 4 KiB or more")
    return value


def _chunk_nbytes(text: str) -> int:
    value = parse_nbytes(text)
    if 0 < value < 64:
        raise ValueError("a chunk has 64 bytes or more, or 0 to have it chosen")
    return value


def _nic(text: str) -> str:
    names = [name.strip() for name in text.removeprefix("^").split(",")]
    if not all(re.fullmatch(r"[\w.-]+(:[1-9]\d*)?", name) for name in names):
        raise ValueError("it must be names by commas, such as mlx5_0,mlx5_1:1, or such names after a single ^")
    return ("^" if text.startswith("^") else "") + ",".join(names)


def _mtu_nbytes(text: str) -> int:
    if text not in ("0", "256", "512", "1024", "2048", "4096"):
        raise ValueError("it must be 0, 256, 512, 1024, 2048 or 4096 bytes")
    return int(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.lower()
        if word not in words:
            raise ValueError(f"it must be one of {', '.join(words)}")
        return word

    return parse


_LEVELS = ("WARN", "VERSION", "INFO", "TRACE")


def _level(text: str) -> str:
    return _one_of(*(level.lower() for level in _LEVELS))(text).upper()


RANKS_PER_NODE: Variable[int | None] = Variable(
    "HDMA_RANKS_PER_NODE", _number(1, "ranks"), None, "the number of ranks that make one node (unset: a host)", True
)
WIRE = Variable(
    "HDMA_WIRE",
    _one_of("auto", "verbs", "tcp"),
    "auto",
    "the network between nodes: verbs (RDMA), tcp, or auto: RDMA where there are devices for it",
    True,
)
DEVICE = Variable(
    "HDMA_DEVICE",
    _one_of("auto", "host", "cuda", "hip"),
    "auto",
    "the runtime for tensors on GPUs: auto (what torch was built for), cuda, hip, or host (none)",
    True,
)
TIMEOUT_S: Variable[float] = Variable(
    "HDMA_TIMEOUT_S", _number(0.001, "seconds", integer=False), 300.0, "the longest wait for a rank, in seconds", False
)
WINDOW_NBYTES: Variable[int | None] = Variable(
    "HDMA_WINDOW_BYTES",
    _window_nbytes,
    None,
    "the memory of one rank that its peers may write or read "
    "(unset: 64 MiB on the host, on a GPU 512 MiB with one node, else 256)",
    True,
)
CHUNK_NBYTES = Variable(
    "HDMA_CHUNK_BYTES",
    _chunk_nbytes,
    0,
    "the piece of a shard that is pipelined, bytes (0: 256 KiB on the host, by the length of the message on a GPU)",
    True,
)
REDUCE_BLOCKS = Variable(
    "HDMA_REDUCE_BLOCKS",
    _number(0, "blocks", high=1024),
    0,
    "the most blocks that the reduction kernel takes (0: 128 on NVIDIA's GPUs, 16 on AMD's)",
    False,
)
STREAM_PRIORITY = Variable(
    "HDMA_STREAM_PRIORITY",
    _one_of("high", "low"),
    "high",
    "the priority of hdma's streams on a GPU, and so of its reduction kernel: high or low",
    False,
)
AMD_COPY = Variable(
    "HDMA_AMD_COPY",
    _one_of("auto", "nocu", "default"),
    "auto",
    "the kind of hipMemcpyAsync between AMD GPUs: auto (nocu), nocu or default (see csrc/device/hip.cc)",
    False,
)
AMD_FLAG = Variable(
    "HDMA_AMD_FLAG",
    _one_of("auto", "copy", "write"),
    "auto",
    "how a stream raises a flag on AMD GPUs: auto (copy), copy or write (see csrc/device/hip.cc)",
    False,
)
NIC: Variable[str | None] = Variable(
    "HDMA_NIC",
    _nic,
    None,
    "the RDMA devices that this rank may use, device or device:port by commas; after ^, those that it may not "
    "(unset: the nearest one)",
    False,
)
GID_INDEX: Variable[int | None] = Variable(
    "HDMA_GID_INDEX",
    _number(0, "entries", high=255),
    None,
    "the entry of the RDMA port's GID table (unset: the first RoCE v2 entry, of IPv4 if there is one; 0 on InfiniBand)",
    False,
)
MTU_NBYTES: Variable[int] = Variable(
    "HDMA_MTU", _mtu_nbytes, 0, "the bytes of an RDMA packet's data (0: as many as both ports allow)", True
)
SERVICE_LEVEL: Variable[int] = Variable(
    "HDMA_SERVICE_LEVEL", _number(0, "service levels", high=15), 0, "the InfiniBand service level of RDMA packets", True
)
TRAFFIC_CLASS: Variable[int] = Variable(
    "HDMA_TRAFFIC_CLASS", _number(0, "classes", high=255), 0, "the traffic class (RoCE: IP TOS) of RDMA packets", True
)
GPU_RDMA = Variable(
    "HDMA_GPU_RDMA",
    _one_of("off", "auto"),
    "off",
    "whether NICs reach the memory of GPUs: auto (by dma-buf, where all ranks can) or off (by way of host memory)",
    True,
)
QP_TIMEOUT: Variable[int] = Variable(
    "HDMA_QP_TIMEOUT",
    _number(0, "powers of two", high=31),
    0,
    "the exponent t of an RDMA queue pair's time-out of 4.096 us x 2^t a try (0: chosen from HDMA_TIMEOUT_S)",
    False,
)
# Not 7, which software RoCE (rxe) takes for "for ever".
QP_RETRIES: Variable[int] = Variable(
    "HDMA_QP_RETRIES", _number(0, "tries", high=7), 6, "how often an RDMA queue pair sends again, unanswered", False
)
RENDEZVOUS: Variable[Path | None] = Variable(
    "HDMA_RENDEZVOUS", Path, None, "a folder that all ranks share, where they meet instead of by their launcher", False
)
DEBUG = Variable("HDMA_DEBUG", _level, "WARN", f"how much is printed: {', '.join(_LEVELS)}", False)

TABLE: tuple[Variable[Any], ...] = (
    RANKS_PER_NODE,
    WIRE,
    DEVICE,
    TIMEOUT_S,
    WINDOW_NBYTES,
    CHUNK_NBYTES,
    REDUCE_BLOCKS,
    STREAM_PRIORITY,
    AMD_COPY,
    AMD_FLAG,
    NIC,
    GID_INDEX,
    MTU_NBYTES,
    SERVICE_LEVEL,
    TRAFFIC_CLASS,
    GPU_RDMA,
    QP_TIMEOUT,
    QP_RETRIES,
    RENDEZVOUS,
    DEBUG,
)


def agreed() -> dict[str, str]:
    """Values in force that must be equal on all ranks, by name: what ranks compare at start-up."""
    return {variable.name: str(variable.read()) for variable in TABLE if variable.agree}


_warned: set[str] = set()


def warn_unknown() -> None:
    """Warns once about each HDMA_* variable that is not in the table, with the nearest name that is."""
    known = [variable.name for variable in TABLE]
    for name in sorted(os.environ):
        if name.startswith("HDMA_") and name not in known and name not in _warned:
            _warned.add(name)
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
            warnings.warn(f"{name} has no effect: hdma has no such variable; {hint}", RuntimeWarning, stacklevel=3)


def debug(level: str, text: str) -> None:
    """Prints a line to stderr where HDMA_DEBUG asks for `level` or more."""
    if _LEVELS.index(level) <= _LEVELS.index(DEBUG.read()):
        # One write, or the lines of several ranks mix; no stderr, as under pythonw: nobody asked to see it.
        if sys.stderr is not None:
            sys.stderr.write(f"hdma: {text}\n")
            sys.stderr.flush()
