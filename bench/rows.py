"""The printed table of bench/collectives.py: nccl-tests' columns, with the backend, the copy bound and the ratio."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from record import Record
from tables import label

_HEAD = (
    ("size", 11, "(B)"),
    ("count", 10, "(elements)"),
    ("type", 8, ""),
    ("redop", 5, ""),
    ("root", 4, ""),
    ("backend", 7, ""),
    ("bound", 9, "(us)"),
)
_PLACE = (("time", 9, "(us)"), ("algbw", 6, "(GB/s)"), ("busbw", 6, "(GB/s)"), ("xbound", 6, ""), ("#wrong", 6, ""))


def header_lines(header: Record) -> list[str]:
    """What is above the rows, as comments."""
    about = label(header).splitlines()
    about.append("; ".join(f"{name}: {library}" for name, library in header["libraries"].items()))
    if header["bound"] != "copy":
        about.append(f"no copy bound: {header['bound']}")
    widths = [(name, width, unit) for name, width, unit in (*_HEAD, *_PLACE, *_PLACE)]
    left = sum(width + 2 for _, width, _ in _HEAD)
    place = sum(width + 2 for _, width, _ in _PLACE)
    lines = [
        " " * left + "out-of-place".center(place) + "in-place".center(place),
        "".join(f"  {name.rjust(width)}" for name, width, _ in widths),
        "".join(f"  {unit.rjust(width)}" for _, width, unit in widths),
    ]
    return [f"# {line}" for line in about] + [f"#{line}" for line in lines]


def row_line(places: Sequence[Record]) -> str:
    """One backend's row: its records out of place and in place, of which either may be missing."""
    r = places[0]
    bound = f"{median(r['bound_s']) * 1e6:.1f}" if r["bound_s"] else "N/A"
    root = "-1" if r["root"] is None else str(r["root"])
    cells = [str(r["nbytes"]), str(r["count"]), r["dtype"], r["op"] or "none", root, r["backend"], bound]
    for in_place in (False, True):
        found = [r for r in places if r["in_place"] == in_place]
        cells += _figures(found[0]) if found else ["N/A"] * len(_PLACE)
    text = "".join(f"  {cell.rjust(width)}" for cell, (_, width, _) in zip(cells, (*_HEAD, *_PLACE, *_PLACE)))
    return f" {text}  {r['collective']}"


def _figures(r: Record) -> list[str]:
    time_s = median(r["time_s"])
    algbw = r["nbytes"] / time_s / 1e9
    ratio = f"{time_s / median(r['bound_s']):.2f}" if r["bound_s"] else "N/A"
    wrong = "N/A" if r["wrong"] is None else str(r["wrong"])
    return [f"{time_s * 1e6:.1f}", f"{algbw:.2f}", f"{algbw * r['busbw_factor']:.2f}", ratio, wrong]
