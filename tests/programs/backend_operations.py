"""A rank that compares every operation of the backend with torch's own arithmetic: dtypes, forms, lists, futures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import hdma
import hdma.backend

warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
DEVICE = os.environ.get("TEST_TORCH", "cpu")
ON_GPU = DEVICE != "cpu"
if ON_GPU:
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.set_default_device(DEVICE)
if not hasattr(dist, "all_gather_single"):  # Names from torch 2.13 on.
    dist.all_gather_single, dist.reduce_scatter_single = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
dist.init_process_group("hdma", timeout=timedelta(seconds=60))
rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
assert (dist.get_backend(), world.group_name, world.rank(), world.size()) == ("hdma", "0", rank, size)
REDUCED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REDUCED += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
MOVED = [*REDUCED, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]
OPS = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.AVG: lambda x: x.mean(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
}


def values(of: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers of rank `of`: any order of additions gives the same."""
    generator = torch.Generator("cpu").manual_seed(100 * seed + of)
    return torch.randint(-3, 4, shape, generator=generator, dtype=torch.int8, device="cpu").to(dtype).to(DEVICE)


def everyone(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    return [values(r, *shape, dtype=dtype, seed=seed) for r in range(size)]


def reduced(parts: list[torch.Tensor], op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return OPS[op](torch.stack(parts).to(wide)).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[got.element_size()]
    assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, want.shape, got.dtype, want.dtype)
    got, want = got.contiguous(), want.contiguous()
    assert torch.equal(got.view(bits), want.view(bits)), (what, got, want)


def refused(call: Callable[[], object], *words: str, error: type[Exception] = hdma.UsageError) -> None:
    try:
        call()
    except error as problem:
        assert all(word in str(problem) for word in words), problem
    else:
        raise AssertionError(f"not refused: {words}")


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with gaps between them."""
    wide = torch.full((*tensor.shape, 2), 9).to(tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


# Dtypes that move, in all the forms of AllGather, broadcast and all-to-all.
for dtype in MOVED:
    shards = everyone(2, 3, dtype=dtype)
    out = torch.zeros(2 * size, 3, dtype=dtype)
    dist.all_gather_single(out, shards[rank])
    same(out, torch.cat(shards), dtype)
    stacked = torch.zeros(size, 2, 3, dtype=dtype)
    dist.all_gather_into_tensor(stacked, shards[rank], async_op=True).wait()
    same(stacked, torch.stack(shards), dtype)
    outs = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
    dist.all_gather(outs, shards[rank])
    same(torch.stack(outs), torch.stack(shards), dtype)
    tensor = shards[rank].clone()
    dist.broadcast(tensor, src=size - 1)
    same(tensor, shards[size - 1], dtype)
    wholes = everyone(2 * size, 3, dtype=dtype)
    out = torch.zeros(2 * size, 3, dtype=dtype)
    dist.all_to_all_single(out, wholes[rank])
    same(out, torch.cat([whole[2 * rank : 2 * rank + 2] for whole in wholes]), dtype)

# Dtypes and operations that are reduced.
for dtype in REDUCED:
    for op in OPS:
        if dtype is torch.bool or (op == dist.ReduceOp.AVG and not dtype.is_floating_point):
            continue
        wholes = everyone(size, 5, dtype=dtype)
        total = reduced(wholes, op)
        out = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_single(out, wholes[rank], op=op)
        same(out, total[rank], (dtype, op))
        out = torch.zeros(1, 5, dtype=dtype)
        dist.reduce_scatter(out, list(wholes[rank].split(1)), op=op)
        same(out[0], total[rank], (dtype, op))
        tensor = wholes[rank].clone()
        dist.all_reduce(tensor, op=op)
        same(tensor, total, (dtype, op))
        tensor = wholes[rank].clone()
        dist.all_reduce(tensor, op=op, async_op=True).wait()
        same(tensor, total, (dtype, op))
small = torch.full((size, 3), 0.5).to(torch.float8_e4m3fn)
out = torch.zeros(3, dtype=small.dtype)
dist.reduce_scatter_single(out, small)
same(out, torch.full((3,), 0.5 * size).to(small.dtype))
flag = torch.tensor([rank == 0, True, False])
dist.all_reduce(flag, op=dist.ReduceOp.MAX)
assert flag.tolist() == [True, True, False]
whole = torch.ones(3, dtype=torch.int64)
refused(lambda: dist.all_reduce(whole, op=dist.ReduceOp.AVG), "average")
# By gloo, or as parts: operations and dtypes that hdma lacks.
tensor = torch.tensor([1 << rank, 3], dtype=torch.int32)
if not ON_GPU:  # NCCL has none of these.
    dist.all_reduce(tensor, op=dist.ReduceOp.BOR)
    assert tensor.tolist() == [(1 << size) - 1, 3]
tensor = torch.tensor([complex(rank, 1)])
dist.all_reduce(tensor)
assert tensor.tolist() == [complex(sum(range(size)), size)]
if not ON_GPU:
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    same(sparse.to_dense(), torch.ones(size))

# Shapes: scalars, nothing, other forms of the same elements, gaps.
out = torch.zeros(size)
dist.all_gather_single(out, torch.tensor(float(rank)))
same(out, torch.arange(size, dtype=torch.float32))
scalar = torch.zeros(())
dist.reduce_scatter_single(scalar, torch.ones(size))
assert scalar.item() == size
dist.all_reduce(scalar.fill_(rank + 1.0))
assert scalar.item() == size * (size + 1) / 2
for _ in range(2):
    dist.all_gather_single(torch.zeros(0, 3), torch.zeros(0, 3))
    dist.reduce_scatter_single(torch.zeros(0), torch.zeros(0))
    dist.all_reduce(torch.zeros(0))
    dist.broadcast(torch.zeros(0), 0)
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0))
    dist.all_gather([torch.zeros(0) for _ in range(size)], torch.zeros(0))
for async_op in (False, True):
    shards, wholes = everyone(4, 3), everyone(size, 4, 3)
    out = strided(torch.zeros(size, 3, 4))
    done = dist.all_gather_single(out, strided(shards[rank]), async_op=async_op)
    _ = done and done.wait()
    same(out.reshape(size, 4, 3), torch.stack(shards))
    out = torch.zeros(3, 4).t()
    done = dist.reduce_scatter_single(out, strided(wholes[rank]), async_op=async_op)
    _ = done and done.wait()
    same(out, reduced(wholes)[rank])
    tensor = strided(wholes[rank])
    done = dist.all_reduce(tensor, async_op=async_op)
    _ = done and done.wait()
    same(tensor, reduced(wholes))
    tensor = strided(wholes[rank])
    done = dist.broadcast(tensor, size - 1, async_op=async_op)
    _ = done and done.wait()
    same(tensor, wholes[size - 1])
    out = strided(torch.zeros(size, 4, 3))
    done = dist.all_to_all_single(out, strided(wholes[rank]), async_op=async_op)
    _ = done and done.wait()
    same(out, torch.stack([whole[rank] for whole in wholes]))
    # Lists: of other shapes, with gaps, parts of one tensor.
    outs = [strided(torch.zeros(3, 4)), *(torch.zeros(12) for _ in range(size - 1))]
    done = dist.all_gather(outs, shards[rank], async_op=async_op)
    _ = done and done.wait()
    same(torch.stack([out.reshape(4, 3) for out in outs]), torch.stack(shards))
    flat = torch.zeros(size, 12)
    done = dist.all_gather(list(flat), shards[rank], async_op=async_op)
    _ = done and done.wait()
    same(flat.view(size, 4, 3), torch.stack(shards))
    # Large ones, of which rank r has r fewer.
    outs = [strided(torch.zeros(100000)), *(torch.zeros(100000 - r) for r in range(1, size))]
    done = dist.all_gather(outs, values(rank, 100000 - rank), async_op=async_op)
    _ = done and done.wait()
    for r in range(size):
        same(outs[r], values(r, 100000 - r))
    # Rank r has r + 1 elements, also in all-to-all, where rank r sends r + s elements to rank s.
    outs = [torch.zeros(r + 1) for r in range(size)]
    done = dist.all_gather(outs, values(rank, rank + 1), async_op=async_op)
    _ = done and done.wait()
    for r in range(size):
        same(outs[r], values(r, r + 1))
    parts = [[values(r, s + 1, seed=s) for s in range(size)] for r in range(size)]
    out = torch.zeros(rank + 1)
    done = dist.reduce_scatter(out, parts[rank], async_op=async_op)
    _ = done and done.wait()
    same(out, reduced([parts[r][rank] for r in range(size)]))
    parts = [[values(r, r + s, seed=s) for s in range(size)] for r in range(size)]
    outs = [torch.zeros(r + rank) for r in range(size)]
    done = dist.all_to_all(outs, parts[rank], async_op=async_op)
    _ = done and done.wait()
    for r in range(size):
        same(outs[r], parts[r][rank])
    out, inp = strided(torch.zeros(sum(len(each) for each in outs), 2)), torch.cat(parts[rank])[:, None].expand(-1, 2)
    done = dist.all_to_all_single(
        out, inp, [len(each) for each in outs], [len(each) for each in parts[rank]], async_op=async_op
    )
    _ = done and done.wait()
    same(out, torch.cat(outs)[:, None].expand(-1, 2))
# In place, as FSDP does.
out = torch.zeros(size, 3)
out[rank] = values(rank, 3)
dist.all_gather_single(out, out[rank])
same(out, torch.stack(everyone(3)))

# Coalesced, by both forms of torch's manager.
for options in ({}, {"async_ops": True}, {"device": torch.device(DEVICE)}):
    shards, wholes = [everyone(k, seed=k) for k in (1, 4, 9)], [everyone(size, k, seed=k) for k in (1, 4, 9)]
    outs = [torch.zeros(size, k) for k in (1, 4, 9)]
    with dist._coalescing_manager(**options) as manager:
        for out, parts in zip(outs, shards):
            dist.all_gather_single(out, parts[rank])
    manager.wait()
    for out, parts in zip(outs, shards):
        same(out, torch.stack(parts))
    outs = [strided(torch.zeros(k)) for k in (1, 4, 9)]
    with dist._coalescing_manager(**options) as manager:
        for out, parts in zip(outs, wholes):
            dist.reduce_scatter_single(out, parts[rank])
    manager.wait()
    for out, parts in zip(outs, wholes):
        same(out, reduced(parts)[rank])
    tensors = [parts[rank].clone() for parts in wholes]
    with dist._coalescing_manager(**options) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, parts in zip(tensors, wholes):
        same(tensor, reduced(parts))

# Functional collectives.
shards, wholes = everyone(2, 3), everyone(2 * size, 3)
same(functional.all_gather_tensor(shards[rank], 0, world).wait(), torch.cat(shards))
same(functional.reduce_scatter_tensor(wholes[rank], "sum", 0, world).wait(), reduced(wholes)[2 * rank : 2 * rank + 2])
same(functional.all_reduce(shards[rank], "sum", world).wait(), reduced(shards))
same(functional.broadcast(shards[rank], 1, world).wait(), shards[1])
chunks = torch.cat([whole[2 * rank : 2 * rank + 2] for whole in wholes])
same(functional.all_to_all_single(wholes[rank], None, None, world).wait(), chunks)
same(functional.all_to_all_single(wholes[rank], [2] * size, [2] * size, world).wait(), chunks)
for got, parts in zip(
    functional.all_gather_into_tensor_coalesced([shards[rank], wholes[rank]], world), (shards, wholes)
):
    same(got.wait(), torch.cat(parts))
grads = torch.ones(2, 3, requires_grad=True)
gathered = functional.all_gather_tensor_autograd(grads, 0, world)
(gathered * torch.ones(2 * size, 3)).sum().backward()  # Torch 2.11 wants a contiguous gradient.
same(grads.grad, torch.full((2, 3), float(size)))

# Works: waited for twice, dropped, as futures.
tensor = torch.ones(1000)
work = dist.all_reduce(tensor, async_op=True)
assert work.wait() and work.wait(timedelta(seconds=1))
if ON_GPU:  # There a wait is the stream's.
    torch.cuda.synchronize()
assert work.is_completed() and work.is_success()
assert work.exception() is None and work.result()[0] is tensor
for n in (1, 1 << 20):
    tensor, doubled = torch.ones(n), []
    future = dist.all_reduce(tensor, async_op=True).get_future()
    then = future.then(lambda done: doubled.append(1) or done.value()[0] * 2)
    same(then.wait(), torch.full((n,), 2.0 * size))
    assert future.wait()[0] is tensor and doubled == [1]
    assert dist.barrier(async_op=True).get_future_result().wait() == 0
# A callback that awaits a future of its own, as torch's PowerSGD hook has it.
tensor, second = torch.ones(1 << 18), torch.ones(3)
future = dist.all_reduce(tensor, async_op=True).get_future()
nested = future.then(lambda _: dist.all_reduce(second, async_op=True).get_future().wait()[0])
same(nested.wait(), torch.full((3,), float(size)))
outs = [[strided(torch.zeros(1000)) for _ in range(size)] for _ in range(20)]
singles = [torch.zeros(size, 1000) for _ in range(20)]
for i in range(20):
    dist.all_gather(outs[i], torch.full((1000,), float(i * size + rank)), async_op=True)
    dist.all_gather_single(singles[i], torch.full((1000,), float(i * size + rank)), async_op=True)
dist.barrier()
for i in range(20):
    want = (torch.arange(size) + float(i * size))[:, None].expand(size, 1000)
    same(singles[i], want)
    same(torch.stack(outs[i]), want)
number = world._get_sequence_number_for_group()
dist.barrier()
assert world._get_sequence_number_for_group() == number + 1

# The group's own methods, as torch's groups may be called.
tensor = torch.full((2,), float(rank))
world.allreduce(tensor).wait()
world.allreduce([tensor], dist.ReduceOp.MAX).wait()
world.broadcast(tensor, 1).wait()
outs = [torch.zeros(2) for _ in range(size)]
world.allgather(outs, tensor).wait()
world.barrier(timeout=timedelta(seconds=30)).wait()
same(outs[0], torch.full((2,), float(sum(range(size)))))

# gloo's.
gathered = [strided(torch.zeros(3)) for _ in range(size)] if rank == 1 else None
dist.gather(values(rank, 3), gathered, dst=1)
if gathered:
    same(torch.stack(gathered), torch.stack(everyone(3)))
out = strided(torch.zeros(3))
dist.scatter(out, [strided(values(r, 3)) for r in range(size)] if rank == 0 else None, src=0)
same(out, values(rank, 3))
tensor = strided(values(rank, 3))
dist.reduce(tensor, 1)
if rank == 1:
    same(tensor, reduced(everyone(3)))
peer = (rank + 1) % size
got = strided(torch.zeros(3))
if ON_GPU:  # NCCL's sends wait for the receives that are not issued with them.
    steps = [lambda: dist.send(values(rank, 3), peer), lambda: dist.recv(got, (rank - 1) % size)]
    for step in steps if rank % 2 == 0 else steps[::-1]:
        step()
    same(got, values((rank - 1) % size, 3))
else:
    works = [dist.isend(values(rank, 3), peer), dist.irecv(got, (rank - 1) % size)]
    assert all(work.wait() and work.wait() for work in works)
    same(got, values((rank - 1) % size, 3))
    got = torch.zeros(3)
    ops = [dist.P2POp(dist.isend, values(rank, 3), peer), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, values((rank - 1) % size, 3))
    if rank == 0:
        assert {dist.recv(got) for _ in range(size - 1)} == set(range(1, size))
    else:
        dist.send(values(rank, 3), 0)
names: list[object] = [None] * size
dist.all_gather_object(names, {"rank": rank})
assert names == [{"rank": r} for r in range(size)]

# Refused before anything moves; the group goes on.
refused(lambda: dist.all_gather_single(torch.zeros(3), torch.zeros(3)), f"{size}", "elements")
refused(lambda: dist.reduce_scatter_single(torch.zeros(3), torch.zeros(3 * size, dtype=torch.float64)), "dtype")
refused(lambda: world.allgather([[torch.zeros(2)] * size], [torch.zeros(3)]).wait(), "elements")
refused(lambda: world.allgather([[torch.zeros(2)] * (size + 1)], [torch.zeros(2)]).wait(), "list")
refused(lambda: dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1)), "multiple")
refused(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1] * size, [4] * size), "sum")
refused(lambda: dist.all_to_all([torch.zeros(1)] * size, [torch.zeros(2)] * size), "sends 2 elements")
pairs = [torch.zeros(2 * size), torch.zeros(3)], [torch.zeros(2), torch.zeros(3)]
refused(lambda: world.all_gather_single_coalesced(*pairs), "pair 1")
if ON_GPU:
    refused(lambda: dist.all_reduce(torch.zeros(3, device="meta")), "meta")
    graph = torch.cuda.CUDAGraph()
    captured = torch.zeros(3)
    with torch.cuda.graph(graph):
        refused(lambda: dist.all_reduce(captured), "captured")
    dist.all_reduce(captured)
world.monitored_barrier(timedelta(seconds=30))
meta = torch.zeros(3, device="meta")
refused(lambda: dist.all_reduce(meta), "meta")
refused(lambda: dist.all_gather_single(torch.zeros(3 * size), meta), "meta")
refused(lambda: world._get_backend(torch.device("xpu")), "xpu")
dist.barrier()
dist.destroy_process_group()
print("all equal")
