// What the kernels use of the GPU beyond C++: number formats, vectors of memory, sums over lanes, bulk copies, matrix
// products. Nothing is included: NVRTC brings no headers of its own.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};
struct none {};  // the type of what isn't there

template <class A, class B> struct same {
    static constexpr bool value = false;
};
template <class A> struct same<A, A> {
    static constexpr bool value = true;
};

#ifndef REPLAYSSM_EMULATED  // the tests have a header that does the rest of this file on a CPU

#define DEVICE __device__ __forceinline__

DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }

DEVICE float f16_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

DEVICE u16 float_to_f16(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

DEVICE u16 float_to_bf16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

// Both to one unit in the last place: the exact ones branch into slow paths.
DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEVICE float inverse_root(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r * 0.5f, fmaf(-x * r, r, 1.0f), r);
}

// Off by 2^-22 of the result, and by 2^-24 for each unit of x: for decays, which are small where x is large.
DEVICE float fast_exp(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * 1.4426950408889634f));
    return r;
}

// The same number, of which the compiler can't know that: what follows from it is worked out again, and not kept in
// registers from one round of a loop to the next.
DEVICE u32 fresh(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float from_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float from_lane_after(float x, int distance) { return __shfl_down_sync(0xffffffffu, x, distance); }

// The two bytes of each word that `selector` names, of x (0 to 3) and y (4 to 7).
DEVICE u32 pick_bytes(u32 x, u32 y, u32 selector) { return __byte_perm(x, y, selector); }

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// A barrier in shared memory that a bulk copy completes. One thread makes it, and orders it before that copy.
DEVICE void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders a thread's writes to shared memory before later bulk copies into it.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The barrier's next phase ends when copies of so many bytes in all have come.
DEVICE void expect_copies(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Copy `bytes`, a multiple of 16 between addresses of such, from global to shared memory: one of those that the barrier
// expects.
DEVICE void bulk_copy_part(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

DEVICE void barrier_wait(u64* barrier, u32 phase) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(phase)
            : "memory");
    } while (!done);
}

// c += a b, with a [16, 16] and b [16, 8] of 16-bit numbers and c [16, 8]. Lane 4i + j holds of a: columns 2j, 2j + 1
// of row i, of row i + 8, then columns 2j + 8, 2j + 9 of both rows; of b: rows 2j, 2j + 1, then 2j + 8, 2j + 9, of
// column i; of c: columns 2j, 2j + 1 of row i, then of row i + 8.
template <class T>
DEVICE void matrix_product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (same<T, bf16>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same on tf32 numbers, float32 of which the last 13 bits are left out, with a [16, 8] and b [8, 8]. Lane 4i + j holds
// of a: column j of row i, of row i + 8, then column j + 4 of both; of b: rows j and j + 4 of column i; of c: as above.
DEVICE void matrix_product_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Copy 16 bytes, between addresses of multiples of 16, from global to shared memory, or zeros there: for a thread that later
// waits for all its own copies of this kind.
DEVICE void copy_16_bytes(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

DEVICE void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 rows of 16 bytes from shared memory: lane 8n + i gives the address of row i of matrix n, lane 4i + j gets
// word j of row i of each. As operands of products of 16-bit numbers, or of tf32, want it.
DEVICE void load_matrices(u32 (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// threadIdx.x, of which a loop's body keeps nothing from one round to the next: what follows from it costs less to work
// out again than registers to hold.
DEVICE int thread_of_round() {
    int r;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
    return r;
}

// Bring `bytes`, as above, into the L2 cache.
DEVICE void prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// What is the same in all lanes of a warp, so that the compiler knows.
DEVICE int same_in_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// How many came before `count` more, in whose turn the callers' reads of global memory are done.
DEVICE int count_arrival(int* counter, int count = 1) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
    return before;
}

// Words that one access writes, in global memory. (Those of a struct are stored one by one.)
DEVICE void store_words(void* to, u32 a, u32 b) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b) : "memory");
}
DEVICE void store_words(void* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// A kernel, each block of which does run(params, memory). The bound is Hopper's: there it decides how many blocks share a
// multiprocessor.
#if __CUDA_ARCH__ == 900
#define BOUND __maxnreg__(CASE_REGISTERS)
#else
#define BOUND __launch_bounds__(32 * CASE_WARPS, 1)
#endif
#define KERNEL(name, Params, Memory, run)                                   \
    extern "C" __global__ void BOUND name(const __grid_constant__ Params p) { \
        extern __shared__ __align__(128) unsigned char shared[];            \
        run(p, *reinterpret_cast<Memory*>(shared));                         \
    }

#endif

// The only copy of a phase.
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    expect_copies(barrier, bytes);
    bulk_copy_part(to, from, bytes, barrier);
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return as_float(static_cast<u32>(x.bits) << 16); }
DEVICE float to_float(f16 x) { return f16_to_float(x.bits); }

template <class T> struct convert;
template <> struct convert<float> {
    static DEVICE float from(float x) { return x; }
};
template <> struct convert<bf16> {
    static DEVICE bf16 from(float x) { return bf16{float_to_bf16(x)}; }
};
template <> struct convert<f16> {
    static DEVICE f16 from(float x) { return f16{float_to_f16(x)}; }
};

// The two numbers of a word, the first in its low half.
template <class T> DEVICE float first_of(u32 word) { return to_float(T{static_cast<u16>(word)}); }
template <class T> DEVICE float second_of(u32 word) { return to_float(T{static_cast<u16>(word >> 16)}); }
template <> DEVICE float second_of<bf16>(u32 word) { return as_float(word & 0xffff0000u); }

template <class T> DEVICE u32 two_of(float first, float second) {
    return convert<T>::from(first).bits | static_cast<u32>(convert<T>::from(second).bits) << 16;
}

// Two numbers as sums of TERMS each, in pairs, in bfloat16.
template <int TERMS> DEVICE void split(float x, float y, u32 (&pairs)[TERMS]) {
#pragma unroll
    for (int t = 0; t < TERMS; ++t) {
        pairs[t] = two_of<bf16>(x, y);
        x -= first_of<bf16>(pairs[t]);
        y -= second_of<bf16>(pairs[t]);
    }
}

struct alignas(16) words4 {
    u32 w[4];
};
struct alignas(8) words2 {
    u32 w[2];
};

// N consecutive numbers as they lie in memory, moved in accesses of 16 bytes, or of 8 where they are no more.
template <class T, int N> struct packed {
    static constexpr int WORDS = N * static_cast<int>(sizeof(T)) / 4;
    static_assert(WORDS == 2 || WORDS % 4 == 0, "no such access");
    u32 word[WORDS];

    DEVICE void load(const void* from) {
        if constexpr (WORDS == 2) {
            const words2 x = *static_cast<const words2*>(from);
            word[0] = x.w[0];
            word[1] = x.w[1];
        } else {
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i) {
                const words4 x = static_cast<const words4*>(from)[i];
#pragma unroll
                for (int j = 0; j < 4; ++j) word[4 * i + j] = x.w[j];
            }
        }
    }

    DEVICE void store(void* to) const {
        if constexpr (WORDS == 2) {
            *static_cast<words2*>(to) = words2{{word[0], word[1]}};
        } else {
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i)
                static_cast<words4*>(to)[i] = words4{{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]}};
        }
    }

    // The same, of 8 or 16 bytes, in one access to global memory.
    DEVICE void store_at_once(void* to) const {
        static_assert(WORDS <= 4, "more than one access");
        if constexpr (WORDS == 2)
            store_words(to, word[0], word[1]);
        else
            store_words(to, word[0], word[1], word[2], word[3]);
    }

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
    }

    DEVICE void unpack(float* x) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (same<T, float>::value)
                x[i] = as_float(word[i]);
            else
                x[i] = i % 2 ? second_of<T>(word[i / 2]) : first_of<T>(word[i / 2]);
        }
    }

    DEVICE void pack(const float* x) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (same<T, float>::value)
                word[i] = as_bits(x[i]);
            else
                word[i] = two_of<T>(x[2 * i], x[2 * i + 1]);
        }
    }
};

// 16 bytes of each half of a granule, in the order of the halves. In shared memory, two rows that are read at once would
// lie in the same banks, so odd rows are read the other way round.
template <class T> struct Granule {
    static constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));
    packed<T, VECTOR> half[2];

    DEVICE void load(const T* row, bool odd) {
        packed<T, VECTOR> first, second;
        first.load(row + (odd ? 4 * VECTOR : 0));
        second.load(row + (odd ? 0 : 4 * VECTOR));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            half[0].word[w] = odd ? second.word[w] : first.word[w];
            half[1].word[w] = odd ? first.word[w] : second.word[w];
        }
    }
    DEVICE void clear() {
        half[0].clear();
        half[1].clear();
    }
};

// c += a b, as matrix_product does, for 32 columns of a and rows of b. A lane has eight consecutive ones of rows lane / 4
// and lane / 4 + 8 of a, and of column lane / 4 of b: a sum may run over them in any order, if both operands agree.
template <class T>
DEVICE void multiply_eights(float (&c)[4], const packed<T, 8>& upper, const packed<T, 8>& lower, const packed<T, 8>& b) {
#pragma unroll
    for (int w = 0; w < 4; w += 2)
        matrix_product<T>(c, upper.word[w], lower.word[w], upper.word[w + 1], lower.word[w + 1], b.word[w], b.word[w + 1]);
}

// A float32 as the sum of two tf32 numbers, rounded to nearest: what is left out is 2^-23 of it at most.
struct TwoTerms {
    u32 high, low;
};

DEVICE TwoTerms two_terms(float x) {
    const u32 high = (as_bits(x) + 0x1000) & 0xffffe000;
    return TwoTerms{high, as_bits(x - as_float(high))};
}

// The same in one instruction less, cut in place of rounded: up to 2^-21 are left out, 2^-23 on average.
DEVICE TwoTerms cut_terms(float x) {
    return TwoTerms{as_bits(x), as_bits(x - as_float(as_bits(x) & 0xffffe000))};
}

// N consecutive numbers that one access moves.
template <class T, int N> struct alignas(sizeof(T) * N) Few {
    T x[N];
};

template <int LANES> DEVICE float sum_over_lanes(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += from_lane_xor(x, distance);
    return x;
}

DEVICE float max_over_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, from_lane_xor(x, distance));
    return x;
}

// Sums of one number of each lane over those from a lane on, and over those behind it.
struct Suffix {
    float from, behind;
};

DEVICE Suffix suffix_sums(float x, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float other = from_lane_after(x, distance);
        if (lane + distance < 32) x += other;
    }
    const float behind = from_lane_after(x, 1);
    return Suffix{x, lane == 31 ? 0.0f : behind};
}

// Sums of N numbers over groups of LANES lanes. A lane gets the sum of number `lane % LANES / (LANES / N)`: in each
// round it gives half of its numbers away, which takes N − 1 shuffles and not N log₂ LANES. The order of summation is
// that of sum_over_lanes, whatever N.
template <int N, int LANES> DEVICE float sums_over_lanes(float (&x)[N], int lane) {
    static_assert(N <= LANES, "no lane for some of the sums");
    int distance = LANES / 2;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float given = upper ? x[i] : x[i + half];
            const float kept = upper ? x[i + half] : x[i];
            x[i] = kept + from_lane_xor(given, distance);
        }
        distance /= 2;
    }
#pragma unroll
    for (int d = LANES / N / 2; d > 0; d /= 2) x[0] += from_lane_xor(x[0], d);
    return x[0];
}
