"""A rank that drops its communicator, with a call in flight and without close(): it must end all the same."""

from __future__ import annotations

import gc

import numpy as np

import hdma
import hdma.world

comm = hdma.init()
comm.barrier()
x, big = np.ones(4 << 20, np.float32), np.ones(comm.size << 22, np.float32)
comm.all_gather(big, x, async_op=True)
hdma.world._world = None
del comm
gc.collect()
