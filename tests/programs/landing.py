"""A rank that uses shards one by one: waits for them out of order, pushes them late, in several parts."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import places
from reference import reduction, same_bits, values

import hdma

places.start()
comm = hdma.init()
rank, size = comm.rank, comm.size
for numel in (0, 5, 4096, 300001):
    shards = [values(r, numel, np.float32) for r in range(size)]
    out = places.put(np.zeros(size * numel, np.float32))
    call = comm.start_all_gather(out, places.put(shards[rank]))
    assert sorted(call.order) == [(s, p) for s in range(size) for p in range(call.parts)], call.order
    assert call.range(0)[0] == 0 and call.range(call.parts - 1)[1] == numel
    for shard, part in reversed(call.order):
        call.wait(shard, part)
        first, end = call.range(part)
        got = places.numpy(places.part(out, slice(shard * numel + first, shard * numel + end)), np.float32)
        assert same_bits(got, shards[shard][first:end]), (numel, shard, part)
    call.finish()

    inputs = [values(r, size * numel, np.float32, seed=1) for r in range(size)]
    inp, out = places.put(np.full(size * numel, np.nan, np.float32)), places.put(np.zeros(numel, np.float32))
    call = comm.start_reduce_scatter(out, inp)
    assert sorted(call.order) == [(s, p) for s in range(size) for p in range(call.parts)], call.order
    order = call.order if rank % 2 else sorted(call.order, key=lambda pair: (pair[0] * 7 + pair[1]) % 5)
    for shard, part in order:
        first, end = call.range(part)
        at = slice(shard * numel + first, shard * numel + end)
        places.write(places.part(inp, at), inputs[rank][at])
        call.push(shard, part)
    call.finish()
    mine = [x[rank * numel : (rank + 1) * numel] for x in inputs]
    assert same_bits(places.numpy(out, np.float32), reduction(mine, "sum", comm.nodes, np.float32)), numel

# A shard that lands is usable while another's sender has not even begun.
late = size - 1
kept = [call, inp, out]  # To free memory of a GPU waits for all that is on it.
out = places.put(np.zeros(size * 4, np.float32))
if rank == late:
    time.sleep(1.0)
call = comm.start_all_gather(out, places.put(np.full(4, rank, np.float32)))
if size > 1 and rank != late:
    call.wait(rank)
    assert not call._work.done()
call.finish()

# The last push ends a call that was waited for from another thread.
inp, out = places.put(np.ones(size * 4, np.float32)), places.put(np.zeros(4, np.float32))
call = comm.start_reduce_scatter(out, inp)
if places.ON_GPU:  # Another thread that waits is of no use there.
    for bad in (call.finish, lambda: comm.all_reduce(out)):
        try:
            bad()
        except hdma.UsageError:
            continue
        sys.exit("no UsageError")
waiter = threading.Thread(target=call.finish)
if not places.ON_GPU:
    waiter.start()
for shard, part in call.order:
    assert places.ON_GPU or waiter.is_alive()
    call.push(shard, part)
if places.ON_GPU:
    waiter.start()
waiter.join()
call.finish()
assert (places.numpy(out, np.float32) == size).all()
for bad in (lambda: call.push(size), lambda: call.wait(0)):
    try:
        bad()
    except hdma.UsageError:
        continue
    sys.exit("no UsageError")
comm.close()
