// Products of rows (of the checkpoint, of the ring's keys) with q and k.

// First column of piece i of a lane. Rows of 64 columns are so short that two rows lie in the same banks of shared
// memory: there, odd rows are read in another order.
template <class F> DEVICE int column_of(int i, int lane) {
    const int odd = F::LANES == 4 ? lane / F::LANES & 1 : 0;
    return ((i ^ odd) * F::LANES + lane % F::LANES) * F::VECTOR;
}

// A lane's columns of one row.
template <class F, class T> DEVICE void load_columns(const T* row, int lane, float (&x)[F::COLUMNS]) {
#pragma unroll
    for (int i = 0; i < F::PIECES; ++i) {
        packed<T, F::VECTOR> piece;
        piece.load(row + column_of<F>(i, lane));
        piece.unpack(x + i * F::VECTOR);
    }
}

DEVICE float dot16(const float (&x)[16], const float (&y)[16]) {
    float sum = x[0] * y[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) sum = fmaf(x[i], y[i], sum);
    return sum;
}

// S q and S k of the warp's rows of a tile by multiply-adds, with the q and k of one of the block's key heads.
template <class F> DEVICE void multiply(Memory<F>& m, const typename F::C* tile, int key_head, int warp, int lane) {
    constexpr int VECTORS = F::DELTA ? 2 : 1;
    constexpr int PASSES = F::RPW / F::PASS;
    constexpr int WANTED = F::LANES / VECTORS < 4 ? F::LANES / VECTORS : 4;
    constexpr int BATCH = PASSES < WANTED ? PASSES : WANTED;  // passes whose sums are taken together
    static_assert(PASSES % BATCH == 0, "passes don't divide into batches");
    float q[16], k[16];
    load_columns<F>(m.q[key_head], lane, q);
    if (F::DELTA) load_columns<F>(m.k[key_head], lane, k);
    if (F::CHANNEL) {
        float total[16];
        load_columns<F>(m.total, lane, total);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            q[i] *= total[i];
            k[i] *= total[i];
        }
    }
    tile += warp * F::RPW * F::D_K;
    const int in_pass = lane / F::LANES;
#pragma unroll 1
    for (int first = 0; first < PASSES; first += BATCH) {
        float sums[BATCH * VECTORS];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            float s[16];
            load_columns<F>(tile + ((first + n) * F::PASS + in_pass) * F::D_K, lane, s);
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

// q and k as the right operand of matrix products: columns 2i and 2i + 1 are their i-th terms. A lane takes 8
// consecutive numbers of a row at a time, so the columns of a row are numbered to suit: a sum may run over them in any
// order, if both operands agree.
template <int D_K> struct Vectors {
    u32 word[D_K / 32][4];
};

// One term: the numbers as they are.
template <class F> DEVICE Vectors<F::D_K> plain_vectors(const Memory<F>& m, int key_head, int lane) {
    Vectors<F::D_K> b;
    const typename F::X* x = lane / 4 & 1 ? m.k[key_head] : m.q[key_head];
    const bool used = lane < 8 && (F::DELTA || lane < 4);
#pragma unroll
    for (int i = 0; i < F::D_K / 32; ++i) {
        packed<typename F::X, 8> piece;
        piece.load(x + i * 32 + lane % 4 * 8);
#pragma unroll
        for (int w = 0; w < 4; ++w) b.word[i][w] = used ? piece.word[w] : 0;
    }
    return b;
}

// A number of q or k, decayed for a channel gate.
template <class F> DEVICE float decayed(const Memory<F>& m, const typename F::X* x, int column) {
    return F::CHANNEL ? to_float(x[column]) * m.total[column] : to_float(x[column]);
}

// A power of two that brings the largest number near the upper end of float16; 1 for bfloat16.
template <class F> DEVICE float matrix_scale(const Memory<F>& m, const typename F::X* x, int lane) {
    if (same<typename F::C, bf16>::value) return 1.0f;
    float largest = 0.0f;
#pragma unroll
    for (int c = lane; c < F::D_K; c += 32) largest = fmaxf(largest, fabsf(decayed<F>(m, x, c)));
    const int exponent = 268 - static_cast<int>(as_bits(max_over_warp(largest)) >> 23);
    return as_float(static_cast<u32>(exponent < 1 ? 1 : exponent > 253 ? 253 : exponent) << 23);
}

template <class F> DEVICE Pair matrix_scales(const Memory<F>& m, int key_head, int lane) {
    return Pair{matrix_scale<F>(m, m.q[key_head], lane), F::DELTA ? matrix_scale<F>(m, m.k[key_head], lane) : 1.0f};
}

// q and k as three numbers of the checkpoint's type each, whose sums are exact to float32. All threads together.
template <class F> DEVICE void split_into_terms(Memory<F>& m, int key_head, int lane) {
    using C = typename F::C;
    const Pair scale = matrix_scales<F>(m, key_head, lane);
#pragma unroll
    for (int n = 0; n < F::D_K; n += F::THREADS) {
        const int c = n + threadIdx.x;
        if (F::D_K % F::THREADS && c >= F::D_K) continue;
        float q = decayed<F>(m, m.q[key_head], c) * scale.q, k = decayed<F>(m, m.k[key_head], c) * scale.k;
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            const C of_q = convert<C>::from(q), of_k = convert<C>::from(k);
            m.terms[key_head][2 * term][c] = of_q;
            m.terms[key_head][2 * term + 1][c] = of_k;
            q -= to_float(of_q);
            k -= to_float(of_k);
        }
    }
}

template <class F> DEVICE Vectors<F::D_K> split_vectors(const Memory<F>& m, int key_head, int lane) {
    Vectors<F::D_K> b;
    const int column = lane / 4;
    const bool used = column < 6 && (F::DELTA || column % 2 == 0);
#pragma unroll
    for (int i = 0; i < F::D_K / 32; ++i) {
        packed<typename F::C, 8> piece;
        piece.load(m.terms[key_head][used ? column : 0] + i * 32 + lane % 4 * 8);
#pragma unroll
        for (int w = 0; w < 4; ++w) b.word[i][w] = used ? piece.word[w] : 0;
    }
    return b;
}

// A row's 8 numbers of two chunks of 32 columns, in the order of the chunks. In shared memory, two rows that are read at
// once would lie in the same banks, so odd rows are read the other way round.
template <class T> struct TwoPieces {
    packed<T, 8> piece[2];

    DEVICE void load(const T* row, bool odd) {
        packed<T, 8> first, second;
        first.load(row + (odd ? 32 : 0));
        second.load(row + (odd ? 0 : 32));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            piece[0].word[w] = odd ? second.word[w] : first.word[w];
            piece[1].word[w] = odd ? first.word[w] : second.word[w];
        }
    }
    DEVICE void clear() {
        piece[0].clear();
        piece[1].clear();
    }
};

// sums += rows · vectors for 16 rows, of which a lane holds pieces of rows lane / 4 and lane / 4 + 8.
template <class T, int D_K>
DEVICE void accumulate(float (&sums)[2][4], const TwoPieces<T>& upper, const TwoPieces<T>& lower,
                       const Vectors<D_K>& b, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int w = 0; w < 4; w += 2)
            matrix_product<T>(sums[half], upper.piece[half].word[w], lower.piece[half].word[w],
                              upper.piece[half].word[w + 1], lower.piece[half].word[w + 1],
                              b.word[chunk + half][w], b.word[chunk + half][w + 1]);
}

// The same on the matrix units.
template <class F>
DEVICE void multiply_matrix(Memory<F>& m, const typename F::C* tile, int key_head, int warp, int lane) {
    using C = typename F::C;
    Pair back{1.0f, 1.0f};
    Vectors<F::D_K> b;
    if constexpr (F::SPLIT) {
        const Pair scale = matrix_scales<F>(m, key_head, lane);
        back = Pair{1.0f / scale.q, 1.0f / scale.k};  // powers of two
        b = split_vectors<F>(m, key_head, lane);
    } else {
        b = plain_vectors<F>(m, key_head, lane);
    }
    const bool odd = lane / 4 & 1;
    tile += (warp * F::RPW + lane / 4) * F::D_K + lane % 4 * 8;
#pragma unroll 2
    for (int n = 0; n < F::MATRICES; ++n) {
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < F::D_K / 32; i += 2) {
            TwoPieces<C> upper, lower;
            upper.load(tile + n * 16 * F::D_K + i * 32, odd);
            if (F::HALF)
                lower.clear();
            else
                lower.load(tile + (n * 16 + 8) * F::D_K + i * 32, odd);
            accumulate<C>(sums, upper, lower, b, i);
        }
        float sum[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sum[e] = sums[0][e] + sums[1][e];
            if (F::TERMS > 1) sum[e] = sum_over_lanes<4>(sum[e]) * (e % 2 ? back.k : back.q);
        }
        if (lane % 4 == 0) {
            Pair* row = m.sums + warp * F::RPW + n * 16 + lane / 4;
            row[0] = Pair{sum[0], sum[1]};
            if (!F::HALF) row[8] = Pair{sum[2], sum[3]};
        }
    }
}

// k·q and the inverse norms, by one warp.
template <class F> DEVICE void share_products(Memory<F>& m, int key_head, int lane) {
    float kq = 0.0f, qq = 0.0f, kk = 0.0f;
#pragma unroll
    for (int c = lane; c < F::D_K; c += 32) {
        const float q = to_float(m.q[key_head][c]), k = to_float(m.k[key_head][c]);
        kq = fmaf(k, q, kq);
        qq = fmaf(q, q, qq);
        kk = fmaf(k, k, kk);
    }
    kq = sum_over_lanes<32>(kq);
    float q_norm = 1.0f, k_norm = 1.0f;
    if (F::DELTA && (F::FLAGS & L2_NORM)) {
        q_norm = inverse_root(sum_over_lanes<32>(qq) + 1e-6f);
        k_norm = inverse_root(sum_over_lanes<32>(kk) + 1e-6f);
    }
    if (lane == 0) m.products[key_head] = Products{kq, q_norm, k_norm, 0.0f};
}

// Products of 16 of the ring's keys with q and k, by one warp on the matrix units. `keys` may have been fetched before
// the cursor was known: rows behind it count as zero.
template <class F> struct KeyTile {
    packed<typename F::K, 8> upper[F::D_K / 32], lower[F::D_K / 32];

    DEVICE void fetch(const typename F::K* ring_k, int first, int rows, int lane) {
        const int j = first + lane / 4;
        const typename F::K* from = ring_k + j * F::D_K + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < F::D_K / 32; ++i) {
            if (j < rows)
                upper[i].load(from + i * 32);
            else
                upper[i].clear();
            if (j + 8 < rows)
                lower[i].load(from + 8 * F::D_K + i * 32);
            else
                lower[i].clear();
        }
    }

    DEVICE void multiply(Pair* scores, const Vectors<F::D_K>& b, int first, int cursor, int lane) const {
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < F::D_K / 32; ++i)
#pragma unroll
            for (int w = 0; w < 4; w += 2)
                matrix_product<typename F::K>(sums[i % 2], upper[i].word[w], lower[i].word[w], upper[i].word[w + 1],
                                              lower[i].word[w + 1], b.word[i][w], b.word[i][w + 1]);
        if (lane % 4) return;
        const int j = first + lane / 4;
        const Pair zero{0.0f, 0.0f};
        scores[j] = j < cursor ? Pair{sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]} : zero;
        scores[j + 8] = j + 8 < cursor ? Pair{sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]} : zero;
    }
};

// The same by multiply-adds: all warps together, PASS records at a time each. `ring_k` is of one of the block's key heads.
template <class F>
DEVICE void share_scores(Memory<F>& m, const Row& at, const typename F::K* ring_k, int key_head, int warp, int lane) {
    const int in_pass = lane / F::LANES;
    float q[16], k[16], key[16];
    load_columns<F>(m.q[key_head], lane, q);
    if (F::DELTA) load_columns<F>(m.k[key_head], lane, k);
    const int rows = (at.cursor + F::UNITS - 1) / F::UNITS * F::UNITS;
#pragma unroll 1
    for (int first = warp * F::PASS; first < rows; first += F::WARPS * F::PASS) {
        const int j = first + in_pass;
        const bool committed = j < at.cursor;
        if constexpr (F::CHANNEL)
            load_columns<F>(m.keys + (committed ? j : 0) * F::D_K, lane, key);
        else
            load_columns<F>(ring_k + (committed ? j : 0) * F::D_K, lane, key);
        const float score_q = sum_over_lanes<F::LANES>(dot16(key, q));
        const float score_k = F::DELTA ? sum_over_lanes<F::LANES>(dot16(key, k)) : 0.0f;
        if (lane % F::LANES == 0) m.scores[key_head][j] = committed ? Pair{score_q, score_k} : Pair{0.0f, 0.0f};
    }
}
