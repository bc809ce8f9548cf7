"""The definitions on figures worked out by hand, the report on made-up records, the benchmarks themselves, small."""

import json
import sys

import pytest
from processes import ROOT, environment, mpirun, run

sys.path.insert(0, str(ROOT / "bench"))
import record
import report

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
    assert report.hidden_fraction(10.0, 4.0, 10.0) == 1.0  # the collective cost nothing
    assert report.hidden_fraction(10.0, 4.0, 14.0) == 0.0  # one after the other
    assert report.hidden_fraction(10.0, 4.0, 12.0) == 0.5
    assert report.hidden_fraction(4.0, 10.0, 12.0) == 0.5  # the shorter one may be the GEMM
    assert report.hidden_fraction(10.0, 4.0, 16.0) == -0.5
    assert report.gemm_slowdown(10.0, 12.5) == 1.25
    assert report.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert report.geometric_mean([]) != report.geometric_mean([])


def test_ratios_are_taken_within_a_turn():
    """A machine that slows down between turns must not show as slowdown: pairs are compared, then the median taken."""
    row = overlap("hdma", [8, 8, 8], [2.0, 4.0, 8.0], gemm_s=[1.0, 2.0, 4.0], gemm_beside_s=[1.1, 2.2, 4.4])
    row["collective_s"] = [1.0, 2.0, 4.0]
    summary = report.summarise(row)
    assert summary["slowdown"] == pytest.approx(1.1)
    assert summary["hidden"] == 0.0
    assert summary["both_s"] == 4.0


def test_means():
    shapes = ([8, 8, 8], [8, 8, 9])
    rows = [overlap("hdma", g, [b] * 3) for g, b in zip(shapes, (2.0, 2.0))]
    rows += [overlap("gloo", g, [b] * 3) for g, b in zip(shapes, (2.0, 8.0))]
    found = report.with_means([report.summarise(row) for row in rows])
    means = {row["backend"]: row for row in found if row["gemm"] == "mean"}
    assert [row["versus_gloo"] for row in found[:2]] == [1.0, 4.0]
    assert means["hdma"]["versus_gloo"] == pytest.approx(2.0) and means["gloo"]["versus_gloo"] == pytest.approx(1.0)
    assert means["gloo"]["both_s"] == pytest.approx(4.0)
    assert means["hdma"]["hidden"] == 1.0 and means["gloo"]["hidden"] == pytest.approx((1.0 - 5.0) / 2)


def test_table_without_gloo():
    table = report.table([HEADER, overlap("hdma", [8, 8, 8], [2.0] * 3)])
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


def test_collectives_runs(tmp_path):
    args = ["-b", "4K", "-e", "64K", "-f", "16", "-n", "3", "-w", "1", "--dtype", "bfloat16"]
    done = mpirun(2, [ROOT / "bench" / "collectives.py", *args, "--json", tmp_path / "c.json"], environment())
    assert done.code == 0 and "busbw" in done.out, done.out
    rows = record.read(tmp_path / "c.json")[1:]
    assert {row["shard_nbytes"] for row in rows} == {4096, 65536} and len(rows) == 8
    assert all(len(row["time_s"]) == 3 for row in rows)


@pytest.mark.parametrize("wrong", ["all_gather", "reduce_scatter"])
def test_gate_stops_wrong_results(tmp_path, wrong):
    """One wrong element on one rank ends every rank with code 1 before anything is timed."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "import backends, overlap\n"
        "class Wrong(backends.Gloo):\n"
        f"    def {wrong}(self, out, inp, *, async_op=False):\n"
        f"        super().{wrong}(out, inp)\n"
        "        out[-1] += backends.dist.get_rank() == 1\n"
        "backends.BACKENDS['wrong'] = Wrong\n"
        "overlap.main()\n"
    )
    done = mpirun(2, [program, "-B", "gloo,wrong", "--shapes", "8x8x8", "--turns", "1"], environment())
    assert done.code == 1, done.out
    assert f"equality gate failed: wrong {wrong}" in done.out and "rank 1" in done.out
    assert "GEMM slowdown" not in done.out


def test_arguments_refused():
    for args in (["-B", "nccl"], ["--shapes", "8x8"], ["--collectives", "gather"]):
        done = run([sys.executable, ROOT / "bench" / "overlap.py", *args], environment())
        assert done.code == 2, done.out
