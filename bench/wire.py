"""A wire alone, between two processes of this machine: TCP, and RDMA beside perftest's ib_write_bw on the same devices.

    python bench/wire.py --sizes 64K,1M,8M --json run.jsonl

All take turns, so that a drift of the machine meets all alike; medians. The wire is driven as hdma's proxy drives it:
puts into a ring of 4 slots, each given back by an empty put; who has nothing to do sleeps.

  GB/s       one way
  of perf.   GB/s by those of ib_write_bw, which polls, keeps 128 writes outstanding and gives nothing back
  latency    microseconds of an empty put, half of a ping-pong
  post       microseconds of posting a chunk, in which software devices also send it; a link of 400 Gb/s takes a chunk
             of 1 MiB every 21
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import record

from hdma import nics
from hdma.env import parse_nbytes

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build" / "bench" / "wire"
LIMIT_S = 240.0
# The bytes of one turn: long against a ping-pong, short against the patience of who waits for the table.
TURN_NBYTES = 32 << 20


def build() -> None:
    """Compiles the program unless it is newer than its sources."""
    sources = [ROOT / "bench" / "wire.cc", *(ROOT / "csrc" / "wire").glob("*.cc"), ROOT / "csrc" / "base.cc"]
    newest = max(path.stat().st_mtime for path in [*sources, *(ROOT / "csrc").glob("**/*.h")])
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > newest:
        return
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++17", "-O2", f"-I{ROOT / 'csrc'}", *map(str, sources), "-pthread", "-ldl"]
    subprocess.run([*command, "-o", f"{PROGRAM}.new"], check=True)
    Path(f"{PROGRAM}.new").replace(PROGRAM)


def ends(wanted: str) -> list[tuple[str, int]]:
    """Device and GID index of both ends: those named in `device:GID` form, or the first two active ports."""
    if wanted:
        pairs = [name.rpartition(":") for name in wanted.split(",")]
        return [(device, int(gid)) for device, _, gid in pairs]
    offers = [offer for offer in nics.choose(nics.find()) if offer.port == 1]
    return [(offer.device, offer.gid_index) for offer in (offers * 2)[:2] if offers]


def turn(wire: str, nbytes: int, count: int, pair: list[tuple[str, int]]) -> dict[str, Any]:
    """One turn of the program: GB/s, and seconds of a one-way trip and of posting."""
    names = [str(word) for end in pair for word in end] if wire == "verbs" else []
    command = [str(PROGRAM), wire, str(nbytes), str(count), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def perftest(nbytes: int, count: int, pair: list[tuple[str, int]]) -> float:
    """GB/s of ib_write_bw between the two devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    about = ["-F", "-s", str(nbytes), "-n", str(count), "-p", str(port), "--report_gbits"]
    commands = [["ib_write_bw", "-d", device, "-x", str(gid), *about] for device, gid in pair]
    with subprocess.Popen(commands[0], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as server:
        try:
            until = time.monotonic() + LIMIT_S
            while not listens(port) and server.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            done = subprocess.run([*commands[1], "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT_S)
        finally:
            server.kill()
    return average_gb_s(done.stdout + done.stderr)


def average_gb_s(output: str) -> float:
    """The average of ib_write_bw's table in Gb/s, as GB/s. Raises `SystemExit` where there is none."""
    row = re.search(r"BW average\[Gb/sec\].*\n\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)", output)
    if not row:
        raise SystemExit(f"ib_write_bw says: {output.strip()[-500:]}")
    return float(row[1]) / 8


def listens(port: int) -> bool:
    """Whether a process of this machine does: perftest does not say so."""
    tables = [Path(path).read_text().splitlines()[1:] for path in ("/proc/net/tcp", "/proc/net/tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in sockets)


def measure(wires: list[str], nbytes: int, turns: int, pair: list[tuple[str, int]], peer: bool) -> list[record.Record]:
    count = max(16, TURN_NBYTES // nbytes)
    rows: dict[str, list[dict[str, Any]]] = {wire: [] for wire in wires}
    beside: list[float] = []
    for _ in range(turns):
        for wire in wires:
            rows[wire].append(turn(wire, nbytes, count, pair))
        if peer:
            beside.append(perftest(nbytes, count, pair))
    records = []
    for wire, found in rows.items():
        about: record.Record = {"kind": "wire", "wire": wire, "nbytes": nbytes, "count": count}
        about |= {key: [each[key] for each in found] for key in ("gb_s", "latency_s", "post_s")}
        records.append(about | {"ib_write_bw_gb_s": beside if wire == "verbs" else []})
    return records


def line(row: record.Record) -> str:
    ratio = f"{median(row['gb_s']) / median(row['ib_write_bw_gb_s']):9.2f}" if row["ib_write_bw_gb_s"] else f"{'-':>9}"
    times = f"{median(row['latency_s']) * 1e6:10.1f} {median(row['post_s']) * 1e6:8.1f}"
    return f"{row['wire']:6} {row['nbytes']:10d} {median(row['gb_s']):9.3f} {ratio} {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default="64K,1M,8M", help="bytes of a put, by commas (64K,1M,8M)")
    add("--turns", type=int, default=5, help="measured turns (5)")
    add("--devices", default="", metavar="D:GID,D:GID", help="both ends (the first two active ports)")
    add("--json", metavar="FILE", help="record the run in this file")
    args = parser.parse_args()
    pair = ends(args.devices)
    real = bool(pair) and {device for device, _ in pair} <= {nic.name for nic in nics.find()}
    peer = real and shutil.which("ib_write_bw") is not None
    build()
    print("# wire by turns" + (f" between {pair[0][0]} and {pair[1][0]}" if pair else "; no RDMA device: TCP only"))
    if real and not peer:
        print("# no ib_write_bw (perftest) to compare with")
    print(f"{'#wire':6} {'bytes':>10} {'GB/s':>9} {'of perf.':>9} {'latency us':>10} {'post us':>8}")
    rows: list[record.Record] = []
    for size in map(parse_nbytes, args.sizes.split(",")):
        for row in measure(["tcp", "verbs"] if pair else ["tcp"], size, args.turns, pair, peer):
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        record.write(args.json, [record.header(2, 2), *rows])


if __name__ == "__main__":
    main()
