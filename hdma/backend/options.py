"""The options of torch's calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

c10d: Any = torch._C._distributed_c10d
_SUM = c10d.ReduceOp.SUM
_Op = c10d.ReduceOp.RedOpType
_OPS = {_Op.SUM: "sum", _Op.AVG: "avg", _Op.MAX: "max", _Op.MIN: "min", _Op.PRODUCT: "prod"}
REDUCED = frozenset(
    (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
)


def op_name(opts: Any) -> str | None:
    """The reduction as the communicator calls it; None if it has no such."""
    if opts is None or opts.reduceOp == _SUM:
        return "sum"
    return _OPS.get(opts.reduceOp.op)


def options(opts: Any, timeout: timedelta | None, op: Any = None, make: Any = c10d.AllgatherOptions) -> Any:
    """Options, also where a call of the group itself gave its arguments one by one, as torch's groups allow."""
    if opts is not None and not hasattr(opts, "asyncOp"):
        timeout, op = (opts, op) if isinstance(opts, timedelta) else (timeout, opts)
        opts = None
    if opts is None and not (timeout is None and op is None):
        opts = make()
        if timeout is not None:
            opts.timeout = timeout
        if op is not None:
            opts.reduceOp = op
    return opts


def now(opts: Any) -> Any:
    now = c10d.AllgatherOptions()
    now.asyncOp = False
    if opts is not None:
        now.timeout = opts.timeout
    return now
