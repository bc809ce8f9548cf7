"""Uses the stub GPU driver directly, without hdma: functions for test_stub.py."""

from __future__ import annotations

import ctypes as c
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import stub_gpu as gpu

CUDA = gpu.RUNTIME == "cuda"
Handle = c.c_char * 64


class ByValue(c.Structure):
    _fields_ = [("bytes", Handle)]


class ReduceArguments(c.Structure):
    _fields_ = [
        ("dst", c.c_uint64),
        ("also", c.c_uint64),
        ("srcs", c.c_uint64 * 64),
        ("source_count", c.c_uint),
        ("op", c.c_uint),
        ("divisor", c.c_int),
        ("unused", c.c_uint),
        ("element_count", c.c_longlong),
    ]


def wait(stream: int, address: int, value: int) -> None:
    more = () if CUDA else (0xFFFFFFFF,)
    gpu.call(gpu.either("cuStreamWaitValue32_v2", "hipStreamWaitValue32"), stream, address, value, 0, *more)


def write(stream: int, address: int, value: int) -> None:
    gpu.call(gpu.either("cuStreamWriteValue32_v2", "hipStreamWriteValue32"), stream, address, value, 0)


def register(memory: np.ndarray) -> int:
    gpu.call(gpu.either("cuMemHostRegister_v2", "hipHostRegister"), memory.ctypes.data, memory.nbytes, 2)
    address = c.c_uint64()
    name = gpu.either("cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer")
    gpu.call(name, c.byref(address), memory.ctypes.data, 0)
    return address.value


def unregister(memory: np.ndarray) -> None:
    gpu.call(gpu.either("cuMemHostUnregister", "hipHostUnregister"), memory.ctypes.data)


def new_event() -> int:
    event = c.c_void_p()
    gpu.call(gpu.either("cuEventCreate", "hipEventCreateWithFlags"), c.byref(event), 2)
    return event.value or 0


def record(event: int, stream: int) -> None:
    gpu.call(gpu.either("cuEventRecord", "hipEventRecord"), event, stream)


def wait_event(stream: int, event: int) -> None:
    gpu.call(gpu.either("cuStreamWaitEvent", "hipStreamWaitEvent"), stream, event, 0)


def function(name: str) -> int:
    module, found = c.c_void_p(), c.c_void_p()
    gpu.call(gpu.either("cuModuleLoadData", "hipModuleLoadData"), c.byref(module), b"no image")
    gpu.call(gpu.either("cuModuleGetFunction", "hipModuleGetFunction"), c.byref(found), module, name.encode())
    return found.value or 0


def launch(name: str, stream: int, dst: int, srcs: list[int], count: int, grid: int = 16, block: int = 512) -> int:
    arguments = ReduceArguments(dst=dst, source_count=len(srcs), divisor=1, element_count=count)
    arguments.srcs[: len(srcs)] = srcs
    parameters = (c.c_void_p * 1)(c.addressof(arguments))
    call = gpu.either("cuLaunchKernel", "hipModuleLaunchKernel")
    return gpu.status(call, function(name), grid, 1, 1, block, 1, 1, 0, stream, parameters, None)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def exchange() -> None:
    """Ten rounds: each of two ranks pushes into the other's memory, then raises a flag there, twice over; then sums."""
    rank, count = int(os.environ["RANK"]), 100_000
    gpu.use(rank)
    shared = Path(os.environ["SHARED"])
    window = gpu.StubArray(2 * 4 * count + 64, np.uint8)
    assert (window.numpy() == 0xCB).all()
    gpu.copy_in(window.address + 8 * count, np.zeros(64, np.uint8))
    handle = ByValue()
    gpu.call(gpu.either("cuIpcGetMemHandle", "hipIpcGetMemHandle"), c.byref(handle), window.address)
    open_it = gpu.either("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle")
    peer = c.c_uint64()
    assert gpu.status(open_it, c.byref(peer), handle, 1) == 201  # in the owner's process
    (shared / f"new{rank}").write_bytes(bytes(handle))
    (shared / f"new{rank}").rename(shared / f"handle{rank}")
    theirs = shared / f"handle{1 - rank}"
    assert until(theirs.exists)
    handle = ByValue.from_buffer_copy(theirs.read_bytes())
    assert gpu.status(open_it, c.byref(peer), handle, 0) == 1  # flags
    gpu.call(open_it, c.byref(peer), handle, 1)
    base, nbytes = c.c_uint64(), c.c_uint64()
    name = gpu.either("cuMemGetAddressRange_v2", "hipMemGetAddressRange")
    gpu.call(name, c.byref(base), c.byref(nbytes), peer.value + 5)
    assert (base.value, nbytes.value) == (peer.value, window.nbytes)
    push, pull, mine = gpu.Stream(), gpu.Stream(), window.address + 8 * count
    copy = gpu.either("cuMemcpyAsync", "hipMemcpyAsync")
    more = () if CUDA else (1024,)
    sent, last = [], None
    for i in range(10):  # The slot's parity: a round overwrites what the peer has read two rounds ago.
        sent.append(gpu.StubArray.from_numpy(np.full(count, 10 * i + rank, np.float32)))
        slot = i % 2 * 4 * count
        if i >= 2:
            wait(push.handle, mine + 4, i - 1)
        gpu.call(copy, peer.value + slot, sent[-1].address, 4 * count, *more, push.handle)
        write(push.handle, peer.value + 8 * count, i + 1)
        wait(pull.handle, mine, i + 1)
        if i == 9:
            last = gpu.StubArray(count)
            sources = [sent[-1].address, window.address + slot]
            assert launch("hdma_reduce_float32_float32", pull.handle, last.address, sources, count) == 0
        else:
            pull.synchronize()
            at = window.address + slot
            assert (gpu.copy_out(at, 4 * count).view(np.float32) == 10 * i + 1 - rank).all(), i
        write(pull.handle, peer.value + 8 * count + 4, i + 1)
    push.synchronize()
    pull.synchronize()
    assert last is not None and (last.numpy() == 181).all()
    gpu.call(gpu.either("cuIpcCloseMemHandle", "hipIpcCloseMemHandle"), peer.value)
    assert gpu.live("imported") == 0
    del window, sent, last
    assert gpu.live("allocated") == 0


def memory() -> None:
    array = np.arange(1000, dtype=np.int16).reshape(10, 100)
    x = gpu.StubArray.from_numpy(array)
    assert (x.numpy() == array).all() and (x.part(2, 4).numpy() == array[2:4]).all()
    assert (gpu.StubArray(7, np.uint8).numpy() == 0xCB).all()
    try:
        gpu.StubArray(1 << 20, np.uint8)  # STUB_MEMORY_NBYTES, of which some is taken
        raise AssertionError("no limit")
    except RuntimeError as error:
        assert str(error).endswith(": 2")
    free, total = c.c_uint64(), c.c_uint64()
    gpu.call(gpu.either("cuMemGetInfo_v2", "hipMemGetInfo"), c.byref(free), c.byref(total))
    assert (free.value, total.value) == ((1 << 20) - 2000, 1 << 20)
    # The CPU cannot touch it: a child that does so is killed.
    child = os.fork()
    if child == 0:
        c.memset(x.address, 0, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] & 0x7F == 11
    assert gpu.status(gpu.either("cuMemFree_v2", "hipFree"), x.address + 2) == 1
    # Freeing waits for the device's streams.
    stream, y = gpu.Stream(), gpu.StubArray(100)
    stream.sleep(50_000)
    del y
    assert stream.idle()


def events() -> None:
    first, second, event = gpu.Stream(), gpu.Stream(), new_event()
    flags = np.zeros(4, np.uint32)
    address = register(flags)
    assert CUDA == (address == flags.ctypes.data)
    wait_event(first.handle, event)  # never recorded: passes
    first.synchronize()
    assert gpu.status(gpu.either("cuEventQuery", "hipEventQuery"), event) == 0
    wait(first.handle, address, 5)
    record(event, first.handle)
    assert gpu.status(gpu.either("cuEventQuery", "hipEventQuery"), event) == 600
    wait_event(second.handle, event)
    write(second.handle, address + 4, 1)
    time.sleep(0.02)
    assert flags[1] == 0 and not first.idle() and not second.idle()
    # The wait was for the record of that time, whatever is recorded later.
    third = gpu.Stream()
    wait(third.handle, address + 8, 1)
    record(event, third.handle)
    flags[0] = 5  # a plain store
    second.synchronize()
    assert flags[1] == 1 and not third.idle()
    flags[2] = 1
    third.synchronize()
    if CUDA:  # cyclic
        flags[3] = 3
        wait(first.handle, address + 12, 0xFFFFFFFE)
        first.synchronize()
    unregister(flags)
    assert gpu.status(gpu.either("cuMemHostUnregister", "hipHostUnregister"), flags.ctypes.data) == 713


def errors() -> None:
    stream, x = gpu.Stream(), gpu.StubArray(100, np.uint8)
    copy, more = gpu.either("cuMemcpyAsync", "hipMemcpyAsync"), () if CUDA else (3,)
    assert gpu.status(copy, x.address + 50, x.address, 51, *more, stream.handle) == 1
    assert gpu.status(copy, x.address + 50, x.address, 50, *more, 12345) == 400
    if not CUDA:
        assert gpu.status(copy, x.address + 50, x.address, 50, 7, stream.handle) == 21
    flags = np.zeros(1, np.uint32)
    name = gpu.either("cuStreamWriteValue32_v2", "hipStreamWriteValue32")
    assert gpu.status(name, stream.handle, flags.ctypes.data, 1, 0) == 1  # not registered
    assert gpu.status(name, stream.handle, x.address + 2, 1, 0) == 1
    stream.set_capturing(True)
    state = c.c_int()
    gpu.call(gpu.either("cuStreamIsCapturing", "hipStreamIsCapturing"), stream.handle, c.byref(state))
    assert state.value == 1
    stream.set_capturing(False)
    if CUDA:
        context = c.c_void_p()
        gpu.call("cuCtxPopCurrent_v2", c.byref(context))
        assert gpu.status("cuStreamQuery", stream.handle) == 201
        gpu.call("cuCtxPushCurrent_v2", context)
    assert launch("hdma_copy", stream.handle, x.address, [flags.ctypes.data], 4) == 0
    assert gpu.status(gpu.either("cuStreamQuery", "hipStreamQuery"), stream.handle) == 700


def kernels() -> None:
    stream = gpu.Stream()
    for offset, count in ((0, 10_000), (3, 1_001), (1, 1), (0, 0)):
        arrays = [np.arange(count + offset, dtype=np.float32) * (s + 1) for s in range(3)]
        sources = [gpu.StubArray.from_numpy(array) for array in arrays]
        out = gpu.StubArray.from_numpy(np.zeros(count + offset + 8, np.float32))
        at = [x.address + 4 * offset for x in (out, *sources)]
        assert launch("hdma_reduce_float32_float32", stream.handle, at[0], at[1:], count) == 0
        stream.synchronize()
        want = np.zeros_like(out.numpy())
        want[offset : offset + count] = sum(arrays)[offset:]
        assert (out.numpy() == want).all(), (offset, count)
        assert launch("hdma_copy", stream.handle, at[0] + 1, at[1:2], 4 * count) == 0
        stream.synchronize()
        copied = out.numpy().view(np.uint8)[4 * offset + 1 : 4 * (offset + count) + 1]
        assert copied.tobytes() == arrays[0][offset:].tobytes()
    try:
        function("hdma_nothing")
        raise AssertionError("found")
    except RuntimeError as error:
        assert str(error).endswith(": 500")


def held() -> None:
    """As measured on an H200: all connections held, and nothing runs; streams that wait for events hold none."""
    connections = int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    flags = np.zeros(2, np.uint32)
    address, event = register(flags), new_event()
    x, fresh = gpu.StubArray(10, np.uint8), gpu.Stream()
    waiting = [gpu.Stream() for _ in range(connections)]
    for stream in waiting[:-1]:
        wait(stream.handle, address, 1)
    if connections > 1:
        record(event, waiting[0].handle)
        behind = [gpu.Stream() for _ in range(10)]
        for stream in behind:
            wait_event(stream.handle, event)
    fresh.fill(x, 1)
    fresh.synchronize()
    wait(waiting[-1].handle, address, 1)
    time.sleep(0.02)
    fresh.fill(x, 2)
    time.sleep(0.05)
    assert not fresh.idle()
    write(fresh.handle, address, 1)  # nor can the device release it
    time.sleep(0.02)
    assert flags[0] == 0
    flags[0] = 1
    fresh.synchronize()
    assert (x.numpy() == 2).all()
    unregister(flags)


def batches() -> None:
    """A chain of copies in one batch comes out differently over some tries."""

    class Attributes(c.Structure):
        _fields_ = [("order", c.c_int), ("hints", c.c_int * 4), ("flags", c.c_uint)]

    stream, seen = gpu.Stream(), set()
    pair = c.c_uint64 * 2
    for _ in range(20):
        x = gpu.StubArray.from_numpy(np.array([1, 2, 3], np.uint8))
        dsts, srcs = pair(x.address + 1, x.address + 2), pair(x.address, x.address + 1)
        one, index = Attributes(order=1), c.c_uint64(0)
        name, tail = "cuMemcpyBatchAsync_v2", (2, c.byref(one), c.byref(index), 1)
        assert gpu.status(name, dsts, srcs, pair(1, 1), *tail, 0) == 1  # not in the null stream
        gpu.call(name, dsts, srcs, pair(1, 1), *tail, stream.handle)
        stream.synchronize()
        seen.add(tuple(x.numpy()))
    assert seen == {(1, 1, 1), (1, 1, 2)}, seen

    class Operation(c.Structure):
        _fields_ = [
            ("operation", c.c_int),
            ("address", c.c_uint64),
            ("value", c.c_uint64),
            ("flags", c.c_uint),
            ("alias", c.c_uint64),
            ("pad", c.c_uint64),
        ]

    flags = np.zeros(3, np.uint32)
    at = register(flags)
    steps = (Operation * 3)(Operation(2, at, 7), Operation(1, at + 4, 9), Operation(2, at + 8, 8))
    gpu.call("cuStreamBatchMemOp_v2", stream.handle, 3, steps, 0)
    assert until(lambda: flags[0] == 7)
    time.sleep(0.02)
    assert flags[2] == 0
    flags[1] = 9
    stream.synchronize()
    assert flags[2] == 8
    unregister(flags)


def ends_while_held() -> None:
    flags = np.zeros(1, np.uint32)
    address = register(flags)
    stream = gpu.Stream()
    wait(stream.handle, address, 1)
    array = gpu.StubArray(10)
    stream.fill(array, 1)
    array.address = 0  # Freeing it would wait for ever.


def forked() -> None:
    """A child ends like any other, held streams or not; it cannot use the driver."""
    flags = np.zeros(1, np.uint32)
    stream = gpu.Stream()
    wait(stream.handle, register(flags), 1)
    child = os.fork()
    if child == 0:
        sys.exit(0 if gpu.status(gpu.either("cuStreamQuery", "hipStreamQuery"), stream.handle) == 3 else 9)
    assert os.waitpid(child, 0)[1] == 0
    flags[0] = 1
    stream.synchronize()
    unregister(flags)


def no_gpu() -> None:
    try:
        gpu.use(0)
        raise AssertionError("a GPU")
    except RuntimeError as error:
        assert str(error).endswith(": 100"), error


def visible() -> None:
    count, names = c.c_int(), []
    gpu.call(gpu.either("cuDeviceGetCount", "hipGetDeviceCount"), c.byref(count))
    for device in range(count.value):
        text, back = c.create_string_buffer(20), c.c_int()
        gpu.call(gpu.either("cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId"), text, 20, device)
        gpu.call(gpu.either("cuDeviceGetByPCIBusId", "hipDeviceGetByPCIBusId"), c.byref(back), text)
        assert back.value == device
        names.append(text.value.decode().lower())
    assert names == ["0000:2b:00.0", "0000:0b:00.0"], names
    hidden = b"0000:1b:00.0"
    assert gpu.status(gpu.either("cuDeviceGetByPCIBusId", "hipDeviceGetByPCIBusId"), c.byref(count), hidden) == 101


def failing() -> None:
    stream = gpu.Stream()
    assert gpu.status("cuStreamQuery", stream.handle) == 217
    a, b = c.c_uint64(), c.c_uint64()
    assert [gpu.status("cuMemGetInfo_v2", c.byref(a), c.byref(b)) for _ in range(4)] == [0, 0, 2, 2]


for what in sys.argv[1:]:
    if what not in ("exchange", "no_gpu", "visible"):
        gpu.use(0)
    globals()[what]()
