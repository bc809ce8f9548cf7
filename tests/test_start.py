"""Whatever goes wrong at start-up ends it on all ranks, soon, with the cause; and it can be tried again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from processes import Finished, environment, mpirun, ranks, run, run_all
from remains import nothing_remains  # noqa: F401
from test_collectives import PROGRAMS, grid_env, run_grid

from hdma import env, errors
from hdma.launch import Launch
from hdma.rendezvous.folder import Folder
from hdma.rendezvous.process import Process

PHASES = ["joined", "greeted", "listening", "linked", "with memory", "ready"]


def check(finished: list[Finished], victim: int, code: int = 0) -> None:
    codes = [each.code for each in finished]
    expected = [code if rank == victim else 0 for rank in range(len(codes))]
    assert codes == expected, "\n".join(each.out for each in finished)


@pytest.mark.parametrize("phase", PHASES)
def test_killed(phase: str, tmp_path: Path) -> None:
    """The others need not wait for the time-out; nothing stays in the folder, least of all the secret."""
    check(ranks(4, [PROGRAMS / "start.py", "kill", phase], grid_env((2, 2), tmp_path / "meet")), 3, -9)
    assert os.listdir(tmp_path / "meet") == []


@pytest.mark.parametrize("phase", ["greeted", "linked"])
@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=["1x2", "2x1"])
def test_killed_with_one_peer(grid: tuple[int, int], phase: str, tmp_path: Path) -> None:
    check(ranks(2, [PROGRAMS / "start.py", "kill", phase], grid_env(grid, tmp_path)), 1, -9)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=["1x2", "2x2"])
def test_failures_are_told_and_tried_again(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("start.py", grid, tmp_path / "meet", "retry")
    assert os.listdir(tmp_path / "meet") == []


def test_failures_are_told_by_mpi() -> None:
    done = mpirun(4, [PROGRAMS / "start.py", "retry"], environment(HDMA_RANKS_PER_NODE=2, HDMA_TIMEOUT_S=30))
    assert done.code == 0, done.out


def test_failures_are_told_by_a_store(tmp_path: Path) -> None:
    """Threads as ranks: what is tried is the board, not torch."""
    done = run([sys.executable, PROGRAMS / "anew.py", "store"], environment())
    assert done.code == 0, done.out


def test_failures_are_told_in_a_folder(tmp_path: Path) -> None:
    done = run([sys.executable, PROGRAMS / "anew.py", str(tmp_path)], environment())
    assert done.code == 0, done.out
    assert os.listdir(tmp_path) == []


def test_too_few_descriptors_on_one_rank(tmp_path: Path) -> None:
    run_grid("start.py", (2, 2), tmp_path, "descriptors")


@pytest.mark.parametrize("name", ["HDMA_CHUNK_BYTES", "HDMA_TIMEOUT_S"])
def test_a_setting_that_one_rank_cannot_use(name: str, tmp_path: Path) -> None:
    """It fails before the others have come, who are told all the same."""
    program = [
        "-c",
        "import os, time; rank = os.environ['RANK']; bad = rank == '1'\n"
        f"if bad: os.environ[{name!r}] = '1x'\n"
        "bad or time.sleep(0.5 + int(rank))\nimport hdma\ntry: hdma.init()\nexcept hdma.Error as error: print(error)",
    ]
    started = time.monotonic()
    # The second of the others comes when the first has left again.
    for rank, each in enumerate(ranks(3, program, environment(HDMA_RENDEZVOUS=tmp_path, HDMA_TIMEOUT_S=30))):
        told = "" if rank == 1 else "rank 1 could not start: "
        assert each.out.startswith(told + f"{name}='1x' cannot be used"), each.out
    assert time.monotonic() - started < 15 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("grid", [(2, 2)], ids=["2x2"])
def test_a_timer_interrupts_everything(grid: tuple[int, int], tmp_path: Path) -> None:
    run_grid("timers.py", grid, tmp_path)


def test_strangers_at_the_door(tmp_path: Path) -> None:
    run_grid("flooded.py", (3, 1), tmp_path, HDMA_TIMEOUT_S=30)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_64_ranks(tmp_path: Path) -> None:
    finished = ranks(64, [PROGRAMS / "crowd.py"], grid_env((1, 64), tmp_path / "meet"), timeout_s=100)
    assert all(each.code == 0 for each in finished), "\n".join(each.out for each in finished)
    assert os.listdir(tmp_path / "meet") == []


def test_two_processes_claim_a_rank(tmp_path: Path) -> None:
    program = "import hdma, time; c = hdma.init(); c.barrier()"
    env = environment(HDMA_RENDEZVOUS=tmp_path, HDMA_TIMEOUT_S=30, WORLD_SIZE=3)
    # The last comes late, so that the twins meet.
    commands = [
        ([sys.executable, "-c", f"import time; time.sleep({rank == 2}); {program}"], {**env, "RANK": str(rank)})
        for rank in (0, 1, 1, 2)
    ]
    finished = run_all(commands, 60)
    assert sorted(each.code for each in finished) == [0, 0, 0, 1]
    twin = next(each for each in finished if each.code)
    assert re.search(r"UsageError: rank 1 joined twice: .* holds process \d+ on .*Two processes claim", twin.out)


# What is left in a folder


@contextmanager
def another_process(source: str = "import time; time.sleep(60)") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", source], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def launch(rank: int, size: int = 2) -> Launch:
    return Launch(rank, size, None, None, "test", None)


def leave_behind(folder: Path, rank: int, end: Callable[[subprocess.Popen[bytes]], None]) -> None:
    """A process joins as a rank and does not leave."""
    source = (
        "import time; from pathlib import Path; from hdma.launch import Launch\n"
        "from hdma.rendezvous.folder import Folder\n"
        f"place = Folder(Launch({rank}, 2, None, None, 'test', None), Path({str(folder)!r}), 'a')\n"
        "time.sleep(60)"
    )
    with another_process(source) as process:
        until = time.monotonic() + 20
        while not list(folder.glob(f"*/joined.{rank}")) and time.monotonic() < until:
            time.sleep(0.02)
        end(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_the_place_of_a_killed_process_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_behind(tmp_path, 0, kill)
    assert list(tmp_path.glob("*/joined.0"))
    taken, failures = [], []

    def take() -> None:
        try:
            taken.append(Folder(launch(0), tmp_path, "a"))
        except errors.UsageError as error:
            failures.append(error)

    write = Folder._write

    def slow_to_return(self: Folder, name: str, content: bytes, exclusive: bool = False) -> None:
        write(self, name, content, exclusive)
        time.sleep(0.2)

    # Of several that want it, one gets it, also when they see each other's records at once.
    monkeypatch.setattr(Folder, "_write", slow_to_return)
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and all("joined twice" in str(error) for error in failures)
    taken[0].close()
    assert os.listdir(tmp_path) == []


def test_a_job_starts_where_one_was_killed(tmp_path: Path) -> None:
    env = grid_env((1, 2), tmp_path, HDMA_TIMEOUT_S=20)
    ranks(1, [PROGRAMS / "start.py", "kill", "joined"], env | {"RANK": "0"})
    with another_process() as stranger:  # All of them: one is killed while it waits for the other.
        program = f"import os, signal; os.kill({stranger.pid}, signal.SIGKILL); import hdma; hdma.init()"
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=env | {"RANK": "0", "WORLD_SIZE": "2"}, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 20
        while not list(tmp_path.glob("*/joined.0")) and time.monotonic() < until:
            time.sleep(0.02)
        kill(process)
    assert list(tmp_path.glob("*/joined.0"))
    run_grid("crowd.py", (1, 2), tmp_path, HDMA_TIMEOUT_S=20)
    assert os.listdir(tmp_path) == []


def test_the_place_of_a_live_process_is_not_taken(tmp_path: Path) -> None:
    def claim(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.UsageError, match=f"rank 1 joined twice: .* holds process {process.pid} on"):
            Folder(launch(1), tmp_path, "a")

    leave_behind(tmp_path, 1, claim)


def test_the_place_of_another_host_is_taken_after_an_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_host(wrote_s: float) -> Process:
        return Process(1, "far", "another boot", 1, wrote_s)

    with monkeypatch.context() as patch:
        patch.setattr(Process, "this", lambda: of_another_host(time.time() - 10))
        Folder(launch(0), tmp_path, "a", timeout_s=1)
    with pytest.raises(errors.UsageError, match=f"holds process 1 on far.*earlier job's, remove {tmp_path}"):
        Folder(launch(0), tmp_path, "a", timeout_s=1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda now=time.time: now() + 100)
        Folder(launch(0), tmp_path, "a", timeout_s=1).close()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    place = Folder(launch(0), tmp_path, "a")
    (path,) = tmp_path.iterdir()
    threading.Timer(0.3, lambda: [each.unlink() for each in path.iterdir()] and path.rmdir()).start()
    with pytest.raises(errors.DeviceError, match=r"cannot meet the others in .*No such file.*leave it alone"), place:
        place.exchange("key", b"x", 10.0)


def test_a_full_folder(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "hdma-test", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root to mount a tmpfs")
    try:
        places = [Folder(launch(rank), tmp_path, "a") for rank in (0, 1)]
        with pytest.raises(errors.DeviceError, match=r"No space left on device\. Free space there"), places[0]:
            places[0].exchange("key", b"x" * 100_000, 5.0)
        with pytest.raises(errors.DeviceError, match=r"rank 0 could not start: .*No space left"), places[1]:
            places[1].exchange("key", b"x", 5.0)
        # Not even for why it failed.
        places = [Folder(launch(rank), tmp_path, "a") for rank in (0, 1)]
        with open(tmp_path / "filler", "wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(b"x")
        with pytest.raises(errors.DeviceError, match=r"No space left on device\. Free space there"), places[0]:
            places[0].exchange("key", b"x", 5.0)
        with pytest.raises(errors.Error, match="rank 0 could not start: it had no room to say why"), places[1]:
            places[1].exchange("key", b"x", 5.0)
        (tmp_path / "filler").unlink()
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# What is printed


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []

    class Stderr:
        def write(self, text: str) -> None:
            writes.append(text)

        def flush(self) -> None:
            pass

    monkeypatch.setenv("HDMA_DEBUG", "INFO")
    monkeypatch.setattr(sys, "stderr", Stderr())
    env.debug("INFO", "a text")
    assert writes == ["hdma: a text\n"]
    monkeypatch.setattr(sys, "stderr", None)
    env.debug("INFO", "a text")


def test_ranks_that_outnumber_cores_are_told_of(tmp_path: Path) -> None:
    program = ["-c", "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import hdma; hdma.init()"]
    for each in ranks(2, program, grid_env((1, 2), tmp_path, HDMA_DEBUG="INFO")):
        assert "2 threads on 1 cores: waits sleep at once" in each.out, each.out
