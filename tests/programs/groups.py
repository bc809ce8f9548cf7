"""A rank of several groups: nested, overlapping, of one rank, in another order, used by several threads at once."""

from __future__ import annotations

import threading

import numpy as np

import hdma

comm = hdma.init()
rank, size = comm.rank, comm.size

backwards = comm.group(range(size - 1, -1, -1))
assert (backwards.rank, backwards.size) == (size - 1 - rank, size)
x = np.full(5, rank)
backwards.broadcast(x, root=0)
assert (x == size - 1).all()

same = [r for r in range(size) if r % 2 == rank % 2]
half = comm.group(same)
x = np.full(70001, float(rank))
half.all_reduce(x)
assert (x == sum(same)).all()
alone = half.group([half.rank])
alone.all_reduce(x)
alone.barrier()
assert alone.size == 1 and (x == sum(same)).all()

# The same members again: another communicator, and the first goes on.
again = comm.group(same)
works = [group.all_reduce(np.full(9, 1.0), async_op=True) for group in (half, again, backwards, comm)]
for work in works:
    work.wait()

if size > 2 and rank < 3:  # On 2x2 these are a node and a half.
    three = comm.group([0, 1, 2])
    out = np.empty(3)
    three.all_gather(out, np.array([float(rank)]))
    assert out.tolist() == [0.0, 1.0, 2.0], out
    three.close()

# A thread for each communicator, in no order between them.
totals: dict[int, float] = {}


def many(index: int, group: hdma.Communicator) -> None:
    total = 0.0
    for i in range(200):
        y = np.full(1 + i * 7 % 513, 1.0)
        group.all_reduce(y)
        total += float(y[-1])
    totals[index] = total


groups = [comm, half, again, backwards]
threads = [threading.Thread(target=many, args=pair) for pair in enumerate(groups)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert totals == {i: 200.0 * group.size for i, group in enumerate(groups)}

for wrong in ([], [0, 0], [size], [-1], [(rank + 1) % size] if size > 1 else [1]):
    try:
        comm.group(wrong)
    except hdma.UsageError:
        pass
    else:
        raise SystemExit(f"no UsageError: {wrong}")
for group in (half, again, backwards, alone):
    group.close()
comm.barrier()
comm.close()
