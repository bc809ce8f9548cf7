"""The torch.distributed backend "hdma", for tensors in host memory and on GPUs.

    import hdma.backend                      # from torch 2.14 on not needed: the entry point registers it
    torch.distributed.init_process_group("hdma")

What hdma does not do itself (point to point, gather, scatter, reduce, some dtypes and operations) is forwarded to a
gloo group, on GPUs to an NCCL group, which is made when it is first needed.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hdma.backend.group import Group

__all__ = ["Group", "register"]


def register() -> None:
    """Makes `init_process_group("hdma")` known. Called by the import; may be called again."""
    # A list: torch 2.13 takes a string for its characters.
    dist.Backend.register_backend("hdma", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> Group:
    ranks = options.global_ranks_in_group
    timeout_s = options.timeout.total_seconds()
    return Group(options.store, options.group_rank, options.group_size, timeout_s, options.group_id, default=not ranks)


register()
