"""The report for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Any

_MATRIX_RANKS, _GIDS = 16, 8
_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
_LINKS = {"self": ".", "memory": "mem", "tcp": "tcp", "rdma": "rdma", "": "-"}


def report(found: dict[str, Any]) -> str:
    versions, machine = found["versions"], found["machine"]
    packages = [f"{name} {versions[name] or '-'}" for name in ("python", "numpy", "torch", "mpi4py", "ml_dtypes")]
    mpi = found["mpi"]
    if mpi and mpi["mpi"]:
        packages[3] += f" ({mpi['mpi']} {mpi['version']})"
    features = [name if there else f"no {name}" for name, there in machine["features"].items()]
    parts = [
        "\n".join(
            [
                f"hdma {versions['hdma']}, its core by {versions['compiler'] or 'an unknown compiler'}; "
                + ", ".join(packages),
                f"{machine['name']}: {machine['cpu']} ({', '.join(features)}), {machine['cpus']} CPUs, "
                f"{found['limits']['memory']['total_nbytes'] / 2**30:.1f} GiB; {machine['system']}",
                _used("wires", found["wires"]) + "; " + _used("devices", found["devices"]),
            ]
        ),
        *(_gpus(row) for row in found["devices"] if row.get("gpus")),
        _rdma(found["rdma"]),
        _job(found["job"]),
        _groups(found["groups"]),
        "\n".join(check(row) for row in found["checks"]),
        _summary(found["checks"]),
    ]
    return "\n\n".join(part for part in parts if part)


def check(row: dict[str, Any]) -> str:
    """Verdict, name, evidence; the remedy below."""
    where = f"{row['where']}: " if row.get("where") else ""
    lines = [f"{_MARKS[row['verdict']]}  {row['name']:<14} {where}{row['evidence']}"]
    if row["remedy"]:
        lines.append(f"{'':21}-> {row['remedy']}")
    return "\n".join(lines)


def settings(rows: Sequence[dict[str, Any]]) -> str:
    """The table of variables, then what is wrong with those that are set."""
    cells = [("variable", "value", "default", "all ranks", "meaning")]
    wrong = []
    for row in rows:
        value = row["set"] if row["error"] or not row["known"] else _shown(row["value"])
        value += " (default)" if row["known"] and not (row["set"] or "").strip() else ""
        equal = "equal" if row["agree"] else ""
        cells.append((row["name"], value, _shown(row["default"]) if row["known"] else "", equal, row["meaning"]))
        if row["error"]:
            wrong.append(f"FAIL  {row['error']}")
        elif row["nearest"]:
            wrong.append(f"WARN  {row['name']} has no effect: did you mean {row['nearest']}?")
        elif not row["known"]:
            wrong.append(f"WARN  {row['name']} has no effect: there is no such variable")
    return "\n".join([_columns(cells), *([""] if wrong else []), *wrong])


def _shown(value: Any) -> str:
    if isinstance(value, int) and value and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _used(title: str, rows: Sequence[dict[str, Any]]) -> str:
    used = [row["name"] for row in rows if row["used"]]
    idle = [row["name"] for row in rows if not row["used"] and (row["library"] or row["devices"])]
    return f"{title}: {', '.join(used)}" + (f" (found, not used: {', '.join(idle)})" if idle else "")


def _gpus(row: dict[str, Any]) -> str:
    """A line a GPU, with those that it reaches and, of AMD's, by what links."""
    cells = [("GPU", "name", "PCI address", "architecture", "reaches", "links")]
    for number, gpu in enumerate(row["gpus"]):
        reached = (
            [str(other) for other, can in enumerate(row["reaches"][number]) if can and other != number]
            if row["reaches"]
            else []
        )
        counts = Counter(link["type"] for link in row["links"][number] if link) if row["links"] else Counter()
        links = ", ".join(f"{count} {name}" for name, count in counts.items())
        cells.append((str(number), gpu["name"], gpu["pci"], gpu["arch"] or "unknown", " ".join(reached) or "-", links))
    shown = cells if row["links"] else [cell[:5] for cell in cells]
    return f"{row['name']}: {_count(len(row['gpus']), 'GPU')}\n{_columns(shown)}"


def _rdma(row: dict[str, Any]) -> str:
    """A line a port, its GIDs with the one that would be used marked, and how near the devices are to the GPUs."""
    if not row["devices"]:
        return ""
    titles = ("port", "link", "state", "rate", "PCI address", "NUMA", "interfaces", "device file", "GIDs (*: used)")
    cells: list[Sequence[str]] = [titles]
    for device in row["devices"]:
        numa = str(device["numa_node"]) if device["numa_node"] >= 0 else "-"
        file = device["uverbs"] + (f" ({device['open_error']})" if device["open_error"] else "")
        about = (device["pci"] or "virtual", numa, " ".join(device["netdevs"]) or "-", file or "-")
        for port in device["ports"]:
            state = f"{port['state']} ({port['physical_state']})"
            name = f"{device['name']}:{port['number']}"
            cells.append((name, port["link_layer"], state, port["rate"], *about, _gids(port)))
    lines = [f"rdma: {_count(len(row['devices']), 'device')}, {row['library'] or 'no libibverbs'}", _columns(cells)]
    if row["gpus"]:
        usable = [any(port["gid_index"] is not None for port in device["ports"]) for device in row["devices"]]
        matrix = [["GPU \\ device", *(device["name"] for device in row["devices"])]]
        for gpu, far, relations in zip(row["gpus"], row["distances"], row["relations"]):
            best = min((d for d, can in zip(far, usable) if can), default=None)
            marks = [name + ("*" if can and d == best else "") for name, d, can in zip(relations, far, usable)]
            matrix.append([f"{gpu['runtime']} {gpu['number']}", *marks])
        lines += ["", _columns(matrix)]
        lines.append(
            "PIX: one switch; PXB: several; PHB: the host bridge; NODE: host bridges of a NUMA node; SYS: NUMA nodes; "
            "-: not on PCI; *: the nearest that can be used"
        )
    if row["taken"]:
        ports = ", ".join(f"rank {rank} {port}" for rank, port in enumerate(row["taken"][:_MATRIX_RANKS]))
        more = ", ..." if len(row["taken"]) > _MATRIX_RANKS else ""
        lines += ["", f"between nodes: {ports}{more}; of this rank: {row['why']}"]
    return "\n".join(lines)


def _gids(port: dict[str, Any]) -> str:
    shown = []
    for gid in port["gids"]:
        mark = "*" if gid["index"] == port["gid_index"] else ""
        address = IPv6Address(gid["address"])
        shown.append(f"{mark}{gid['index']}: {address.ipv4_mapped or address} ({gid['kind']})")
    # The one in use is the one to see.
    shown.sort(key=lambda text: not text.startswith("*"))
    return ", ".join(shown[:_GIDS]) + (", ..." if len(shown) > _GIDS else "") or "none"


def _job(job: dict[str, Any]) -> str:
    if not job["nodes"]:
        return ""
    lines = [
        f"{job['size']} ranks by {job['launcher']}, {_count(len(job['nodes']), 'node')} x "
        f"{_count(len(job['nodes'][0]), 'rank')}"
    ]
    for number, ranks in enumerate(job["nodes"]):
        who = ", ".join(f"{rank} (pid {job['pids'][rank]})" for rank in ranks)
        hosts = ", ".join(dict.fromkeys(job["hosts"][rank] for rank in ranks))
        lines.append(f"node {number} on {hosts}: ranks {who}")
    if job["size"] <= _MATRIX_RANKS:
        cells = [["from \\ to", *map(str, range(job["size"]))]]
        cells += [[str(rank), *(_LINKS[link] for link in row)] for rank, row in enumerate(job["links"])]
        lines += [
            "",
            _columns(cells),
            "mem: shared memory of node mates; tcp, rdma: to the rail peer; -: relayed by a mate",
        ]
    return "\n".join(lines)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _groups(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("nodes x ranks", "slot", "window", "flags", "a node in all", "descriptors", "window on a GPU")
    cells: list[tuple[str, ...]] = [titles]
    for row in rows:
        sizes = [f"{row[key] / 1024:.0f} KiB" for key in ("slot_nbytes", "window_nbytes", "flags_nbytes")]
        node = f"{row['node_nbytes'] / 2**20:.1f} MiB"
        grid = f"{row['nodes']}x{row['ranks_per_node']}"
        on_gpu = f"{row['gpu_window_nbytes'] / 2**20:.0f} MiB"
        cells.append((grid, *sizes, node, str(row["descriptors"]), on_gpu))
    title = "One communicator takes of each rank (a window at its first collective in host memory, or on a GPU):"
    return f"{title}\n{_columns(cells)}" if rows else ""


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in _MARKS}
    return f"{len(rows)} checks: {counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
