"""A rank that passes wrong arguments: each a UsageError that says what, and the communicator goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

import hdma

comm = hdma.init()
size, rank = comm.size, comm.rank
f4, f4s = np.zeros(4, np.float32), np.zeros(4 * size, np.float32)
frozen = np.zeros(4 * size, np.float32)
frozen.flags.writeable = False
wide = np.zeros((4 * size, 2), np.float32)
WRONG: list[tuple[str, Callable[[], object]]] = [
    ("times the 4 elements", lambda: comm.all_gather(np.zeros(4 * size + 1, np.float32), f4)),
    ("times the 4 elements", lambda: comm.reduce_scatter(f4, np.zeros(4 * size - 1, np.float32))),
    ("same dtype", lambda: comm.all_gather(np.zeros(4 * size, np.int32), f4)),
    ("not contiguous", lambda: comm.all_gather(wide[:, 0], f4)),
    ("not contiguous", lambda: comm.reduce_scatter(f4, wide[:, 0])),
    ("read-only", lambda: comm.all_gather(frozen, f4)),
    (
        "must be a torch.Tensor, a numpy.ndarray or an array with __cuda_array_interface__, not list",
        lambda: comm.all_gather(f4s, [0.0] * 4),
    ),
    ("sequence of ranks", lambda: comm.group(1)),  # type: ignore[arg-type]
    ("masked array", lambda: comm.all_gather(np.ma.zeros(4 * size), np.zeros(4))),
    ("same dtype", lambda: comm.all_gather(np.zeros(size, "f4,i4"), np.zeros(1, "i4,f4"))),
    ("root must be a rank", lambda: comm.broadcast(f4, root=size)),
    ("multiple of", lambda: comm.all_to_all(np.zeros(2 * size + 1), np.zeros(2 * size))),
    ("does not work in place", lambda: comm.all_to_all(f4s, f4s)),
    ("no average", lambda: comm.all_reduce(np.zeros(3, np.int64), op="avg")),
    ("not NoneType", lambda: comm.all_gather(None, f4)),
    ("int32 has no average", lambda: comm.reduce_scatter(np.zeros(1, np.int32), np.zeros(size, np.int32), op="avg")),
    ("op must be one of", lambda: comm.reduce_scatter(f4, f4s, op="median")),
    ("dtype must be one of", lambda: comm.reduce_scatter(np.zeros(1, np.complex64), np.zeros(size, np.complex64))),
    ("wire_dtype of float32 is float32, not", lambda: comm.reduce_scatter(f4, f4s, wire_dtype="float16")),
    ("byte order", lambda: comm.all_gather(np.zeros(4 * size, ">f4"), np.zeros(4, ">f4"))),
    ("does not fit a slot", lambda: comm.all_gather(np.zeros(size, "V9000000"), np.zeros(1, "V9000000"))),
    ("Python objects", lambda: comm.all_gather(np.zeros(size, object), np.zeros(1, object))),
    ("overlap", lambda: comm.start_all_gather(f4s, f4s[(rank + 1) % size * 4 :][:4] if size > 1 else f4s[1:])),
]
if size > 1:
    WRONG.append(("in place", lambda: comm.reduce_scatter(f4s[(rank + 1) % size * 4 :][:4], f4s)))
for text, call in WRONG[: None if size > 1 else -1]:
    try:
        call()
    except hdma.UsageError as error:
        assert text in str(error), (text, error)
    else:
        sys.exit(f"no UsageError: {text}")
comm.all_gather(f4s, f4)
comm.barrier()
assert not comm.closed
comm.close()
try:
    comm.barrier()
    sys.exit("closed, but went on")
except hdma.Error as error:
    assert "closed" in str(error)
