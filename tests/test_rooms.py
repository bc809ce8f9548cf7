"""Who may include whom in csrc/: the rules of the house, as a table."""

from __future__ import annotations

import re

from processes import ROOT

CSRC = ROOT / "csrc"
# A header and its source may include the headers named, and what those may.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "plan": {"base"},
    "memory": {"base"},
    "shared": {"base", "memory", "plan"},
    "kernels/copy_host": set(),
    "kernels/reduce_host": {"kernels/copy_host", "base", "plan", "kernels/reduce_loops"},
    "kernels/source": set(),
    "device/device": {"shared"},
    "device/host": {"device/device", "memory", "kernels/copy_host", "kernels/reduce_host"},
    "device/runtime": {"base"},
    "device/cuda": {"device/runtime"},
    "device/hip": {"device/runtime"},
    "device/card": {"device/device", "device/runtime"},
    "device/gpu": {"device/card", "memory"},
    "wire/wire": {"base", "plan"},
    "wire/tcp": {"wire/wire"},
    "wire/ibverbs": {"base"},
    "wire/nic": {"wire/ibverbs", "wire/wire"},
    "wire/flusher": {"wire/nic"},
    "wire/verbs": {"wire/flusher"},
    "calls": {"shared"},
    "control": {"calls"},
    "proxy": {"calls", "wire/wire"},
    "ticket": {"control", "device/device"},
    "engine": {"proxy", "ticket"},
    "bindings": {"device/gpu", "engine", "kernels/source", "memory"},
}


def files() -> dict[str, list[str]]:
    """Room -> the headers of ours that its files include."""
    found: dict[str, list[str]] = {}
    for path in sorted(CSRC.rglob("*.cc")) + sorted(CSRC.rglob("*.h")):
        room = str(path.relative_to(CSRC).with_suffix(""))
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            header = (path.parent / name).resolve().relative_to(CSRC.resolve()).with_suffix("")
            if str(header) != room:
                found.setdefault(room, []).append(str(header))
        found.setdefault(room, [])
    return found


def test_includes_follow_the_table() -> None:
    for room, headers in files().items():
        assert room in ALLOWED, f"{room} has no row in the table of rooms"
        assert set(headers) <= ALLOWED[room], f"{room} includes {set(headers) - ALLOWED[room]}"


def test_only_bindings_know_python() -> None:
    foreign = re.compile(r"#include <(Python\.h|nanobind|torch|ATen|c10|mpi\.h|cuda|hip|infiniband)")
    users = {path.name for path in CSRC.rglob("*.*") if foreign.search(path.read_text())}
    assert users == {"bindings.cc"}


def test_every_file_says_what_it_is() -> None:
    for path in CSRC.rglob("*.h"):
        head = path.read_text().split("#pragma once")[0]
        for word in ("// Protocol:", "// Threading:", "// Ordering:"):
            assert word in head, f"{path.name} does not open with {word}"
