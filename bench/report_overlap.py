"""Table and plot of what bench/overlap.py recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from intervals import interval_of_mean_of_medians, interval_of_median
from record import Record
from tables import columns, label

MOST_LOST = 0.2
DEFINITIONS = """\
together      wall time of the overlapped region: the collective is started, the GEMM runs, the collective is waited for
GEMM, coll.   wall times of each alone. All times: slowest rank of a turn, median of turns
GEMM slowdown time of the GEMM beside the collective / time of the GEMM alone in the same turn, median
hidden        (GEMM + coll. - together) / min(GEMM, coll.) of a turn, median: 100 % = the shorter one costs nothing,
              0 % = no better than one after the other, below 0 % = worse; above 100 % = noise: alone was slower
vs ...        the time together of gloo, or on GPUs of nccl, / this one's: above 1 is faster
mean          geometric, over shapes; of hidden, which may be negative, arithmetic; interval: 95 %, by resampling turns
busbw         of the collective alone, GB/s
lost          part of its bandwidth alone that the collective lost beside the GEMM, median, worst rank; above 20 % (!)
              the slowdown is not that of a whole collective. On GPUs the slowdown is measured beside collectives that
              go on until after the GEMMs, and a region holds as many GEMMs and collectives as take about 2 ms each"""


def gemm_slowdown(alone_s: float, beside_s: float) -> float:
    """How many times longer the GEMM takes beside the collective."""
    return beside_s / alone_s


def hidden_fraction(gemm_s: float, collective_s: float, both_s: float) -> float:
    """The part of the shorter of the two that the overlap saves; 1 is all of it, below 0 a loss."""
    return (gemm_s + collective_s - both_s) / min(gemm_s, collective_s)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values; not a number if there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summarise(r: Record) -> Record:
    """Medians over turns of an `overlap` record; ratios are taken within a turn first."""
    turns = list(zip(r["gemm_s"], r["collective_s"], r["both_s"], r["gemm_beside_s"]))
    return {
        "collective": r["collective"],
        "gemm": "x".join(map(str, r["gemm"])),
        "shard_nbytes": r["shard_nbytes"],
        "backend": r["backend"],
        "in_place": r.get("in_place", False),
        "gemm_s": median(r["gemm_s"]),
        "collective_s": median(r["collective_s"]),
        "both_s": median(r["both_s"]),
        "slowdown": median(gemm_slowdown(alone, beside) for alone, _, _, beside in turns),
        "slowdowns": [gemm_slowdown(alone, beside) for alone, _, _, beside in turns],
        "hidden": median(hidden_fraction(gemm, collective, both) for gemm, collective, both, _ in turns),
        "busbw": r["shard_nbytes"] * r.get("calls", 1) * r.get("busbw_factor", 0) / median(r["collective_s"]) / 1e9,
        "lost": median(r["lost"]) if "lost" in r else None,
    }


def with_means(rows: list[Record], baseline: str = "gloo") -> list[Record]:
    """The rows, and after those of each collective one a backend: geometric means of times and ratios over shapes.

    `hidden` may be negative, so its mean is the arithmetic one. `versus` is there where the baseline ran that shape.
    """
    for row in rows:
        same = [r for r in rows if r["backend"] == baseline and all(r[k] == row[k] for k in ("collective", "gemm"))]
        row["versus"] = same[0]["both_s"] / row["both_s"] if same else None
        row["interval"] = interval_of_median(row["slowdowns"])
    result = []
    for collective in dict.fromkeys(row["collective"] for row in rows):
        of_collective = [row for row in rows if row["collective"] == collective]
        result += of_collective
        for backend in dict.fromkeys(row["backend"] for row in of_collective):
            group = [row for row in of_collective if row["backend"] == backend]
            means: Record = {k: geometric_mean(row[k] for row in group) for k in _TIMES}
            means["busbw"] = geometric_mean(row["busbw"] for row in group) if all(row["busbw"] for row in group) else 0
            means["hidden"] = sum(row["hidden"] for row in group) / len(group)
            ratios = [row["versus"] for row in group]
            means["versus"] = geometric_mean(ratios) if all(ratios) else None
            means["interval"] = interval_of_mean_of_medians([row["slowdowns"] for row in group])
            means["lost"] = None if group[0]["lost"] is None else max(row["lost"] for row in group)
            about = {"collective": collective, "gemm": "mean", "shard_nbytes": None, "backend": backend}
            result.append(about | {"in_place": group[0]["in_place"]} | means)
    return result


_TIMES = ("gemm_s", "collective_s", "both_s", "slowdown")


def table(records: Sequence[Record]) -> str:
    """The printed table, with the definitions of its columns."""
    digits = 1 if records[0]["memory"] == "host" else 3
    baseline = "gloo" if records[0]["memory"] == "host" else "nccl"
    head = ("collective", "GEMM m x n x k", "shard MiB", "backend", "together ms", f"vs {baseline}", "GEMM ms")
    lines: list[tuple[str, ...]] = [(*head, "coll. ms", "GEMM slowdown", "interval", "hidden", "busbw", "lost")]
    for row in with_means([summarise(r) for r in records if r["kind"] == "overlap"], baseline):
        lines.append(
            (
                f"{row['collective']} in place" if row["in_place"] else row["collective"],
                row["gemm"],
                f"{row['shard_nbytes'] / 2**20:.3g}" if row["shard_nbytes"] else "",
                row["backend"],
                f"{row['both_s'] * 1e3:.{digits}f}",
                f"{row['versus']:.2f}" if row["versus"] else "",
                f"{row['gemm_s'] * 1e3:.{digits}f}",
                f"{row['collective_s'] * 1e3:.{digits}f}",
                f"{row['slowdown']:.2f}" if baseline == "gloo" else f"{row['slowdown']:.3f}",
                "{:.2f} to {:.2f}".format(*row["interval"]),
                f"{row['hidden'] * 100:.0f} %",
                f"{row['busbw']:.3g}" if row["busbw"] else "",
                "" if row["lost"] is None else f"{row['lost'] * 100:.0f} %{'!' if row['lost'] > MOST_LOST else ''}",
            )
        )
    return "\n\n".join([label(records[0]), columns(lines), DEFINITIONS])


def plot(records: Sequence[Record], path: str) -> None:
    """Bars of the overlapped region beside its two parts, one panel a collective, as PNG or what `path` ends with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [summarise(r) for r in records if r["kind"] == "overlap"]
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    size = (7 * len(collectives), 5)
    figure, panels = pyplot.subplots(1, len(collectives), figsize=size, squeeze=False, layout="constrained")
    for axes, collective in zip(panels[0], collectives):
        _panel(axes, collective, [row for row in rows if row["collective"] == collective])
    figure.suptitle(label(records[0]), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(axes: Any, collective: str, rows: list[Record]) -> None:
    names = [f"{row['gemm']}\n{row['backend']}" for row in rows]
    gemm, coll, both = ([row[k] * 1e3 for row in rows] for k in ("gemm_s", "collective_s", "both_s"))
    at = range(len(rows))
    axes.bar([x - 0.2 for x in at], gemm, 0.36, label="GEMM alone", color="#8aa4c8")
    axes.bar([x - 0.2 for x in at], coll, 0.36, bottom=gemm, label=f"{collective} alone", color="#d9b36c")
    axes.bar([x + 0.2 for x in at], both, 0.36, label="both together", color="#4b7f52")
    axes.set_xticks(list(at), names, fontsize=7)
    axes.set_ylabel("ms (slowest rank, median)")
    axes.set_title(collective)
    axes.legend(fontsize=8)
