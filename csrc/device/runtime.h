// runtime: the calls of a GPU's driver that device/gpu is made of; of CUDA (cuda.cc) or HIP (hip.cc), which are loaded
// when first asked for, so that one build serves machines with either and with none.
//
// Protocol: a Current makes the GPU current in its thread for as long as it lives; everything but load(), count(),
// info(), reaches() and holds() needs one. All functions throw Error(Device) with the call, its arguments and the driver's own words.
//
// Threading: any thread; what two threads put on one stream at once comes in either order.
//
// Ordering: a stream executes in order. A word written by a stream is seen after everything that the stream did before
// it, by every GPU and CPU (the driver's default for written values: a system-wide barrier first).
#pragma once

#include <array>
#include <memory>
#include <string>

#include "../base.h"

namespace hdma {

using Stream = void *;
using Event = void *;
using IpcHandle = std::array<char, 64>;

struct WordOp {
    bool waits;  // until the word has reached the value; otherwise writes it
    char *word;  // as the GPU sees it
    uint32_t value;
};

struct Transfer {
    char *dst;
    const char *src;
    size_t nbytes;
    bool host;  // one end is pinned memory of the host
};

struct GpuInfo {
    std::string name, pci, arch;  // "NVIDIA H200", "0000:65:00.0", "sm_90"
};

class Runtime {
  public:
    // "cuda" or "hip". Throws where its library is not there, with where it was looked for and what to do.
    static std::shared_ptr<Runtime> load(const std::string &name);
    virtual ~Runtime() = default;

    virtual const char *name() const = 0;
    // What HDMA_AMD_COPY and HDMA_AMD_FLAG say; before anything else.
    virtual void configure(const std::string &, const std::string &) {}
    virtual int count() = 0;
    virtual GpuInfo info(int ordinal) = 0;
    // Whether one GPU can map another's memory.
    virtual bool reaches(int ordinal, int other) = 0;
    // The GPU whose memory that is; -1 if of none.
    virtual int owner(const void *memory) = 0;
    // Whether a stream may wait for a word: the driver must have hardware queues left for all other streams.
    // If not, why.
    virtual bool holds(std::string &why_not) const = 0;
    // Returns what end() takes.
    virtual void *begin(int ordinal) = 0;
    virtual void end(void *before) noexcept = 0;

    virtual char *allocate(size_t nbytes) = 0;
    virtual void free(char *memory) noexcept = 0;
    virtual size_t memory_left() = 0;
    virtual IpcHandle handle(char *memory) = 0;
    virtual char *open(const IpcHandle &handle) = 0;
    virtual void close(char *mapped) noexcept = 0;
    // A dma-buf of memory of allocate(), by which a NIC can reach it; throws where the system has none.
    virtual int export_memory(char *, size_t) { throw Error(Kind::Device, "its runtime is not known to export memory to NICs"); }
    // Whether what a NIC has written is seen by every GPU only after the NIC has read there.
    virtual bool flushes(int) { return true; }
    // Host memory, whole pages, for the GPU to use; returns its address there.
    virtual char *pin(void *memory, size_t nbytes) = 0;
    virtual void unpin(void *memory) noexcept = 0;

    virtual Stream make_stream(bool high_priority) = 0;
    virtual bool capturing(Stream stream) = 0;
    virtual Event make_event() = 0;
    virtual void record(Event event, Stream stream) = 0;
    virtual bool passed(Event event) = 0;
    virtual void follow(Stream stream, Event event) = 0;

    virtual void words(Stream stream, const WordOp *ops, size_t count) = 0;
    // In no order among themselves. None is from a GPU to itself.
    virtual void copy(Stream stream, const Transfer *transfers, size_t count) = 0;

    virtual void *load_code(const std::string &code) = 0;
    virtual void *function(void *module, const char *name) = 0;
    virtual void launch(void *function, Stream stream, unsigned blocks, unsigned threads, void *argument) = 0;
};

class Current {
  public:
    Current(Runtime &runtime, int ordinal) : runtime_(runtime), before_(runtime.begin(ordinal)) {}
    ~Current() { runtime_.end(before_); }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

  private:
    Runtime &runtime_;
    void *before_;
};

// A library's functions by name.
class Library {
  public:
    // The first of `names` that the system finds. Throws with the reasons, beginning with `what`, ending with `remedy`.
    Library(std::initializer_list<const char *> names, const char *what, const char *remedy);
    // Throws where it is not there, unless `optional`.
    template <class F>
    void find(F &function, const char *name, bool optional = false) const {
        function = reinterpret_cast<F>(symbol(name, optional));
    }

  private:
    void *symbol(const char *name, bool optional) const;
    void *library_ = nullptr;
    std::string name_;
};

// "cuMemAlloc(4096 bytes): out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)".
template <class... Arguments>
std::string driver_error(const char *name, const char *text, int result, const char *pattern, Arguments... arguments) {
    std::string call;
    if constexpr (sizeof...(Arguments) == 0)
        call = pattern;
    else
        call = format(pattern, arguments...);
    return call + format(": %s (%s, %d)", text ? text : "unknown error", name ? name : "?", result);
}

std::shared_ptr<Runtime> cuda_runtime();
std::shared_ptr<Runtime> hip_runtime();

}  // namespace hdma
