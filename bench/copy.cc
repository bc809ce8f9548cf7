// The large copy of the host device beside memcpy: from a window that stays in the cache to an output that does not.
//
//     g++ -O2 -std=c++17 -Icsrc bench/copy.cc csrc/kernels/copy_host.cc -pthread -o /tmp/copy && /tmp/copy
//
// One and two threads at once, interleaved turns, medians.
#include <kernels/copy_host.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kWindow = 2 << 20, kOutput = 256 << 20;

char *map(size_t nbytes, int kind) {
    void *at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::abort();
    std::memset(at, 1, nbytes);
    return static_cast<char *>(at);
}

struct Pair {
    char *window = map(kWindow, MAP_SHARED), *output = map(kOutput, MAP_PRIVATE);
};

// GB/s of one thread while `pairs` threads copy.
double measure(const std::vector<Pair> &pairs, size_t chunk, bool streaming) {
    auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (const Pair &pair : pairs)
        threads.emplace_back([&pair, chunk, streaming] {
            for (size_t at = 0; at < kOutput; at += chunk) {
                char *dst = pair.output + at;
                const char *src = pair.window + at % kWindow;
                streaming ? hdma::copy_streaming(dst, src, chunk) : static_cast<void>(std::memcpy(dst, src, chunk));
            }
        });
    for (std::thread &thread : threads) thread.join();
    return kOutput / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 1e9;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main() {
    for (size_t count : {1, 2}) {
        std::vector<Pair> pairs(count);
        for (size_t chunk : {64 << 10, 256 << 10, 1 << 20}) {
            std::vector<double> plain, streaming;
            for (int turn = 0; turn < 9; ++turn) {
                plain.push_back(measure(pairs, chunk, false));
                streaming.push_back(measure(pairs, chunk, true));
            }
            std::printf("%zu threads, %4zu KiB: memcpy %5.1f GB/s each, streaming %5.1f (%.2fx)\n", count, chunk >> 10,
                        median(plain), median(streaming), median(streaming) / median(plain));
        }
    }
}
