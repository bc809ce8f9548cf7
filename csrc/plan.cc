// plan: see plan.h.
#include "plan.h"

#include <algorithm>

#include "base.h"

namespace hdma {

namespace {

Place decode_place(const int64_t *row) {
    return Place{static_cast<Space>(row[0] & 0xff), (row[0] & 0x100) != 0, static_cast<int32_t>(row[1]),
                 static_cast<int32_t>(row[2]), row[3], row[4]};
}

}  // namespace

// Columns of a step: verb, lane, doorbell, space|wire, rank, shard, offset, nbytes, first source, sources,
// flag owner, flag, ring, value, local flag, local ring, local value, needs, gives. hdma/compile.py writes them.
LoadedPlan decode(const int64_t *steps, size_t step_count, const int64_t *sources, size_t source_count,
                  const int64_t *spans, size_t span_count) {
    LoadedPlan plan;
    for (size_t i = 0; i < source_count; ++i) plan.sources.push_back(decode_place(sources + i * kSourceColumns));
    for (size_t i = 0; i < span_count; ++i)
        plan.spans.push_back({static_cast<uint32_t>(spans[2 * i]), static_cast<uint32_t>(spans[2 * i + 1])});
    for (size_t i = 0; i < step_count; ++i) {
        const int64_t *c = steps + i * kStepColumns;
        Step s{};
        s.verb = static_cast<Verb>(c[0]);
        s.lane = static_cast<Lane>(c[1]);
        s.doorbell = c[2] != 0;
        s.dst = decode_place(c + 3);
        s.first_source = static_cast<uint32_t>(c[8]);
        s.source_count = static_cast<uint32_t>(c[9]);
        s.flag_owner = static_cast<int32_t>(c[10]);
        s.flag = static_cast<uint32_t>(c[11]);
        s.ring = static_cast<uint32_t>(c[12]);
        s.value = static_cast<uint32_t>(c[13]);
        s.local_flag = static_cast<int32_t>(c[14]);
        s.local_ring = static_cast<uint32_t>(c[15]);
        s.local_value = static_cast<uint32_t>(c[16]);
        s.needs = static_cast<int32_t>(c[17]);
        s.gives = static_cast<int32_t>(c[18]);
        if (s.first_source + s.source_count > plan.sources.size())
            throw Error(Kind::Error, "a step names sources that are not there: plan.h and compile.py differ");
        plan.order_count = std::max(plan.order_count, static_cast<uint32_t>(std::max(s.needs, s.gives) + 1));
        (s.lane == Lane::Put ? plan.put : s.lane == Lane::Credit ? plan.credit : plan.walk).push_back(s);
    }
    return plan;
}

}  // namespace hdma
