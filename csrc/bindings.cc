// bindings: the only file that knows Python. It turns Python objects into the engine's structures, drops the GIL
// around everything that may block, and turns Error into the classes of hdma.errors.
//
// Protocol: hdma/communicator.py is the only caller.
//
// Threading: any Python thread; the engine says what may run at once.
//
// Ordering: see engine.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "device/gpu.h"
#include "engine.h"
#include "kernels/source.h"
#include "memory.h"

namespace nb = nanobind;
using namespace hdma;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// Negative or not finite: no deadline of its own (the call's own waits have theirs).
int64_t deadline_ns(double timeout_s) {
    if (!std::isfinite(timeout_s) || timeout_s < 0 || timeout_s > 1e8) return INT64_MAX;
    return now_ns() + static_cast<int64_t>(timeout_s * 1e9);
}

// Ctrl-C, seen by a thread that waits without the GIL. The signal's exception stays set, to be raised as it is.
bool interrupted() {
    nb::gil_scoped_acquire locked;
    return PyErr_CheckSignals() != 0;
}

// Waits in slices so that Ctrl-C is seen; `wait(deadline_ns)` returns whether it is over.
template <class Wait>
bool wait_interruptibly(double timeout_s, Wait wait) {
    int64_t deadline = deadline_ns(timeout_s);
    for (;;) {
        int64_t slice = std::min(deadline, now_ns() + 200 * 1000 * 1000);
        {
            nb::gil_scoped_release unlocked;
            if (wait(slice)) return true;
        }
        if (PyErr_CheckSignals()) throw nb::python_error();
        if (now_ns() >= deadline) return false;
    }
}

struct Rows {
    const int64_t *data;
    size_t count;
    Rows(const nb::bytes &bytes, size_t columns)
        : data(static_cast<const int64_t *>(bytes.data())), count(bytes.size() / sizeof(int64_t) / columns) {}
};

// A pointer of our own: one made from a Python object would need the GIL where a thread of ours drops it last.
struct PlanHandle {
    std::shared_ptr<const LoadedPlan> plan;
};

struct RequestHandle {
    std::shared_ptr<const Request> request;
};

using Pieces = std::vector<std::tuple<PlanHandle, uint32_t, int64_t, int64_t, int64_t, int64_t>>;

void make_request(RequestHandle *self, const std::string &text, const Pieces &pieces, int dtype, int wire_dtype, int op,
                  uint32_t marks, bool pushes) {
    auto request = std::make_shared<Request>();
    request->text = CallText(text);
    for (const auto &[plan, repeats, nbytes, offset, input_stride, output_stride] : pieces)
        request->pieces.push_back({plan.plan, repeats, nbytes, offset, input_stride, output_stride});
    request->dtype = static_cast<Dtype>(dtype);
    request->wire_dtype = static_cast<Dtype>(wire_dtype);
    request->op = static_cast<Op>(op);
    request->marks = marks;
    request->pushes = pushes;
    new (self) RequestHandle{std::move(request)};
}

CallerStream stream_of(uintptr_t stream) { return reinterpret_cast<CallerStream>(stream); }

Call make_call(const RequestHandle &handle, uintptr_t input, uintptr_t output, uintptr_t stream) {
    return {handle.request, reinterpret_cast<char *>(input), reinterpret_cast<char *>(output), stream_of(stream)};
}

// The structure behind numpy's __array_struct__ protocol, version 2.
struct ArrayStruct {
    int two, dimensions;
    char kind;
    int itemsize, flags;
    intptr_t *shape, *strides;
    void *data;
    PyObject *descr;
};

PyStructSequence_Field buffer_fields[] = {{"address", nullptr}, {"numel", nullptr},  {"nbytes", nullptr},
                                          {"itemsize", nullptr}, {"dtype", nullptr}, {"gpu", nullptr},
                                          {nullptr, nullptr}};
PyStructSequence_Desc buffer_desc = {
    "hdma._core.Buffer", "`numel` elements of `itemsize` bytes at `address`, on GPU `gpu` or (-1) in host memory.",
    buffer_fields, 6};
PyTypeObject *buffer_type = nullptr;

// Attributes by interned names: half of the time of asking by C strings.
struct Names {
    PyObject *dtype, *array_struct, *is_cpu, *is_cuda, *get_device, *is_contiguous, *is_neg, *is_conj, *numel, *data_ptr;
    void intern() {
        dtype = PyUnicode_InternFromString("dtype");
        array_struct = PyUnicode_InternFromString("__array_struct__");
        is_cpu = PyUnicode_InternFromString("is_cpu");
        is_cuda = PyUnicode_InternFromString("is_cuda");
        get_device = PyUnicode_InternFromString("get_device");
        is_contiguous = PyUnicode_InternFromString("is_contiguous");
        is_neg = PyUnicode_InternFromString("is_neg");
        is_conj = PyUnicode_InternFromString("is_conj");
        numel = PyUnicode_InternFromString("numel");
        data_ptr = PyUnicode_InternFromString("data_ptr");
    }
} names;

nb::object checked(PyObject *result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
}
nb::object get(nb::handle object, PyObject *name) { return checked(PyObject_GetAttr(object.ptr(), name)); }
nb::object call(nb::handle object, PyObject *name) { return checked(PyObject_CallMethodNoArgs(object.ptr(), name)); }
bool says(nb::handle object, PyObject *name) { return call(object, name).ptr() == Py_True; }

nb::object make_buffer(uintptr_t address, int64_t numel, nb::handle known, long gpu) {
    nb::object dtype = nb::borrow(PyTuple_GET_ITEM(known.ptr(), 0)), itemsize = nb::borrow(PyTuple_GET_ITEM(known.ptr(), 1));
    nb::object made = checked(PyStructSequence_New(buffer_type));
    PyStructSequence_SetItem(made.ptr(), 0, PyLong_FromUnsignedLongLong(address));
    PyStructSequence_SetItem(made.ptr(), 1, PyLong_FromLongLong(numel));
    PyStructSequence_SetItem(made.ptr(), 2, PyLong_FromLongLong(numel * nb::cast<int64_t>(itemsize)));
    PyStructSequence_SetItem(made.ptr(), 3, itemsize.release().ptr());
    PyStructSequence_SetItem(made.ptr(), 4, dtype.release().ptr());
    PyStructSequence_SetItem(made.ptr(), 5, PyLong_FromLong(gpu));
    return made;
}

// A numpy array that is contiguous (and writable, where that is asked for), of a dtype in `known`; None otherwise.
// In one call and by numpy's own structure: a third of the time of asking the array in Python.
nb::object array_buffer(nb::handle array, const nb::dict &known, bool writable) {
    constexpr int kContiguous = 0x1, kWritable = 0x400;
    nb::object dtype = get(array, names.dtype);
    nb::handle found = PyDict_GetItemWithError(known.ptr(), dtype.ptr());
    if (!found.is_valid()) return nb::none();
    nb::object capsule = get(array, names.array_struct);
    auto *a = static_cast<ArrayStruct *>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (!a) throw nb::python_error();
    int needed = kContiguous | (writable ? kWritable : 0);
    if ((a->flags & needed) != needed) return nb::none();
    int64_t numel = 1;
    for (int i = 0; i < a->dimensions; ++i) numel *= a->shape[i];
    return make_buffer(reinterpret_cast<uintptr_t>(a->data), numel, found, -1);
}

// The same of a dense torch tensor in host memory or on a GPU ("cuda" on AMD's too).
nb::object tensor_buffer(nb::handle tensor, const nb::dict &known) {
    nb::object dtype = get(tensor, names.dtype);
    nb::handle found = PyDict_GetItemWithError(known.ptr(), dtype.ptr());
    bool host = get(tensor, names.is_cpu).ptr() == Py_True;
    if (!found.is_valid() || !(host || get(tensor, names.is_cuda).ptr() == Py_True) || !says(tensor, names.is_contiguous) ||
        says(tensor, names.is_neg) || (PyTuple_GET_ITEM(found.ptr(), 2) == Py_True && says(tensor, names.is_conj)))
        return nb::none();
    auto address = nb::cast<uintptr_t>(call(tensor, names.data_ptr));
    auto numel = nb::cast<int64_t>(call(tensor, names.numel));
    if (!address && numel) return nb::none();  // Its storage was taken away.
    return make_buffer(address, numel, found, host ? -1 : nb::cast<long>(call(tensor, names.get_device)));
}

// Closes an engine that was dropped without close() while other threads may go on.
struct EngineHandle {
    std::unique_ptr<Engine> engine;
    explicit EngineHandle(std::unique_ptr<Engine> made) : engine(std::move(made)) {}
    EngineHandle(EngineHandle &&) = default;
    // In a forked child: what threads of the parent hold or wait for can never be destroyed here.
    bool forgotten = false;
    ~EngineHandle() {
        if (forgotten) {
            (void)engine.release();
            return;
        }
        if (!engine) return;
        nb::gil_scoped_release unlocked;
        engine.reset();
    }
    Engine *operator->() const { return engine.get(); }
};

// What one communicator has on a GPU.
struct GpuHandle {
    std::shared_ptr<GpuMemory> memory;
};
struct AllocationHandle {
    std::shared_ptr<const GpuMemory::Allocation> allocation;
};

void make_gpu(GpuHandle *self, const std::string &runtime, int ordinal, const nb::bytes &code, int rank, int size,
              bool high_priority, unsigned blocks, const std::string &amd_copy, const std::string &amd_flag) {
    std::string text(static_cast<const char *>(code.data()), code.size());
    nb::gil_scoped_release unlocked;
    Runtime::load(runtime)->configure(amd_copy, amd_flag);
    auto card = Card::of(runtime, ordinal, text, {high_priority, blocks});
    new (self) GpuHandle{std::make_shared<GpuMemory>(std::move(card), rank, size)};
}

// hdma/nics/queue_pair.py: device, port, GID index, MTU in bytes, service level, traffic class, time-out exponent, retries.
using NicRow = std::tuple<std::string, int, int, uint32_t, uint8_t, uint8_t, uint8_t, uint8_t>;

NicChoice choice_of(const NicRow &row) {
    const auto &[device, port, gid_index, mtu_nbytes, service_level, traffic_class, timeout, retries] = row;
    return {device, port, gid_index, mtu_nbytes, service_level, traffic_class, timeout, retries};
}

// Why the device cannot reach the window; empty if it can.
std::string no_dma_buf(GpuHandle &gpu, const NicRow &nic, int rank, size_t window_nbytes) {
    nb::gil_scoped_release unlocked;
    try {
        try_dma_buf(choice_of(nic), rank, {gpu.memory->window(rank), window_nbytes, 0, gpu.memory->export_window()});
        return "";
    } catch (const Error &error) {
        return error.text;
    }
}

EngineHandle *make_engine(int rank, int size, size_t flag_count, size_t ring_count, size_t window_nbytes,
                          double timeout_s, const std::string &limit, double spin_s,
                          std::vector<std::string> flag_names,
                          const std::vector<std::tuple<int, int, int, int, int>> &peers,
                          const std::vector<std::tuple<int, int, std::string>> &control,
                          const std::vector<std::tuple<int, int, int>> &links, const std::optional<NicRow> &nic,
                          const EngineHandle *first, const GpuHandle *gpu, bool dma_buf) {
    Engine::Config config;
    config.rank = rank;
    config.size = size;
    config.flag_count = flag_count;
    config.ring_count = ring_count;
    config.window_nbytes = window_nbytes;
    config.timeout_ns = static_cast<int64_t>(timeout_s * 1e9);
    config.limit = limit;
    config.spin_ns = static_cast<int64_t>(spin_s * 1e9);
    config.flag_names = std::move(flag_names);
    config.interrupted = interrupted;
    for (auto [peer, flags_fd, window_fd, doorbell_fd, pid] : peers)
        config.peers.push_back({peer, Fd(flags_fd), Fd(window_fd), Fd(doorbell_fd), pid});
    for (const auto &[peer, fd, name] : control) config.control.push_back({peer, Fd(fd), name});
    for (auto [peer, lane, fd] : links) config.links.push_back({peer, static_cast<Lane>(lane), Fd(fd)});
    if (nic) config.nic = choice_of(*nic);
    if (first) config.ties = (*first)->ties();
    if (gpu)
        config.make_device = [memory = gpu->memory, rank, wire_nbytes = links.empty() || dma_buf ? 0 : window_nbytes](
                                 std::vector<WindowPart> parts, std::shared_ptr<Shared> shared, Fault &fault) {
            auto own = std::find_if(parts.begin(), parts.end(), [&](const WindowPart &part) { return part.rank == rank; });
            return memory->device(std::move(own->memory), wire_nbytes, std::move(shared), fault);
        };
    nb::gil_scoped_release unlocked;
    return new EngineHandle(std::make_unique<Engine>(std::move(config)));
}

nb::dict stats(const EngineHandle &engine) {
    Engine::Stats s = engine->stats();
    nb::dict d;
    d["calls"] = s.calls;
    d["copies"] = s.copies;
    d["copy_nbytes"] = s.copy_nbytes;
    d["reduces"] = s.reduces;
    d["reduce_nbytes"] = s.reduce_nbytes;
    d["puts"] = s.puts;
    d["put_nbytes"] = s.put_nbytes;
    d["wire_sent_nbytes"] = s.wire_sent_nbytes;
    return d;
}

}  // namespace

NB_MODULE(_core, m) {
    // A daemon thread that is in a call when the interpreter ends keeps its objects; that is no fault to print about.
    nb::set_leak_warnings(false);
    m.doc() = "The C++ core of hdma: see csrc/engine.h. Private: use hdma.Communicator.";
    m.def("flags_nbytes", [](size_t flag_count) { return Shared::nbytes(flag_count * sizeof(Word)); },
          "Bytes of the memory that a rank's flags and call records take.");

    m.def("read_process",
          [](int pid, uint64_t address, size_t nbytes) -> nb::object {
              std::string bytes(nbytes, '\0');
              if (!read_process(pid, bytes.data(), address, nbytes)) return nb::none();
              return nb::bytes(bytes.data(), nbytes);
          },
          "Bytes of another process's memory, None where the system forbids it.");
    m.def("kernel_source", [] { return nb::str(kernel_source().data(), kernel_source().size()); });
    m.def("memory_left",
          [](const std::string &root) {
              MemoryLeft left = memory_left(root);
              return std::make_pair(left.nbytes, left.where);
          },
          nb::arg("root") = "", "Bytes that this process may still take, and what sets the limit.");
    m.def("reserve_memory", &reserve_memory, Unlocked(), "Gives a memfd its size, every page of it.");

    nb::register_exception_translator([](const std::exception_ptr &pointer, void *) {
        try {
            std::rethrow_exception(pointer);
        } catch (const Error &error) {
            nb::object classes = nb::module_::import_("hdma.errors").attr("BY_CODE");
            PyErr_SetString(classes[static_cast<size_t>(error.kind)].ptr(), error.what());
        }
    });

    nb::class_<PlanHandle>(m, "Plan").def(
        "__init__", [](PlanHandle *self, const nb::bytes &steps, const nb::bytes &sources, const nb::bytes &spans) {
            Rows a(steps, kStepColumns), b(sources, kSourceColumns), c(spans, 2);
            new (self) PlanHandle{
                std::make_shared<LoadedPlan>(decode(a.data, a.count, b.data, b.count, c.data, c.count))};
        });

    nb::class_<RequestHandle>(m, "Request").def("__init__", &make_request);
    names.intern();
    buffer_type = PyStructSequence_NewType(&buffer_desc);
    m.attr("Buffer") = nb::handle(reinterpret_cast<PyObject *>(buffer_type));
    m.def("array_buffer", &array_buffer);
    m.def("tensor_buffer", &tensor_buffer);

    nb::class_<Ticket>(m, "Ticket")
        .def("wait",
             [](Ticket &t, double timeout_s) {
                 return wait_interruptibly(timeout_s, [&](int64_t deadline) { return t.wait(deadline); });
             })
        .def("wait_given",
             [](Ticket &t, uint32_t mark, uintptr_t stream, double timeout_s) {
                 return wait_interruptibly(timeout_s, [&](int64_t deadline) {
                     return t.wait_given(mark, stream_of(stream), deadline);
                 });
             })
        .def("order", [](Ticket &t, uintptr_t stream) { t.order(stream_of(stream)); }, Unlocked())
        .def("done", &Ticket::done, Unlocked())
        .def("check", [](Ticket &t) {
            if (auto error = t.error()) throw *error;
        }, Unlocked());

    m.def("gpu_count", [](const std::string &runtime) { return Runtime::load(runtime)->count(); }, Unlocked(),
          "GPUs that this process sees; runtime: cuda or hip.");
    m.def("gpu_of",
          [](const std::string &runtime, uintptr_t at) {
              // In a forked child the driver may wait for threads that are not there.
              return Card::forked() ? -1 : Runtime::load(runtime)->owner(reinterpret_cast<const void *>(at));
          },
          "The GPU whose memory that is, -1 if of none.");
    m.def("gpu_info",
          [](const std::string &runtime, int ordinal) {
              GpuInfo info = Runtime::load(runtime)->info(ordinal);
              return std::make_tuple(info.name, info.pci, info.arch);
          },
          Unlocked(), "Name, PCI address and architecture of a GPU.");
    m.def("gpu_reaches",
          [](const std::string &runtime, int ordinal, int other) { return Runtime::load(runtime)->reaches(ordinal, other); },
          Unlocked(), "Whether one GPU can map another's memory.");
    m.def("gpu_polls",
          [](const std::string &runtime) {
              std::string why_not;
              Runtime::load(runtime)->holds(why_not);
              return why_not;
          },
          Unlocked(), "Why a thread polls the waits of calls on GPUs; empty where streams hold them.");
    nb::class_<AllocationHandle>(m, "Allocation")
        .def_prop_ro("address", [](const AllocationHandle &a) { return reinterpret_cast<uintptr_t>(a.allocation->at); })
        .def_prop_ro("nbytes", [](const AllocationHandle &a) { return a.allocation->nbytes; })
        .def_prop_ro("handle", [](const AllocationHandle &a) {
            return nb::bytes(a.allocation->handle.data(), a.allocation->handle.size());
        });
    nb::class_<GpuHandle>(m, "Gpu")
        .def("__init__", &make_gpu, nb::kw_only(), nb::arg("runtime"), nb::arg("ordinal"), nb::arg("code"), nb::arg("rank"),
             nb::arg("size"), nb::arg("high_priority"), nb::arg("blocks"), nb::arg("amd_copy"), nb::arg("amd_flag"))
        .def_prop_ro("pci", [](const GpuHandle &g) { return g.memory->card().info().pci; })
        .def_prop_ro("polls", [](const GpuHandle &g) { return g.memory->card().why_not(); })
        .def("allocate",
             [](GpuHandle &g, size_t nbytes, const std::string &what) {
                 return AllocationHandle{g.memory->allocate(nbytes, what)};
             },
             Unlocked())
        .def("map",
             [](GpuHandle &g, const AllocationHandle &own, int mate, const std::string &pci, int pid, const nb::bytes &bytes) {
                 IpcHandle handle;
                 if (bytes.size() != handle.size()) throw Error(Kind::Error, "a handle of another size");
                 std::copy_n(static_cast<const char *>(bytes.data()), handle.size(), handle.data());
                 nb::gil_scoped_release unlocked;
                 g.memory->map(own.allocation, mate, pci, pid, handle);
             })
        .def("find", [](GpuHandle &g, uintptr_t at, size_t nbytes) {
            return g.memory->find(reinterpret_cast<const char *>(at), nbytes);
        })
        .def("no_dma_buf", &no_dma_buf)
        .def("drop", [](GpuHandle &g, const AllocationHandle &own) { g.memory->drop(own.allocation); }, Unlocked())
        .def("close", [](GpuHandle &g, bool agreed) { g.memory->close(agreed); }, nb::arg("agreed") = true, Unlocked())
        // In a forked child: the driver is the parent's. Never destroyed.
        .def("forget", [](GpuHandle &g) { new std::shared_ptr<GpuMemory>(g.memory); });

    nb::class_<EngineHandle>(m, "Engine")
        .def(nb::new_(&make_engine), nb::kw_only(), nb::arg("rank"), nb::arg("size"), nb::arg("flag_count"),
             nb::arg("ring_count"), nb::arg("window_nbytes"), nb::arg("timeout_s"), nb::arg("limit"), nb::arg("spin_s"),
             nb::arg("flag_names"), nb::arg("peers"), nb::arg("control"), nb::arg("links"), nb::arg("nic").none() = nb::none(),
             nb::arg("first").none() = nb::none(), nb::arg("gpu").none() = nb::none(), nb::arg("dma_buf") = false)
        .def("run",
             [](EngineHandle &e, const RequestHandle &request, uintptr_t input, uintptr_t output, uintptr_t stream) {
                 Call call = make_call(request, input, output, stream);
                 try {
                     nb::gil_scoped_release unlocked;
                     e->run(call);
                 } catch (const Error &) {
                     if (PyErr_Occurred()) throw nb::python_error();
                     throw;
                 }
             })
        .def("submit",
             [](EngineHandle &e, const RequestHandle &request, uintptr_t input, uintptr_t output, uintptr_t stream) {
                 Call call = make_call(request, input, output, stream);
                 nb::gil_scoped_release unlocked;
                 return e->submit(call);
             })
        .def("push",
             [](EngineHandle &e, const std::shared_ptr<Ticket> &ticket, uint32_t mark, uintptr_t stream) {
                 e->push(ticket, mark, stream_of(stream));
             },
             Unlocked())
        .def("drain",
             [](EngineHandle &e) {
                 {
                     nb::gil_scoped_release unlocked;
                     e->drain();
                 }
                 if (PyErr_Occurred()) throw nb::python_error();
             })
        .def("follow", [](EngineHandle &e, uintptr_t stream, uintptr_t behind) {
                 e->follow(stream_of(stream), stream_of(behind));
             },
             Unlocked())
        .def("busy", [](EngineHandle &e) { return e->busy(); }, Unlocked())
        .def("abort", [](EngineHandle &e, int kind, const std::string &text) { e->abort(static_cast<Kind>(kind), text); }, Unlocked())
        .def("fault", [](EngineHandle &e) { return e->fault().raised() ? e->fault().text() : std::string(); })
        .def("check", [](EngineHandle &e) { e->fault().check(); })
        .def("forget", [](EngineHandle &e) {
                 e.forgotten = true;
                 e->forget();
             })
        .def("close",
             [](EngineHandle &e) {
                 {
                     nb::gil_scoped_release unlocked;
                     e->close();
                 }
                 if (PyErr_Occurred()) throw nb::python_error();
             })
        .def("stats", &stats);
}
