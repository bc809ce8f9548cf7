"""What the VM needs from Debian: programs, installed where missing; a kernel, only unpacked, in build/rdma.

Needs Debian 12 on x86-64, and root to install.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / "build" / "rdma"
# The last four are for tests.
PACKAGES = (
    "busybox-static iproute2 kmod qemu-system-x86 rdma-core ibverbs-providers ibverbs-utils perftest libibverbs-dev"
)
# Without crc32_generic no device can be made, and the message does not say so.
MODULES = "crc32_generic virtio_pci virtio_console 9pnet_virtio 9p overlay veth sch_netem ib_uverbs rdma_ucm rdma_rxe"

# Of one command, the slowest of which download.
LIMIT_S = 600


class Failed(Exception):
    """The VM cannot be set up, or died."""


def say(text: str) -> None:
    print("vm:", text, file=sys.stderr, flush=True)


def call(*args: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; raises Failed with all of its output."""
    env = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{shlex.join(map(str, args))} takes more than {LIMIT_S} s: is the network there?") from None
    if done.returncode:
        raise Failed(f"{shlex.join(map(str, args))} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def apt(*args: str, cwd: Path | None = None) -> None:
    call("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *args, cwd=cwd)


def prepared() -> Path:
    """The folder with `kernel` and `initrd`; installs, downloads and builds what is missing; raises Failed."""
    if not shutil.which("apt-get") or os.uname().machine != "x86_64":
        raise Failed("needs Debian on x86-64, for its packages and its kernel")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = missing_packages()
        if missing:
            names = " ".join(missing)
            if os.getuid():
                raise Failed(f"needs root, or: apt-get install --no-install-recommends {names}")
            say(f"installs {names}")
            apt("update")
            apt("install", "-y", "--no-install-recommends", *missing)
        folder = place()
        if not folder or not folder.is_dir():
            # What apt knew may no longer be there to download.
            if not missing and not os.getuid():
                apt("update")
            folder = place()
        if not folder:
            raise Failed("apt knows no linux-image-amd64 (try apt-get update)")
        if not folder.is_dir():
            build(folder)
        return folder


def missing_packages() -> list[str]:
    status = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *PACKAGES.split()]
    found = subprocess.run(status, capture_output=True, text=True).stdout.splitlines()
    return [package for package in PACKAGES.split() if f"installed {package}" not in found]


def place() -> Path | None:
    """Where Debian's newest kernel belongs, as NAME=VERSION=HASH of what builds it; None if apt knows none."""
    command = ["apt-cache", "show", "--no-all-versions", "linux-image-amd64"]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"^Depends: (linux-image-\S+) \(= (\S+)\)", shown, re.MULTILINE)
    recipe = hashlib.sha256(Path(__file__).read_bytes() + (HERE / "init").read_bytes()).hexdigest()
    return CACHE / f"{found[1]}={found[2]}={recipe[:12]}" if found else None


def build(folder: Path) -> None:
    """Downloads and unpacks the kernel that `folder` is named after, and makes an initrd with the modules."""
    package = folder.name.rpartition("=")[0]
    say(f"downloads and unpacks {package}")
    for old in CACHE.glob("*/"):
        shutil.rmtree(old)
    new = CACHE / "new"
    tree, unpacked = new / "tree", new / "unpacked"
    for name in ("bin", "modules", "proc", "sys", "dev", "mnt"):
        (tree / name).mkdir(parents=True)
    apt("download", package, cwd=new)
    (archive,) = new.glob("*.deb")
    call("dpkg", "-x", archive, unpacked)
    (image,) = unpacked.glob("boot/vmlinuz-*")
    release = image.name.removeprefix("vmlinuz-")
    # Here, since the kernel would take 3 s to unpack itself on an emulated CPU.
    packed = image.read_bytes()
    begin = packed.find(b"\xfd7zXZ\0")
    if begin < 0:
        raise Failed(f"{image.name} is not packed by xz")
    (new / "kernel").write_bytes(lzma.LZMADecompressor().decompress(packed[begin:]))

    call("depmod", "-b", unpacked, release)
    lines = []
    for module in MODULES.split():
        lines += call("modprobe", "-d", unpacked, "-S", release, "--show-depends", module).splitlines()
    # In this order; a module that is built in has no file.
    files = [Path(line.split()[1]) for line in dict.fromkeys(lines) if line.startswith("insmod ")]
    for file in files:
        shutil.copy(file, tree / "modules")
    (tree / "modules/order").write_text("".join(f"{file.name}\n" for file in files))
    shutil.copy("/bin/busybox", tree / "bin")
    shutil.copy(HERE / "init", tree)
    (tree / "init").chmod(0o755)
    call("sh", "-c", "find . | busybox cpio -o -H newc >../initrd", cwd=tree)

    shutil.rmtree(tree)
    shutil.rmtree(unpacked)
    archive.unlink()
    new.rename(folder)
