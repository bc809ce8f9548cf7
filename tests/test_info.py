"""The doctor: what it finds on this host and in a job, that it finds faults, and that it names the remedy."""

import json
import os
import resource
import sys

import pytest
from processes import environment, free_port, mpirun, ranks, run, torchrun

from hdma.info import checks, found, groups, host, launchers, settings
from hdma.topology import Topology

INFO = ["-m", "hdma.info"]


def info(*args, **env):
    return run([sys.executable, *INFO, *args], environment(**env))


def facts(**more):
    """Of a host on which all is well, but for `more`."""
    limits = {
        "memlock_nbytes": None,
        "descriptors": {"soft": 65536, "hard": 65536, "open": 4},
        "shm": {"total_nbytes": 1 << 30, "free_nbytes": 1 << 30},
        "memory": {"total_nbytes": 1 << 36, "available_nbytes": 1 << 35, "cgroup_nbytes": None},
        "pids": None,
    }
    limits |= more.pop("limits", {})
    machine = {"features": {"avx2": True, "f16c": True}} | more.pop("machine", {})
    wires = [{"name": "tcp", "devices": ["lo", "eth0"]}, {"name": "verbs", "library": None, "devices": []}]
    values = {"wires": wires, "devices": [], "topology": Topology(2, 8), "here": 8, "cpus": 64} | more
    return checks.Facts(machine, limits, **values)


def verdicts(**more):
    return {check.name: check for check in checks.host(facts(**more))}


def test_alone():
    done = info()
    assert done.code == 0, done.out
    assert "checks:" in done.out and "0 failed" in done.out
    assert "8x8" in done.out and "23552 KiB" in done.out  # 23 rings x 4 slots x 256 KiB


def test_json():
    done = info("--json")
    assert done.code == 0, done.out
    report = json.loads(done.out)
    assert {*report} == {
        *("versions", "mpi", "machine", "limits", "wires", "devices", "mpirun", "job"),
        *("groups", "variables", "checks", "verdict"),
    }
    assert report["versions"]["hdma"] and report["versions"]["compiler"] and report["machine"]["cpus"] >= 1
    assert report["job"] | {"joined": True, "rank": 0, "size": 1, "nodes": []} == report["job"]
    assert {wire["name"] for wire in report["wires"]} == {"tcp", "verbs"}
    assert {device["name"] for device in report["devices"]} == {"host", "cuda", "hip"}
    for check in report["checks"]:
        assert {*check} == {"name", "verdict", "evidence", "remedy", "where"} and check["evidence"]
        assert check["verdict"] in ("ok", "warn", "fail")
    assert report["verdict"] in ("ok", "warn")
    assert report["limits"]["descriptors"]["soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_loads_neither_torch_nor_mpi():
    code = "import sys; sys.argv = ['x', '--json']; from hdma.info.__main__ import main; main(); "
    code += "print({'torch', 'mpi4py', 'ml_dtypes'} & {*sys.modules}, file=sys.stderr)"
    assert run([sys.executable, "-c", code], environment()).out.endswith("set()\n")


def test_low_descriptor_limit_fails():
    code = 'ulimit -n 40; exec "$0" -m hdma.info'
    done = run(["sh", "-c", code, sys.executable], environment())
    assert done.code == 1 and "FAIL  descriptors    limit 40" in done.out and "ulimit -n" in done.out, done.out


def test_unknown_variable_is_named_with_the_nearest():
    done = info(HDMA_TIMEOUTS=3)
    assert done.code == 0, done.out
    assert "WARN  variables      HDMA_TIMEOUTS has no effect" in done.out and "did you mean HDMA_TIMEOUT_S?" in done.out
    assert "RuntimeWarning" not in done.out


def test_variable_that_cannot_be_used_fails():
    done = info("--json", HDMA_WINDOW_BYTES="big")
    assert done.code == 1, done.out
    report = json.loads(done.out)
    (check,) = (check for check in report["checks"] if check["verdict"] == "fail")
    assert check["name"] == "variables" and "HDMA_WINDOW_BYTES='big'" in check["evidence"]
    assert report["groups"] == [] and report["verdict"] == "fail"


def test_window_that_is_too_small_fails(monkeypatch):
    monkeypatch.setenv("HDMA_WINDOW_BYTES", "4K")
    assert verdicts(topology=Topology(2, 2), here=4)["memory"].verdict == "ok"
    check = verdicts(topology=Topology(8, 8))["memory"]
    assert check.verdict == "fail" and "HDMA_WINDOW_BYTES=4096 is too small for 8x8" in check.evidence
    grids = {
        (row["nodes"], row["ranks_per_node"])
        for row in json.loads(info("--json", HDMA_WINDOW_BYTES="4K").out)["groups"]
    }
    assert (2, 2) in grids and (8, 8) not in grids


def test_env_table():
    done = info("--env", HDMA_TIMEOUT_S="2.5", HDMA_CHUNK_BYTE="1M")
    assert done.code == 0, done.out
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "2.5 " in lines["HDMA_TIMEOUT_S"] and "300 " in lines["HDMA_TIMEOUT_S"]
    assert "64 MiB (default)" in lines["HDMA_WINDOW_BYTES"] and "equal" in lines["HDMA_WINDOW_BYTES"]
    assert "HDMA_CHUNK_BYTE has no effect: did you mean HDMA_CHUNK_BYTES?" in done.out
    done = info("--env", "--json", HDMA_DEVICE="cuda")
    assert done.code == 1
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert "no GPU device" in rows["HDMA_DEVICE"]["error"] and rows["HDMA_WIRE"]["value"] == "auto"


def test_wrong_arguments():
    assert info("--xml").code == 2


def test_under_mpirun():
    done = mpirun(2, INFO, environment())
    assert done.code == 0, done.out
    assert "2 ranks by mpirun, 1 node x 2 ranks" in done.out and done.out.count("checks:") == 1
    assert "all 2 ranks joined" in done.out


def test_nodes_and_links():
    done = mpirun(4, [*INFO, "--json"], environment(HDMA_RANKS_PER_NODE=2))
    assert done.code == 0, done.out
    report = json.loads(done.out)
    assert report["job"]["nodes"] == [[0, 1], [2, 3]] and len({*report["job"]["pids"]}) == 4
    assert report["job"]["links"][0] == ["self", "memory", "tcp", ""]
    assert [(row["nodes"], row["ranks_per_node"]) for row in report["groups"]] == [(2, 2)]


def test_under_torchrun():
    done = torchrun(2, INFO, environment())
    assert done.code == 0 and "2 ranks by torchrun" in done.out, done.out


def test_missing_rank_ends_in_a_verdict(tmp_path):
    """The doctor waits no longer than asked, and says who is missing; also a rank that is not the reporter."""
    for absent, title in ((1, "FAIL  job"), (0, "rank 1:\nFAIL  job")):
        env = environment(HDMA_RENDEZVOUS=tmp_path, HDMA_TIMEOUT_S=0.5)
        (done,) = ranks(2, INFO, env, absent=[absent])
        assert done.code == 1 and title in done.out and f"rank {absent} is missing" in done.out, done.out


def test_half_a_launcher():
    done = info(RANK=1)
    assert done.code == 1 and "WORLD_SIZE is not" in done.out, done.out


def test_nobody_at_the_store():
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), HDMA_TIMEOUT_S=0.5)
    (done,) = ranks(2, INFO, env, absent=[0])
    assert done.code == 1 and "FAIL  job" in done.out, done.out


def test_well_host_passes():
    assert {name: check.verdict for name, check in verdicts().items() if check.verdict != "ok"} == {}


@pytest.mark.parametrize(
    ("name", "verdict", "more"),
    [
        ("descriptors", "fail", {"limits": {"descriptors": {"soft": 64, "hard": 64, "open": 4}}}),
        ("memory", "fail", {"limits": {"memory": {"available_nbytes": 1 << 26, "cgroup_nbytes": 1 << 27}}}),
        ("memory", "warn", {"limits": {"memory": {"available_nbytes": 1 << 28, "cgroup_nbytes": None}}}),
        ("processes", "fail", {"limits": {"pids": {"limit": 100, "used": 90, "left": 10}}}),
        ("processes", "warn", {"limits": {"pids": {"limit": 100, "used": 50, "left": 50}}}),
        ("/dev/shm", "warn", {"limits": {"shm": {"total_nbytes": 1 << 26, "free_nbytes": 1 << 20}}}),
        ("/dev/shm", "warn", {"limits": {"shm": None}}),
        ("cores", "warn", {"cpus": 2}),
        ("processor", "warn", {"machine": {"features": {"avx2": True, "f16c": False}}}),
    ],
)
def test_each_fault_is_found(name, verdict, more):
    check = verdicts(**more)[name]
    assert check.verdict == verdict and check.evidence and check.remedy


def test_tcp_without_a_network():
    wires = [{"name": "tcp", "devices": ["lo"]}, {"name": "verbs", "library": None, "devices": []}]
    assert verdicts(wires=wires)["tcp"].verdict == "warn"


def test_rendezvous_that_is_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HDMA_RENDEZVOUS", str(tmp_path / "none"))
    assert "is no folder" in verdicts()["variables"].evidence


OPEN_MPI = {"path": "/x/mpirun", "mpi": "Open MPI", "version": "5.0.11"}


def test_mpirun_that_would_refuse(monkeypatch):
    """As root, and for want of slots: the verdict names the variables."""
    for name in [name for name in os.environ if name.startswith(("OMPI_ALLOW", "PRTE_MCA"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root, slots, library = launchers.checks(OPEN_MPI, {"mpi": "Open MPI", "version": "5.0.11", "error": ""}, 2)
    assert root.verdict == slots.verdict == "warn" and library.verdict == "ok"
    assert "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in root.remedy
    assert "not enough slots" in slots.evidence
    assert "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe" in slots.remedy
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    (mpirun_check,) = launchers.checks(OPEN_MPI, {"mpi": "Open MPI", "version": "5", "error": ""}, 2)[:-1]
    assert mpirun_check.verdict == "ok"


def test_mpi4py_of_another_mpi():
    mpich = {"path": "/x/mpirun", "mpi": "MPICH", "version": "5.0.2"}
    _, check = launchers.checks(mpich, {"mpi": "Open MPI", "version": "5", "error": ""}, 8)
    assert check.verdict == "warn" and "MPI4PY_LIBMPI" in check.remedy
    _, check = launchers.checks(mpich, None, 8)
    assert "not installed" in check.evidence


def test_programs_that_do_not_end(monkeypatch, tmp_path):
    """An mpirun that hangs costs its time limit, not the doctor."""
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\nexec sleep 30\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(found, "_PROGRAM_S", 0.2)
    assert found.mpirun() == {"path": str(script), "mpi": "", "version": ""}


@pytest.mark.parametrize(
    ("printed", "mpi", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "Open MPI", "5.0.11"),
        ("HYDRA build details:\n    Version:             5.0.2\n    Release Date: 2026", "MPICH", "5.0.2"),
        ("slurm wrapper", "", ""),
    ],
)
def test_mpirun_says_what_it_is(monkeypatch, tmp_path, printed, mpi, version):
    script = tmp_path / "mpirun"
    script.write_text(f"#!/bin/sh\necho '{printed}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert found.mpirun() == {"path": str(script), "mpi": mpi, "version": version}


def test_control_groups(monkeypatch):
    """The tightest group counts, in both versions; file caches are memory that can be had."""
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": "50\n",
        "/sys/fs/cgroup/a/memory.max": "1000\n",
        "/sys/fs/cgroup/a/memory.current": "900\n",
        "/sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 300\n",
    }
    monkeypatch.setattr(host, "_read", lambda path: files.get(str(path), ""))
    assert host._cgroup_memory() == {"limit": 1000, "used": 900, "left": 400}
    files |= {
        "/proc/self/cgroup": "4:memory:/x\n3:pids:/\n0::/\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str((1 << 63) - 4096),
        "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1",
        "/sys/fs/cgroup/pids/pids.max": "100",
        "/sys/fs/cgroup/pids/pids.current": "30",
    }
    assert host._cgroup_memory() is None
    assert host.limits()["pids"] == {"limit": 100, "used": 30, "left": 70}


def test_descriptors_are_what_a_rank_takes(tmp_path):
    """Counted in ranks of 2x2 after start-up, which itself takes the margin."""
    code = "import os, hdma; n = len(os.listdir('/proc/self/fd')); c = hdma.init()\n"
    code += "print('took', len(os.listdir('/proc/self/fd')) - n)"
    env = environment(HDMA_RANKS_PER_NODE=2, HDMA_RENDEZVOUS=tmp_path)
    for done in ranks(4, ["-c", code], env):
        assert done.code == 0 and 8 <= int(done.out.split()[-1]) <= groups.descriptors(2, 2), done.out


def test_settings_do_not_change_the_environment(monkeypatch):
    monkeypatch.setenv("HDMA_DEBUG", "info")
    before = dict(os.environ)
    assert {row["name"]: row["value"] for row in settings.table()}["HDMA_DEBUG"] == "INFO"
    assert dict(os.environ) == before
