"""Whether the ranks of one node may read each other's tensors where they are (process_vm_readv), agreed by all.

The kernel may forbid it: another user, a security module (Yama's ptrace_scope), a container without the right. So each
rank reads a random number of each other, and all must have succeeded.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets

from hdma import _core
from hdma.rendezvous import Rendezvous


def readable_mates(rendezvous: Rendezvous, timeout_s: float) -> dict[int, int]:
    """Process ids by rank, for `rendezvous` of one node; empty where any rank cannot read any other's memory."""
    number = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    card = {"pid": os.getpid(), "address": ctypes.addressof(number), "number": number.raw.hex()}
    cards = [json.loads(raw) for raw in rendezvous.exchange("memory", json.dumps(card).encode(), timeout_s)]
    seen = [_core.read_process(c["pid"], c["address"], 16) == bytes.fromhex(c["number"]) for c in cards]
    # The second exchange also keeps `number` alive until all have looked.
    verdicts = rendezvous.exchange("readable", b"1" if all(seen) else b"0", timeout_s)
    return {rank: c["pid"] for rank, c in enumerate(cards)} if set(verdicts) == {b"1"} else {}
