"""Table and plot of what bench/overlap.py recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from record import Record
from tables import columns, label

DEFINITIONS = """\
together      wall time of the overlapped region: the collective is started, the GEMM runs, the collective is waited for
GEMM, coll.   wall times of each alone. All times: slowest rank of a turn, median of turns
GEMM slowdown time of the GEMM beside the collective / time of the GEMM alone in the same turn, median
hidden        (GEMM + coll. - together) / min(GEMM, coll.) of a turn, median: 100 % = the shorter one costs nothing,
              0 % = no better than one after the other, below 0 % = worse; above 100 % = noise: alone was slower
vs gloo       gloo's time together / this one's: above 1 is faster
mean          geometric, over shapes; of hidden, which may be negative, arithmetic"""


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
        "gemm_s": median(r["gemm_s"]),
        "collective_s": median(r["collective_s"]),
        "both_s": median(r["both_s"]),
        "slowdown": median(gemm_slowdown(alone, beside) for alone, _, _, beside in turns),
        "hidden": median(hidden_fraction(gemm, collective, both) for gemm, collective, both, _ in turns),
    }


def with_means(rows: list[Record]) -> list[Record]:
    """The rows, and after those of each collective one a backend: geometric means of times and ratios over shapes.

    `hidden` may be negative, so its mean is the arithmetic one. `versus_gloo` is added where gloo ran the same shape.
    """
    for row in rows:
        same = [r for r in rows if r["backend"] == "gloo" and all(r[k] == row[k] for k in ("collective", "gemm"))]
        row["versus_gloo"] = same[0]["both_s"] / row["both_s"] if same else None
    result = []
    for collective in dict.fromkeys(row["collective"] for row in rows):
        of_collective = [row for row in rows if row["collective"] == collective]
        result += of_collective
        for backend in dict.fromkeys(row["backend"] for row in of_collective):
            group = [row for row in of_collective if row["backend"] == backend]
            means: Record = {k: geometric_mean(row[k] for row in group) for k in _TIMES}
            means["hidden"] = sum(row["hidden"] for row in group) / len(group)
            ratios = [row["versus_gloo"] for row in group]
            means["versus_gloo"] = geometric_mean(ratios) if all(ratios) else None
            result.append({"collective": collective, "gemm": "mean", "shard_nbytes": None, "backend": backend} | means)
    return result


_TIMES = ("gemm_s", "collective_s", "both_s", "slowdown")


def table(records: Sequence[Record]) -> str:
    """The printed table, with the definitions of its columns."""
    head = ("collective", "GEMM m x n x k", "shard MiB", "backend", "together ms", "vs gloo", "GEMM ms", "coll. ms")
    lines: list[tuple[str, ...]] = [(*head, "GEMM slowdown", "hidden")]
    for row in with_means([summarise(r) for r in records if r["kind"] == "overlap"]):
        lines.append(
            (
                row["collective"],
                row["gemm"],
                f"{row['shard_nbytes'] / 2**20:.3g}" if row["shard_nbytes"] else "",
                row["backend"],
                f"{row['both_s'] * 1e3:.1f}",
                f"{row['versus_gloo']:.2f}" if row["versus_gloo"] else "",
                f"{row['gemm_s'] * 1e3:.1f}",
                f"{row['collective_s'] * 1e3:.1f}",
                f"{row['slowdown']:.2f}",
                f"{row['hidden'] * 100:.0f} %",
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
