// source: see source.h.
//
// The assembler copies the file in, whose path starts where setup.py compiles, the repository's root. A C++ compiler
// that embeds files by itself is not to be had everywhere yet.
#include "source.h"

asm(R"(
    .pushsection .rodata
    .type hdma_reduce_gpu, STT_OBJECT
    .type hdma_reduce_gpu_end, STT_OBJECT
hdma_reduce_gpu:
    .incbin "csrc/kernels/reduce_gpu.cu"
hdma_reduce_gpu_end:
    .popsection
)");

// Of this file only; the compiler cannot see what the assembler defines.
extern "C" __attribute__((visibility("hidden"))) const char hdma_reduce_gpu[], hdma_reduce_gpu_end[];

namespace hdma {

std::string_view kernel_source() {
    return {hdma_reduce_gpu, static_cast<size_t>(hdma_reduce_gpu_end - hdma_reduce_gpu)};
}

}  // namespace hdma
