"""A rank that trains with torch's own parallel wrappers over the backend; gradients equal a single process's."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import hdma.backend  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
DEVICE = os.environ.get("TEST_TORCH", "cpu")
if DEVICE != "cpu":
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.set_default_device(DEVICE)
dist.init_process_group("hdma", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(DEVICE, (size,))
rows = torch.randn(4 * size, 16, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(DEVICE)
mine = rows[4 * rank : 4 * rank + 4]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


single = model()
single(rows).square().mean().backward()
wanted = {name: parameter.grad for name, parameter in single.named_parameters()}


def check_gradients(parallel: nn.Module, prefix: str = "") -> None:
    found = dict(parallel.named_parameters())
    assert set(found) == {prefix + name for name in wanted}
    for name, gradient in wanted.items():
        close(found[prefix + name].grad, gradient)


# DDP: with its default reduction, small buckets, and a hook made of futures.
def averaged(_, bucket):  # torch compares annotations with its classes, which a string is not.
    work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


for bucket_mb, hook in ((25, None), (0.001, None), (25, averaged)):
    ddp = DistributedDataParallel(model(), bucket_cap_mb=bucket_mb)
    if hook:
        ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp.zero_grad()
        ddp(mine).square().mean().backward()
    check_gradients(ddp, "module.")

# FSDP2: the same gradients and the same step.
sharded = model()
for layer in (sharded[0], sharded[3]):
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
sharded(mine).square().mean().backward()
check_gradients(sharded)
optimizer.step()
with torch.no_grad():
    for name, parameter in single.named_parameters():
        close(dict(sharded.named_parameters())[name], parameter - 0.1 * wanted[name])

# A checkpoint of the sharded model, loaded into another one.
checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=sys.argv[1])
other = model()
fully_shard(other, mesh=mesh)
state = {"model": other.state_dict()}
checkpoint.load(state, checkpoint_id=sys.argv[1])
other.load_state_dict(state["model"])
for a, b in zip(other.parameters(), sharded.parameters()):
    close(a, b.full_tensor())

# DTensor: each placement to each other.
whole = torch.arange(float(16 * size * size)).reshape(4 * size, 4 * size)
for start in (Shard(0), Shard(1), Replicate()):
    for end in (Shard(0), Shard(1), Replicate()):
        close(distribute_tensor(whole, mesh, [start]).redistribute(mesh, [end]), whole)
partial = DTensor.from_local(whole, mesh, [Partial()])
for end in (Shard(0), Shard(1), Replicate()):
    close(partial.redistribute(mesh, [end]), size * whole)

# Tensor parallel (all_reduce), then with the norm sequence parallel (AllGather and ReduceScatter).
plans = (
    {"1": ColwiseParallel(), "3": RowwiseParallel(use_local_output=False)},
    {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    },
)
for plan in plans:
    torch.manual_seed(0)
    parallel = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    want = parallel(rows)
    want.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in parallel.named_parameters()}
    parallel.zero_grad()
    parallel = parallelize_module(parallel, mesh, plan)
    got = parallel(rows if "0" not in plan else mine).full_tensor()
    close(got.detach(), want.detach())
    got.square().mean().backward()
    for name, parameter in parallel.named_parameters():
        close(parameter.grad, gradients[name])
dist.barrier()
dist.destroy_process_group()
print("all equal")
