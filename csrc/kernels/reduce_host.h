// reduce_host: the sum of several arrays in fixed order, for the host.
//
// Protocol: dst[i] = round(widen(srcs[0][i]) + widen(srcs[1][i]) + ...), added in that order in fp32, rounded once.
//
// Threading: no state; any thread. dst may be one of the sources (same address), not overlap one otherwise.
//
// Ordering: plain loads and stores; the caller orders them by flags.
#pragma once

#include <cstddef>

#include "../plan.h"

namespace hdma {

void reduce_host(void *dst, Dtype dst_type, const void *const *srcs, size_t source_count, Dtype src_type,
                 size_t element_count);

}  // namespace hdma
