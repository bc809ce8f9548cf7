"""The doctor: what it finds on this host and in a job, that it finds faults, and that it names the remedy."""

import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import rdma_tree
import stub_gpu
from processes import environment, free_port, mpirun, ranks, run, torchrun

from hdma import kernels
from hdma.errors import DeviceError
from hdma.info import checks, found, gpus, groups, host, job, kfd, launchers, rdma, settings
from hdma.info import text as written
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
        *("versions", "mpi", "machine", "limits", "wires", "devices", "rdma", "mpirun", "job"),
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
    assert "64 MiB on the host" in lines["HDMA_WINDOW_BYTES"] and "equal" in lines["HDMA_WINDOW_BYTES"]
    assert "HDMA_CHUNK_BYTE has no effect: did you mean HDMA_CHUNK_BYTES?" in done.out
    done = info("--env", "--json", HDMA_DEVICE="tpu")
    assert done.code == 1
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert "one of auto, host, cuda, hip" in rows["HDMA_DEVICE"]["error"] and rows["HDMA_WIRE"]["value"] == "auto"


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
    # Who ends takes its links along: not before all have counted.
    code += "took = len(os.listdir('/proc/self/fd')) - n; c.barrier(); print('took', took)"
    env = environment(HDMA_RANKS_PER_NODE=2, HDMA_RENDEZVOUS=tmp_path)
    for done in ranks(4, ["-c", code], env):
        assert done.code == 0 and 8 <= int(done.out.split()[-1]) <= groups.descriptors(2, 2), done.out


def test_settings_do_not_change_the_environment(monkeypatch):
    monkeypatch.setenv("HDMA_DEBUG", "info")
    before = dict(os.environ)
    assert {row["name"]: row["value"] for row in settings.table()}["HDMA_DEBUG"] == "INFO"
    assert dict(os.environ) == before


# GPUs: on the stub of a driver, and of what a driver might say.


def stub_info(runtime, *args, gpus=2, stub=None, **env):
    return info(*args, **stub_gpu.variables(stub_gpu.build(), runtime, gpus, **stub or {}), HDMA_DEVICE=runtime, **env)


def compiles(runtime):
    try:
        return bool(kernels.Compiler(kernels.KINDS[runtime]))
    except DeviceError:
        return False


def gpu_row(name="cuda", count=2, **more):
    """A driver of GPUs on which all is well, but for `more`."""
    arch = "sm_90" if name == "cuda" else "gfx942"
    link = {"type": "xGMI", "weight": 15, "engines": 4}
    row = {
        "name": name,
        "used": True,
        "library": "lib",
        "devices": ["/dev/x"],
        "error": "",
        "peer_error": "",
        "doing": "",
    }
    row["gpus"] = [{"name": "a GPU", "pci": f"0000:{n:02x}:00.0", "arch": arch} for n in range(count)]
    row["reaches"] = [[True] * count for _ in range(count)]
    row["links"] = [[None if a == b else link for b in range(count)] for a in range(count)] if name == "hip" else []
    row["polls"] = "" if name == "cuda" else "waits of streams are kernels"
    row["kernels"] = [{"arch": arch, "compiler": "/lib (1.0)", "kept": True, "error": ""}]
    return row | {"tried": []} | more


def gpu_verdicts(row, gpus_here=None, torch=None, **more):
    limits = {"memlock_nbytes": more.pop("memlock_nbytes", None)}
    return {check.name: check for check in gpus.checks(facts(devices=[row], limits=limits, **more), gpus_here, torch)}


@pytest.mark.parametrize("runtime", ["cuda", "hip"])
def test_gpus(runtime):
    done = stub_info(runtime, "--json", gpus=3)
    report = json.loads(done.out)
    (row,) = (device for device in report["devices"] if device["name"] == runtime)
    assert row["used"] and not row["error"] and [gpu["name"] for gpu in row["gpus"]] == ["stub GPU"] * 3
    assert row["gpus"][1]["pci"].lower() == "0000:1b:00.0" and row["reaches"] == [[True] * 3] * 3
    assert bool(row["polls"]) == (runtime == "hip")
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts[f"{runtime}"] == verdicts[f"{runtime} peers"] == verdicts[f"{runtime} waits"] == "ok"
    assert (verdicts[f"{runtime} kernels"] == "ok") == compiles(runtime) == (done.code == 0), done.out
    assert report["groups"][0]["gpu_window_nbytes"] == 256 << 20


def test_gpus_with_faults():
    done = stub_info("cuda", stub={"no_peer": 1}, CUDA_DEVICE_MAX_CONNECTIONS=1)
    assert done.code == 1 and "FAIL  cuda peers     GPUs 1-0 do not reach" in done.out, done.out
    assert "WARN  cuda waits     CUDA_DEVICE_MAX_CONNECTIONS=1: a thread polls them" in done.out
    done = stub_info("hip", HSA_ENABLE_SDMA=0, HIP_LAUNCH_BLOCKING=1, GPU_MAX_HW_QUEUES=2)
    for text in ("HSA_ENABLE_SDMA=0: all copies run on compute units", "HIP_LAUNCH_BLOCKING=1", "GPU_MAX_HW_QUEUES=2"):
        assert f"WARN  hip variables  {text}" in done.out, done.out


def test_drivers_that_fail():
    done = stub_info("cuda", stub={"fail": "cuDeviceGetName:999"})
    assert done.code == 1 and "FAIL  cuda           the CUDA driver (libcuda.so.1): cuDeviceGetName()" in done.out, (
        done.out
    )
    done = stub_info("hip", stub={"fail": "hipDeviceCanAccessPeer:1"})
    assert "WARN  hip peers      hipDeviceCanAccessPeer(0, 1)" in done.out, done.out


def test_driver_without_a_gpu():
    done = info(**stub_gpu.variables(stub_gpu.build(), no_gpu=1), CUDA_VISIBLE_DEVICES="")
    assert "which shows no GPU (CUDA_VISIBLE_DEVICES=): tensors in host memory only" in done.out, done.out
    assert "a HIP runtime, which shows no GPU" in done.out
    done = info(HDMA_DEVICE="host", **stub_gpu.variables(stub_gpu.build()))
    assert done.code == 0 and "HDMA_DEVICE=host: they are not looked at" in done.out, done.out


@pytest.mark.parametrize(
    ("body", "error"),
    [("pause();", "gave no answer within 0.5 s while loading"), ("abort();", "ended by signal 6 while loading")],
)
def test_drivers_that_hang_or_crash(monkeypatch, tmp_path, body, error):
    code = f"#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void start() {{ {body} }}"
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", library], input=code, text=True, check=True)
    monkeypatch.setattr(gpus, "_DRIVER_S", 0.5 if "pause" in body else 20.0)
    (row,) = gpus.look([{"name": "cuda", "used": False, "library": library, "devices": ["/dev/nvidia0"]}])
    assert error in row["error"] and not row["used"]
    assert gpu_verdicts(row)["cuda"].verdict == "fail"


def test_a_driver_that_torch_brings(monkeypatch, tmp_path):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    library = tmp_path / "torch" / "lib" / "libamdhip64.so"
    library.symlink_to(stub_gpu.build() / "libamdhip64.so")
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = (row for row in found.devices() if row["name"] == "hip")
    if row["library"] == str(library):  # Not where ROCm is installed.
        monkeypatch.setenv("STUB_GPUS", "1")
        (row,) = gpus.look([row])
        assert len(row["gpus"]) == 1, row


def test_each_gpu_is_used():
    if not compiles("cuda"):
        pytest.skip("no compiler for CUDA kernels")
    done = stub_info("cuda", "--try")
    assert done.code == 0 and "ok    cuda use       a first call works on each of 2" in done.out, done.out
    assert "sm_90: " in done.out
    done = stub_info("cuda", "--try", stub={"fail": "cuMemHostRegister_v2:2"})
    assert done.code == 1 and "FAIL  cuda use       GPU 1: cuMemHostRegister(" in done.out, done.out


def test_gpus_of_a_well_host():
    for name in ("cuda", "hip"):
        found = gpu_verdicts(gpu_row(name), gpus_here=8, torch="2.13.0")
        assert {check.verdict for check in found.values()} == {"ok"}, found
    assert gpus.checks(facts(), None, None)[0].verdict == "ok"


@pytest.mark.parametrize(
    ("name", "verdict", "row", "more"),
    [
        ("cuda", "warn", {"library": None, "gpus": []}, {}),
        ("cuda", "warn", {"gpus": []}, {}),
        ("cuda", "fail", {"gpus": [], "error": "cuInit(0): too old (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803)"}, {}),
        ("cuda", "warn", {"gpus": [], "error": "cuInit(0): no device (CUDA_ERROR_NO_DEVICE, 100)"}, {}),
        ("cuda peers", "warn", {"count": 3, "reaches": [[True, True, False], [True] * 3, [False, True, True]]}, {}),
        ("cuda kernels", "fail", {"kernels": [{"arch": "sm_90", "error": "no nvrtc"}]}, {}),
        ("cuda waits", "warn", {"polls": "CUDA_LAUNCH_BLOCKING is set"}, {}),
        ("cuda use", "fail", {"tried": [{"error": "cuMemAlloc(): out of memory", "s": 1.0}]}, {}),
        ("pinned memory", "fail", {}, {"here": 1 << 20}),
        ("gpus", "warn", {}, {"gpus_here": 2}),
        ("torch", "warn", {}, {"torch": "2.13.0+cpu"}),
    ],
)
def test_each_fault_of_gpus_is_found(name, verdict, row, more):
    check = gpu_verdicts(gpu_row(**row), **more)[name]
    assert check.verdict == verdict and check.evidence and check.remedy


def test_locked_memory(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check = gpu_verdicts(gpu_row(), memlock_nbytes=1 << 16)["pinned memory"]
    assert check.verdict == "warn" and "64 KiB" in check.evidence and "ulimit -l" in check.remedy


def test_kernels_that_cannot_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    row = gpu_row(kernels=[{"arch": "sm_90", "compiler": "/lib (1.0)", "kept": False, "error": ""}])
    assert "every process compiles" in gpu_verdicts(row)["cuda kernels"].evidence
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    check = gpu_verdicts(row)["cuda kernels"]
    assert check.verdict == "ok" and "at the first use" in check.evidence


def test_links_of_amd_gpus(tmp_path):
    """Three GPUs behind one CPU: two by xGMI, the third by PCIe; one of them is not among the visible ones."""

    def node(number, links=(), **properties):
        for folder, more in {"": properties, **dict(links)}.items():
            path = tmp_path / str(number) / folder
            path.mkdir(parents=True, exist_ok=True)
            (path / "properties").write_text("".join(f"{name} {value}\n" for name, value in more.items()))

    def link(to, kind, weight, engines=0):
        return {
            "type": kind,
            "node_from": 9,
            "node_to": to,
            "weight": weight,
            "recommended_sdma_engine_id_mask": engines,
        }

    node(0, {"io_links/0": link(1, 2, 20)}, simd_count=0, cpu_cores_count=64)
    one = {"io_links/0": link(0, 2, 20), "io_links/1": link(2, 11, 15, 16384), "p2p_links/0": link(10, 2, 40)}
    node(1, one, simd_count=1216, location_id=0x0500, domain=0, gfx_target_version=90402)
    node(2, {"io_links/0": link(1, 11, 15, 4)}, simd_count=1216, location_id=0x2600, domain=0)
    node(10, {"p2p_links/0": link(1, 7, 40)}, simd_count=1216, location_id=0x2609, domain=1)
    (tmp_path / "1" / "io_links" / "2").mkdir()  # Not to be read.
    found = kfd.links(["0000:05:00.0", "0001:26:01.1", "0000:26:00.0"], str(tmp_path))
    assert [[each and each["type"] for each in row] for row in found] == [
        [None, "PCIe", "xGMI"],
        ["type 7", None, None],
        ["xGMI", None, None],
    ]
    assert found[0][2] == {"type": "xGMI", "weight": 15, "engines": 16384}
    assert kfd.links(["0000:05:00.0"], str(tmp_path / "none")) == []
    check = gpu_verdicts(gpu_row("hip", 3, links=found))["hip links"]
    assert "1 of 6 PCIe" in check.evidence and "2 of 6 xGMI" in check.evidence and "for 2 of them" in check.evidence


# RDMA: on made-up trees of /sys.


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A host without RDMA devices yet; libibverbs is there, and shows what the kernel does."""
    for name in [name for name in os.environ if name.startswith("HDMA_")]:
        monkeypatch.delenv(name)
    made = rdma_tree.Tree(tmp_path)
    monkeypatch.setattr(rdma.nics, "library_error", lambda: "")
    monkeypatch.setattr("hdma.nics.agreement.library_error", lambda: "")
    monkeypatch.setattr(rdma, "_seen", lambda: [nic.name for nic in rdma.nics.find(str(made))])
    return made


def rdma_row(tree, *gpus):
    devices = [{"name": "cuda", "gpus": [{"pci": address} for address in gpus]}]
    return rdma.near(rdma.look(str(tree)), devices, str(tree)) | {"taken": [], "why": ""}


def rdma_verdicts(row, **more):
    return {check.name: check for check in rdma.checks(facts(**more), row)}


def test_no_rdma_device(tree, monkeypatch):
    row = rdma_row(tree)
    assert rdma.wire(row) == {"name": "verbs", "used": False, "library": "libibverbs.so.1", "devices": []}
    (check,) = rdma.checks(facts(), row)
    assert check.verdict == "ok" and "there is no RDMA device" in check.evidence and "TCP" in check.evidence
    (check,) = rdma.checks(facts(), row | {"library": None})
    assert check.verdict == "ok" and "nor is there libibverbs.so.1" in check.evidence and "apt" in check.evidence
    assert written._rdma(row) == ""
    monkeypatch.setenv("HDMA_WIRE", "verbs")
    (check,) = rdma.checks(facts(), rdma_row(tree))
    assert check.verdict == "fail" and "HDMA_WIRE=tcp" in check.remedy


def test_rdma_of_a_well_host(monkeypatch, tmp_path, tree):
    """The text has ports, their GIDs and the matrix; JSON the same."""
    made, addresses = rdma_tree.dgx(tmp_path / "dgx")
    monkeypatch.setattr(rdma, "_seen", lambda: [nic.name for nic in rdma.nics.find(str(made))])
    row = rdma_row(made, *addresses)
    row["taken"], row["why"], wrong = rdma.taken(row, [row], facts(topology=Topology(1, 1)), 0)
    assert row["taken"] == ["mlx5_4:1"] and row["why"] == "of 10 equally near ones the fastest" and wrong == []
    assert json.dumps(row) and rdma.wire(row)["used"]
    found = rdma_verdicts(row | {"locked_nbytes": None})
    assert {check.verdict for check in found.values()} == {"ok"}, found
    assert "pinned host memory" in found["rdma and GPUs"].evidence
    lines = {line.split()[0]: line for line in written._rdma(row).splitlines() if line}
    assert "InfiniBand" in lines["mlx5_4:1"] and "400 Gb/sec (4X NDR)" in lines["mlx5_4:1"]
    assert "ACTIVE (LinkUp)" in lines["mlx5_4:1"] and "*0: fe80::e42:a1ff:fe00:1" in lines["mlx5_4:1"]
    assert "*3: 10.0.0.1 (RoCE v2), 0: fe80:" in lines["mlx5_20:1"] and "0000:e8:00.0" in lines["mlx5_20:1"]
    matrix = [line.split() for line in written._rdma(row).splitlines() if line.startswith("cuda")]
    names = written._rdma(row).split("GPU \\ device")[1].split("\n")[0].split()
    assert [names[line[2:].index("PIX*")] for line in matrix] == [
        *("mlx5_7", "mlx5_6", "mlx5_5", "mlx5_4", "mlx5_10", "mlx5_11", "mlx5_12", "mlx5_13")
    ]
    assert matrix[0].count("NODE") == 4 and matrix[0].count("SYS") == 5
    assert "between nodes: rank 0 mlx5_4:1; of this rank: of 10" in written._rdma(row)


@pytest.mark.parametrize(
    ("device", "verdict", "evidence"),
    [
        ({"state": "1: DOWN", "physical": "2: Polling"}, "warn", "mlx5_0 port 1 is DOWN"),
        ({"gids": ()}, "warn", "has no RoCE v2 GID"),
        ({"device_file": False}, "warn", "cannot be opened"),
        ({}, "ok", "1 device, usable: mlx5_0:1 (RoCE v2 over IPv4)"),
    ],
)
def test_rdma_device(tree, monkeypatch, device, verdict, evidence):
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0", **device)
    row = rdma_row(tree)
    check = rdma_verdicts(row)["rdma"]
    assert check.verdict == verdict and evidence in check.evidence and bool(check.remedy) == (verdict != "ok")
    assert "mlx5_0:1" in written._rdma(row)
    if verdict != "ok":
        assert row["devices"][0]["ports"][0]["fault"] in check.evidence and "HDMA_WIRE=tcp" in check.remedy
        monkeypatch.setenv("HDMA_WIRE", "verbs")
        assert rdma_verdicts(rdma_row(tree))["rdma"].verdict == "fail"


def test_rdma_that_is_not_wanted(tree, monkeypatch):
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    monkeypatch.setenv("HDMA_WIRE", "tcp")
    (check,) = rdma.checks(facts(), rdma_row(tree))
    assert check.verdict == "ok" and check.evidence == "HDMA_WIRE=tcp: 1 device, not used"


def test_no_libibverbs(tree, monkeypatch):
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    for place in ("hdma.info.rdma.nics", "hdma.nics.agreement"):
        monkeypatch.setattr(f"{place}.library_error", lambda: "cannot open shared object file")
    row = rdma_row(tree)
    found = rdma_verdicts(row)
    assert found["rdma"].verdict == found["rdma library"].verdict == "warn"
    assert "apt install libibverbs1 ibverbs-providers" in found["rdma library"].remedy
    assert "no libibverbs" in written._rdma(row)


def test_no_provider(tree, monkeypatch):
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    monkeypatch.setattr(rdma, "_seen", lambda: [])
    check = rdma_verdicts(rdma_row(tree))["rdma library"]
    assert check.verdict == "warn" and "does not show mlx5_0" in check.evidence and "ibverbs-providers" in check.remedy


def test_rdma_devices_by_the_library():
    """On a host without any, and with any."""
    assert {*rdma._seen()} <= {nic.name for nic in rdma.nics.find()}


def test_locked_memory_of_rdma(tree, monkeypatch):
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    row = rdma_row(tree)
    check = rdma_verdicts(row | {"locked_nbytes": 1 << 20})["rdma memory"]
    assert check.verdict == "warn" and "window is 11.0 MiB" in check.evidence and "1.0 MiB" in check.evidence
    assert "ulimit -l unlimited" in check.remedy and "HDMA_WINDOW_BYTES" in check.remedy
    assert rdma_verdicts(row | {"locked_nbytes": 1 << 24})["rdma memory"].verdict == "ok"
    assert rdma_verdicts(row | {"locked_nbytes": None})["rdma memory"].verdict == "ok"
    # With GPUs the windows are larger.
    assert rdma_verdicts(row | {"locked_nbytes": 1 << 24, "gpus": [1]})["rdma memory"].verdict == "warn"


@pytest.mark.parametrize(
    ("capabilities", "users", "limit"),
    [
        ("000001ffffffffff", "0 0 4294967295", None),
        ("000001ffffffbfff", "0 0 4294967295", 65536),
        ("000001ffffffffff", "0 1000 1", 65536),
    ],
)
def test_limit_of_locked_memory(tree, monkeypatch, capabilities, users, limit):
    """Void with CAP_IPC_LOCK, but not with that of a namespace of users."""
    tree.write("proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}")
    tree.write("proc/self/uid_map", f"  {users}")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, resource.RLIM_INFINITY))
    assert rdma.look(str(tree))["locked_nbytes"] == limit
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert rdma.look(str(tree))["locked_nbytes"] is None


def test_rdma_names_of_nothing(tree, monkeypatch):
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    monkeypatch.setenv("HDMA_NIC", "mlx5_0,mlx5_9:1")
    check = rdma_verdicts(rdma_row(tree))["rdma names"]
    assert check.verdict == "warn" and "there is no mlx5_9:1 here" in check.evidence and "mlx5_0:1" in check.remedy


def test_rdma_device_that_is_lost(tmp_path, tree, monkeypatch):
    """That of the third GPU: it has to take another one, farther."""
    made, addresses = rdma_tree.dgx(tmp_path / "dgx")
    made.write("sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN")
    row = rdma_row(made, *addresses)
    check = rdma_verdicts(row)["rdma nearest"]
    assert check.verdict == "warn" and "nearest to GPU 2 (mlx5_5 port 1 is DOWN" in check.evidence
    assert "NODE*" in next(line for line in written._rdma(row).splitlines() if line.startswith("cuda 2"))


def test_rdma_variables_that_cannot_be(tree, monkeypatch):
    """Of values that cannot be read the check of variables tells; of those that do not go together this one."""
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    monkeypatch.setenv("HDMA_QP_TIMEOUT", "20")
    monkeypatch.setenv("HDMA_TIMEOUT_S", "30")
    check = rdma_verdicts(rdma_row(tree))["rdma"]
    assert check.verdict == "fail" and "HDMA_QP_TIMEOUT=20" in check.evidence
    monkeypatch.setenv("HDMA_NIC", ",")
    assert "rdma" not in rdma_verdicts(rdma_row(tree))


def test_rdma_of_a_job(tree):
    """Which port each rank takes, or why they do not agree."""
    tree.nic("mlx5_0", "pci0000:00/0000:01:00.0")
    tree.nic("mlx5_1", "pci0000:00/0000:02:00.0")
    row = rdma_row(tree)
    pair = facts(topology=Topology(2, 1))
    assert rdma.taken(row, [row, row], pair, 1)[:2] == (
        *(["mlx5_0:1", "mlx5_0:1"], "of 2 equally near ones by turns of the ranks"),
    )
    ports, _, (check,) = rdma.taken(row, [row, rdma_row(rdma_tree.Tree(tree.root / "bare"))], pair, 0)
    assert ports == [] and check.verdict == "fail" and "rank 1 cannot use RDMA" in check.evidence
    assert "HDMA_WIRE=tcp" in check.remedy


def test_links_of_a_job_over_rdma():
    me = job.Job(size=4, comm=SimpleNamespace(topology=Topology(2, 2)))
    found = job.describe(me, [{"host": "h", "pid": rank} for rank in range(4)], "rdma")
    assert found["links"][0] == ["self", "memory", "rdma", ""] and "rdma" in written._job(found)


def test_why_a_port_is_taken():
    def offer(position, distance=4, **more):
        keys = {"device": "d", "port": 1, "gid_index": 0, "gid": "", "link_layer": "", "fabric": "", "told": False}
        return keys | {"rate_gbit_s": 100.0, "position": position, "distance": distance} | more

    def why(offers, number=0):
        return rdma._why(offers, rdma.nics.Offer(**offers[number]))

    assert why([offer(0, told=True), offer(1, told=True)]) == "HDMA_NIC names it"
    assert why([offer(0)]) == "the only one that can be used"
    assert why([offer(0), offer(1, 200)]) == "the nearest"
    assert why([offer(0), offer(1, 200)], 1) == "the nearest that all ranks of its rail have"
