// The CUDA kernels on a CPU, for tests: a thread of a block is a fibre with a stack of its own, and a fibre that waits
// for others lets the next one run. Blocks run one after the other, every second one with its threads in reverse, so
// that a barrier that is missing shows itself.
#pragma once
#define REPLAYSSM_EMULATED

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define DEVICE inline

namespace emulated {

constexpr int LANES = 32;
constexpr size_t STACK = 256 * 1024;

struct Index {
    int x;
};

struct Fibre {
    ucontext_t start;
    jmp_buf at;
    bool started = false, finished = false;
};

// A meeting of some threads, which all wait until the last has come.
struct Meeting {
    int wanted = 0, come = 0;
    unsigned round = 0;
};

inline Index thread_index, block_index;
inline std::vector<Fibre> fibres;
inline std::vector<char> stacks;
inline std::vector<Meeting> warps;
inline std::vector<unsigned> board;  // [warps, lanes, 8]: what lanes show each other
inline Meeting block;
inline ucontext_t scheduler;
inline jmp_buf scheduler_at;
inline void (*body)();

inline void wait_for_others() {
    if (_setjmp(fibres[thread_index.x].at) == 0) _longjmp(scheduler_at, 1);
}

inline void meet(Meeting& meeting) {
    const unsigned round = meeting.round;
    if (++meeting.come == meeting.wanted) {
        meeting.come = 0;
        ++meeting.round;
        return;
    }
    while (meeting.round == round) wait_for_others();
}

inline unsigned* shown_by(int lane) { return board.data() + (thread_index.x / LANES * LANES + lane) * 8; }
inline Meeting& warp() { return warps[thread_index.x / LANES]; }
inline int lane() { return thread_index.x % LANES; }

inline void entry() {
    body();
    fibres[thread_index.x].finished = true;
    _longjmp(scheduler_at, 1);
}

inline void resume(int thread) {
    thread_index.x = thread;
    Fibre& fibre = fibres[thread];
    if (fibre.started) _longjmp(fibre.at, 1);
    fibre.started = true;
    setcontext(&fibre.start);
}

inline void run_block(int threads, bool reversed) {
    fibres.assign(threads, Fibre());
    stacks.resize(threads * STACK);
    warps.assign(threads / LANES, Meeting());
    board.assign(threads * 8, 0);
    for (Meeting& meeting : warps) meeting.wanted = LANES;
    block = Meeting();
    block.wanted = threads;
    for (int i = 0; i < threads; ++i) {
        ucontext_t& start = fibres[i].start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks.data() + i * STACK;
        start.uc_stack.ss_size = STACK;
        start.uc_link = nullptr;
        makecontext(&start, entry, 0);
    }
    volatile int left = threads;
    volatile int next = 0;
    while (left > 0) {
        left = 0;
        for (next = 0; next < threads; next = next + 1) {
            const int thread = reversed ? threads - 1 - next : next;
            if (fibres[thread].finished) continue;
            left = left + 1;
            if (_setjmp(scheduler_at) == 0) resume(thread);
        }
    }
}

inline void demand(bool met, const char* what) {
    if (met) return;
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
}

// All blocks of a kernel, whose shared memory holds NaN at first.
template <class Params, class Memory, void (*RUN)(const Params&, Memory&)>
inline void launch(int blocks, int threads, const Params& given, int shared_bytes) {
    static const Params* params;
    static Memory* shared;
    demand(sizeof(Memory) == shared_bytes, "the shared memory has another size than was asked for");
    params = &given;
    shared = static_cast<Memory*>(std::aligned_alloc(128, sizeof(Memory)));
    body = [] { RUN(*params, *shared); };
    for (block_index.x = 0; block_index.x < blocks; ++block_index.x) {
        std::memset(static_cast<void*>(shared), 0xff, sizeof(Memory));
        run_block(threads, block_index.x % 2);
    }
    std::free(shared);
}

}  // namespace emulated

#define KERNEL(name, Params, Memory, run)                                                     \
    extern "C" void name(int blocks, const Params* given, int shared_bytes) {                 \
        emulated::launch<Params, Memory, run>(blocks, 32 * CASE_WARPS, *given, shared_bytes); \
    }

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index

inline float as_float(unsigned x) {
    float r;
    std::memcpy(&r, &x, 4);
    return r;
}

inline unsigned as_bits(float x) {
    unsigned r;
    std::memcpy(&r, &x, 4);
    return r;
}

inline float f16_to_float(unsigned short x) {
    _Float16 r;
    std::memcpy(&r, &x, 2);
    return static_cast<float>(r);
}

inline unsigned short float_to_f16(float x) {
    const _Float16 r = static_cast<_Float16>(x);
    unsigned short bits;
    std::memcpy(&bits, &r, 2);
    return bits;
}

inline unsigned short float_to_bf16(float x) {
    const unsigned bits = as_bits(x);
    if (x != x) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float fast_exp(float x) { return std::exp(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }

inline void sync_block() { emulated::meet(emulated::block); }
inline void sync_warp() { emulated::meet(emulated::warp()); }

inline unsigned pick_bytes(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
    unsigned found = 0;
    for (int byte = 0; byte < 4; ++byte) found |= (both >> (selector >> 4 * byte & 7) * 8 & 0xff) << 8 * byte;
    return found;
}

inline float from_lane(float x, int lane) {
    *emulated::shown_by(emulated::lane()) = as_bits(x);
    sync_warp();
    const float found = as_float(*emulated::shown_by(lane % emulated::LANES));
    sync_warp();
    return found;
}

inline float from_lane_xor(float x, int mask) { return from_lane(x, emulated::lane() ^ mask); }

inline float from_lane_after(float x, int distance) {
    const int lane = emulated::lane() + distance;
    return from_lane(x, lane < emulated::LANES ? lane : emulated::lane());
}

// A barrier's word: in its low half the number of phases that have ended, in its high half the bytes that are to come.
inline void barrier_init(unsigned long long* barrier) { *barrier = 0; }

inline void fence_copies() {}
inline unsigned fresh(unsigned x) { return x; }

inline void expect_copies(unsigned long long* barrier, unsigned bytes) {
    emulated::demand(*barrier >> 32 == 0, "a barrier is told to expect copies while it waits for others");
    *barrier += bytes ? static_cast<unsigned long long>(bytes) << 32 : 1;
}

inline void bulk_copy_part(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
    const auto aligned = [](const void* p) { return reinterpret_cast<size_t>(p) % 16 == 0; };
    emulated::demand(aligned(to) && aligned(from) && bytes % 16 == 0, "a bulk copy isn't aligned to 16 bytes");
    emulated::demand(*barrier >> 32 >= bytes, "more is copied than the barrier expects");
    std::memcpy(to, from, bytes);
    *barrier -= static_cast<unsigned long long>(bytes) << 32;
    if (*barrier >> 32 == 0) ++*barrier;
}

inline void barrier_wait(unsigned long long* barrier, unsigned phase) {
    while ((*static_cast<volatile unsigned long long*>(barrier) & 1) == phase) emulated::wait_for_others();
}

struct bf16;
struct f16;

template <class T> inline float number_in(unsigned word, int half);

template <class T>
inline void matrix_product(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(emulated::shown_by(emulated::lane()), mine, sizeof(mine));
    sync_warp();
    const int row = emulated::lane() / 4;
    for (int e = 0; e < 4; ++e) {
        const int column = emulated::lane() % 4 * 2 + e % 2;
        double sum = c[e];
        for (int n = 0; n < 16; ++n) {
            const unsigned* left = emulated::shown_by(row * 4 + n % 8 / 2);
            const unsigned* right = emulated::shown_by(column * 4 + n % 8 / 2);
            const unsigned a = left[n / 8 * 2 + e / 2], b = right[4 + n / 8];
            sum += static_cast<double>(number_in<T>(a, n % 2)) * number_in<T>(b, n % 2);
        }
        c[e] = static_cast<float>(sum);
    }
    sync_warp();
}

inline void copy_16_bytes(void* to, const void* from, bool there) {
    const auto aligned = [](const void* p) { return reinterpret_cast<size_t>(p) % 16 == 0; };
    emulated::demand(aligned(to) && aligned(from), "a copy isn't aligned to 16 bytes");
    if (there)
        std::memcpy(to, from, 16);
    else
        std::memset(to, 0, 16);
}

inline void wait_for_own_copies() {}

inline void load_matrices(unsigned (&words)[4], const void* row) {
    emulated::demand(reinterpret_cast<size_t>(row) % 16 == 0, "a row of a matrix isn't aligned to 16 bytes");
    std::memcpy(emulated::shown_by(emulated::lane()), &row, sizeof(row));
    sync_warp();
    for (int n = 0; n < 4; ++n) {
        const unsigned* found;
        std::memcpy(&found, emulated::shown_by(8 * n + emulated::lane() / 4), sizeof(found));
        words[n] = found[emulated::lane() % 4];
    }
    sync_warp();
}

template <class... Words> inline void store_words(void* to, Words... words) {
    const unsigned all[] = {words...};
    emulated::demand(reinterpret_cast<size_t>(to) % sizeof(all) == 0, "words that are stored together aren't aligned");
    std::memcpy(to, all, sizeof(all));
}

inline int thread_of_round() { return threadIdx.x; }
inline int same_in_warp(int x) { return x; }
inline void prefetch(const void* from, unsigned bytes) {
    emulated::demand(reinterpret_cast<size_t>(from) % 16 == 0 && bytes % 16 == 0, "a prefetch isn't aligned to 16 bytes");
}
inline int count_arrival(int* counter, int count = 1) {
    const int before = *counter;
    *counter += count;
    return before;
}

inline void matrix_product_tf32(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                unsigned b1) {
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(emulated::shown_by(emulated::lane()), mine, sizeof(mine));
    sync_warp();
    const auto number = [](unsigned word) { return static_cast<double>(as_float(word & 0xffffe000u)); };
    const int row = emulated::lane() / 4;
    for (int e = 0; e < 4; ++e) {
        const int column = emulated::lane() % 4 * 2 + e % 2;
        double sum = c[e];
        for (int n = 0; n < 8; ++n) {
            const unsigned* left = emulated::shown_by(row * 4 + n % 4);
            const unsigned* right = emulated::shown_by(column * 4 + n % 4);
            sum += number(left[n / 4 * 2 + e / 2]) * number(right[4 + n / 4]);
        }
        c[e] = static_cast<float>(sum);
    }
    sync_warp();
}

template <> inline float number_in<bf16>(unsigned word, int half) {
    return as_float(half ? word & 0xffff0000u : word << 16);
}

template <> inline float number_in<f16>(unsigned word, int half) {
    return f16_to_float(static_cast<unsigned short>(half ? word >> 16 : word));
}
