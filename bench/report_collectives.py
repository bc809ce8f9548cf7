"""Runs of bench/collectives.py side by side, each normalised by the copy bound that it measured itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from record import Record
from report_overlap import geometric_mean
from tables import columns, label

DEFINITIONS = """\
size     of the whole, as in nccl-tests: for all_gather and reduce_scatter the shards of all ranks together
xbound   time / copy bound of the same run and row: compare runs by this, not by their times
busbw    what must pass through a rank, GB/s: see bench/collectives.py --help
mean     geometric, over sizes"""


def summarise(runs: Sequence[Sequence[Record]]) -> list[Record]:
    """Medians of all rows, sorted for comparison; `who` tells library and run apart."""
    rows = []
    for number, (header, *records) in enumerate(runs, 1):
        for r in records:
            time_s = median(r["time_s"])
            bound_s = median(r["bound_s"]) if r["bound_s"] else None
            busbw = r["nbytes"] / time_s / 1e9 * r["busbw_factor"]
            who = _who(r, header, number if len(runs) > 1 else None)
            measured = {"time_s": time_s, "bound_s": bound_s, "busbw": busbw, "who": who}
            rows.append({**r, **measured, "ranks": header["ranks"], "xbound": time_s / bound_s if bound_s else None})
    order = {case: i for i, case in enumerate(dict.fromkeys(_case(row) for row in rows))}
    return sorted(rows, key=lambda row: (order[_case(row)], row["nbytes"]))


def _who(r: Record, header: Record, run: int | None) -> str:
    name = f"mpi ({r['library']})" if r["backend"] == "mpi" else r["backend"]
    return name if run is None else f"{name}, run {run}"


def _case(row: Record) -> tuple[Any, ...]:
    return row["collective"], row["in_place"], row["dtype"], row["op"], row["ranks"]


def title(case: tuple[Any, ...]) -> str:
    collective, in_place, dtype, op, ranks = case
    return " ".join([collective, *(["in place"] if in_place else []), dtype, *([op] if op else []), f"{ranks} ranks"])


def table(runs: Sequence[Sequence[Record]]) -> str:
    """The printed comparison, with the definitions of its columns."""
    rows = summarise(runs)
    lines = [("collective", "who", "size", "time us", "bound us", "xbound", "busbw GB/s")]
    for case in dict.fromkeys(_case(row) for row in rows):
        group = [row for row in rows if _case(row) == case]
        for row in group:
            bound = (f"{row['bound_s'] * 1e6:.1f}", f"{row['xbound']:.2f}") if row["bound_s"] else ("", "")
            lines.append((title(case), row["who"], str(row["nbytes"]), f"{row['time_s'] * 1e6:.1f}", *bound, _2(row)))
        lines += [(title(case), who, "mean", "", "", f"{mean:.2f}", "") for who, mean in _means(group)]
    heads = [f"run {i}: {label(run[0])}" if len(runs) > 1 else label(run[0]) for i, run in enumerate(runs, 1)]
    return "\n\n".join(["\n".join(dict.fromkeys("\n".join(heads).splitlines())), columns(lines, 2), DEFINITIONS])


def _2(row: Record) -> str:
    return f"{row['busbw']:.2f}"


def _means(group: Iterable[Record]) -> Iterable[tuple[str, float]]:
    by_who: dict[str, list[float | None]] = {}
    for row in group:
        by_who.setdefault(row["who"], []).append(row["xbound"])
    return [(who, geometric_mean(v for v in values if v)) for who, values in by_who.items() if all(values)]


def plot(runs: Sequence[Sequence[Record]], path: str) -> None:
    """busbw above and xbound below against size, one column a collective, as PNG or what `path` ends with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in summarise(runs) if row["nbytes"]]
    cases = list(dict.fromkeys(_case(row) for row in rows))
    colours = {who: f"C{i % 10}" for i, who in enumerate(dict.fromkeys(row["who"] for row in rows))}
    size = (4.5 * len(cases), 7)
    figure, panels = pyplot.subplots(2, len(cases), figsize=size, squeeze=False, layout="constrained", sharex="col")
    for number, case in enumerate(cases):
        group = [row for row in rows if _case(row) == case]
        for who in dict.fromkeys(row["who"] for row in group):
            mine = [row for row in group if row["who"] == who]
            for axes, key in zip(panels[:, number], ("busbw", "xbound")):
                points = [(row["nbytes"], row[key]) for row in mine if row[key]]
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=who, color=colours[who])
        upper, lower = panels[0][number], panels[1][number]
        upper.set_title(title(case), fontsize=9)
        upper.set_ylabel("busbw GB/s")
        lower.set_ylabel("time / copy bound")
        lower.set_xlabel("size, bytes (of the whole)")
        lower.set_xscale("log", base=2)
        lower.set_yscale("log")
        lower.axhline(1.0, color="grey", linewidth=0.8)
        upper.legend(fontsize=7)
    figure.suptitle("\n".join(dict.fromkeys(label(run[0]).splitlines()[0] for run in runs)), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
