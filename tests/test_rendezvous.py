"""Ranks meet in every kind of place; those missing are named in time; a rank that joins twice is told so at once."""

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, environment, free_port, mpirun, ranks, run, torchrun

from hdma import errors, rendezvous
from hdma.launch import Launch
from hdma.rendezvous.folder import Folder

MEET = ROOT / "tests" / "programs" / "meet.py"


def results(folder: Path) -> dict[int, dict]:
    return {int(path.name.split(".")[0]): json.loads(path.read_text()) for path in folder.glob("*.json")}


def check_met(folder: Path, size: int, meeting: str) -> None:
    found = results(folder)
    assert sorted(found) == list(range(size))
    assert [r["error"] for r in found.values()] == [""] * size
    assert {r["meeting"] for r in found.values()} == {meeting}


def check_named(folder: Path, waiting: list[int], missing: str, timeout_s: float) -> None:
    found = results(folder)
    assert sorted(found) == waiting
    for result in found.values():
        assert result["error"].startswith("hdma.errors.TimeoutError") and missing in result["error"]
        # Who gives up first tells the others, which may have come later.
        assert timeout_s - 1.0 < result["took_s"] < timeout_s + 1.5


def test_single_process(tmp_path):
    with rendezvous.make(Launch(0, 1, 0, 1, "single process", None), 1.0) as place:
        assert place.exchange("key", b"x", 1.0) == [b"x"]


def test_folder(tmp_path):
    (tmp_path / "r").mkdir()
    done = ranks(5, [MEET, tmp_path / "r", "20"], environment(HDMA_RENDEZVOUS=tmp_path / "meet"))
    assert [d.code for d in done] == [0] * 5, done[0].out
    check_met(tmp_path / "r", 5, "Folder")
    assert os.listdir(tmp_path / "meet") == []


def test_folder_missing(tmp_path):
    (tmp_path / "r").mkdir()
    ranks(4, [MEET, tmp_path / "r", "4"], environment(HDMA_RENDEZVOUS=tmp_path / "meet"), absent=[0, 2])
    check_named(tmp_path / "r", [1, 3], "ranks 0, 2 are missing", 4)
    assert os.listdir(tmp_path / "meet") == []


def test_folder_twice(tmp_path):
    launch = Launch(0, 2, None, None, "test", "job/7")
    first = Folder(launch, tmp_path, "a")
    started = time.monotonic()
    who = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(errors.UsageError, match=f"rank 0 joined twice.*{who}"):
        Folder(launch, tmp_path, "a")
    assert time.monotonic() - started < 0.5
    first.close()
    assert os.listdir(tmp_path) == []


def test_folder_left_over_is_never_read(tmp_path):
    """What a killed job left is no member of this one: its rank counts as missing, its payload is not taken."""
    job = [Launch(rank, 2, None, None, "test", None) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        killed = list(pool.map(lambda me: Folder(me, tmp_path, "a"), job))
        assert list(pool.map(lambda place: place.exchange("key", b"old", 9.0), killed)) == [[b"old"] * 2] * 2
    next(tmp_path.glob("*/joined.1")).unlink()
    with pytest.raises(errors.TimeoutError, match="rank 0 is missing"):
        Folder(job[1], tmp_path, "a").exchange("key", b"new", 0.3)
    with pytest.raises(errors.UsageError, match=f"earlier job's, remove {tmp_path}"):
        Folder(job[0], tmp_path, "a")


def test_folder_unusable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UsageError, match="Set HDMA_RENDEZVOUS to a folder"):
        Folder(Launch(0, 2, None, None, "test", None), tmp_path / "file", "a")


def test_store_hosted_by_rank_0(tmp_path):
    done = ranks(4, [MEET, tmp_path, "30"], environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()))
    assert [d.code for d in done] == [0] * 4, done[0].out
    check_met(tmp_path, 4, "TorchStore")


def test_store_missing(tmp_path):
    """The slow import of torch is inside the time that is measured from the first look, so the limit is generous."""
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    ranks(3, [MEET, tmp_path, "6"], env, absent=[1])
    found = results(tmp_path)
    assert sorted(found) == [0, 2]
    assert all("rank 1 is missing" in result["error"] for result in found.values())
    assert all("hdma.errors.TimeoutError" in result["error"] and result["took_s"] < 12.0 for result in found.values())


def test_store_host_missing(tmp_path):
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    ranks(3, [MEET, tmp_path, "2"], env, absent=[0])
    found = results(tmp_path)
    assert sorted(found) == [1, 2]
    assert all("rank 0 is missing" in result["error"] for result in found.values())


def test_store_twice(tmp_path):
    """Two processes with RANK=1: the store counts them."""
    program = tmp_path / "twice.py"
    program.write_text(
        "import sys, torch.distributed as dist\n"
        "from hdma import errors, launch, rendezvous\n"
        "from hdma.rendezvous.torch_store import TorchStore\n"
        "store = dist.HashStore()\n"
        "one = launch.Launch(1, 2, None, None, 'test', None)\n"
        "TorchStore(one, store, 'a')\n"
        "TorchStore(one, store, 'b')\n"
        "try:\n"
        "    TorchStore(one, store, 'a')\n"
        "except errors.UsageError as error:\n"
        "    print(error)\n"
    )
    done = run([sys.executable, program], environment())
    assert done.code == 0 and "rank 1 joined twice" in done.out


def test_store_port_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=taken.getsockname()[1])
        ranks(2, [MEET, tmp_path, "5"], env, absent=[1])
    assert "rank 0 joined twice" in results(tmp_path)[0]["error"]


def test_torchrun(tmp_path):
    done = torchrun(3, [MEET, tmp_path, "30"], environment())
    assert done.code == 0, done.out
    check_met(tmp_path, 3, "TorchStore")
    assert {result["launcher"] for result in results(tmp_path).values()} == {"torchrun"}


def test_store_of_torch_distributed(tmp_path):
    """A program that calls init_process_group first needs no launcher; one that calls it afterwards shares the port."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch.distributed as dist\n"
        "rank, port, first = int(os.environ.pop('RANK')), os.environ.pop('MASTER_PORT'), sys.argv.pop() == 'first'\n"
        "group = dict(rank=rank, world_size=2, init_method=f'tcp://127.0.0.1:{port}')\n"
        "if first:\n"
        "    del os.environ['WORLD_SIZE']\n"
        "    dist.init_process_group('gloo', **group)\n"
        "else:\n"
        "    os.environ |= dict(RANK=str(rank), MASTER_PORT=port)\n"
        f"exec(open({str(MEET)!r}).read())\n"
        "if not first:\n"
        "    dist.init_process_group('gloo', **group)\n"
        "dist.barrier()\n"
    )
    for order in ("first", "later"):
        (tmp_path / order).mkdir()
        env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="lo")
        done = ranks(2, [program, tmp_path / order, "30", order], env)
        assert [d.code for d in done] == [0, 0], done[0].out + done[1].out
        check_met(tmp_path / order, 2, "TorchStore")


def test_mpi(tmp_path):
    done = mpirun(4, [MEET, tmp_path, "30"], environment())
    assert done.code == 0, done.out
    check_met(tmp_path, 4, "Mpi")


def test_mpi_missing(tmp_path):
    """MPI_Init would wait for the absent rank for ever."""
    done = mpirun(4, [MEET, tmp_path, "3", "2"], environment())
    assert done.code != 0
    found = results(tmp_path)
    assert found and 2 not in found
    for result in found.values():
        assert "hdma.errors.TimeoutError" in result["error"] and "rank 2 is missing" in result["error"]
        assert 2.5 < result["took_s"] < 5.0


def test_mpi_missing_after_mpi_init(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"from mpi4py import MPI\nexec(open({str(MEET)!r}).read())\n")
    mpirun(3, [program, tmp_path, "2", "0"], environment())
    check_named(tmp_path, [1, 2], "rank 0 is missing", 2.0)


def test_mpi_without_mpi4py(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no such package here')\n")
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    mpirun(2, [MEET, tmp_path, "5"], env)
    assert "Install hdma[mpi]" in results(tmp_path)[1]["error"]


def test_no_place_to_meet():
    with pytest.raises(errors.UsageError, match="Set HDMA_RENDEZVOUS"):
        rendezvous.make(Launch(0, 2, None, None, "RANK and WORLD_SIZE", None), 1.0)
