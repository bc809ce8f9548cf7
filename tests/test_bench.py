"""The definitions on figures worked out by hand, the report on made-up records, the benchmarks themselves, small."""

import json
import sys

import collectives
import intervals
import numpy as np
import operations
import pytest
import record
import report_blocks
import report_collectives
import report_overlap
import stub_verbs
import timeline
import torch
import wire
from processes import ROOT, environment, mpirun, ranks, run

HEADER = {
    "kind": "header",
    "date": "2026-01-02T03:04:05+00:00",
    "ranks": 4,
    "nodes": 2,
    "memory": "host",
    "machine": {"cpu": "abacus", "cores": 2},
    "versions": {"torch": "9.9"},
}


def overlap(backend, gemm, both_s, **more):
    row = {"kind": "overlap", "backend": backend, "collective": "all_gather", "gemm": gemm, "shard_nbytes": 1 << 20}
    turns = {"gemm_s": [2.0] * 3, "collective_s": [1.0] * 3, "both_s": both_s, "gemm_beside_s": [2.5] * 3}
    return {**row, **turns, **more}


def test_definitions():
    assert report_overlap.hidden_fraction(10.0, 4.0, 10.0) == 1.0  # the collective cost nothing
    assert report_overlap.hidden_fraction(10.0, 4.0, 14.0) == 0.0  # one after the other
    assert report_overlap.hidden_fraction(10.0, 4.0, 12.0) == 0.5
    assert report_overlap.hidden_fraction(4.0, 10.0, 12.0) == 0.5  # the shorter one may be the GEMM
    assert report_overlap.hidden_fraction(10.0, 4.0, 16.0) == -0.5
    assert report_overlap.gemm_slowdown(10.0, 12.5) == 1.25
    assert report_overlap.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert report_overlap.geometric_mean([]) != report_overlap.geometric_mean([])


def test_ratios_are_taken_within_a_turn():
    """A machine that slows down between turns must not show as slowdown: pairs are compared, then the median taken."""
    row = overlap("hdma", [8, 8, 8], [2.0, 4.0, 8.0], gemm_s=[1.0, 2.0, 4.0], gemm_beside_s=[1.1, 2.2, 4.4])
    row["collective_s"] = [1.0, 2.0, 4.0]
    summary = report_overlap.summarise(row)
    assert summary["slowdown"] == pytest.approx(1.1)
    assert summary["hidden"] == 0.0
    assert summary["both_s"] == 4.0


def test_means():
    shapes = ([8, 8, 8], [8, 8, 9])
    rows = [overlap("hdma", g, [b] * 3) for g, b in zip(shapes, (2.0, 2.0))]
    rows += [overlap("gloo", g, [b] * 3) for g, b in zip(shapes, (2.0, 8.0))]
    found = report_overlap.with_means([report_overlap.summarise(row) for row in rows])
    means = {row["backend"]: row for row in found if row["gemm"] == "mean"}
    assert [row["versus"] for row in found[:2]] == [1.0, 4.0]
    assert means["hdma"]["versus"] == pytest.approx(2.0) and means["gloo"]["versus"] == pytest.approx(1.0)
    assert means["gloo"]["both_s"] == pytest.approx(4.0)
    assert means["hdma"]["hidden"] == 1.0 and means["gloo"]["hidden"] == pytest.approx((1.0 - 5.0) / 2)


def test_table_without_gloo():
    table = report_overlap.table([HEADER, overlap("hdma", [8, 8, 8], [2.0] * 3)])
    assert "8x8x8" in table and "2000.0" in table and "1.25" in table and "100 %" in table
    assert "two CPU cores show the method, not the benefit on GPUs" in table
    assert "hidden        (GEMM + coll. - together) / min(GEMM, coll.)" in table


def test_report_command(tmp_path):
    rows = [overlap(backend, [8, 8, 8], [s] * 3) for backend, s in (("hdma", 2.0), ("gloo", 3.0))]
    record.write(tmp_path / "o.json", [HEADER, *rows])
    args = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "o.json", "--plot", tmp_path / "o.png"]
    done = run(args, environment())
    assert done.code == 0 and "1.50" in done.out, done.out
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_gpus():
    """busbw from the calls of a region, the interval of the slowdown, and a collective that did not keep up."""
    header = {**HEADER, "memory": "gpu", "machine": {"cpu": "abacus", "cores": 2, "gpu": "slide rule", "gpus": 4}}
    header["versions"] = {"torch": "9.9", "driver": "1.0"}
    more = {"calls": 3, "busbw_factor": 0.75 * 4, "gemm_beside_s": [2.2, 2.4, 2.6]}
    rows = [overlap("hdma", [8, 8, 8], [2.0] * 3, lost=[0.1, 0.1, 0.3], **more)]
    rows += [overlap("nccl", [8, 8, 8], [3.0] * 3, lost=[0.5] * 3, **more)]
    summary = report_overlap.summarise(rows[0])
    assert summary["busbw"] == pytest.approx(3 * 0.75 * 4 * (1 << 20) / 1.0 / 1e9) and summary["lost"] == 0.1
    mine = report_overlap.with_means([summary])[0]
    assert mine["interval"] == pytest.approx((1.1, 1.3))
    table = report_overlap.table([header, *rows])
    assert "vs nccl" in table and "1.50" in table and "50 %!" in table and "4x slide rule, driver 1.0" in table
    assert "CPU cores show the method" not in table


def test_a_timeline_of_spans():
    """Spans that overlap count once, and what copies and kernels share is told apart."""
    trace = [
        {"cat": "kernel", "ts": 0, "dur": 4},
        {"cat": "kernel", "ts": 2, "dur": 4},
        {"cat": "gpu_memcpy", "ts": 5, "dur": 5},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
    ]
    copies, kernels = timeline.split(trace)
    assert (timeline.length(copies), timeline.length(kernels)) == (5, 6)
    assert timeline.shared(copies, kernels) == 1 and timeline.merged(kernels) == [(0, 6)]
    assert timeline.parse_sizes("1M,16K") == [1 << 20, 16 << 10]


def test_intervals():
    """They hold what they should: the medians of samples, nearly always; and nothing where there is no spread."""
    chance = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        low, high = intervals.interval_of_median(np.exp(chance.normal(0.0, 0.1, 21)))
        held += low <= 1.0 <= high
    assert 180 <= held <= 199
    assert intervals.interval_of_mean_of_medians([[2.0, 2.0], [8.0, 8.0]]) == pytest.approx((4.0, 4.0))


def test_curve_of_blocks(tmp_path):
    """The rate beside a GEMM is that of the kernels done by its end; what the GEMM lost is told for each GB of them."""
    row = {"kind": "blocks", "work": "sum of 2", "blocks": 16, "priority": "high", "nbytes": 10**9, "kernel_s": 0.5}
    row |= {"gemm_s": [1.0] * 3, "gemm_beside_s": [1.25] * 3, "kernels_beside": [5.0] * 3}
    summary = report_blocks.summarise(row)
    assert (summary["alone"], summary["beside"], summary["slowdown"]) == (2.0, 4.0, 1.25)
    assert summary["interval"] == pytest.approx((1.25, 1.25)) and summary["lost"] == pytest.approx(50.0)
    record.write(tmp_path / "b.jsonl", [HEADER, row, row | {"priority": "low"}])
    args = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "b.jsonl", "--plot", tmp_path / "b.png"]
    done = run(args, environment())
    assert done.code == 0 and "50.00" in done.out, done.out
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_overlap_runs(tmp_path):
    small = ["--shapes", "16x32x32,16x32x48", "--turns", "3", "--warm-limit-s", "0.2", "--json", tmp_path / "o.json"]
    done = mpirun(4, [ROOT / "bench" / "overlap.py", *small], environment(HDMA_RANKS_PER_NODE=2))
    assert done.code == 0 and "GEMM slowdown" in done.out, done.out
    head, *rows = [json.loads(line) for line in (tmp_path / "o.json").read_text().splitlines()]
    assert (head["ranks"], head["nodes"]) == (4, 2) and "overlap.py" in head["command"]
    assert head["environment"]["HDMA_RANKS_PER_NODE"] == "2" and head["versions"]["torch"]
    cases = {(row["backend"], row["collective"], tuple(row["gemm"])) for row in rows}
    assert len(cases) == len(rows) == 8
    for row in rows:
        assert all(len(row[key]) == 3 for key in ("gemm_s", "collective_s", "both_s", "gemm_beside_s"))
        assert all(both >= beside > 0.0 for both, beside in zip(row["both_s"], row["gemm_beside_s"]))


def run_collectives(size, args, turn_s, **env):
    """With turns shorter than those of a measurement."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import collectives; "
    code += f"collectives.TURN_S = {turn_s}; collectives.main()"
    return mpirun(size, ["-c", code, *args], environment(**env))


def test_collectives_runs(tmp_path):
    """Sizes are of the whole, the same for all backends; every row has exact results, times and the copy bound."""
    args = ["-b", "4K", "-e", "64K", "-f", "16", "-n", "3", "-w", "1", "-d", "bfloat16", "-B", "hdma,mpi"]
    done = run_collectives(2, [*args, "--json", tmp_path / "c.json"], 0.005)
    assert done.code == 0 and "busbw" in done.out and "# Out of bounds values : 0 OK" in done.out, done.out
    assert "mpi reduce_scatter left out: MPI has no sum of bfloat16" in done.out
    header, *rows = record.read(tmp_path / "c.json")
    assert header["libraries"]["mpi"].startswith("Open MPI 5") and header["bound"] == "copy"
    cases = {(r["collective"], r["backend"], r["in_place"], r["nbytes"]) for r in rows}
    assert len(cases) == len(rows) == 2 * (2 * 2 + 2 * 1)
    assert {(row["nbytes"], row["count"]) for row in rows} == {(4096, 1024), (65536, 16384)}
    assert all(len(row["time_s"]) == len(row["bound_s"]) == 3 and row["wrong"] == 0 for row in rows)


def test_small_calls_are_repeated(monkeypatch):
    """A turn is long enough that the clock and the barrier do not dominate; a first, slow call does not mislead."""

    class Alone:
        def maxima(self, values):
            return values

        def timed(self, region):
            before = calls[0]
            region()
            return 1e-6 * (calls[0] - before) + (1.0 if before == 0 else 0.0)

    calls = [0]

    def call():
        calls[0] += 1

    monkeypatch.setattr(collectives, "TURN_S", 0.001)
    assert collectives.TURN_S / 2 <= 1e-6 * collectives.repeats_for(Alone(), call) <= 4 * collectives.TURN_S


@pytest.mark.long
def test_all_collectives_over_two_nodes():
    """Every collective, type and operation that a backend has; those that it lacks are named, not failed."""
    args = ["--collectives", "all", "-o", "all", "-d", "uint8,half", "-b", "3000", "-e", "3000", "-n", "1", "-w", "0"]
    done = run_collectives(4, [*args, "-u", "3", "-r", "1", "-B", "gloo,hdma"], 1e-4, HDMA_RANKS_PER_NODE=2)
    assert done.code == 0 and "# Out of bounds values : 0 OK" in done.out, done.out
    assert "gloo reduce_scatter left out: uint8 has no average" in done.out
    rows = [line.split() for line in done.out.splitlines() if not line.startswith("#")]
    assert {row[-1] for row in rows} == set(operations.COLLECTIVES)


def test_wrong_elements_are_counted(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "import backends, collectives\n"
        "class Wrong(backends.Gloo):\n"
        "    def all_gather(self, out, inp, async_op=False):\n"
        "        super().all_gather(out, inp)\n"
        "        out[-3:] += backends.dist.get_rank() == 1\n"
        "backends.BACKENDS['wrong'] = Wrong\n"
        "collectives.main()\n"
    )
    args = ["-B", "gloo,wrong", "--collectives", "all_gather", "-b", "1K", "-e", "1K", "-n", "1"]
    done = mpirun(2, [program, *args], environment())
    assert done.code == 1 and "# Out of bounds values : 6 FAILED" in done.out, done.out


def test_row_that_hangs_ends_with_T(tmp_path):
    """-T ends all ranks and says where they were."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "import backends, collectives\n"
        "class Slow(backends.Gloo):\n"
        "    def barrier(self):\n"
        "        time.sleep(60)\n"
        "backends.BACKENDS['slow'] = Slow\n"
        "collectives.main()\n"
    )
    # Without MPI, which would leave shared memory behind where a process ends like this.
    args = [program, "-B", "slow", "--collectives", "barrier", "-T", "0.5"]
    for done in ranks(2, args, environment(HDMA_RENDEZVOUS=tmp_path)):
        assert done.code == 1 and "Timeout" in done.out and "in barrier" in done.out, done.out


@pytest.mark.long
def test_all_measurements_in_one_go(tmp_path):
    """Without a GPU: a step that works leaves records, text and plot, others are told, and ranks end in time."""
    args = ["-D", "host", "-B", "hdma", "--ranks", "2", "--largest", "64K", "--folder", tmp_path, "--name", "run"]
    program, env = ROOT / "bench" / "gpus.py", environment()
    done = run([sys.executable, program, *args, "--turns", "2", "--steps", "small,collectives,timeline"], env, 100)
    assert "# small: done" in done.out and "# collectives: done" in done.out and done.code == 1, done.out
    assert done.out.endswith("timeline ended with code 1\n")
    made = {"collectives.jsonl", "collectives.png", "collectives.txt", "small.jsonl", "small.txt", "timeline.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {f"run-{name}" for name in made}
    more = ["--turns", "1000000", "--steps", "small", "--limit-s", "4"]
    done = run([sys.executable, program, *args, *more], env, 60)
    assert done.code == 1 and "small took longer than 4 s" in done.out


def test_mpi_without_its_mpirun():
    env = environment(RANK=0, WORLD_SIZE=2)
    done = run([sys.executable, ROOT / "bench" / "collectives.py", "-B", "mpi"], env)
    assert done.code == 1 and "Start the benchmark with the mpirun of the MPI" in done.out, done.out


def test_counts_are_nccl_tests():
    """Parts are multiples of 16 bytes; tiny sizes still move something."""
    count = operations.count_for
    assert count("all_gather", 1 << 20, torch.float32, 4) == 65536
    assert count("all_gather", 1000, torch.float32, 3) == 80
    assert count("all_to_all", 1, torch.float64, 8) == 1
    assert count("all_reduce", 1000, torch.float32, 3) == 250
    assert operations.Case("reduce_scatter", 10, "half", "sum").nbytes(4) == 80
    factors = {name: kind.busbw(4) for name, kind in operations.COLLECTIVES.items()}
    assert factors == {
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_reduce": 1.5,
        "broadcast": 1.0,
        "all_to_all": 0.75,
        "barrier": 0.0,
    }


@pytest.mark.parametrize("op", operations.OPS)
@pytest.mark.parametrize("dtype", operations.DTYPES)
def test_expected_results_are_exact(op, dtype):
    """Against float64 arithmetic, in the opposite order of ranks."""
    size, numel = 3, 9000
    case = operations.Case("all_reduce", numel, dtype, op)
    if op == "avg" and not case.dtype.is_floating_point:
        return
    inputs = [operations.values(case, rank, 0, numel, size).double() for rank in reversed(range(size))]
    found = torch.stack(inputs)
    combined = {
        "sum": found.sum(0),
        "avg": found.mean(0),
        "prod": found.prod(0),
        "max": found.amax(0),
        "min": found.amin(0),
    }[op]
    ((start, expected),) = operations.expected(case, 0, size)
    assert start == 0 and torch.equal(expected.double(), combined)
    assert len(combined.unique()) > 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_one_wrong_element_is_found(collective, in_place):
    """What is right passes; one wrong element, in the part of another rank if there are such, is counted and named."""
    case = operations.Case(collective, 5000, "bfloat16", "sum" if collective == "reduce_scatter" else None)
    call = operations.Call(case, in_place, 1, 3)
    sizes = [len(tensor) for tensor in call.args[:2]]
    assert sorted(sizes) == [5000, 15000] and sum(operations.numels(case, in_place, 3)) == (
        15000 if in_place else 20000
    )
    call.reset()
    assert call.wrong() >= len(call.result) - 5000
    for start, part in operations.expected(case, 1, 3):
        call.result[start : start + len(part)] = part
    assert call.wrong() == 0 and call.first_wrong() == ""
    call.result[-2] += 100
    assert call.wrong() == 1 and f"the first at {len(call.result) - 2}: " in call.first_wrong()


def run_of(library, time_s, bound_s):
    row = {"kind": "collective", "collective": "all_gather", "in_place": False, "dtype": "float", "op": None}
    row |= {"root": None, "nbytes": 1 << 20, "count": 1 << 17, "busbw_factor": 0.5, "wrong": 0, "repeats": 1}
    return [HEADER, {**row, "backend": "mpi", "library": library, "time_s": [time_s], "bound_s": [bound_s]}]


def test_runs_are_compared_by_their_own_bounds(tmp_path):
    """The second run was twice as slow, its machine four times: it is the better library."""
    runs = [run_of("Open MPI 5", 1.0, 0.25), run_of("MPICH 5", 2.0, 1.0)]
    assert [(r["xbound"], r["who"]) for r in report_collectives.summarise(runs)] == [
        (4.0, "mpi (Open MPI 5), run 1"),
        (2.0, "mpi (MPICH 5), run 2"),
    ]
    for name, rows in zip("ab", runs):
        record.write(tmp_path / name, rows)
    args = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "a", tmp_path / "b", "--plot", tmp_path / "c.png"]
    done = run(args, environment())
    assert done.code == 0 and "mpi (MPICH 5), run 2" in done.out, done.out
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", ["all_gather", "reduce_scatter"])
def test_gate_stops_wrong_results(tmp_path, wrong):
    """One wrong element on one rank ends every rank with code 1 before anything is timed."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "import backends, overlap\n"
        "class Wrong(backends.Gloo):\n"
        f"    def {wrong}(self, out, *rest, async_op=False):\n"
        f"        super().{wrong}(out, *rest)\n"
        "        out[-1] += backends.dist.get_rank() == 1\n"
        "backends.BACKENDS['wrong'] = Wrong\n"
        "overlap.main()\n"
    )
    done = mpirun(2, [program, "-B", "gloo,wrong", "--shapes", "8x8x8", "--turns", "1"], environment())
    assert done.code == 1, done.out
    assert f"equality gate failed: wrong {wrong}" in done.out and "rank 1" in done.out
    assert "GEMM slowdown" not in done.out


def test_arguments_refused():
    for args in (["-B", "nccl"], ["-D", "gpu", "-B", "hdma,mpi"], ["--shapes", "8x8"], ["--collectives", "gather"]):
        done = run([sys.executable, ROOT / "bench" / "overlap.py", *args], environment())
        assert done.code == 2, done.out


@pytest.mark.parametrize(
    "args",
    [
        "-B nccl",
        "-B ucc",
        "-D gpu -B gloo",
        "-D gpu -B low",
        "-R 2",
        "-d float8",
        "-o mean",
        "-f 1",
        "-b 1T",
        "-n 0",
        "-a 4",
        "-w -1",
    ],
)
def test_arguments_of_collectives_refused(monkeypatch, args):
    monkeypatch.setattr(sys, "argv", ["collectives.py", *args.split()])
    with pytest.raises(SystemExit) as ended:
        collectives.parse_args()
    assert ended.value.code == 2


def test_a_wire_alone(tmp_path):
    args = ["--turns", "1", "--sizes", "64K", "--json", tmp_path / "w.json", "--devices", "mlx5_0:1,mlx5_1:1"]
    done = run(
        [sys.executable, ROOT / "bench" / "wire.py", *args], environment(**stub_verbs.variables(stub_verbs.build()))
    )
    assert done.code == 0, done.out
    _, tcp, verbs = record.read(tmp_path / "w.json")
    assert (tcp["wire"], verbs["wire"]) == ("tcp", "verbs") and not verbs["ib_write_bw_gb_s"]
    for row in (tcp, verbs):
        assert row["nbytes"] == 65536 and min(*row["gb_s"], *row["latency_s"], *row["post_s"]) > 0
    assert [line.split()[0] for line in done.out.splitlines()[-2:]] == ["tcp", "verbs"]


def test_a_wire_cannot_be_made(tmp_path):
    args = [
        sys.executable,
        ROOT / "bench" / "wire.py",
        "--turns",
        "1",
        "--sizes",
        "64K",
        "--devices",
        "mlx5_7:1,mlx5_1:1",
    ]
    done = run(args, environment(**stub_verbs.variables(stub_verbs.build())))
    assert done.code == 1 and "knows no device mlx5_7" in done.out and "Traceback" not in done.out, done.out


def test_output_of_perftest():
    output = """---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    32             1.34               1.28                 0.000153
---------------------------------------------------------------------------------------
"""
    assert wire.average_gb_s(output) == pytest.approx(0.16)
    with pytest.raises(SystemExit, match="Unable to init"):
        wire.average_gb_s("Unable to init the socket connection")
