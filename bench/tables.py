"""Text around figures: where they come from, and cells as aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from record import Record


def label(header: Record) -> str:
    """Where the figures come from, and on host memory what they cannot show."""
    machine, cores = header["machine"], header["machine"]["cores"]
    gpus = f"{machine['gpus']}x {machine['gpu']}, driver {header['versions']['driver']}; " if "gpu" in machine else ""
    lines = [
        f"{header['ranks']} rank{'s' if header['ranks'] > 1 else ''} on {header['nodes']} "
        f"node{'s' if header['nodes'] > 1 else ''}, one thread a rank; {gpus}"
        f"{machine['cpu']}, {cores} cores; torch {header['versions']['torch']}; {header['date']}"
    ]
    if header["memory"] == "host":
        count = "two" if cores == 2 else str(cores)
        lines.append(
            f"{count} CPU core{'s' if cores > 1 else ''} show the method, not the benefit on GPUs: here the ranks "
            "share the cores, and the collective takes them from the GEMM"
        )
    return "\n".join(lines)


def columns(lines: Sequence[Sequence[str]], text_columns: int = 4) -> str:
    """Lines of cells as aligned text; the first `text_columns` to the left, but numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [
        "  ".join(c.ljust(w) if i < text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    return "\n".join([rows[0], "-" * max(map(len, rows)), *rows[1:]])
