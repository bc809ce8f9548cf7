"""Four ranks in many groups: overlapping ones, some never used, destroyed and made again, alone, by device strings."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hdma.backend  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
# As torchrun does, one store for all lives of the default group.
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)


def begin(backend: str) -> None:
    place = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=place, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def total(group: dist.ProcessGroup | None) -> int:
    tensor = torch.tensor([1 << rank])
    dist.all_reduce(tensor, group=group)
    out = torch.zeros(dist.get_world_size(group), 1, dtype=tensor.dtype)
    dist.all_gather_single(out, tensor, group=group)
    assert (out == tensor).all()
    return int(tensor)


for backend in ("hdma", "cpu:hdma"):
    begin(backend)
    assert total(None) == 15
    members = {"first three": [0, 1, 2], "last three": [1, 2, 3], "outer": [0, 3], "alone": [2], "backwards": [3, 0]}
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    unused = [dist.new_group([0, 1, 2, 3]) for _ in range(20)]
    for _ in range(2):
        for name, group in groups.items():
            if rank in members[name]:
                assert total(group) == sum(1 << r for r in members[name]), name
                assert dist.get_backend(group) == backend and dist.get_process_group_ranks(group) == sorted(
                    members[name]
                )
            else:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
    # Root and peers are ranks of the world; only two ranks of a group use its point to point.
    if rank in members["last three"]:
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=3, group=groups["last three"])
        assert tensor.item() == 3
        if rank != 2:
            if rank == 1:
                dist.send(torch.tensor([7]), 3, group=groups["last three"])
            else:
                dist.recv(tensor, 1, group=groups["last three"])
                assert tensor.item() == 7
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    assert total(mesh["data"].get_group()) == (5 if rank % 2 == 0 else 10)
    assert total(mesh["model"].get_group()) == (3 if rank < 2 else 12)
    works = [dist.all_reduce(torch.ones(9), group=g, async_op=True) for g in (unused[0], unused[1], None)]
    assert all(work.wait() for work in works)
    if rank in members["outer"]:
        dist.destroy_process_group(groups["outer"])
    dist.barrier()
    again = dist.new_group(members["outer"])
    if rank in members["outer"]:
        assert total(again) == 9
    dist.barrier()
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 3.0, time.monotonic() - started

# Left open: the process must end by itself all the same, with code 0, also with a work that nobody waits for.
begin("hdma")
last = dist.new_group()
dist.all_reduce(torch.ones(1000), group=last, async_op=True)
dist.all_gather([torch.zeros(3, 3).t() for _ in range(size)], torch.ones(3, 3), async_op=True)
dist.all_reduce(torch.ones(1000), async_op=True).get_future()
print("all right", flush=True)
