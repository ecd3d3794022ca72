// One decode step by replay, for both gates and both rules (equations: replayssm/backends/torch/decode.py, same letters).
//
// A block holds ROWS rows of one slot's states, taken as one matrix [H_v d_v, d_k]: a part of a head, or several heads
// of one key head. Each of its warps brings in its own RPW rows by one bulk copy and works on them alone; what all rows
// share (the products of the ring's keys with q and k, the decays) is computed once per block while the copies are
// under way. An output's order of summation depends on nothing but the types and d_k, so neither batch nor block shape
// changes a bit.

enum flag {
    L2_NORM = 1,
    SOFTPLUS = 2,
    BOUNDED = 4,
    ROW_CURSORS = 8,   // write_pos is [B], and each slot reads its own checkpoint
    NORMAL_KEYS = 16,  // a record is (u, k, g) with the normalised key
    INPUT_RECORDS = 32,  // a record is (x, B, Δ)
    ZERO_PADDING = 64,
};

// As `_PARAMS` in decode.py. Strides in elements.
struct Params {
    const void *q, *k, *v, *a, *b, *rate, *bias, *d, *z;
    void *y, *checkpoint, *ring_u, *ring_k;
    float* ring_g;
    const int *write_pos, *checkpoint_slot, *slots;
    const void* force_flush;
    i64 q_row, q_head, k_row, k_head, v_row, v_head, a_row, a_head, b_row, b_head, z_row, z_head, d_head, d_dim;
    i64 checkpoint_stride, ring_u_stride, ring_k_stride, ring_g_stride;
    float scale, beta_scale, lower_bound, dt_min, dt_max;
    int flush_period, ring_rows, num_v_heads, group, tiles, flags;
    int a_type, b_type, rate_type, bias_type, d_type, z_type, force_bytes;
};

template <bool CHANNEL_, bool DELTA_, class C_, class X_, class U_, class K_, int D_V_, int D_K_, int ROWS_, int WARPS_,
          int FLUSH_PASSES_, bool EAGER_>
struct Config {
    static constexpr bool CHANNEL = CHANNEL_;  // gate: one decay per key channel
    static constexpr bool DELTA = DELTA_;      // rule
    using C = C_;                              // checkpoint
    using X = X_;                              // activations
    using U = U_;                              // ring_u
    using K = K_;                              // ring_k
    static constexpr int D_V = D_V_, D_K = D_K_, ROWS = ROWS_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int RPW = ROWS / WARPS;                    // rows of a warp
    static constexpr int HEADS = ROWS > D_V ? ROWS / D_V : 1;   // of a block
    static constexpr int COLUMNS = 16;                          // of a lane, in sums over rows
    static constexpr int LANES = D_K / COLUMNS;                 // that share a row
    static constexpr int PASS = 32 / LANES;                     // rows that a warp reads at once
    static constexpr int FLUSH_PASSES = FLUSH_PASSES_;           // whose rows a flush holds in registers
    static constexpr bool EAGER = EAGER_;  // fetch ring rows before the cursor says which are needed
    static constexpr int VECTOR = 16 / static_cast<int>(sizeof(C));  // consecutive columns of a lane
    static constexpr int PIECES = COLUMNS / VECTOR;
    static constexpr int UNITS = 16;  // records that are fetched before the first is needed
    static constexpr int SETS = 1 + (UNITS - 1) / (WARPS * PASS);  // of their keys, by a warp
    // A 16-bit checkpoint is multiplied by q and k on the matrix units: exact products, sums in float32.
    static constexpr bool MATRIX = sizeof(C) == 2;
    // q and k as sums of so many numbers of the checkpoint's type.
    static constexpr bool EXACT = !CHANNEL && (same<C, X>::value || (same<C, f16>::value && same<X, bf16>::value));
    static constexpr int TERMS = EXACT ? 1 : 3;
    static_assert(ROWS % WARPS == 0 && RPW % PASS == 0 && RPW <= 32, "rows don't divide into passes of warps");
    static_assert(!MATRIX || RPW % 16 == 0 || RPW == 8, "a matrix product takes 16 rows, or 8 and nothing");
    static_assert(D_V % ROWS == 0 || ROWS % D_V == 0, "a block is a part of a head, or whole heads");
    static_assert(HEADS == 1 || (!CHANNEL && D_V % PASS == 0), "a pass lies in one head");
};

struct alignas(8) Pair {
    float q, k;
};

// What a block's rows share.
struct alignas(16) Products {
    float kq, q_norm, k_norm;
    float unused;
};

struct alignas(16) Head {
    float total;  // decay of the checkpoint
    float beta;
    float input;  // Δ of Mamba-2
    float unused;
};

// The block's shared memory. `shared_bytes` in blocks.py counts the same.
template <class F> struct Memory {
    unsigned char* tile;  // [ROWS, D_K] of C
    float* keys;          // channel gate: decayed keys [R, D_K]
    float *q, *k, *total;  // [D_K]; total for a channel gate
    Pair* sums;            // [ROWS]: S q and S k
    Pair* scores;          // [HEADS, R]: k_j·q and k_j·k, decayed
    u64* barriers;         // [WARPS]
    Products* products;
    Head* heads;   // [HEADS]
    float* after;  // head gate: decays of the records [HEADS, R]

    DEVICE Memory(unsigned char* start, int ring_rows) {
        tile = start;
        keys = reinterpret_cast<float*>(start + F::ROWS * F::D_K * sizeof(typename F::C));
        q = keys + (F::CHANNEL ? ring_rows * F::D_K : 0);
        k = q + F::D_K;
        total = k + F::D_K;
        sums = reinterpret_cast<Pair*>(total + (F::CHANNEL ? F::D_K : 0));
        scores = sums + F::ROWS;
        barriers = reinterpret_cast<u64*>(scores + F::HEADS * ring_rows);
        products = reinterpret_cast<Products*>(barriers + F::WARPS + (F::WARPS + F::ROWS + F::HEADS * ring_rows) % 2);
        heads = reinterpret_cast<Head*>(products + 1);
        after = reinterpret_cast<float*>(heads + F::HEADS);
    }
};

DEVICE float load_any(const void* from, i64 at, int type) {
    if (type == 0) return static_cast<const float*>(from)[at];
    const u16 bits = static_cast<const u16*>(from)[at];
    return type == 1 ? to_float(bf16{bits}) : to_float(f16{bits});
}

DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float delta_gate(const Params& p, float a, float rate) {
    if (p.flags & BOUNDED) return p.lower_bound * sigmoid(expf(rate) * a);
    return -expf(rate) * softplus(a);
}

DEVICE float delta_beta(const Params& p, i64 row, int head) {
    return p.beta_scale * sigmoid(load_any(p.b, row * p.b_row + head * p.b_head, p.b_type));
}

// Which slot, and where it stands.
struct Row {
    int row, cursor;
    i64 slot;
    bool flush;
};

// Where a slot's own tensors lie.
template <class F> struct Places {
    typename F::C* own;     // the block's rows of the checkpoint
    typename F::K* ring_k;  // [R, D_K] of the key head
    typename F::U* ring_u;  // the thread's row of the updates, D_V apart

    DEVICE Places(const Params& p, i64 slot, int first_row, int key_head, int head, int dim) {
        own = static_cast<typename F::C*>(p.checkpoint) + slot * p.checkpoint_stride +
              static_cast<i64>(first_row) * F::D_K;
        ring_k = static_cast<typename F::K*>(p.ring_k) + slot * p.ring_k_stride +
                 static_cast<i64>(key_head) * p.ring_rows * F::D_K;
        ring_u = static_cast<typename F::U*>(p.ring_u) + slot * p.ring_u_stride +
                 static_cast<i64>(head) * p.ring_rows * F::D_V + dim;
    }
};

// First column of piece i of a lane. Rows of 64 columns are so short that two rows lie in the same banks of shared
// memory: there, odd rows are read in another order.
template <class F> DEVICE int column_of(int i, int lane) {
    const int odd = F::LANES == 4 ? lane / F::LANES & 1 : 0;
    return ((i ^ odd) * F::LANES + lane % F::LANES) * F::VECTOR;
}

template <class F> DEVICE void load_columns(const float* from, int lane, float (&x)[F::COLUMNS]) {
#pragma unroll
    for (int i = 0; i < F::PIECES; ++i) {
        packed<float, F::VECTOR> piece;
        piece.load(from + column_of<F>(i, lane));
        piece.unpack(x + i * F::VECTOR);
    }
}

// A lane's columns of one row of numbers, as they lie in memory.
template <class F, class T> struct Columns {
    packed<T, F::VECTOR> piece[F::PIECES];

    DEVICE void load(const T* row, int lane) {
#pragma unroll
        for (int i = 0; i < F::PIECES; ++i) piece[i].load(row + column_of<F>(i, lane));
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < F::PIECES; ++i) piece[i].clear();
    }
    DEVICE void unpack(float (&x)[F::COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < F::PIECES; ++i) piece[i].unpack(x + i * F::VECTOR);
    }
};

DEVICE float dot16(const float (&x)[16], const float (&y)[16]) {
    float sum = x[0] * y[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) sum = fmaf(x[i], y[i], sum);
    return sum;
}

// Channel gate: the decays of all records up to and with this token, newest first, and with them the decayed keys.
template <class F>
DEVICE void channel_decays(const Params& p, const Memory<F>& m, const Row& at, int head, const typename F::K* ring_k,
                           float* ring_g, bool append) {
    const float rate = load_any(p.rate, head, p.rate_type);
    for (int c = threadIdx.x; c < F::D_K; c += F::THREADS) {
        float a = load_any(p.a, at.row * p.a_row + head * p.a_head + c, p.a_type);
        a += load_any(p.bias, static_cast<i64>(head) * F::D_K + c, p.bias_type);
        const float gate = delta_gate(p, a, rate);
        float decay = gate;
        for (int first = (at.cursor - 1) & ~7; first >= 0; first -= 8) {  // −8 for an empty ring
            float g[8], key[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int j = first + i;
                g[i] = j < at.cursor ? ring_g[j * F::D_K + c] : 0.0f;
                key[i] = j < at.cursor ? to_float(ring_k[j * F::D_K + c]) : 0.0f;
            }
#pragma unroll
            for (int i = 7; i >= 0; --i) {
                const int j = first + i;
                if (j < at.cursor) m.keys[j * F::D_K + c] = key[i] * expf(decay);
                decay += g[i];
            }
        }
        m.total[c] = expf(decay);
        if (append) ring_g[at.cursor * F::D_K + c] = gate;
    }
    if (threadIdx.x == 0) *m.heads = Head{1.0f, delta_beta(p, at.row, head), 0.0f, 0.0f};
}

// Head gate: one warp computes the gate of a head and the decays of its records, newest first.
template <class F>
DEVICE void head_decays(const Params& p, const Memory<F>& m, const Row& at, int first_head, int local, bool append,
                        int lane) {
    const int head = first_head + local;
    float* ring_g = p.ring_g + at.slot * p.ring_g_stride + static_cast<i64>(head) * p.ring_rows;
    const float rate = load_any(p.rate, head, p.rate_type);
    float a = load_any(p.a, at.row * p.a_row + head * p.a_head, p.a_type);
    if (p.bias) a += load_any(p.bias, head, p.bias_type);
    float beta = 0.0f, gate;
    if (F::DELTA) {
        gate = delta_gate(p, a, rate);
        beta = delta_beta(p, at.row, head);
    } else {
        if (p.flags & SOFTPLUS) a = softplus(a);
        a = fminf(fmaxf(a, p.dt_min), p.dt_max);
        gate = a * rate;
    }
    const bool inputs = p.flags & INPUT_RECORDS;
    float newer = gate;  // log decay from behind the records at hand to this token
    for (int first = (at.cursor - 1) & ~31; first >= 0; first -= 32) {
        const int j = first + lane;
        const float stored = j < at.cursor ? ring_g[j] : 0.0f;
        const float g = inputs ? stored * rate : stored;
        float behind = g;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = from_lane_after(behind, distance);
            if (lane + distance < 32) behind += other;
        }
        float follows = from_lane_after(behind, 1);
        if (lane == 31) follows = 0.0f;
        if (j < at.cursor) m.after[local * p.ring_rows + j] = expf(follows + newer) * (inputs ? stored : 1.0f);
        newer += from_lane(behind, 0);
    }
    if (lane == 0) {
        m.heads[local] = Head{expf(newer), beta, a, 0.0f};
        if (append) ring_g[at.cursor] = inputs ? a : gate;
    }
}

// S q and S k of the warp's rows by multiply-adds, into m.sums.
template <class F>
DEVICE void multiply(const Memory<F>& m, int warp, int lane, const float (&q)[16], const float (&k)[16]) {
    constexpr int VECTORS = F::DELTA ? 2 : 1;
    constexpr int PASSES = F::RPW / F::PASS;
    constexpr int WANTED = F::LANES / VECTORS < 4 ? F::LANES / VECTORS : 4;
    constexpr int BATCH = PASSES < WANTED ? PASSES : WANTED;  // passes whose sums are taken together
    static_assert(PASSES % BATCH == 0, "passes don't divide into batches");
    const typename F::C* tile = reinterpret_cast<const typename F::C*>(m.tile) + warp * F::RPW * F::D_K;
    const int in_pass = lane / F::LANES;
#pragma unroll
    for (int first = 0; first < PASSES; first += BATCH) {
        float sums[BATCH * VECTORS];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            Columns<F, typename F::C> row;
            row.load(tile + ((first + n) * F::PASS + in_pass) * F::D_K, lane);
            float s[16];
            row.unpack(s);
            sums[n * VECTORS] = dot16(s, q);
            if (F::DELTA) sums[n * VECTORS + VECTORS - 1] = dot16(s, k);
        }
        const float sum = sums_over_lanes<BATCH * VECTORS, F::LANES>(sums, lane);
        constexpr int SHARE = F::LANES / (BATCH * VECTORS);
        const int number = lane % F::LANES / SHARE;
        if (lane % SHARE == 0) {
            const int row = warp * F::RPW + (first + number / VECTORS) * F::PASS + in_pass;
            if (number % VECTORS == 0)
                m.sums[row].q = sum;
            else
                m.sums[row].k = sum;
        }
    }
}

// A power of two that brings the largest of x (by absolute value) near the upper end of float16; 1 for bfloat16.
template <class F> DEVICE float matrix_scale(const float* x, const float* factor, int lane) {
    if (same<typename F::C, bf16>::value || (F::EXACT && same<typename F::C, typename F::X>::value)) return 1.0f;
    float largest = 0.0f;
#pragma unroll
    for (int c = lane; c < F::D_K; c += 32) largest = fmaxf(largest, fabsf(F::CHANNEL ? x[c] * factor[c] : x[c]));
    const int exponent = 268 - static_cast<int>(as_bits(max_over_warp(largest)) >> 23);
    return as_float(static_cast<u32>(exponent < 1 ? 1 : exponent > 253 ? 253 : exponent) << 23);
}

// The given one of the numbers of the checkpoint's type whose sum x is.
template <class F> DEVICE float term_of(float x, int term) {
    if (F::TERMS == 1) return x;
    const float first = to_float(convert<typename F::C>::from(x));
    const float rest = x - first;
    const float second = to_float(convert<typename F::C>::from(rest));
    return term == 0 ? first : term == 1 ? second : rest - second;
}

// S q and S k of the warp's rows on the matrix units, into m.sums. The right operand's columns 2i and 2i + 1 are the
// i-th terms of q and k. A lane takes 16 bytes of a row at a time, so the columns of the state are numbered to suit:
// the sum may run over them in any order. Two rows that are read at once would lie in the same banks, so odd rows are
// read with each pair of pieces exchanged.
template <class F> DEVICE void multiply_matrix(const Memory<F>& m, int warp, int lane) {
    using C = typename F::C;
    constexpr int CHUNKS = F::D_K / 32;
    constexpr int TILES = (F::RPW + 15) / 16;
    constexpr bool HALF = F::RPW == 8;  // the lower eight rows of the only tile are none
    const int group = lane / 4, quarter = lane % 4;
    const bool of_k = group & 1;
    const int term = group / 2;
    const float* x = of_k ? m.k : m.q;
    const bool used = term < F::TERMS && (F::DELTA || !of_k);
    const float q_scale = matrix_scale<F>(m.q, m.total, lane);
    const float k_scale = F::DELTA ? matrix_scale<F>(m.k, m.total, lane) : 1.0f;
    const float factor = of_k ? k_scale : q_scale;

    const C* tile = reinterpret_cast<const C*>(m.tile) + warp * F::RPW * F::D_K;
    const bool odd = group & 1;
    float sums[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; i += 2) {
        u32 b[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = (i + half) * 32 + quarter * 8;
            float values[8];
            packed<float, 8> eight;
            eight.load(x + column);
            eight.unpack(values);
            if (F::CHANNEL) {
                float total[8];
                eight.load(m.total + column);
                eight.unpack(total);
#pragma unroll
                for (int e = 0; e < 8; ++e) values[e] *= total[e];
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) values[e] = term_of<F>(values[e] * factor, term);
#pragma unroll
            for (int w = 0; w < 4; ++w) b[half][w] = used ? two_of<C>(values[2 * w], values[2 * w + 1]) : 0;
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const C* upper = tile + (n * 16 + group) * F::D_K + quarter * 8;
            const C* lower = upper + 8 * F::D_K;
            packed<C, 8> u0, u1, l0, l1;
            u0.load(upper + (odd ? i + 1 : i) * 32);
            u1.load(upper + (odd ? i : i + 1) * 32);
            if (HALF) {
                l0.clear();
                l1.clear();
            } else {
                l0.load(lower + (odd ? i + 1 : i) * 32);
                l1.load(lower + (odd ? i : i + 1) * 32);
            }
#pragma unroll
            for (int w = 0; w < 4; w += 2)
                matrix_product<C>(sums[n], odd ? u1.word[w] : u0.word[w], odd ? l1.word[w] : l0.word[w],
                                  odd ? u1.word[w + 1] : u0.word[w + 1], odd ? l1.word[w + 1] : l0.word[w + 1],
                                  b[0][w], b[0][w + 1]);
#pragma unroll
            for (int w = 0; w < 4; w += 2)
                matrix_product<C>(sums[n], odd ? u0.word[w] : u1.word[w], odd ? l0.word[w] : l1.word[w],
                                  odd ? u0.word[w + 1] : u1.word[w + 1], odd ? l0.word[w + 1] : l1.word[w + 1],
                                  b[1][w], b[1][w + 1]);
            sync_warp();  // keeps the compiler from loading all pieces at once, which takes too many registers
        }
    }
    const float q_back = 1.0f / q_scale, k_back = 1.0f / k_scale;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (F::TERMS > 1) sums[n][e] = sum_over_lanes<4>(sums[n][e]);
        if (quarter == 0) {
            Pair* row = m.sums + warp * F::RPW + n * 16 + group;
            row[0] = Pair{sums[n][0] * q_back, sums[n][1] * k_back};
            if (!HALF) row[8] = Pair{sums[n][2] * q_back, sums[n][3] * k_back};
        }
    }
}

// Fold the records and this token into the warp's rows, as they lie in shared memory, and write them. Lane i of the
// warp holds the update of its i-th row.
template <class F>
DEVICE void flush_rows(const Params& p, const Memory<F>& m, const Row& at, int warp, int lane, float update,
                       float key_factor, const Places<F>& place) {
    using C = typename F::C;
    constexpr int PASSES = F::RPW / F::PASS;
    constexpr int BATCH = PASSES < F::FLUSH_PASSES ? PASSES : F::FLUSH_PASSES;
    const C* tile = reinterpret_cast<const C*>(m.tile) + warp * F::RPW * F::D_K;
    const int in_pass = lane / F::LANES;
    const int my_row = warp * F::RPW + lane;
    const int my_head = F::HEADS > 1 ? my_row / F::D_V : 0;
    const bool owner = lane < F::RPW;
#pragma unroll 1
    for (int first = 0; first < PASSES; first += BATCH) {
        float s[BATCH][16];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = (first + n) * F::PASS + in_pass;
            Columns<F, C> held;
            held.load(tile + row * F::D_K, lane);
            held.unpack(s[n]);
            if (!F::CHANNEL) {
                const float total = m.heads[F::HEADS > 1 ? (warp * F::RPW + row) / F::D_V : 0].total;
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n][i] *= total;
            }
        }
        if (F::CHANNEL) {
            float total[16];
            load_columns<F>(m.total, lane, total);
#pragma unroll
            for (int n = 0; n < BATCH; ++n)
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n][i] *= total[i];
        }
#pragma unroll 1
        for (int j = 0; j <= at.cursor; ++j) {
            float key[16], u = update;
            if (j == at.cursor) {
                load_columns<F>(m.k, lane, key);
#pragma unroll
                for (int i = 0; i < 16; ++i) key[i] *= key_factor;
            } else {
                u = owner ? to_float(place.ring_u[j * F::D_V]) : 0.0f;
                if (F::CHANNEL) {
                    load_columns<F>(m.keys + j * F::D_K, lane, key);
                } else {
                    u *= m.after[(owner ? my_head : 0) * p.ring_rows + j];
                    Columns<F, typename F::K> stored;
                    stored.load(place.ring_k + j * F::D_K, lane);
                    stored.unpack(key);
                }
            }
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                const float factor = from_lane(u, (first + n) * F::PASS + in_pass);
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n][i] = fmaf(factor, key[i], s[n][i]);
            }
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            C* row = place.own + static_cast<i64>(warp * F::RPW + (first + n) * F::PASS + in_pass) * F::D_K;
#pragma unroll
            for (int i = 0; i < F::PIECES; ++i) {
                packed<C, F::VECTOR> piece;
                piece.pack(s[n] + i * F::VECTOR);
                piece.store(row + column_of<F>(i, lane));
            }
        }
    }
}

// The ring's first records as they lie in memory, all under way at once.
template <class F> struct Records {
    Columns<F, typename F::K> keys[F::SETS];
    typename F::U updates[F::UNITS];

    // `rows` of the ring may be read: the committed ones, or all of them before it is known which are.
    DEVICE void fetch(const typename F::K* ring_k, const typename F::U* ring_u, int rows, int warp, int lane) {
        if (!F::CHANNEL) {
#pragma unroll
            for (int n = 0; n < F::SETS; ++n) {
                const int j = (n * F::WARPS + warp) * F::PASS + lane / F::LANES;
                if (j < rows)
                    keys[n].load(ring_k + j * F::D_K, lane);
                else
                    keys[n].clear();
            }
        }
        const bool owner = lane < F::RPW;
#pragma unroll
        for (int i = 0; i < F::UNITS; ++i)
            updates[i] = owner && i < rows ? ring_u[i * F::D_V] : convert<typename F::U>::from(0.0f);
    }
};

// k·q and the inverse norms, by one warp.
template <class F> DEVICE void share_products(const Params& p, const Memory<F>& m, int lane) {
    float kq = 0.0f, qq = 0.0f, kk = 0.0f;
#pragma unroll
    for (int c = lane; c < F::D_K; c += 32) {
        const float q = m.q[c], k = m.k[c];
        kq = fmaf(k, q, kq);
        qq = fmaf(q, q, qq);
        kk = fmaf(k, k, kk);
    }
    kq = sum_over_lanes<32>(kq);
    float q_norm = 1.0f, k_norm = 1.0f;
    if (F::DELTA && (p.flags & L2_NORM)) {
        q_norm = 1.0f / sqrtf(sum_over_lanes<32>(qq) + 1e-6f);
        k_norm = 1.0f / sqrtf(sum_over_lanes<32>(kk) + 1e-6f);
    }
    if (lane == 0) *m.products = Products{kq, q_norm, k_norm, 0.0f};
}

// Products of the ring's keys with q and k, decayed up to this token. A warp takes PASS records at a time.
template <class F>
DEVICE void share_scores(const Params& p, const Memory<F>& m, const Row& at, const typename F::K* ring_k,
                         const Records<F>& records, int warp, int lane) {
    constexpr int STEP = F::WARPS * F::PASS;
    const int in_pass = lane / F::LANES;
    float x[16], key[16];
    const auto keep = [&](int j, Pair score) {
        if (lane % F::LANES || j >= at.cursor) return;
#pragma unroll
        for (int local = 0; local < F::HEADS; ++local) {
            const float after = F::CHANNEL ? 1.0f : m.after[local * p.ring_rows + j];
            m.scores[local * p.ring_rows + j] = Pair{score.q * after, score.k * after};
        }
    };
    int first = warp * F::PASS;
    if constexpr (!F::CHANNEL) {
        Pair scores[F::SETS] = {};
        load_columns<F>(m.q, lane, x);
#pragma unroll
        for (int n = 0; n < F::SETS; ++n) {
            if (first + n * STEP < at.cursor) {
                records.keys[n].unpack(key);
                scores[n].q = sum_over_lanes<F::LANES>(dot16(key, x));
            }
        }
        if (F::DELTA) {
            sync_warp();  // k takes the registers of q
            load_columns<F>(m.k, lane, x);
#pragma unroll
            for (int n = 0; n < F::SETS; ++n) {
                if (first + n * STEP < at.cursor) {
                    records.keys[n].unpack(key);
                    scores[n].k = sum_over_lanes<F::LANES>(dot16(key, x));
                }
            }
        }
#pragma unroll
        for (int n = 0; n < F::SETS; ++n) keep(first + n * STEP + in_pass, scores[n]);
        first += F::SETS * STEP;
    }
    for (; first < at.cursor; first += STEP) {
        const int j = first + in_pass;
        const int readable = j < at.cursor ? j : first;
        if (F::CHANNEL) {
            load_columns<F>(m.keys + readable * F::D_K, lane, key);
        } else {
            Columns<F, typename F::K> stored;
            stored.load(ring_k + readable * F::D_K, lane);
            stored.unpack(key);
        }
        Pair score{0.0f, 0.0f};
        load_columns<F>(m.q, lane, x);
        score.q = sum_over_lanes<F::LANES>(dot16(key, x));
        if (F::DELTA) {
            load_columns<F>(m.k, lane, x);
            score.k = sum_over_lanes<F::LANES>(dot16(key, x));
        }
        keep(j, score);
    }
}

// The records' part of S q and S k, for the thread's own row.
template <class F>
DEVICE Pair replay_records(const Memory<F>& m, const Row& at, const Pair* scores, const typename F::U* ring_u,
                           Records<F>& records, bool owner) {
    Pair sum{0.0f, 0.0f};
    for (int first = 0; first < at.cursor; first += F::UNITS) {
        if (first) {
#pragma unroll
            for (int i = 0; i < F::UNITS; ++i)
                records.updates[i] =
                    owner && first + i < at.cursor ? ring_u[(first + i) * F::D_V] : convert<typename F::U>::from(0.0f);
        }
#pragma unroll
        for (int i = 0; i < F::UNITS; ++i) {
            if (first + i < at.cursor) {
                const float u = to_float(records.updates[i]);
                const Pair score = scores[first + i];
                sum.q = fmaf(u, score.q, sum.q);
                if (F::DELTA) sum.k = fmaf(u, score.k, sum.k);
            }
        }
    }
    return sum;
}

template <class F> DEVICE void decode(const Params& p, unsigned char* shared) {
    using C = typename F::C;
    using X = typename F::X;
    using U = typename F::U;
    using K = typename F::K;
    const Memory<F> m(shared, p.ring_rows);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Row at;
    at.row = blockIdx.x / p.tiles;
    const int first_row = (blockIdx.x - at.row * p.tiles) * F::ROWS;
    const int first_head = first_row / F::D_V;
    const int key_head = first_head / p.group;
    const int slot = p.slots[at.row];

    // The thread's own row.
    const int my_row = warp * F::RPW + lane;
    const bool owner = lane < F::RPW;
    const int my_head = F::HEADS > 1 && owner ? my_row / F::D_V : 0;
    const int head = first_head + my_head;
    const int dim = F::HEADS > 1 ? my_row - my_head * F::D_V : first_row - first_head * F::D_V + my_row;
    const auto y_at = [&](i64 row) { return static_cast<X*>(p.y) + (row * p.num_v_heads + head) * F::D_V + dim; };
    if (slot < 0) {
        if (owner && (p.flags & ZERO_PADDING)) *y_at(at.row) = convert<X>::from(0.0f);
        return;
    }

    Places<F> place(p, slot, first_row, key_head, head, dim);

    // The copy starts from the slot's own checkpoint, where it nearly always lies, before it is known to.
    const bool row_cursors = p.flags & ROW_CURSORS;
    C* warp_tile = reinterpret_cast<C*>(m.tile) + warp * F::RPW * F::D_K;
    constexpr u32 BYTES = F::RPW * F::D_K * sizeof(C);
    if (lane == 0) {
        barrier_init(m.barriers + warp);
        bulk_copy(warp_tile, place.own + warp * F::RPW * F::D_K, BYTES, m.barriers + warp);
    }
    at.cursor = p.write_pos[row_cursors ? at.row : slot];
    const int source = row_cursors ? slot : p.checkpoint_slot[slot];
    at.slot = slot;
    Records<F> records;
    if (F::EAGER) records.fetch(place.ring_k, place.ring_u, p.ring_rows, warp, lane);

    // Inputs, which don't wait for the cursor.
    const X* q_from = static_cast<const X*>(p.q) + at.row * p.q_row + key_head * p.q_head;
    const X* k_from = static_cast<const X*>(p.k) + at.row * p.k_row + key_head * p.k_head;
    for (int c = threadIdx.x; c < F::D_K; c += F::THREADS) {
        m.q[c] = to_float(q_from[c]);
        m.k[c] = to_float(k_from[c]);
    }
    const float v = owner ? to_float(static_cast<const X*>(p.v)[at.row * p.v_row + head * p.v_head + dim]) : 0.0f;
    float z = 0.0f, skip = 0.0f;
    if (!F::DELTA && owner) {
        if (p.z) z = load_any(p.z, at.row * p.z_row + head * p.z_head + dim, p.z_type);
        if (p.d) skip = load_any(p.d, head * p.d_head + dim * p.d_dim, p.d_type);
    }
    at.flush = at.cursor >= p.flush_period - 1;
    if (p.force_bytes == 1) at.flush |= static_cast<const unsigned char*>(p.force_flush)[at.row] != 0;
    if (p.force_bytes == 4) at.flush |= static_cast<const int*>(p.force_flush)[at.row] != 0;

    const u32 phase = source != slot;
    if (phase) {
        if (lane == 0) {
            const C* from = static_cast<const C*>(p.checkpoint) + source * p.checkpoint_stride +
                            static_cast<i64>(first_row + warp * F::RPW) * F::D_K;
            barrier_wait(m.barriers + warp, 0);
            bulk_copy(warp_tile, from, BYTES, m.barriers + warp);
        }
        sync_warp();
    }
    if (!F::EAGER) records.fetch(place.ring_k, place.ring_u, at.cursor, warp, lane);

    const bool append = !at.flush;
    const bool first_of_head = first_row - first_head * F::D_V == 0;
    if (F::CHANNEL) {
        float* ring_g = p.ring_g + at.slot * p.ring_g_stride + static_cast<i64>(first_head) * p.ring_rows * F::D_K;
        channel_decays<F>(p, m, at, first_head, place.ring_k, ring_g, append && first_of_head);
    } else {
        for (int local = warp; local < F::HEADS; local += F::WARPS)
            head_decays<F>(p, m, at, first_head, local, append && first_of_head, lane);
    }
    sync_block();

    if (warp == F::WARPS - 1) share_products<F>(p, m, lane);
    share_scores<F>(p, m, at, place.ring_k, records, warp, lane);
    sync_block();

    const Pair ring = replay_records<F>(m, at, m.scores + my_head * p.ring_rows, place.ring_u, records, owner);
    if constexpr (F::MATRIX) {
        barrier_wait(m.barriers + warp, phase);
        multiply_matrix<F>(m, warp, lane);
    } else {
        float q[16], k[16];
        load_columns<F>(m.q, lane, q);
        if (F::DELTA) load_columns<F>(m.k, lane, k);
        if (F::CHANNEL) {
            float total[16];
            load_columns<F>(m.total, lane, total);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                q[i] *= total[i];
                k[i] *= total[i];
            }
        }
        barrier_wait(m.barriers + warp, phase);
        multiply<F>(m, warp, lane, q, k);
    }
    sync_warp();

    place = Places<F>(p, anew(slot), first_row, key_head, head, dim);
    const Products shared_products = *m.products;
    const bool normal_keys = F::DELTA && (p.flags & NORMAL_KEYS);
    const float key_factor = normal_keys ? shared_products.k_norm : 1.0f;
    float update = 0.0f;
    if (owner) {
        const Head h = m.heads[my_head];
        const Pair state = m.sums[my_row];
        const float sq = fmaf(state.q, h.total, ring.q);
        float y, record;
        if (F::DELTA) {
            const float sk = fmaf(state.k, h.total, ring.k);
            const float change = h.beta * (v - shared_products.k_norm * sk);
            update = change * shared_products.k_norm;
            y = fmaf(update, shared_products.kq, sq) * (shared_products.q_norm * p.scale);
            record = update = normal_keys ? change : update;
        } else {
            update = h.input * v;
            y = fmaf(update, shared_products.kq, sq);
            if (p.d) y = fmaf(skip, v, y);
            if (p.z) y *= z * sigmoid(z);
            record = p.flags & INPUT_RECORDS ? v : update;
        }
        *y_at(anew(at.row)) = convert<X>::from(y);
        if (append) {
            // u holds the factor that normalises k: infinity would stay for good
            if (same<U, f16>::value) record = fminf(fmaxf(record, -65504.0f), 65504.0f);
            place.ring_u[at.cursor * F::D_V] = convert<U>::from(record);
        }
    }
    if (append) {
        if (first_of_head && first_head % p.group == 0)
            for (int c = threadIdx.x; c < F::D_K; c += F::THREADS)
                place.ring_k[at.cursor * F::D_K + c] = convert<K>::from(m.k[c] * key_factor);
    } else {
        flush_rows<F>(p, m, at, warp, lane, update, key_factor, place);
    }
}

using Case = Config<CASE_CHANNEL, CASE_DELTA, CASE_C, CASE_X, CASE_U, CASE_K, CASE_D_V, CASE_D_K, CASE_ROWS, CASE_WARPS,
                    CASE_FLUSH_PASSES, CASE_EAGER>;

#ifndef REPLAYSSM_EMULATED
extern "C" __global__ void __maxnreg__(CASE_REGISTERS) replayssm_decode(const __grid_constant__ Params p) {
    SHARED_MEMORY(shared);
    decode<Case>(p, shared);
}
#endif
