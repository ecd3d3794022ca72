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

// S q and S k of the warp's rows of the tile by multiply-adds.
template <class F> DEVICE void multiply(Memory<F>& m, int warp, int lane) {
    constexpr int VECTORS = F::DELTA ? 2 : 1;
    constexpr int PASSES = F::RPW / F::PASS;
    constexpr int WANTED = F::LANES / VECTORS < 4 ? F::LANES / VECTORS : 4;
    constexpr int BATCH = PASSES < WANTED ? PASSES : WANTED;  // passes whose sums are taken together
    static_assert(PASSES % BATCH == 0, "passes don't divide into batches");
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
    const typename F::C* tile = m.tile + warp * F::RPW * F::D_K;
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
// order, if both operands agree. Here two chunks of 32 columns.
// One term: the numbers as they are. Columns behind the second are not used.
template <class F> DEVICE Granule<typename F::X> plain_vectors(const Memory<F>& m, int column, int lane) {
    const typename F::X* x = (lane / 4 & 1 ? m.k : m.q) + column + lane % 4 * 8;
    Granule<typename F::X> b;
    b.half[0].load(x);
    b.half[1].load(x + 32);
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

template <class F> DEVICE Pair matrix_scales(const Memory<F>& m, int lane) {
    return Pair{matrix_scale<F>(m, m.q, lane), F::DELTA ? matrix_scale<F>(m, m.k, lane) : 1.0f};
}

// q and k as three numbers of the checkpoint's type each, whose sums are exact to float32. All threads together.
template <class F> DEVICE void split_into_terms(Memory<F>& m, int lane) {
    using C = typename F::C;
    const Pair scale = matrix_scales<F>(m, lane);
#pragma unroll
    for (int n = 0; n < F::D_K; n += F::THREADS) {
        const int c = n + threadIdx.x;
        if (F::D_K % F::THREADS && c >= F::D_K) continue;
        float q = decayed<F>(m, m.q, c) * scale.q, k = decayed<F>(m, m.k, c) * scale.k;
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            const C of_q = convert<C>::from(q), of_k = convert<C>::from(k);
            m.terms[2 * term][c] = of_q;
            m.terms[2 * term + 1][c] = of_k;
            q -= to_float(of_q);
            k -= to_float(of_k);
        }
    }
}

// Three terms: six columns, of which the sums over pairs are those of q and k.
template <class F> DEVICE Granule<typename F::C> split_vectors(const Memory<F>& m, int column, int lane) {
    const int row = lane / 4;
    const bool used = row < 6 && (F::DELTA || row % 2 == 0);
    const typename F::C* x = m.terms[used ? row : 0] + column + lane % 4 * 8;
    Granule<typename F::C> b;
    b.half[0].load(x);
    b.half[1].load(x + 32);
    if (!used) b.clear();
    return b;
}

// sums += rows · vectors for 16 rows, of which a lane holds pieces of rows lane / 4 and lane / 4 + 8.
template <class T>
DEVICE void accumulate(float (&sums)[2][4], const Granule<T>& upper, const Granule<T>& lower, const Granule<T>& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        multiply_eights<T>(sums[half], upper.half[half], lower.half[half], b.half[half]);
}

// The same on the matrix units.
template <class F> DEVICE void multiply_matrix(Memory<F>& m, int warp, int lane) {
    using C = typename F::C;
    Pair back{1.0f, 1.0f};
    if (F::SPLIT) {
        const Pair scale = matrix_scales<F>(m, lane);
        back = Pair{1.0f / scale.q, 1.0f / scale.k};  // powers of two
    }
    const bool odd = lane / 4 & 1;
#pragma unroll 2
    for (int n = 0; n < F::MATRICES; ++n) {
        const C* rows = m.tile + (warp * F::RPW + n * 16 + lane / 4) * F::D_K + lane % 4 * 8;
        float sums[2][4] = {};
#pragma unroll
        for (int column = 0; column < F::D_K; column += 64) {
            Granule<C> upper, lower;
            upper.load(rows + column, odd);
            if (F::HALF)
                lower.clear();
            else
                lower.load(rows + 8 * F::D_K + column, odd);
            if constexpr (F::SPLIT)
                accumulate<C>(sums, upper, lower, split_vectors<F>(m, column, lane));
            else
                accumulate<C>(sums, upper, lower, plain_vectors<F>(m, column, lane));
        }
        float sum[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sum[e] = sums[0][e] + sums[1][e];
            if (F::SPLIT) sum[e] = sum_over_lanes<4>(sum[e]) * (e % 2 ? back.k : back.q);
        }
        if (lane % 4 == 0) {
            Pair* row = m.sums + warp * F::RPW + n * 16 + lane / 4;
            row[0] = Pair{sum[0], sum[1]};
            if (!F::HALF) row[8] = Pair{sum[2], sum[3]};
        }
    }
}

// k·q and the inverse norms, by one warp.
template <class F> DEVICE void share_products(Memory<F>& m, int lane) {
    float kq = 0.0f, qq = 0.0f, kk = 0.0f;
#pragma unroll
    for (int c = lane; c < F::D_K; c += 32) {
        const float q = to_float(m.q[c]), k = to_float(m.k[c]);
        kq = fmaf(k, q, kq);
        qq = fmaf(q, q, qq);
        kk = fmaf(k, k, kk);
    }
    kq = sum_over_lanes<32>(kq);
    float q_norm = 1.0f, k_norm = 1.0f;
    if (F::DELTA && F::L2_NORM) {
        q_norm = inverse_norm(sum_over_lanes<32>(qq));
        k_norm = inverse_norm(sum_over_lanes<32>(kk));
    }
    if (lane == 0) m.products = Products{kq, q_norm, k_norm, 0};
}

// Products of the ring's keys with q and k: by one warp on the matrix units, 16 records at a time.
template <class F> DEVICE void matrix_scores(Memory<F>& m, const Row& at, int lane) {
    using X = typename F::X;
    const bool odd = lane / 4 & 1;
#pragma unroll 1
    for (int first = 0; first < at.cursor; first += 16) {
        const int j = first + lane / 4;
        const X* key = m.ring_k + j * F::D_K + lane % 4 * 8;
        float sums[2][4] = {};
#pragma unroll
        for (int column = 0; column < F::D_K; column += 64) {
            Granule<X> upper, lower;
            upper.clear();
            lower.clear();
            if (j < at.cursor) upper.load(key + column, odd);
            if (j + 8 < at.cursor) lower.load(key + 8 * F::D_K + column, odd);
            accumulate<X>(sums, upper, lower, plain_vectors<F>(m, column, lane));
        }
        if (lane % 4) continue;
        if (j < at.cursor) m.scores[j] = Pair{sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]};
        if (j + 8 < at.cursor) m.scores[j + 8] = Pair{sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]};
    }
}

// A lane's columns of a record's key; of a channel gate's, decayed to this token.
template <class F> DEVICE void load_record_key(const Memory<F>& m, const Row& at, int j, int lane, float (&key)[16]) {
    if constexpr (!F::CHANNEL) {
        load_columns<F>(m.ring_k + j * F::D_K, lane, key);
    } else {
        load_columns<F>(m.keys + j * F::D_K, lane, key);
        if constexpr (F::WINDOW) {
            if (!at.flush) return;
#pragma unroll
            for (int i = 0; i < 16; ++i) key[i] *= m.token[column_of<F>(i / F::VECTOR, lane) + i % F::VECTOR];
        }
    }
}

// The same by multiply-adds: all warps together, PASS records at a time each.
template <class F> DEVICE void share_scores(Memory<F>& m, const Row& at, int warp, int lane) {
    const int in_pass = lane / F::LANES;
    float q[16], k[16], key[16];
    load_columns<F>(m.q, lane, q);
    if (F::DELTA) load_columns<F>(m.k, lane, k);
#pragma unroll 1
    for (int first = warp * F::PASS; first < at.cursor; first += F::WARPS * F::PASS) {
        const int j = first + in_pass;
        const bool committed = j < at.cursor;
        load_record_key<F>(m, at, committed ? j : 0, lane, key);
        const float score_q = sum_over_lanes<F::LANES>(dot16(key, q));
        const float score_k = F::DELTA ? sum_over_lanes<F::LANES>(dot16(key, k)) : 0.0f;
        if (committed && lane % F::LANES == 0) m.scores[j] = Pair{score_q, score_k};
    }
}
