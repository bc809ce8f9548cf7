"""A rank that uses torch tensors: dtypes that numpy lacks, views, dropped Works, tensors of several shapes."""

from __future__ import annotations

import torch

import hdma

comm = hdma.init()
assert hdma.init() is comm
rank, size = comm.rank, comm.size
for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64):
    x = (torch.arange(6).reshape(2, 3) + rank).to(dtype)
    out = torch.empty(size, 2, 3, dtype=dtype)
    comm.all_gather(out, x)
    want = torch.stack([(torch.arange(6).reshape(2, 3) + r).to(dtype) for r in range(size)])
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), dtype
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    out = torch.empty(3, dtype=dtype)
    comm.reduce_scatter(out, torch.full((size, 3), rank + 1, dtype=dtype), op=torch.distributed.ReduceOp.SUM)
    assert (out == sum(range(1, size + 1))).all(), out
outs = [torch.empty(size * 1000) for _ in range(20)]
for i, out in enumerate(outs):  # The Works and the inputs are dropped at once.
    comm.all_gather(out, torch.full((1000,), float(i * size + rank)), async_op=True)
comm.barrier()
for i, out in enumerate(outs):
    assert torch.equal(out.view(size, 1000)[:, 0], torch.arange(size) + float(i * size)), i
work = comm.barrier(async_op=True)
assert work.wait() and work.wait() and work.done() and work.exception() is None
comm.close()
