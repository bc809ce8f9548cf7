"""The inner gloo group: for what hdma does not do itself."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from hdma.backend.options import c10d
from hdma.errors import UsageError


def make(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo group whose ranks connect in pairs when they first talk, so that some may make it without the others."""
    gloo = getattr(c10d, "ProcessGroupGloo", None)
    if gloo is None:
        raise UsageError("hdma forwards this call to gloo, but this torch was built without gloo")
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in names] or [
        gloo.create_default_device(lazy_init=True)
    ]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(c10d.PrefixStore("gloo", store), rank, size, options)
