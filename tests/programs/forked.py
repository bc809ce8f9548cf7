"""Ranks forked from one process that has loaded torch, which takes longer than most of the tests.

forked.py SIZE PROGRAM [ARGUMENTS]    the last line names the ranks' exit codes; its own is 0 if theirs are
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import hdma.backend  # noqa: F401

size, sys.argv = int(sys.argv[1]), sys.argv[2:]
os.environ["WORLD_SIZE"] = str(size)
ranks = []
for rank in range(size):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ["RANK"] = str(rank)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception as error:
            traceback.print_exc()
            sys.last_value = error  # hdma tells its peers of it at exit.
            sys.exit(1)
        sys.exit(0)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
print("exit codes", *codes)
sys.exit(any(codes))
