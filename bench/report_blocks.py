"""Table and curves of what bench/blocks.py recorded."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from intervals import interval_of_median
from record import Record
from tables import columns, label

DEFINITIONS = """\
GB/s          bytes of results that the kernel makes in a second, launched back to back: alone, and beside the GEMM
GEMM slowdown time of the GEMMs beside the kernels / alone in the same turn, median of turns, with its 95 % interval
lost          GEMM time lost for each GB that the kernel made meanwhile, ms: what a choice of blocks costs in the end"""


def summarise(r: Record) -> Record:
    """GB/s alone and beside, slowdown with its interval, and milliseconds of GEMM lost for a GB."""
    ratios = [beside / alone for alone, beside in zip(r["gemm_s"], r["gemm_beside_s"])]
    made = [count * r["nbytes"] / 1e9 for count in r["kernels_beside"]]
    lost = [(b - a) * 1e3 / gb for a, b, gb in zip(r["gemm_s"], r["gemm_beside_s"], made) if gb]
    return {
        "work": r["work"],
        "priority": r["priority"],
        "blocks": r["blocks"],
        "alone": r["nbytes"] / r["kernel_s"] / 1e9,
        "beside": median(gb / s for gb, s in zip(made, r["gemm_beside_s"])),
        "slowdown": median(ratios),
        "interval": interval_of_median(ratios),
        "lost": median(lost),
    }


def table(records: Sequence[Record]) -> str:
    """The printed table, with the definitions of its columns."""
    head = ("work", "priority", "blocks", "GB/s alone", "GB/s beside", "GEMM slowdown", "95 % interval", "lost ms/GB")
    lines: list[tuple[str, ...]] = [head]
    for row in map(summarise, records[1:]):
        low, high = row["interval"]
        figures = (f"{row['alone']:.0f}", f"{row['beside']:.0f}", f"{row['slowdown']:.3f}", f"{low:.3f} to {high:.3f}")
        lines.append((row["work"], row["priority"], str(row["blocks"]), *figures, f"{row['lost']:.2f}"))
    return "\n\n".join([label(records[0]), columns(lines, 2), DEFINITIONS])


def plot(records: Sequence[Record], path: str) -> None:
    """Speed and GEMM slowdown against blocks, a curve a work and priority, as PNG or what `path` ends with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [summarise(r) for r in records[1:]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for work, priority in dict.fromkeys((row["work"], row["priority"]) for row in rows):
        mine = [row for row in rows if (row["work"], row["priority"]) == (work, priority)]
        name, line = f"{work}{', low priority' if priority == 'low' else ''}", "--" if priority == "low" else "-"
        blocks = [row["blocks"] for row in mine]
        left.plot(blocks, [row["alone"] for row in mine], line, marker="o", label=name)
        slowdown = [row["slowdown"] for row in mine]
        spread = [[s - row["interval"][0], row["interval"][1] - s] for s, row in zip(slowdown, mine)]
        right.errorbar(blocks, slowdown, list(zip(*spread)), fmt=line, marker="o", capsize=3, label=name)
    for axes, title in ((left, "GB/s of results, alone"), (right, "GEMM slowdown beside it")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("blocks")
        axes.set_ylabel(title)
        axes.legend(fontsize=8)
    figure.suptitle(label(records[0]), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
