"""A rank that meets the others three times and writes down what happened: a program for test_rendezvous.py."""

import json
import os
import sys
import time
from pathlib import Path

from hdma import launch, rendezvous

folder, timeout_s, absent = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
me = launch.find()
if str(me.rank) in absent:
    time.sleep(timeout_s + 3.0)
    sys.exit()
started = time.monotonic()
try:
    for _ in range(2):
        with rendezvous.make(me, timeout_s) as place:
            for i in range(3):
                payloads = [bytes([rank, 0, 255]) * (i * 40000 + rank) for rank in range(me.size)]
                assert place.exchange(f"key {i}", payloads[me.rank], timeout_s) == payloads
    result = {"error": "", "launcher": me.launcher, "meeting": type(place).__name__}
except Exception as error:
    result = {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}
result["took_s"] = time.monotonic() - started
(folder / f"{me.rank}.{os.getpid()}.json").write_text(json.dumps(result))
