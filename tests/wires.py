"""The networks between nodes over which rank programs run: TCP, a stub of libibverbs, RDMA devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import stub_verbs

# For parameters: the same test on any machine and, in the VM of tests/rdma, on real devices.
RDMA = ["stub", pytest.param("verbs", marks=pytest.mark.rdma)]
DEVICES = {"stub": stub_verbs.DEVICES, "verbs": ("rxe0", "rxe1")}


def settings(wire: str, **stub: object) -> dict[str, object]:
    """Environment variables of all ranks; `stub`: of the stub, see stub_verbs."""
    if wire == "stub":
        return dict(stub_verbs.variables(stub_verbs.build(), **stub))
    return {"HDMA_WIRE": wire}


def port(wire: str, ranks_per_node: int) -> Callable[[int], Mapping[str, str]]:
    """Those of a rank: its node's device, so that what goes between neighbouring nodes goes between devices."""
    devices = DEVICES.get(wire)
    if devices is None:
        return lambda rank: {}
    return lambda rank: {"HDMA_NIC": devices[rank // ranks_per_node % len(devices)]}
