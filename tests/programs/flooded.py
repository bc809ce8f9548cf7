"""Ranks that start while strangers come to their doors by the hundred."""

from __future__ import annotations

import random
import socket
import threading
import time
from typing import Any

import numpy as np

import hdma
from hdma import handshake


def flood(address: tuple[str, int], stop: threading.Event) -> None:
    held: list[socket.socket] = []
    garbage = [b"GET / HTTP/1.1\r\n\r\n", random.randbytes(300), b"\xff" * 5000, b"\x7f" * 8, b""]
    while not stop.is_set():
        sock = socket.socket()
        sock.settimeout(0.1)
        try:
            sock.connect(address)
            sock.sendall(random.choice(garbage))
        except OSError:
            pass
        held.append(sock)
        if len(held) > 300:
            held.pop(random.randrange(300)).close()


class Flooded(handshake.Switchboard):
    def connect(self, *args: Any) -> dict[handshake.Link, socket.socket]:
        stop = threading.Event()
        threading.Thread(target=flood, args=(tuple(self.addresses[0]), stop), daemon=True).start()
        time.sleep(0.3)
        try:
            return super().connect(*args)
        finally:
            stop.set()


hdma.connect.Switchboard = Flooded
comm = hdma.init()
x = np.full(1000, 1.0)
comm.all_reduce(x)
assert (x == comm.size).all()
comm.close()
