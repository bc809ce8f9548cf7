// The GPU's kernels compiled for the host: run() plays all threads of a grid one after another, in an order that no
// kernel may depend on.
static unsigned thread_index, block_index, block_size, grid_size;
#define HDMA_KERNEL_ON_HOST
#define __global__
#define __device__
#define __launch_bounds__(threads, blocks)
#define THREAD_INDEX thread_index
#define BLOCK_INDEX block_index
#define BLOCK_SIZE block_size
#define GRID_SIZE grid_size
#include "../../csrc/kernels/reduce_gpu.cu"

extern "C" void run(void (*kernel)(ReduceArguments), const ReduceArguments *arguments, unsigned blocks, unsigned threads,
                    bool backwards) {
    grid_size = blocks, block_size = threads;
    for (unsigned i = 0; i < blocks * threads; ++i) {
        unsigned at = backwards ? blocks * threads - 1 - i : i;
        block_index = at / threads, thread_index = at % threads;
        kernel(*arguments);
    }
}
