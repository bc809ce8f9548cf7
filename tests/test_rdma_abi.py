"""Our declarations of libibverbs against its own header, where that is installed; in the VM of tests/rdma it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import missing
from processes import ROOT, SLOWDOWN, environment, run

HEADER = Path("/usr/include/infiniband/verbs.h")


@pytest.mark.timeout(60 * SLOWDOWN)
@pytest.mark.parametrize("where", ["here", pytest.param("vm", marks=pytest.mark.rdma)])
def test_declarations(where: str) -> None:
    if not HEADER.exists():
        missing(f"no {HEADER} (libibverbs-dev)")
    program = ROOT / "tests" / "programs" / "ibverbs_abi.cc"
    done = run(["g++", "-std=c++17", "-fsyntax-only", program], environment(), 30)
    assert done.code == 0, done.out
