"""The GPU's kernels without a GPU: their numbers on the host, what the GPUs' compilers make of them, and the cache."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_driver import Arguments
from processes import ROOT, environment, run_all
from programs import reference

from hdma import _core, errors, kernels

PROGRAMS = ROOT / "tests" / "programs"
DTYPES = [np.dtype(dtype) for dtype in reference.FLOATS + reference.INTEGERS]
HALVES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
SINGLE = np.dtype(np.float32)
PAIRS = [(x, x) for x in DTYPES] + [(x, SINGLE) for x in HALVES] + [(SINGLE, x) for x in HALVES]
NAMES = [f"hdma_reduce_{a.name}_{b.name}" for a, b in PAIRS]
OPS = ("sum", "avg", "max", "min", "prod")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("kernel") / "kernel.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC", "-shared"]
    # A misaligned load would pass here, not on a GPU.
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(["g++", *flags, *checks, "-o", library, PROGRAMS / "kernel_host.cc"], check=True)
    return ctypes.CDLL(str(library))


def launch(
    host: ctypes.CDLL,
    name: str,
    dst: np.ndarray,
    srcs: list[np.ndarray],
    numel: int,
    op: str = "sum",
    divisor: int = 1,
    grid: tuple[int, int] = (2, 96),
    backwards: bool = False,
    also: np.ndarray | None = None,
) -> None:
    pointers = (ctypes.c_void_p * 64)(*(src.ctypes.data for src in srcs))
    second = None if also is None else also.ctypes.data
    arguments = Arguments(dst.ctypes.data, second, pointers, len(srcs), OPS.index(op), divisor, 0, numel)
    host.run(getattr(host, name), ctypes.byref(arguments), *grid, backwards)


def winner(better: Callable[[Any, Any], Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(better(a, b) | (a != a), a, b)


def expected(inputs: list[np.ndarray], op: str, divisor: int, dtype: np.dtype) -> np.ndarray:
    """In fp32 or their own dtype, one rounding; of two zeros the last."""
    mine = inputs[0].dtype
    wide = np.dtype(np.float32) if mine in reference.FLOATS and mine.itemsize < 4 else mine
    combine = {
        "max": functools.partial(winner, np.greater),
        "min": functools.partial(winner, np.less),
    }.get(op, reference.OPS[op])
    total = functools.reduce(combine, [x.astype(wide) for x in inputs])
    if mine in reference.FLOATS and divisor != 1:
        total = total / wide.type(divisor)
    return np.asarray(total).astype(dtype)


@np.errstate(all="ignore")
def check(
    host: ctypes.CDLL,
    name: str,
    inputs: list[np.ndarray],
    op: str,
    divisor: int,
    to: np.dtype,
    offset: int,
    **how: Any,
) -> None:
    """Runs a kernel to an output between guards."""
    numel = inputs[0].size
    around = reference.misaligned(numel * to.itemsize + 128, np.uint8, offset)
    around[:] = 0xA5
    out = around[64 : 64 + numel * to.itemsize].view(to)
    launch(host, name, out, inputs, numel, op, divisor, **how)
    assert reference.same_numbers(out, expected(inputs, op, divisor, to)), (name, op, len(inputs), numel, offset)
    assert (around[:64] == 0xA5).all() and (around[64 + numel * to.itemsize :] == 0xA5).all()


def placed(x: np.ndarray, offset: int) -> np.ndarray:
    y = reference.misaligned(x.size, x.dtype, offset)
    y[:] = x
    return y


def random_bits(rng: np.random.Generator, numel: int, dtype: np.dtype) -> np.ndarray:
    """Any number there is: NaN, infinities, subnormals."""
    if dtype == np.bool_:
        return rng.integers(0, 2, numel).astype(np.bool_)
    return np.frombuffer(rng.bytes(numel * dtype.itemsize), dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_numbers(pair: tuple[np.dtype, np.dtype], op: str, host: ctypes.CDLL) -> None:
    a, b = pair
    name, rng = f"hdma_reduce_{a.name}_{b.name}", np.random.default_rng(len(a.name) * 31 + len(b.name))
    for count in range(1, 10):
        for numel in (0, 1, 15, 33, 6007):
            divisor = count if op == "avg" else 1
            # All arrays alike modulo 16 bytes (with a different one where the widths differ), then each for itself.
            shift = int(rng.integers(0, 16))
            alike = shift * b.itemsize, [shift * a.itemsize] * count
            aligned = int(rng.integers(0, 16)) * b.itemsize, [int(k) * a.itemsize for k in rng.integers(0, 16, count)]
            odd = int(rng.integers(0, 16)), [int(k) for k in rng.integers(0, 16, count)]
            for to, offsets in (alike, aligned, odd):
                inputs = [placed(reference.values(i, numel, a), offset) for i, offset in enumerate(offsets)]
                grid = (int(rng.integers(1, 4)), int(rng.integers(1, 40)))
                check(host, name, inputs, op, divisor, b, to, grid=grid, backwards=bool(shift % 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_any_bits(pair: tuple[np.dtype, np.dtype], op: str, host: ctypes.CDLL) -> None:
    a, b = pair
    rng = np.random.default_rng(5)
    for count in (1, 2, 3):
        inputs = [placed(random_bits(rng, 20000, a), 0) for _ in range(count)]
        for divisor in (1, 3, 8):
            check(host, f"hdma_reduce_{a.name}_{b.name}", inputs, op, divisor, b, 0)


def test_bools_of_any_byte(host: ctypes.CDLL) -> None:
    """What is true is not always 1 in memory."""
    inputs = [placed(np.arange(256, dtype=np.uint8) * k, k) for k in (1, 2)]
    a, b = (x != 0 for x in inputs)
    for op in OPS:
        out = np.zeros(256, np.uint8)
        launch(host, "hdma_reduce_bool_bool", out, inputs, 256, op)
        assert np.array_equal(out, ((a & b) if op in ("min", "prod") else (a | b)).astype(np.uint8)), op


@pytest.mark.parametrize("dtype", [x for x in DTYPES if x in reference.FLOATS and x.itemsize < 4], ids=str)
@np.errstate(all="ignore")
def test_rounded_to_the_nearest(dtype: np.dtype, host: ctypes.CDLL) -> None:
    """By search among all numbers of a dtype, not by anybody's conversion."""
    bits = np.dtype(f"u{dtype.itemsize}")
    every = np.arange(1 << 8 * dtype.itemsize).astype(bits).view(dtype).astype(np.float64)
    finite = np.unique(every[np.isfinite(every)])
    rng = np.random.default_rng(3)
    if dtype in HALVES:
        at = rng.integers(0, finite.size - 1, 20000)
        point = finite[at] + (finite[at + 1] - finite[at]) * rng.integers(0, 9, at.size) / 8
        inputs, name = [point.astype(np.float32)], f"hdma_reduce_float32_{dtype.name}"
    else:
        inputs, name = [rng.choice(finite, 20000).astype(dtype) for _ in range(2)], f"hdma_reduce_{dtype}_{dtype}"
    exact = sum(x.astype(np.float64) for x in inputs)
    out = np.zeros(exact.size, dtype)
    launch(host, name, out, inputs, exact.size)
    usable = (exact.astype(np.float32) == exact) & (exact >= finite[0]) & (exact < finite[-1])
    exact, out = exact[usable], out[usable]
    below = np.searchsorted(finite, exact, "right") - 1
    low, high = exact - finite[below], finite[below + 1] - exact
    assert exact.size > 5000 and (low == high).sum() > 100
    assert np.array_equal(np.abs(out.astype(np.float64) - exact), np.minimum(low, high))
    assert not (out.view(bits)[low == high] & 1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(dtype: np.dtype, host: ctypes.CDLL) -> None:
    for position in range(3):
        for offset in (0, dtype.itemsize, 1):
            inputs = [placed(reference.values(i, 5001, dtype), offset) for i in range(3)]
            want = expected([x.copy() for x in inputs], "sum", 1, dtype)
            launch(host, f"hdma_reduce_{dtype.name}_{dtype.name}", inputs[position], inputs, 5001, grid=(3, 37))
            assert reference.same_numbers(inputs[position], want)


def test_most_sources(host: ctypes.CDLL) -> None:
    inputs = [reference.values(i, 1001, SINGLE) for i in range(64)]
    check(host, "hdma_reduce_float32_float32", inputs, "sum", 1, SINGLE, 0)


def test_copy(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    for numel in (0, 1, 3, 16, 200, 40961):
        for to in range(17):
            at = int(rng.integers(0, 17))
            src = placed(random_bits(rng, numel, np.dtype(np.uint8)), at)
            for places in ((to,), (to, to), (to, int(rng.integers(0, 17)))):
                arounds = [reference.misaligned(numel + 128, np.uint8, place) for place in places]
                first, *second = [around[64:] for around in arounds]
                launch(host, "hdma_copy", first, [src], numel, grid=(2, 33), also=second[0] if second else None)
                for around in arounds:
                    assert np.array_equal(around[64 : 64 + numel], src)
                    assert not around[:64].any() and not around[64 + numel :].any()


# What the compilers of the GPUs say.


@pytest.fixture(scope="module")
def nvrtc() -> kernels.Compiler:
    try:
        return kernels.Compiler(kernels.KINDS["cuda"])
    except errors.DeviceError as error:
        pytest.skip(str(error))


def test_cuda(nvrtc: kernels.Compiler) -> None:
    """Every kernel in registers, and no more of those than 512 threads have."""
    options = [*kernels.CUDA_OPTIONS, "--gpu-architecture=sm_90", "--ptxas-options=-v"]
    cubin, log = nvrtc.compile(_core.kernel_source(), options, "CUBIN")
    assert cubin.startswith(b"\x7fELF")
    found = re.findall(r"entry function '(\w+)'.*\n.*\n.*?(\d+ bytes.*)\n.*Used (\d+) registers", log)
    assert sorted(name for name, _, _ in found) == sorted([*NAMES, "hdma_copy"]), log
    for name, memory, registers in found:
        assert memory == "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", (name, memory)
        assert int(registers) <= 128, name


@pytest.mark.long
def test_cuda_that_the_compiler_does_not_know(nvrtc: kernels.Compiler, tmp_path: Path, monkeypatch: Any) -> None:
    """PTX for the driver, in which the loads can be read: 16 bytes each, from the GPU's memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = kernels.code("cuda", "sm_999").decode()
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?\n)\}", text, re.DOTALL))
    assert sorted(bodies) == sorted([*NAMES, "hdma_copy"])
    for name, body in bodies.items():
        assert "ld.global.v4" in body and "st.global.v4" in body, name
        assert not re.search(r"\b(ld|st)\.(local|v\d|[bufs]\d)", body), f"{name}: of no known memory, or a stack"
        assert "fma.rn" not in body and ".ftz" not in body, name


def test_one_that_somebody_loaded_already(nvrtc: kernels.Compiler) -> None:
    """torch brings its own, which is then used, with its other half, wherever it lies."""
    program = "import ctypes, sys; from hdma import kernels; ctypes.CDLL(sys.argv[1]); sys.path.clear()\n"
    program += "compiler = kernels.Compiler(kernels.KINDS['cuda'])\n"
    program += "code, _ = compiler.compile('extern \"C\" __global__ void f() {}', [], 'PTX')\n"
    program += "print(compiler.path, b'.entry f' in code)"
    done = run_all([([sys.executable, "-c", program, nvrtc.path], environment())], timeout_s=60)[0]
    assert done.out.split() == [os.path.realpath(nvrtc.path), "True"]


def test_cuda_error(nvrtc: kernels.Compiler) -> None:
    with pytest.raises(errors.DeviceError, match=r"nvrtc \(.*NVRTC_ERROR_COMPILATION.*(?s:.*)nonsense"):
        nvrtc.compile("nonsense", [*kernels.CUDA_OPTIONS], "CUBIN")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_hip(arch: str, tmp_path: Path) -> None:
    """By a clang that knows no GPU library, as hipRTC's is one: registers, spills and the width of loads."""
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs a clang that compiles for AMD: pip install ziglang")
    out = tmp_path / "kernel.s"
    alone = ["-nogpulib", "-nogpuinc", "--cuda-device-only", "-Werror"]
    options = [*kernels.HIP_OPTIONS, f"--offload-arch={arch}", *alone]
    command = [Path(found.submodule_search_locations[0]) / "zig", "clang", "-x", "hip", *options, "-S", "-o", out]
    caches = {"ZIG_GLOBAL_CACHE_DIR": tmp_path, "ZIG_LOCAL_CACHE_DIR": tmp_path}
    done = run_all([([*command, ROOT / "csrc/kernels/reduce_gpu.cu"], environment(**caches))], timeout_s=100)[0]
    assert done.code == 0, done.out
    text = out.read_text()
    bodies = dict(re.findall(r"\n(hdma_\w+):(.*?)s_endpgm\n\t\.section", text, re.DOTALL))
    assert sorted(bodies) == sorted([*NAMES, "hdma_copy"])
    for name, body in bodies.items():
        assert "global_load_dwordx4" in body and "global_store_dwordx4" in body, name
        assert not re.search("(flat|scratch|buffer)_(load|store)", body), name
    notes = text.split(".amdgpu_metadata")[1]
    limits = {"private_segment_fixed_size": 0, "vgpr_spill_count": 0, "sgpr_spill_count": 0, "vgpr_count": 128}
    for field, most in limits.items():
        counts = [int(n) for n in re.findall(rf"\.{field}: +(\d+)", notes)]
        assert len(counts) == len(bodies) and max(counts) <= most, (field, counts)


# Finding a compiler, and the cache, with a library that only notes what is asked of it.


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("stub") / "libhiprtc.so"
    flags = ["-O1", "-Wall", "-Wextra", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, "-o", library, PROGRAMS / "stub_hiprtc.c"], check=True)
    return library


@pytest.fixture
def rocm(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ROCm and an empty cache; the log of compilations is in it."""
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    (tmp_path / "rocm" / "lib" / "libhiprtc.so.7").write_bytes(stub.read_bytes())
    for name, value in {"ROCM_PATH": "rocm", "XDG_CACHE_HOME": "cache", "STUB_LOG": "log"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    return tmp_path


def compilations(rocm: Path) -> int:
    return len((rocm / "log").read_text().splitlines())


def kept(rocm: Path) -> list[Path]:
    return sorted((rocm / "cache" / "hdma").iterdir())


def test_compiled_once(rocm: Path) -> None:
    assert [kernels.code("hip", "gfx942") for _ in range(3)] == [b"gfx942"] * 3
    assert compilations(rocm) == 1 and len(kept(rocm)) == 1
    assert (rocm / "log").read_text() == " ".join([*kernels.HIP_OPTIONS, "--offload-arch=gfx942\n"])
    assert kernels.code("hip", "gfx950") == b"gfx950"
    assert compilations(rocm) == 2 and len(kept(rocm)) == 2
    assert kept(rocm)[0].stat().st_mode & 0o777 == 0o600


def test_another_source_or_option_is_compiled_anew(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.code("hip", "gfx942")
    source = _core.kernel_source()
    monkeypatch.setattr(kernels._core, "kernel_source", lambda: source + "\n")
    kernels.code("hip", "gfx942")
    assert compilations(rocm) == 2


def spoilt(path: Path, how: str) -> None:
    text = path.read_bytes()
    if how == "truncated":
        path.write_bytes(text[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "changed":
        path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    elif how == "of another key":
        other = next(each for each in path.parent.iterdir() if each != path)
        path.write_bytes(other.read_bytes())
    elif how == "writable for others":
        path.chmod(0o666)
    elif how == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif os.geteuid():
        pytest.skip("needs root to give files away")
    else:
        os.chown(path, 12345, -1)


WAYS = ["truncated", "empty", "changed", "of another key", "writable for others", "a link", "a pipe", "another user's"]


@pytest.mark.parametrize("how", WAYS)
def test_what_is_not_trusted(how: str, rocm: Path) -> None:
    kernels.code("hip", "gfx950")
    before = set(kept(rocm))
    kernels.code("hip", "gfx942")
    (mine,) = set(kept(rocm)) - before
    spoilt(mine, how)
    assert [kernels.code("hip", "gfx942") for _ in range(2)] == [b"gfx942"] * 2
    assert compilations(rocm) == 3, "compiled again, and repaired"


@pytest.mark.parametrize("place", ["a file", "/proc/none", "relative", "no home", "full"])
def test_without_a_cache(place: str, rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "a file":
        (rocm / "cache").write_text("")
    elif place == "full":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
    elif place == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        monkeypatch.setenv("HOME", "/proc/none")
    assert [kernels.code("hip", "gfx942") for _ in range(2)] == [b"gfx942"] * 2
    assert compilations(rocm) == 2
    if place == "full":
        assert kept(rocm) == []


def test_home(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(rocm))
    kernels.code("hip", "gfx942")
    assert len(list((rocm / ".cache" / "hdma").iterdir())) == 1


def test_several_processes_at_once(rocm: Path) -> None:
    program = "import sys; from hdma import kernels; sys.stdout.write(kernels.code('hip', 'gfx942').decode())"
    env = environment(STUB_SLOW=1)
    finished = run_all([([sys.executable, "-c", program], env)] * 4, timeout_s=60)
    assert [(each.code, each.out) for each in finished] == [(0, "gfx942")] * 4
    assert len(kept(rocm)) == 1
    before = compilations(rocm)
    assert kernels.code("hip", "gfx942") == b"gfx942" and compilations(rocm) == before


def test_failure_shows_the_log(rocm: Path) -> None:
    with pytest.raises(errors.DeviceError, match=r"(?s)HIPRTC_ERROR_COMPILATION.*--offload-arch=broken.*line 7: sigh"):
        kernels.code("hip", "broken")
    assert not (rocm / "cache").exists()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libhiprtc.so.6").write_text("no library")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(errors.DeviceError) as caught:
        kernels.code("hip", "gfx942")
    text = str(caught.value)
    refused = f"{tmp_path}/lib/libhiprtc.so.6: "
    for words in ("no hiprtc", "libhiprtc.so.7", refused, "file too short", "What helps: install"):
        assert words in text, text
    nothing = dataclasses.replace(kernels.KINDS["cuda"], sonames=("libno.so.1",))
    with pytest.raises(errors.DeviceError, match=r"no nvrtc .* tried libno.so.1 .*pip install nvidia-cuda-nvrtc"):
        kernels.Compiler(nothing)


def test_a_library_without_the_functions(rocm: Path) -> None:
    source = rocm / "empty.c"
    source.write_text("int nothing;")
    subprocess.run(["gcc", "-shared", "-o", rocm / "rocm/lib/libhiprtc.so.7", source], check=True)
    with pytest.raises(errors.DeviceError, match="has no hiprtcVersion"):
        kernels.code("hip", "gfx942")
