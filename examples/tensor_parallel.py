"""A transformer's feed-forward block, split over all ranks; only its two collectives are hdma's.

torchrun --nproc-per-node=2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import hdma.backend  # noqa: F401  (registers "hdma"; not needed from torch 2.14 on)

dist.init_process_group("hdma")
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights and tokens on every rank
block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
tokens = torch.randn(8 * size, 64)
whole = block(tokens).detach()

# Each rank normalises its tokens; an AllGather brings all of them to its slice of the first weight, and a
# ReduceScatter sums what the slices of the second make, each rank keeping its tokens.
plan = {
    "0": SequenceParallel(sequence_dim=0),
    "1": ColwiseParallel(input_layouts=Shard(0)),
    "3": RowwiseParallel(output_layouts=Shard(0)),
}
block = parallelize_module(block, init_device_mesh("cpu", (size,)), plan)
mine = slice(8 * rank, 8 * (rank + 1))
out = block(tokens[mine])
out.square().mean().backward()

error = (out - whole[mine]).abs().max().item()
print(f"rank {rank} of {size}: {tuple(out.shape)} of {tuple(whole.shape)}, largest difference {error:.1e}", flush=True)
assert error < 1e-5
dist.destroy_process_group()
