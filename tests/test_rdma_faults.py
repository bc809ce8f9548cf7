"""What goes wrong with RDMA ends in an error in words on every rank, within the time-out, and never in wrong data."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stub_verbs
import wires
from devices import SYSFS, cable, rdma_devices  # noqa: F401
from processes import ROOT, SLOWDOWN, Finished, ranks, run_all
from remains import nothing_remains  # noqa: F401
from test_collectives import PROGRAMS, grid_env, run_grid

pytestmark = [pytest.mark.timeout(120 * SLOWDOWN)]
REAL = pytest.mark.rdma
NOBODY = 65534


def faulty(
    wire: str, folder: Path, pattern: str, limit_s: float = 30.0, size: int = 2, **more: object
) -> list[Finished]:
    """Ranks, one a node, each of which must get an error that matches within the limit."""
    env = grid_env((size, 1), folder / "meet", **({"HDMA_TIMEOUT_S": 20 * SLOWDOWN} | wires.settings(wire) | more))
    program = [PROGRAMS / "wire_faulty.py", folder / "stamp", str(limit_s), pattern]
    finished = ranks(size, program, env, own=wires.port(wire, 1))
    assert all(each.code == 0 for each in finished), "\n".join(each.out for each in finished)
    return finished


@pytest.mark.parametrize(
    "fault, pattern",
    [
        (
            "status:12:20",
            r"WireError: .*rank [01].* mlx5_[01] port 1 \(GID 1, .*transport retry counter.*status 12, vendor error",
        ),
        ("status:10:20", r"WireError: .*status 10"),
        ("event:8:20", r"WireError: rank [01]: mlx5_[01] port 1 .*failed: local catastrophic error"),
        ("event:1:20", r"WireError: .*queue pair on mlx5_[01] port 1 .*failed"),
        ("deaf:12:20", r"WireError: .*transport retry counter exceeded .*HDMA_QP_TIMEOUT"),
    ],
)
def test_a_device_fails(fault: str, pattern: str, tmp_path: Path) -> None:
    faulty("stub", tmp_path, pattern, **stub_verbs.variables(stub_verbs.build(), fail=fault))


def test_a_port_comes_back(tmp_path: Path) -> None:
    """Queue pairs tell of a port that does not: its going down alone is no error."""
    stub = stub_verbs.variables(stub_verbs.build(), fail="event:10:20")
    run_grid("wire_calls.py", (2, 1), tmp_path, "30001", "verbs", wire="stub", **stub)


@pytest.mark.parametrize(
    "setting, pattern",
    [
        (
            {"STUB_IBV_MEMLOCK": 1 << 20},
            r"WireError: rank [01] cannot register its window \(\d+ bytes\).*ulimit -l.*HDMA_WINDOW_BYTES",
        ),
        ({"STUB_IBV_FORBIDDEN": 1}, r"WireError: .*cannot open its RDMA device.*Permission denied.*uverbs"),
        (
            {"STUB_IBV_UNREACHABLE": 1},
            r"WireError: .*cannot link a queue pair to rank.*Connection timed out.*HDMA_GID_INDEX",
        ),
        ({"STUB_IBV_DEVICES": "other"}, r"WireError: .*knows no device mlx5_[01], only: other.*ibverbs-providers"),
        ({"HDMA_MTU": "4096", "STUB_IBV_MTU": 1024}, r"UsageError: .*HDMA_MTU=4096 is more than the 1024 bytes"),
        ({"HDMA_GID_INDEX": "9"}, r"UsageError: .*HDMA_GID_INDEX=9 is no RoCE v2 entry.*10\.9\.0"),
        ({"HDMA_QP_TIMEOUT": "25", "HDMA_TIMEOUT_S": "20"}, r"UsageError: .*HDMA_QP_TIMEOUT=25.*HDMA_TIMEOUT_S=20"),
        ({"LD_LIBRARY_PATH": ""}, r"WireError: .*cannot use RDMA: there is mlx5_0:1, but no libibverbs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_device_cannot_be_used(setting: dict[str, object], pattern: str, tmp_path: Path) -> None:
    if "LD_LIBRARY_PATH" in setting and os.path.exists("/usr/lib/x86_64-linux-gnu/libibverbs.so.1"):
        pytest.skip("libibverbs is installed")
    faulty("stub", tmp_path, pattern, **setting)


@pytest.mark.parametrize("wire", wires.RDMA)
def test_killed_in_mid_call(wire: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if wire == "verbs":
        request.getfixturevalue("cable")
    env = grid_env((2, 1), tmp_path / "meet", **({"HDMA_TIMEOUT_S": 30 * SLOWDOWN} | wires.settings(wire)))
    program = [PROGRAMS / "killed.py", tmp_path / "killed", "1", "kill"]
    survivor, victim = ranks(2, program, env, own=wires.port(wire, 1))
    assert victim.code == -9 and survivor.code == 0 and "is gone" in survivor.out, survivor.out


@pytest.mark.parametrize("wire", wires.RDMA)
def test_a_process_forks(wire: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if wire == "verbs":
        request.getfixturevalue("cable")
    run_grid("forks.py", (2, 1), tmp_path, wire=wire)


@pytest.mark.parametrize(
    "program, grid, timeout_s",
    [
        ("late.py 1", (2, 1), 1),
        ("disagree.py 3", (2, 2), 20),
        ("disagree.py 2", (3, 1), 20),
        ("unpushed.py", (2, 1), 60),
        ("stopped.py 5.0", (2, 2), 2.5),
        ("ending.py late", (2, 2), 5),
        ("ending.py close", (2, 2), 20),
        ("dropped.py", (2, 2), 20),
        ("leaks.py 200 30", (2, 1), 60),
    ],
)
def test_what_goes_wrong_over_tcp_too(program: str, grid: tuple[int, int], timeout_s: float, tmp_path: Path) -> None:
    name, *args = program.split()
    run_grid(name, grid, tmp_path, *args, wire="stub", HDMA_TIMEOUT_S=timeout_s)


@pytest.mark.parametrize(
    "how", ["exception", "interrupted call", "closed by another thread", "killed with a child alive"]
)
def test_leaving(how: str, tmp_path: Path) -> None:
    """A killed rank's child holds no descriptor of a device: the peers learn of the end at once."""
    env = grid_env((2, 1), tmp_path, **(wires.settings("stub") | {"HDMA_TIMEOUT_S": 20}))
    finished = ranks(2, [PROGRAMS / "leaving.py", how], env, own=wires.port("stub", 1))
    codes = [each.code for each in finished]
    first = {"exception": 1, "killed with a child alive": -9}.get(how, 0)
    assert codes == [first, 0], "\n".join(each.out for each in finished)


def test_no_library(tmp_path: Path) -> None:
    """Without a device nothing of RDMA is looked for; HDMA_WIRE=verbs says what is missing."""
    program = ["-c", "import hdma; c = hdma.init(); print('wire', c.wire)"]
    for each in ranks(2, program, grid_env((2, 1), tmp_path / "auto")):
        assert each.code == 0 and "wire " in each.out, each.out
    if SYSFS.is_dir() and any(SYSFS.iterdir()):
        return
    for each in ranks(2, program, grid_env((2, 1), tmp_path / "verbs", HDMA_WIRE="verbs")):
        assert "WireError: " in each.out and "there is no RDMA device" in each.out, each.out


# On real devices.


def shell(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


@contextmanager
def later(folder: Path, size: int, act: list[str]) -> Iterator[None]:
    """Runs a command once all ranks are calling, and notes the moment."""

    def wait() -> None:
        until = time.monotonic() + 30 * SLOWDOWN
        while time.monotonic() < until and not all((folder / f"stamp.{rank}").exists() for rank in range(size)):
            time.sleep(0.05)
        (folder / "stamp").touch()
        shell(*act)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@REAL
def test_lost_packets(cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    shell("tc", "qdisc", "add", "dev", "vb", "root", "netem", "loss", "3%")
    try:
        run_grid("wire_calls.py", (2, 1), tmp_path, "300007", "verbs", wire="verbs", HDMA_WINDOW_BYTES="16M")
    finally:
        shell("tc", "qdisc", "del", "dev", "vb", "root")


@REAL
def test_link_goes_down_in_mid_call(cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Queue pairs give up well before the time-out; the error names the device, its port and the peer."""
    limit_s = 60.0
    pattern = r"WireError: rank [01] lost rank [01].*rxe[01] port 1 .* failed: .*\(status \d+, vendor error .*rdma link"
    try:
        with later(tmp_path, 2, ["ip", "link", "set", "va", "down"]):
            faulty("verbs", tmp_path, pattern, limit_s, HDMA_TIMEOUT_S=limit_s)
    finally:
        restore(cable)


@REAL
def test_port_is_down_at_start_up(cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    shell("ip", "link", "set", "va", "down")
    try:
        faulty("verbs", tmp_path, r"WireError: rank 0 .*cannot use RDMA: rxe0 port 1 is DOWN.*va is down")
    finally:
        restore(cable)


@REAL
def test_ports_of_different_mtu(cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """They take the smaller one; a larger one that was asked for is refused."""
    shell("ip", "link", "set", "vb", "mtu", "1500")
    try:
        run_grid("wire_calls.py", (2, 1), tmp_path / "a", "30001", "verbs", wire="verbs")
        faulty("verbs", tmp_path, "UsageError: .*rank 1: HDMA_MTU=4096 is more than the 1024 bytes", HDMA_MTU=4096)
    finally:
        shell("ip", "link", "set", "vb", "mtu", "9000")


@REAL
def test_gids_of_different_kinds(cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Two addresses that cannot reach each other, and an entry that is none."""
    own = wires.port("verbs", 1)

    def mixed(rank: int) -> dict[str, str]:
        return {**own(rank), "HDMA_GID_INDEX": indices[rank]}

    for indices, pattern in (("12", "cannot be connected.*HDMA_GID_INDEX"), ("77", "HDMA_GID_INDEX=7 is no")):
        env = grid_env((2, 1), tmp_path / indices, HDMA_WIRE="verbs", HDMA_TIMEOUT_S=20 * SLOWDOWN)
        program = [PROGRAMS / "wire_faulty.py", tmp_path / "stamp", "600", f"UsageError: .*{pattern}"]
        for each in ranks(2, program, env, own=mixed):
            assert each.code == 0, each.out


@REAL
@pytest.mark.parametrize("index", [0, 2])
def test_other_gids(index: int, cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Over IPv6 as well; link-local addresses too."""
    run_grid("wire_calls.py", (2, 1), tmp_path, "30001", "verbs", wire="verbs", HDMA_GID_INDEX=index, HDMA_TIMEOUT_S=60)


def as_nobody(env: dict[str, str], args: list[object]) -> tuple[list[str], dict[str, str]]:
    """A plain user with the usual limit of locked memory, and no rights."""
    limits = ["prlimit", f"--memlock={8 << 20}:{8 << 20}", "setpriv", f"--reuid={NOBODY}", "--clear-groups"]
    python = [*limits, "--inh-caps=-all", "--bounding-set=-all", str(ROOT / ".venv/bin/python")]
    return [*python, *(str(arg) for arg in args)], env


@REAL
def test_a_plain_user(cable: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Who may lock 8 MiB is told so, and what helps; a smaller window does, and so does TCP."""
    devices = [f"/dev/infiniband/{name}" for name in os.listdir("/dev/infiniband") if name.startswith("uverbs")]
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o777)

    def ranks_of_nobody(name: str, program: list[object], **more: object) -> list[Finished]:
        (tmp_path / name).mkdir(mode=0o777)
        (tmp_path / name).chmod(0o777)
        settings = {"HDMA_WIRE": "verbs", "HDMA_TIMEOUT_S": 20 * SLOWDOWN} | more
        env, own = grid_env((2, 1), tmp_path / name, **settings), wires.port("verbs", 1)
        each = [as_nobody({**env, **own(r), "RANK": str(r), "WORLD_SIZE": "2"}, program) for r in range(2)]
        finished = run_all(each, 30)
        assert all(done.code == 0 for done in finished), "\n".join(done.out for done in finished)
        return finished

    def faulty_program(pattern: str) -> list[object]:
        return [PROGRAMS / "wire_faulty.py", tmp_path / "stamp", "600", pattern]

    for path in devices:
        os.chmod(path, 0o600)
    try:
        ranks_of_nobody(
            "forbidden", faulty_program(r"WireError: .*user nobody cannot open /dev/infiniband/uverbs[01] of rxe")
        )
        for path in devices:
            os.chmod(path, 0o666)
        limit = r"WireError: .*cannot register its window.*may lock 8388608 bytes.*ulimit -l.*HDMA_WIRE=tcp"
        ranks_of_nobody("limited", faulty_program(limit), HDMA_CHUNK_BYTES="4M")
        calls = [PROGRAMS / "wire_calls.py", "30001"]
        ranks_of_nobody("smaller", [*calls, "verbs"], HDMA_CHUNK_BYTES="4M", HDMA_WINDOW_BYTES="4M")
        ranks_of_nobody("tcp", [*calls, "tcp"], HDMA_CHUNK_BYTES="4M", HDMA_WIRE="tcp")
    finally:
        for path in devices:
            os.chmod(path, 0o600)


def restore(cable: tuple[str, str]) -> None:  # noqa: F811
    shell("ip", "link", "set", "va", "up")
    # What goes down with an interface (tests/rdma/devices.sh).
    shell("ip", "addr", "replace", "fd09::1/64", "dev", "va", "nodad")
    shell("ip", "-6", "route", "replace", "fd09::/64", "dev", "va", "table", "100")
    wait_for(lambda: all("ACTIVE" in (SYSFS / name / "ports/1/state").read_text() for name in cable))


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 10 * SLOWDOWN
    while not done() and time.monotonic() < until:
        time.sleep(0.1)
    assert done()
