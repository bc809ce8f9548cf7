"""Runs a command in a small VM that has RDMA devices: rxe0 and rxe1 on the two ends of one cable.

    python tests/rdma/vm.py [--timeout-s S] [--bring NAME] -- COMMAND [ARGUMENT...]

The guest sees the host's files as they are, cannot change them, and runs COMMAND as root in this checkout. What it writes
is lost, but for the folder /run/job; --bring copies a file from there into the checkout. Its output comes out here, and
its exit code is this program's; 124 says that time ran out, 125 that the VM could not be set up or died.

Missing Debian packages are installed, and a kernel is unpacked into build/rdma, once. Needs Debian 12 on x86-64, and root
to install. Where the CPU offers no virtualisation, it is emulated: everything takes some 20 times as long.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import hashlib
import lzma
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / "build" / "rdma"
# perftest and ibverbs-utils are for tests; libibverbs-dev has the header that they compare with.
PACKAGES = (
    "busybox-static ethtool ibverbs-providers ibverbs-utils iproute2 kmod libibverbs-dev perftest qemu-system-x86 rdma-core"
).split()
# Without crc32_generic no rxe device can be made, and the message does not say so.
MODULES = (
    "crc32_generic virtio_pci virtio_console 9pnet_virtio 9p overlay veth sch_netem ib_uverbs rdma_ucm rdma_rxe"
).split()
PASSED_ON = re.compile(r"(HDMA|PYTEST|TEST)_.*|PATH|HOME|LANG|PYTHONPATH|OMP_NUM_THREADS|COLUMNS")


class Failed(Exception):
    """The VM cannot be set up, or died."""


def say(text: str) -> None:
    print("vm.py:", text, file=sys.stderr, flush=True)


def call(*args: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; raises Failed with all of its output."""
    done = subprocess.run(args, cwd=cwd, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{shlex.join(map(str, args))} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def apt(*args: str, cwd: Path | None = None) -> None:
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    call("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *args, cwd=cwd)


def missing_packages() -> list[str]:
    status = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *PACKAGES]
    found = subprocess.run(status, capture_output=True, text=True).stdout.splitlines()
    return [package for package in PACKAGES if f"installed {package}" not in found]


def kernel_package() -> tuple[str, str] | None:
    """Name and version of Debian's newest kernel package that apt knows."""
    shown = subprocess.run(["apt-cache", "show", "--no-all-versions", "linux-image-amd64"], capture_output=True, text=True)
    found = re.search(r"^Depends: (linux-image-\S+) \(= (\S+)\)", shown.stdout, re.MULTILINE)
    return (found[1], found[2]) if found else None


def prepared() -> Path:
    """The folder with `kernel` and `initrd`; installs, downloads and builds what is missing."""
    if not shutil.which("apt-get") or os.uname().machine != "x86_64":
        raise Failed("needs Debian on x86-64: its packages and its kernel")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing, updated = missing_packages(), False
        if missing:
            say(f"installs {' '.join(missing)}")
            if os.getuid():
                raise Failed(f"needs root to install {' '.join(missing)}")
            apt("update")
            updated = True
            apt("install", "-y", "--no-install-recommends", *missing)
        if not cached(kernel_package()) and not updated and not os.getuid():
            apt("update")
        package = kernel_package()
        if not package:
            raise Failed("apt knows no linux-image-amd64 (apt-get update as root may help)")
        folder = cached(package)
        if not folder:
            folder = build(*package)
        return folder


def place(name: str, version: str) -> Path:
    """Where a kernel is kept: a folder for each version and each way of building."""
    recipe = Path(__file__).read_bytes() + (HERE / "init").read_bytes()
    return CACHE / f"{name}_{version}_{hashlib.sha256(recipe).hexdigest()[:12]}"


def cached(package: tuple[str, str] | None) -> Path | None:
    return place(*package) if package and place(*package).is_dir() else None


def build(name: str, version: str) -> Path:
    say(f"downloads and unpacks {name} {version}")
    for old in CACHE.glob("*/"):
        shutil.rmtree(old)
    new = CACHE / "new"
    tree = new / "tree"
    for folder in ("bin", "modules", "proc", "sys", "dev", "mnt"):
        (tree / folder).mkdir(parents=True)
    apt("download", f"{name}={version}", cwd=new)
    (package,) = new.glob("*.deb")
    call("dpkg", "-x", package, new / "unpacked")
    (image,) = new.glob("unpacked/boot/vmlinuz-*")
    release = image.name.removeprefix("vmlinuz-")
    # Unpacked here, since it takes the emulated CPU 3 s.
    packed = image.read_bytes()
    begin = packed.find(b"\xfd7zXZ\0")
    if begin < 0:
        raise Failed(f"{image.name} is not packed by xz")
    (new / "kernel").write_bytes(lzma.LZMADecompressor().decompress(packed[begin:]))

    call("depmod", "-b", new / "unpacked", release)
    order = []
    for module in MODULES:
        lines = call("modprobe", "-d", new / "unpacked", "-S", release, "--show-depends", module).splitlines()
        order += [Path(line.split()[1]) for line in lines if line.startswith("insmod ")]
    order = list(dict.fromkeys(order))
    for path in order:
        shutil.copy(path, tree / "modules")
    (tree / "modules/order").write_text("".join(f"{path.name}\n" for path in order))
    shutil.copy("/bin/busybox", tree / "bin")
    shutil.copy(HERE / "init", tree)
    (tree / "init").chmod(0o755)
    call("sh", "-c", "cd tree && find . | busybox cpio -o -H newc >../initrd", cwd=new)

    shutil.rmtree(tree)
    shutil.rmtree(new / "unpacked")
    package.unlink()
    return new.rename(place(name, version))


def write_job(job: Path, command: Sequence[str]) -> None:
    """What the guest runs: /run/job/start.sh, which reads job.sh."""
    for folder in ("proc", "sys", "dev", "run"):
        if ROOT.is_relative_to(f"/{folder}"):
            raise Failed(f"the guest has its own /{folder} and does not see this checkout, {ROOT}")
    variables = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    variables = {"LANG": "C.UTF-8", "HOME": "/root", "TEST_RDMA": "expected", "TEST_SLOWDOWN": "20"} | variables
    variables["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
    variables["ROOT"] = str(ROOT)
    variables["TERM"] = os.environ.get("TERM", "dumb") if sys.stdout.isatty() else "dumb"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    (job / "job.sh").write_text("\n".join([*lines, f"job() {{ {shlex.join(command)}; }}", ""]))
    shutil.copy(HERE / "start.sh", job)


def virtualised() -> bool:
    """Whether KVM is of use: /dev/kvm also opens where it has nothing but software under it, and is slower than none."""
    flags = Path("/proc/cpuinfo").read_text()
    return bool(re.search(r"^flags.* (svm|vmx)\b", flags, re.MULTILINE)) and os.access("/dev/kvm", os.R_OK | os.W_OK)


def qemu(kernel: Path, job: Path) -> list[str]:
    machine = ["-accel", "kvm", "-cpu", "host"] if virtualised() else ["-accel", "tcg,thread=multi", "-cpu", "Nehalem"]
    options = (
        "-smp 2 -m 3G -M q35 -nodefaults -no-user-config -display none -no-reboot"
        " -chardev stdio,id=out,signal=off -device virtio-serial-pci -device virtconsole,chardev=out"
        " -fsdev local,id=root,path=/,security_model=none,multidevs=remap,readonly=on"
        " -device virtio-9p-pci,fsdev=root,mount_tag=root -device virtio-9p-pci,fsdev=job,mount_tag=job"
    ).split()
    say_little = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 tsc=reliable random.trust_cpu=on"
    # It must not outlive this program, however that ends.
    return [
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *machine),
        *("-kernel", str(kernel / "kernel"), "-initrd", str(kernel / "initrd"), "-append", say_little),
        *("-serial", f"file:{job}/console.log", "-fsdev", f"local,id=job,path={job},security_model=none", *options),
    ]


def copy_output(source: int) -> None:
    while chunk := os.read(source, 1 << 16):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def boot(kernel: Path, job: Path, timeout_s: float) -> int:
    """Runs the VM to its end: the command's exit code, or 124 after `timeout_s` seconds; raises Failed."""
    began = time.monotonic()
    # By way of a pipe: QEMU would leave this program's own output non-blocking.
    vm = subprocess.Popen(qemu(kernel, job), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert vm.stdout
    copier = threading.Thread(target=copy_output, args=(vm.stdout.fileno(),), daemon=True)
    copier.start()
    try:
        vm.wait(timeout_s)
        late = False
    except subprocess.TimeoutExpired:
        late = True
    finally:
        vm.kill()
        vm.wait()
        copier.join(5)
    code = job / "code"
    if code.is_file() and code.read_text().strip():
        return int(code.read_text())
    phase = "while the command ran" if (job / "began").exists() else "before the command began"
    log = job / "console.log"
    lines = log.read_text(errors="replace").splitlines()[-30:] if log.exists() else []
    tail = "".join(f"\n| {line}" for line in lines) or " nothing"
    if late:
        say(f"time ran out after {timeout_s:g} s, {phase}; the VM was ended. Its console says:{tail}")
        return 124
    raise Failed(f"the VM died after {time.monotonic() - began:.0f} s, {phase} (QEMU: {vm.returncode}). Its console says:{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a command in a small VM that has RDMA devices.")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="the VM's longest life, in seconds (900)")
    parser.add_argument("--bring", metavar="NAME", help="copy this file from the guest's /run/job into the checkout")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    brought = ROOT / args.bring if args.bring else None
    if brought:
        brought.unlink(missing_ok=True)
    try:
        kernel = prepared()
        with tempfile.TemporaryDirectory(prefix="rdma-vm-") as folder:
            job = Path(folder)
            write_job(job, args.command)
            code = boot(kernel, job, args.timeout_s)
            if brought and (job / brought.name).exists():
                shutil.copyfile(job / brought.name, brought)
            return code
    except Failed as error:
        say(str(error))
        return 125


if __name__ == "__main__":
    sys.exit(main())
