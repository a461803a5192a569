// Enough of CUDA's language for a C++ compiler to run a kernel on the CPU: the threads of a block are fibers that take
// turns at barriers, and blocks run one after the other.  One fiber runs at a time, so atomics are plain; what this
// shows is that the kernel computes the right thing, not that its memory is ordered.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};

namespace cpu {

struct Barrier {
    int size, arrived;
    long generation;
};

struct Fiber {
    ucontext_t context;
    Index thread;
    bool done;
};

static std::vector<Fiber> fibers;
static std::vector<Barrier> warps;
static std::vector<uint32_t> words;  // what the lanes of each warp show one another
static Barrier block;
static ucontext_t scheduler;
static int running;
static Index the_block, the_grid;
static void (*body)();

inline void wait(Barrier& barrier) {
    long generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) swapcontext(&fibers[running].context, &scheduler);
}

inline void begin() {
    body();
    fibers[running].done = true;
    swapcontext(&fibers[running].context, &scheduler);
}

inline bool run_block(int threads, std::vector<char>& stacks, size_t stack) {
    fibers.assign(threads, Fiber{});
    warps.assign(threads / 32, Barrier{32, 0, 0});
    words.assign(threads, 0);
    block = Barrier{threads, 0, 0};
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = Index{(unsigned)i, 0, 0};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks.data() + i * stack;
        fiber.context.uc_stack.ss_size = stack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, begin, 0);
    }
    int left = threads;
    while (left > 0) {
        int before = left;
        long progress = block.generation;
        for (auto& warp : warps) progress += warp.generation;
        for (running = 0; running < threads; ++running) {
            if (fibers[running].done) continue;
            swapcontext(&scheduler, &fibers[running].context);
            if (fibers[running].done) --left;
        }
        long after = block.generation;
        for (auto& warp : warps) after += warp.generation;
        // A whole turn in which no barrier opened and none ended: some threads wait where others never come.
        if (left == before && after == progress) return false;
    }
    return true;
}

inline bool run(Index grid, int threads, void (*kernel)()) {
    const size_t stack = 64 << 10;
    std::vector<char> stacks(threads * stack);
    body = kernel;
    the_grid = grid;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                the_block = Index{x, y, z};
                if (!run_block(threads, stacks, stack)) return false;
            }
    return true;
}

template <typename T>
T exchange(T value, int lane_from) {
    int base = running / 32 * 32;
    std::memcpy(&words[running], &value, 4);
    wait(warps[running / 32]);
    T result;
    std::memcpy(&result, &words[base + lane_from], 4);
    wait(warps[running / 32]);
    return result;
}

}  // namespace cpu

#define threadIdx (cpu::fibers[cpu::running].thread)
#define blockIdx (cpu::the_block)
#define gridDim (cpu::the_grid)

inline void __syncthreads() { cpu::wait(cpu::block); }
inline void __threadfence() {}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return cpu::exchange(value, (cpu::running % 32) ^ mask);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
    int base = cpu::running / 32 * 32;
    cpu::words[cpu::running] = predicate;
    cpu::wait(cpu::warps[cpu::running / 32]);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= cpu::words[base + lane] << lane;
    cpu::wait(cpu::warps[cpu::running / 32]);
    return ballot;
}

template <typename T>
T atomicAdd(T* place, T value) {
    T old = *place;
    *place += value;
    return old;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }

inline float __int_as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __uint_as_float(uint32_t bits) { return __int_as_float((int32_t)bits); }
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
