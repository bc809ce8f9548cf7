// reduce_host: the sum, product, maximum or minimum of several arrays in fixed order, for the host.
//
// Protocol: dst[i] = round((widen(srcs[0][i]) op widen(srcs[1][i]) op ...) / divisor), combined in that order. 16-bit
// floats are accumulated in fp32, all else in its own type. Maximum and minimum propagate NaN; integers wrap around;
// the sum of bools is "or".
//
// Threading: no state; any thread. dst may be one of the sources (same address), not overlap one otherwise.
//
// Ordering: plain loads and stores; the caller orders them by flags.
#pragma once

#include <cstddef>

#include "../plan.h"

namespace hdma {

// `streaming`: nobody reads the destination soon. `divisor` is 1 unless the average is wanted and this is its last step.
void reduce_host(Op op, int divisor, void *dst, Dtype dst_type, const void *const *srcs, size_t source_count,
                 Dtype src_type, size_t element_count, bool streaming);

}  // namespace hdma
