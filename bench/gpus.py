"""All measurements of GPUs of one host in one go, with plots: what bench/results holds of them.

    python bench/gpus.py --ranks 8 --folder bench/results --name 2026-12-02-8xh200

One rank a GPU (-D host: in host memory, to try this), as one node, or with HDMA_RANKS_PER_NODE as several, whose data
then goes by way of the host. Each step is a command that also works alone; one that fails, or takes longer than
--limit-s, is told, and the next one begun.

  collectives             AllGather and ReduceScatter alone, 16 MiB to 1 GiB a rank, beside all rivals
  overlap                 beside GEMMs
  collectives-registered  alone in registered memory, in place too
  overlap-registered      beside GEMMs in registered memory, AllGather in place
  small                   64 KiB to 4 MiB a rank
  timeline                where the time of hdma's calls goes
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hdma.env import parse_nbytes

HERE = Path(__file__).resolve().parent
PLOTTED = ("collectives", "overlap")
# torchrun ends its ranks when it is asked to end, not when it is killed.
END_S = 30.0


def steps(ranks: int, device: str, backends: str, largest: int, turns: int) -> dict[str, list[str]]:
    """The script and arguments of each step. Sizes of collectives.py are those of the whole."""
    on = ["-D", device, "-B", backends]
    alone = ["collectives.py", *on, "-d", "bfloat16", "-n", str(turns)]
    large = ["-b", str(ranks * min(16 << 20, largest)), "-e", str(ranks * largest), "-f", "4"]
    small = ["-b", str(ranks << 16), "-e", str(ranks * min(4 << 20, largest)), "-f", "4"]
    beside = ["overlap.py", *on, "--dtype", "bfloat16", "--turns", str(turns)]
    profiled = ",".join(name for name in ("hdma", "nccl") if name in backends.split(","))
    sizes = ",".join(str(n << 20) for n in (1, 16, 64, 256) if n << 20 <= largest) or str(largest)
    return {
        "collectives": [*alone, *large],
        "overlap": beside,
        "collectives-registered": [*alone, *large, "-R", "2"],
        "overlap-registered": [*beside, "-R", "2"],
        "small": [*alone, *small],
        "timeline": ["timeline.py", "-B", profiled, "--sizes", sizes],
    }


def run(command: list[str], output: Path, limit_s: float) -> str:
    """Runs a command, whose output goes into a file and onto the terminal; what went wrong, or nothing."""
    with open(output, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S)
    print(output.read_text(), flush=True)
    return f"took longer than {limit_s:g} s" if code is None else f"ended with code {code}" if code else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(steps(1, "gpu", "hdma", 1 << 20, 1))
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the results go (.)")
    parser.add_argument("--name", required=True, help="what their names begin with")
    parser.add_argument("-D", "--device", choices=("gpu", "host"), default="gpu", help="where tensors are (gpu)")
    parser.add_argument("-B", "--backends", default="hdma,nccl,nccl-zero,low", help="(hdma,nccl,nccl-zero,low)")
    parser.add_argument("--largest", type=parse_nbytes, default=1 << 30, help="bytes of the largest shard (1G)")
    parser.add_argument("--turns", type=int, default=20, help="measured turns (20)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one step (240)")
    parser.add_argument("--steps", default=",".join(known), help=f"({','.join(known)})")
    args, failed = parser.parse_args(), []
    wanted = args.steps.split(",")
    if args.ranks < 1 or args.turns < 1 or not {*wanted} <= {*known}:
        parser.error(f"--ranks and --turns must be 1 or more, --steps some of {','.join(known)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # for -B low
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = steps(args.ranks, args.device, args.backends, args.largest, args.turns)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    for name, (script, *more) in chosen.items():
        if name not in wanted:
            continue
        start_s, base = time.monotonic(), str(args.folder / f"{args.name}-{name}")
        command = [*launch, str(HERE / script), *more, "--json", f"{base}.jsonl"]
        problem = run(command, Path(f"{base}.txt"), args.limit_s)
        if not problem and name.startswith(PLOTTED):
            report = [sys.executable, str(HERE / "report.py"), f"{base}.jsonl", "--plot", f"{base}.png"]
            problem = run(report, Path(f"{base}.txt"), args.limit_s)
        if problem:
            failed.append(f"{name} {problem}")
        print(f"# {name}: {problem or 'done'}, {time.monotonic() - start_s:.0f} s", flush=True)
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
