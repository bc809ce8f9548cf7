// source: the text of reduce_gpu.cu, which is compiled where its GPU is.
//
// Protocol: hdma/kernels.py gives it to the compiler of the GPU's runtime.
//
// Threading: constant; any thread.
//
// Ordering: none.
#pragma once

#include <string_view>

namespace hdma {

std::string_view kernel_source();

}  // namespace hdma
