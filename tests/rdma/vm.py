"""Runs a command in a small VM that has RDMA devices: rxe0 and rxe1, on the two ends of one virtual cable.

    python tests/rdma/vm.py [--timeout-s S] [--cpus N] [--bring NAME] -- COMMAND [ARGUMENT...]

The guest sees the host's files but cannot change them, and runs COMMAND as root in this checkout. What it writes is
lost, but for the folder /run/job: --bring copies a file from there into the checkout. Its output comes out here, and
its exit code is this program's; 124 says that time ran out, 125 that the VM could not be set up or died.

Where the CPU offers no virtualisation it is emulated: small things then take some 10 to 20 times as long.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kernel import HERE, Failed, prepared, say

ROOT = HERE.parent.parent
PASSED_ON = re.compile(r"(HDMA|PYTEST|TEST)_.*|HOME|LANG|COLUMNS|OMP_NUM_THREADS|PATH|PYTHONPATH")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a command in a small VM that has RDMA devices.")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="the VM's longest life, in seconds (900)")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs of the VM (2; 1 is faster where the host is busy)")
    parser.add_argument("--bring", metavar="NAME", help="copy this file from the guest's /run/job into the checkout")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    for ending in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    os.environ["PATH"] = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    if args.bring:
        (ROOT / args.bring).unlink(missing_ok=True)
    try:
        kernel = prepared()
        with tempfile.TemporaryDirectory(prefix="rdma-vm-") as folder:
            job = Path(folder)
            write_job(job, args.command)
            code = boot(kernel, job, args.cpus, args.timeout_s)
            if args.bring and (job / args.bring).exists():
                shutil.copyfile(job / args.bring, ROOT / args.bring)
            return code
    except Failed as error:
        say(str(error))
        return 125


def write_job(job: Path, command: Sequence[str]) -> None:
    """What the guest runs, /run/job/start.sh, and what that reads."""
    if ROOT.parts[1] in ("proc", "sys", "dev", "run"):
        raise Failed(f"the VM has its own /{ROOT.parts[1]}, and so cannot see this checkout: {ROOT}")
    variables = {"HOME": "/root", "LANG": "C.UTF-8", "TEST_RDMA": "expected", "TEST_SLOWDOWN": "20"}
    variables |= {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    variables |= {"ROOT": str(ROOT), "HOSTNAME": os.uname().nodename}
    variables |= {"TERM": os.environ.get("TERM", "dumb") if sys.stdout.isatty() else "dumb"}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    (job / "job.sh").write_text("".join(lines) + f"job() {{ {shlex.join(command)}; }}\n")
    shutil.copy(HERE / "start.sh", job)


def boot(kernel: Path, job: Path, cpus: int, timeout_s: float) -> int:
    """Runs the VM to its end: the command's exit code, or 124 after `timeout_s` seconds; raises Failed."""
    began = time.monotonic()
    # By way of a pipe, since QEMU would leave this program's own output non-blocking.
    vm = subprocess.Popen(qemu(kernel, job, cpus), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert vm.stdout
    copier = threading.Thread(target=copy_output, args=(vm.stdout.fileno(),), daemon=True)
    copier.start()
    late = False
    try:
        vm.wait(timeout_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        vm.kill()
        vm.wait()
        copier.join(5)
    code = (job / "code").read_text().strip() if (job / "code").exists() else ""
    if code:
        return int(code)
    phase = "while the command ran" if (job / "began").exists() else "before the command began"
    console = job / "console.log"
    lines = console.read_text(errors="replace").splitlines()[-60:] if console.exists() else []
    tail = "its console's last lines:\n" + "\n".join(f"| {line}" for line in lines) if lines else "its console is empty"
    if late:
        say(f"time ran out after {timeout_s:g} s, {phase}; {tail}")
        return 124
    raise Failed(f"the VM died after {time.monotonic() - began:.1f} s, {phase} (QEMU: {vm.returncode}); {tail}")


def qemu(kernel: Path, job: Path, cpus: int) -> list[str]:
    machine = "-accel kvm -cpu host" if virtualised() else "-accel tcg,thread=multi -cpu Nehalem"
    options = (
        f"{machine} -smp {cpus} -m 3G -M q35 -nodefaults -no-user-config -display none -no-reboot"
        " -chardev stdio,id=out,signal=off -device virtio-serial-pci -device virtconsole,chardev=out"
        " -fsdev local,id=root,path=/,security_model=none,multidevs=remap,readonly=on"
        " -device virtio-9p-pci,fsdev=root,mount_tag=root -device virtio-9p-pci,fsdev=job,mount_tag=job"
    )
    quiet = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 tsc=reliable random.trust_cpu=on"
    # It must not outlive this program, however that ends.
    return [
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
        *("-kernel", str(kernel / "kernel"), "-initrd", str(kernel / "initrd"), "-append", quiet),
        *("-serial", f"file:{job}/console.log", "-fsdev", f"local,id=job,path={job},security_model=none"),
        *options.split(),
    ]


def virtualised() -> bool:
    """Whether the CPU can run the VM. /dev/kvm alone does not say so: without the CPU's help it is slower than QEMU."""
    flags = Path("/proc/cpuinfo").read_text()
    return bool(re.search(r"^flags.* (svm|vmx)\b", flags, re.MULTILINE)) and os.access("/dev/kvm", os.R_OK | os.W_OK)


def copy_output(source: int) -> None:
    while chunk := os.read(source, 1 << 16):
        with contextlib.suppress(BrokenPipeError):  # The VM goes on without a reader.
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
