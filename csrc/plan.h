// plan: the steps of one rank as the engine walks them, and the fingerprint of a call.
//
// Protocol: Python compiles a Plan (hdma/plan.py) into rows of int64 (hdma/compile.py names the columns); decode()
// turns them into Steps. Values are relative: the walker adds the running chunk count of the step's ring.
//
// Threading: a LoadedPlan does not change after decode(); any thread may read it.
//
// Ordering: handed from thread to thread through the queues of engine and proxy, which lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace hdma {

enum class Verb : uint8_t { Copy, Put, Signal, Wait, Reduce, Enter, Leave };
enum class Lane : uint8_t { Near, Rail, Put, Credit };
enum class Space : uint8_t { None, Input, Output, Window, Host };
enum class Dtype : uint8_t {
    Bytes, Float32, Bfloat16, Float16, Float64, Int8, Int16, Int32, Int64, Uint8, Bool, Float8E4m3, Float8E5m2
};
enum class Op : uint8_t { Sum, Avg, Max, Min, Prod };

inline size_t dtype_nbytes(Dtype dtype) {
    static constexpr uint8_t nbytes[] = {1, 4, 2, 2, 8, 1, 2, 4, 8, 1, 1, 1, 1};
    return nbytes[static_cast<int>(dtype)];
}

// Address = base of (space, rank) + shard * the call's stride + offset.
struct Place {
    Space space;
    bool wire;  // elements are in the wire dtype
    int32_t rank;
    int32_t shard;
    int64_t offset;
    int64_t nbytes;
};

struct Step {
    Verb verb;
    Lane lane;
    bool doorbell;  // signal: the flag's waiter is a proxy, which may have to be woken
    Place dst;
    uint32_t first_source, source_count;
    int32_t flag_owner;
    uint32_t flag, ring, value;            // the flag waited for or raised
    int32_t local_flag;                    // put: -1 for none
    uint32_t local_ring, local_value;
    int32_t needs, gives;                  // index in the call's order, -1 for none
};

struct Span {
    uint32_t ring, chunks;
};

struct LoadedPlan {
    std::vector<Step> walk;      // near and rail, in issue order
    std::vector<Step> put, credit;
    std::vector<Place> sources;
    std::vector<Span> spans;
    uint32_t order_count = 0;    // shards that the walk needs or gives
};

constexpr size_t kStepColumns = 19, kSourceColumns = 5;

LoadedPlan decode(const int64_t *steps, size_t step_count, const int64_t *sources, size_t source_count,
                  const int64_t *spans, size_t span_count);

// What a call is, in words, with a hash of all of them.
struct CallText {
    char text[112] = {};
    uint64_t hash = 0xcbf29ce484222325ull;

    CallText() = default;
    explicit CallText(const std::string &what) {
        std::memcpy(text, what.data(), std::min(what.size(), sizeof text - 1));
        for (char c : what) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    }
};

// Compared between ranks before a call's data is used. `hash` runs over all calls of the communicator, in order.
struct Fingerprint {
    uint64_t call = 0;
    uint64_t hash = 0;
    char text[112] = {};

    void follow(const CallText &next) {
        std::memcpy(text, next.text, sizeof text);
        hash = (hash << 7 ^ hash >> 57 ^ next.hash) * 0x100000001b3ull;
    }
};

}  // namespace hdma
