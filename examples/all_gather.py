"""Every rank gives three numbers; all ranks get everyone's.

    mpirun -n 4 python examples/all_gather.py
    torchrun --nproc-per-node=4 examples/all_gather.py
    python examples/all_gather.py
"""

import numpy as np

import hdma

with hdma.init() as comm:
    mine = np.arange(3, dtype=np.float32) + 10 * comm.rank
    everyone = np.empty(comm.size * mine.size, dtype=np.float32)
    comm.all_gather(everyone, mine)
    place = f"rank {comm.rank} of {comm.size}, node {comm.node} of {comm.nodes}"
    print(f"{place}: gave {mine.tolist()}, got {everyone.tolist()}", flush=True)
