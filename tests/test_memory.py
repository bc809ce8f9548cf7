"""Memory that is not there is an error that says how much is missing, not a SIGBUS and not the OOM killer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Finished, ranks
from test_collectives import grid_env

from hdma import _core, errors

MIB = 1 << 20


def system(root: Path, files: dict[str, str]) -> str:
    """A tree of the files that the core reads."""
    meminfo = "MemTotal: 16000000 kB\nMemFree: 10 kB\nMemAvailable:    8388608 kB\nSwapFree: 0 kB\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def v2(name: str, limit: object, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{name}/memory.max": f"{limit}\n",
        f"{name}/memory.current": f"{used}\n",
        f"{name}/memory.stat": f"anon 5\nfile 9999999\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n",
    }


def v1(name: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    return {
        f"{name}/memory.limit_in_bytes": f"{limit}\n",
        f"{name}/memory.usage_in_bytes": f"{used}\n",
        f"{name}/memory.stat": stat,
    }


V2 = {"proc/self/mountinfo": "26 22 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"}
V1 = {
    "proc/self/mountinfo": "35 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "36 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
}


def test_no_limit(tmp_path: Path) -> None:
    assert _core.memory_left(system(tmp_path, {})) == (8 << 30, "the machine's memory")
    files = V2 | {"proc/self/cgroup": "0::/a\n"} | v2("sys/fs/cgroup/a", "max", 5)
    assert _core.memory_left(system(tmp_path, files))[0] == 8 << 30
    assert _core.memory_left(str(tmp_path / "nothing here"))[0] > 1 << 60


def test_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    files = V2 | {"proc/self/cgroup": "0::/job/step/task\n"}
    files |= v2("sys/fs/cgroup/job", 1000 * MIB, 990 * MIB, cache=100 * MIB)
    files |= v2("sys/fs/cgroup/job/step", "max", 990 * MIB)
    files |= v2("sys/fs/cgroup/job/step/task", 500 * MIB, 300 * MIB)
    left, where = _core.memory_left(system(tmp_path, files))
    assert left == 110 * MIB  # What files are cached in can be had back.
    assert where.endswith(f"/sys/fs/cgroup/job: limit {1000 * MIB} bytes, {890 * MIB} in use besides caches")


def test_version_1(tmp_path: Path) -> None:
    files = V1 | {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/job\n0::/\n"}
    files |= v1("sys/fs/cgroup/memory", 9223372036854771712, 5)
    files |= v1("sys/fs/cgroup/memory/docker", 300 * MIB, 250 * MIB, cache=10 * MIB)
    files |= v1("sys/fs/cgroup/memory/docker/job", 200 * MIB, 50 * MIB)
    assert _core.memory_left(system(tmp_path, files))[0] == 60 * MIB


def test_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
        "proc/self/mountinfo": "36 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    }
    files |= v1("sys/fs/cgroup/memory", 100 * MIB, 30 * MIB)
    assert _core.memory_left(system(tmp_path, files))[0] == 70 * MIB
    files = V2 | {"proc/self/cgroup": "0::/../../elsewhere\n"} | v2("sys/fs/cgroup", 64 * MIB, 60 * MIB)
    assert _core.memory_left(system(tmp_path / "b", files))[0] == 4 * MIB


def test_used_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = V2 | {"proc/self/cgroup": "0::/a\n"} | v2("sys/fs/cgroup/a", 5 * MIB, 7 * MIB, cache=1 * MIB)
    assert _core.memory_left(system(tmp_path, files))[0] == 0


def test_more_than_there_is() -> None:
    fd = os.memfd_create("hdma-test")
    try:
        with pytest.raises(
            errors.DeviceError, match=r"rank 7 cannot: \d+ bytes of shared memory needed, \d+ bytes free"
        ):
            _core.reserve_memory(fd, 1 << 50, 1, "rank 7 cannot")
        left = _core.memory_left()[0]
        with pytest.raises(errors.DeviceError, match="by each of 4 ranks here"):
            _core.reserve_memory(fd, left // 3, 4, "rank 7 cannot")
        assert os.fstat(fd).st_size == 0
        _core.reserve_memory(fd, 5000, 1, "rank 7 cannot")
        assert os.fstat(fd).st_size == 5000
    finally:
        os.close(fd)


PROGRAM = """
import os, resource, sys, numpy as np
{before}
import hdma
try:
    comm = hdma.init()
    {between}
    x = np.ones(1 << 20, np.float32)
    comm.all_gather(np.empty(comm.size << 20, np.float32), x)
    sys.exit("no error")
except hdma.Error as error:
    print(type(error).__name__, error)
    comm = None
"""


def refused(tmp_path: Path, before: str = "", between: str = "", **more: object) -> list[Finished]:
    program = PROGRAM.format(before=before, between=between)
    finished = ranks(2, ["-c", program], grid_env((1, 2), tmp_path, HDMA_TIMEOUT_S=20, **more))
    assert all(each.code == 0 for each in finished), "\n".join(each.out for each in finished)
    return finished


@pytest.mark.parametrize("between", [False, True], ids=["at start-up", "in the first call"])
def test_file_size_limit(between: bool, tmp_path: Path) -> None:
    """RLIMIT_FSIZE holds for a memfd as well, and its signal kills where nobody ignores it."""
    nbytes = 1 << 20 if between else 1024
    limit = "os.environ['RANK'] == '1' and "
    limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, resource.RLIM_INFINITY))"
    finished = refused(tmp_path, **{"between" if between else "before": limit})
    for each in finished:
        assert "DeviceError" in each.out and "rank 1" in each.out and "ulimit -f" in each.out, each.out


def test_address_space_limit(tmp_path: Path) -> None:
    limit = "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    limit += "resource.setrlimit(resource.RLIMIT_AS, (held + (300 << 20), resource.RLIM_INFINITY))"
    for each in refused(tmp_path, before=limit, HDMA_WINDOW_BYTES=1 << 30, HDMA_CHUNK_BYTES=64 << 20):
        assert "DeviceError" in each.out and "cannot map" in each.out and "ulimit -v" in each.out, each.out


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A real group of this process's hierarchy, version 1 or 2, which holds 100 MiB."""
    name = f"hdma-test-{os.getpid()}"
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / name
        try:
            group.mkdir()
            (group / limit).write_text(str(100 * MIB))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("needs root and control groups of memory that can be made")


def test_a_real_control_group(control_group: Path, tmp_path: Path) -> None:
    """Without the check both would be killed while they allocate their windows."""
    enter = f"open({str(control_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    for each in refused(tmp_path, before=enter, HDMA_WINDOW_BYTES=256 << 20, HDMA_CHUNK_BYTES=16 << 20):
        assert "DeviceError" in each.out and str(control_group) in each.out, each.out
        assert f"limit {100 * MIB} bytes" in each.out


def test_signals_do_not_undo_a_reservation() -> None:
    """posix_fallocate starts again after each: a timer that is quick enough would hold it up for ever."""
    import signal

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    fd = os.memfd_create("hdma-test")
    try:
        _core.reserve_memory(fd, 200 * MIB, 1, "rank 0 cannot")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(fd)
