// Products with the window's columns, its tokens' q and k: of keys (the ring's, the window's) and of the state.
//
// Left operands have 16 rows, of which lane 8n + i of load_matrices brings a piece of 16 bytes: of row i, for odd n that of
// row i + 8, and the second of two pieces from lane 16 on.

// c += a b on tf32 numbers, for one [16, 8] by [8, 8] product, of operands that are each one or the sum of two. The
// product of two low terms is left out. Small terms first: the matrix units cut what they add to a sum.
template <bool A_EXACT, bool B_EXACT>
DEVICE void product_of_terms(float (&c)[4], const TwoTerms (&a)[4], const TwoTerms (&b)[2]) {
    if (!A_EXACT) matrix_product_tf32(c, a[0].low, a[1].low, a[2].low, a[3].low, b[0].high, b[1].high);
    if (!B_EXACT) matrix_product_tf32(c, a[0].high, a[1].high, a[2].high, a[3].high, b[0].low, b[1].low);
    matrix_product_tf32(c, a[0].high, a[1].high, a[2].high, a[3].high, b[0].high, b[1].high);
}

template <bool EXACT> DEVICE TwoTerms terms_of(float x) {
    return EXACT ? TwoTerms{as_bits(x), 0} : two_terms(x);
}

// The column that a lane of load_matrices brings a row of, of a right operand's eight.
template <class F> DEVICE int column_of(int tile, int lane) {
    const int column = tile * 8 + lane % 8;
    return column < F::COLUMNS ? column : 0;
}

// Inverse norms of q and k, a warp for some of the tokens.
template <class F> DEVICE void window_norms(WindowMemory<F>& m, int warp, int lane) {
#pragma unroll 1
    for (int i = warp; i < F::TOKENS; i += F::WARPS) {
        float qq = 0.0f, kk = 0.0f;
        if (F::L2_NORM) {
#pragma unroll
            for (int c = lane; c < F::D_K; c += 32) {
                const float q = to_float(m.x[2 * i][c]), k = to_float(m.x[2 * i + 1][c]);
                qq = fmaf(q, q, qq);
                kk = fmaf(k, k, kk);
            }
            qq = sum_over_lanes<32>(qq);
            kk = sum_over_lanes<32>(kk);
        }
        if (lane == 0) {
            m.q_norm[i] = F::L2_NORM ? inverse_norm(qq) : 1.0f;
            m.k_norm[i] = F::L2_NORM ? inverse_norm(kk) : 1.0f;
        }
    }
}

// Rows of 16-bit numbers times all columns, `left` what the lane brings of them.
template <class F>
DEVICE void multiply_by_columns(float (&to)[F::TILES][4], const typename F::X* left, const WindowMemory<F>& m, int lane) {
    using X = typename F::X;
    float sums[F::TILES][2][4] = {};
#pragma unroll
    for (int first = 0; first < F::D_K; first += 32) {
        u32 a[2][4];
        load_matrices(a[0], left + first);
        load_matrices(a[1], left + first + 16);
#pragma unroll
        for (int tile = 0; tile < F::TILES; ++tile) {
            u32 b[4];
            load_matrices(b, m.x[column_of<F>(tile, lane)] + first + lane / 8 * 8);
#pragma unroll
            for (int s = 0; s < 2; ++s)
                matrix_product<X>(sums[tile][first / 32 % 2], a[s][0], a[s][1], a[s][2], a[s][3], b[2 * s], b[2 * s + 1]);
        }
    }
#pragma unroll
    for (int tile = 0; tile < F::TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[tile][e] = sums[tile][0][e] + sums[tile][1][e];
}

// Products of a left operand to the first `rows` rows of `to`.
template <class F>
DEVICE void keep_products(float (*to)[F::COLUMNS], const float (&sums)[F::TILES][4], int rows, int lane) {
#pragma unroll
    for (int tile = 0; tile < F::TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = lane / 4 + e / 2 * 8, c = tile * 8 + lane % 4 * 2 + e % 2;
            if (j < rows && c < F::COLUMNS) to[j][c] = sums[tile][e];
        }
}

// The ring's keys with all columns, by one warp.
template <class F> DEVICE void multiply_ring(WindowMemory<F>& m, int cursor, int lane) {
#pragma unroll 1
    for (int first = 0; first < cursor; first += F::UNITS) {
        const int j = first + lane % 16;
        float sums[F::TILES][4];
        multiply_by_columns<F>(sums, m.ring_k[j < F::RING ? j : F::RING - 1] + lane / 16 * 8, m, lane);
        keep_products<F>(m.scores[0] + first, sums, cursor - first, lane);
    }
}

// The window's keys with all columns, by one warp. PAIRED_NORMS: rows 8 to 15 of the left operand are the q.
template <class F> DEVICE void multiply_window(WindowMemory<F>& m, int lane) {
    const int row = F::PAIRED_NORMS ? lane % 8 : lane % 16, token = row < F::TOKENS ? row : 0;
    const typename F::X* left = F::PAIRED_NORMS && lane / 8 % 2 ? m.x[2 * token] : window_key<F>(m, token);
    float sums[F::TILES][4];
    multiply_by_columns<F>(sums, left + lane / 16 * 8, m, lane);
    keep_products<F>(m.pairs[0], sums, F::PAIRED_NORMS && F::TOKENS > 8 ? 8 : F::TOKENS, lane);
    if constexpr (F::PAIRED_NORMS) {
#pragma unroll
        for (int tile = 0; tile < F::TILES; ++tile) {
            const int i = lane / 4;
            if (i >= F::TOKENS || tile * 4 + lane % 4 != i) continue;
            m.q_norm[i] = F::L2_NORM ? inverse_norm(sums[tile][2]) : 1.0f;
            m.k_norm[i] = F::L2_NORM ? inverse_norm(sums[tile][1]) : 1.0f;
        }
    }
}

// The products of one key with all columns by multiply-adds, one warp.
template <class F, class T, class Q>
DEVICE void multiply_key(const T* key, const Q* columns, float* to, int lane) {
    constexpr int NUMBERS = F::COLUMNS, SHARE = 32 / NUMBERS;
    float sums[NUMBERS] = {};
#pragma unroll
    for (int c = lane; c < F::D_K; c += 32) {
        const float k = to_float(key[c]);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) sums[n] = fmaf(k, to_float(columns[n * F::PITCH + c]), sums[n]);
    }
    const float sum = sums_over_lanes<NUMBERS, 32>(sums, lane);
    if (lane % SHARE == 0) to[lane / SHARE] = sum;
}

// Products of all keys with all columns where the matrix units' aren't exact; a warp for every so many keys.
template <class F> DEVICE void multiply_keys(WindowMemory<F>& m, const WindowRow& at, int warp, int lane) {
#pragma unroll 1
    for (int j = warp; j < at.cursor; j += F::WARPS) multiply_key<F>(m.ring_k[j], m.x[0], m.scores[0][j], lane);
#pragma unroll 1
    for (int j = warp; j < F::TOKENS; j += F::WARPS)
        multiply_key<F>(window_key<F>(m, j), m.x[0], m.pairs[0][j], lane);
}

// Eight numbers of 32 consecutive ones of a row of float32, as terms: 4 (lane % 4) and on, then 16 behind them.
DEVICE void load_terms(const float* row, int lane, TwoTerms (&terms)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float x[4];
        load_floats<4>(row + lane % 4 * 4 + i * 16, x);
#pragma unroll
        for (int e = 0; e < 4; ++e) terms[4 * i + e] = two_terms(x[e]);
    }
}

// Channel gate: products of the decayed keys with the decayed columns, of 32 channels a warp at a time.
template <class F> DEVICE void multiply_channels(WindowMemory<F>& m, const WindowRow& at, int warp, int lane) {
#pragma unroll 1
    for (int n = warp; n < F::PARTS * F::TILES; n += F::WARPS) {
        const int part = n % F::PARTS, tile = n / F::PARTS, column = tile * 8 + lane / 4;
        TwoTerms x[8];
        load_terms(m.columns[column < F::COLUMNS ? column : 0] + part * 32, lane, x);
#pragma unroll 1
        for (int first = 0; first < at.cursor; first += F::UNITS) {
            const int upper = first + lane / 4, lower = upper + 8;
            TwoTerms key[2][8];
            load_terms(m.keys[upper < at.cursor ? upper : 0] + part * 32, lane, key[0]);
            load_terms(m.keys[lower < at.cursor ? lower : 0] + part * 32, lane, key[1]);
            float sums[4] = {};
#pragma unroll
            for (int s = 0; s < 8; s += 2) {
                const TwoTerms a[4] = {key[0][s], key[1][s], key[0][s + 1], key[1][s + 1]}, b[2] = {x[s], x[s + 1]};
                product_of_terms<false, false>(sums, a, b);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int c = tile * 8 + lane % 4 * 2 + e % 2;
                if (c < F::COLUMNS && upper + e / 2 * 8 < at.cursor) m.scores[part][upper + e / 2 * 8][c] = sums[e];
            }
        }
    }
}

// The columns' terms, where they aren't taken as they are; all threads together.
template <class F> DEVICE void split_columns(WindowMemory<F>& m, int thread) {
#pragma unroll 1
    for (int n = thread * 4; n < F::COLUMNS * F::D_K; n += F::THREADS * 4) {
        const int column = n / F::D_K, c = n % F::D_K;
        packed<typename F::X, 4> piece;
        float x[4];
        piece.load(m.x[column] + c);
        piece.unpack(x);
#pragma unroll
        for (int t = 0; t < F::TERMS; ++t) {
            Few<typename F::TERM, 4> term;
#pragma unroll
            for (int e = 0; e < 4; ++e) term.x[e] = split_off<F>(x[e]);
            *reinterpret_cast<Few<typename F::TERM, 4>*>(m.terms[t][column] + c) = term;
        }
    }
}

template <class F> using Sums = float (&)[F::MATRICES][F::TILES][4];

// sums += rows · columns, for 32 columns of 16-bit numbers as they are, `left` what the lane brings of the rows.
template <class F>
DEVICE void multiply_exact(Sums<F> sums, const WindowMemory<F>& m, const typename F::C* left, int first, int lane) {
    using C = typename F::C;
    constexpr int TERMS = F::SAME ? 1 : F::TERMS;
    u32 a[F::MATRICES][2][4];
#pragma unroll
    for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
        for (int s = 0; s < 2; ++s) load_matrices(a[n][s], left + 2 * n * F::D_K + first + s * 16);
#pragma unroll
    for (int tile = 0; tile < F::TILES; ++tile)
#pragma unroll 1  // there aren't the registers for all terms at once
        for (int t = TERMS - 1; t >= 0; --t) {
            const C* x;
            if constexpr (F::SAME)
                x = m.x[column_of<F>(tile, lane)];
            else
                x = m.terms[t][column_of<F>(tile, lane)];
            u32 b[4];
            load_matrices(b, x + first + lane / 8 * 8);
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int n = 0; n < F::MATRICES; ++n)
                    matrix_product<C>(sums[n][tile], a[n][s][0], a[n][s][1], a[n][s][2], a[n][s][3], b[2 * s],
                                      b[2 * s + 1]);
        }
}

// The columns' part of 16 columns of the state, as two right operands: in the order of the left one's words, which hold one
// number each, or two neighbours.
template <class F>
DEVICE void term_operands(TwoTerms (&b)[2][F::TILES][2], const WindowMemory<F>& m, int tile, int first, int lane) {
    constexpr bool FLOAT = sizeof(typename F::C) == 4;
#pragma unroll
    for (int t = 0; t < F::TERMS; ++t) {
        u32 words[4];
        if constexpr (FLOAT) {
            load_matrices(words, m.terms[t][column_of<F>(tile, lane)] + first + lane / 8 * 4);
        } else {
            const auto* x = m.terms[t][column_of<F>(tile, lane / 4)] + first + lane % 4 * 2;
#pragma unroll
            for (int w = 0; w < 4; ++w) words[w] = as_bits(to_float(x[w / 2 * 8 + w % 2]));
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (t == 0)
                b[w / 2][tile][w % 2] = TwoTerms{words[w], 0};
            else
                b[w / 2][tile][w % 2].low = words[w];
        }
    }
}

// The same for 16 columns as tf32.
template <class F>
DEVICE void multiply_terms(Sums<F> sums, const WindowMemory<F>& m, const typename F::C* left, int first, int lane) {
    constexpr bool FLOAT = sizeof(typename F::C) == 4;
    u32 a[F::MATRICES][2][4];
#pragma unroll
    for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
        for (int s = 0; s < (FLOAT ? 2 : 1); ++s) load_matrices(a[n][s], left + 2 * n * F::D_K + first + s * 8);
    TwoTerms b[2][F::TILES][2];
#pragma unroll
    for (int tile = 0; tile < F::TILES; ++tile) term_operands<F>(b, m, tile, first, lane);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n) {
            TwoTerms terms[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                if constexpr (FLOAT) {
                    terms[w] = cut_terms(as_float(a[n][s][w]));
                } else {
                    const u32 word = a[n][0][2 * s + w % 2];
                    terms[w] = terms_of<true>(w < 2 ? first_of<typename F::C>(word) : second_of<typename F::C>(word));
                }
            }
#pragma unroll
            for (int tile = 0; tile < F::TILES; ++tile)
                product_of_terms<F::EXACT_STATE, F::TERMS == 1>(sums[n][tile], terms, b[s][tile]);
        }
}

// S x of the warp's rows. Sums over 64 columns of exact products, or 32 or 16 of split ones, are added in float32.
template <class F> DEVICE void multiply_state(Sums<F> total, const WindowMemory<F>& m, int warp, int lane) {
    constexpr bool BY_16_BITS = F::SAME || F::TERMS == 3;
    constexpr int STEP = F::SAME ? 64 : BY_16_BITS ? 32 : 16;
    const typename F::C* left = WarpRows<F>(warp).in(m, lane % 8) + (F::OWN > 1 ? lane / 8 % 2 * F::D_K : 0);
    left += lane / 16 * F::VECTOR;
#pragma unroll 2
    for (int first = 0; first < F::D_K; first += STEP) {
        float sums[F::MATRICES][F::TILES][4] = {};
        if constexpr (BY_16_BITS) {
#pragma unroll
            for (int column = first; column < first + STEP; column += 32) multiply_exact<F>(sums, m, left, column, lane);
        } else {
            multiply_terms<F>(sums, m, left, first, lane);
        }
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
            for (int tile = 0; tile < F::TILES; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) total[n][tile][e] += sums[n][tile][e];
    }
}

// A lane's numbers of one line, one for each of its rows, as words.
template <class T, int OWN> struct OwnNumbers {
    static constexpr int PER_WORD = OWN > 1 ? 4 / static_cast<int>(sizeof(T)) : 1, WORDS = OWN / PER_WORD;
    u32 word[WORDS];

    DEVICE void load(const T* from) {
        if constexpr (OWN * sizeof(T) == 2) {
            word[0] = from->bits;
        } else {
            const auto words = *reinterpret_cast<const Few<u32, WORDS>*>(from);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = words.x[i];
        }
    }
    DEVICE void store(T* to) const {
        if constexpr (OWN * sizeof(T) == 2) {
            to->bits = static_cast<u16>(word[0]);
        } else {
            Few<u32, WORDS> words;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words.x[i] = word[i];
            *reinterpret_cast<Few<u32, WORDS>*>(to) = words;
        }
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
    }
    DEVICE float of(int row) const {
        if constexpr (sizeof(T) == 4)
            return as_float(word[row]);
        else
            return row % 2 ? second_of<T>(word[row / 2]) : first_of<T>(word[row / 2]);
    }
    DEVICE void pack(const float (&x)[OWN]) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (sizeof(T) == 4)
                word[i] = as_bits(x[i]);
            else
                word[i] = two_of<T>(x[i * PER_WORD], OWN > 1 ? x[i * PER_WORD + PER_WORD - 1] : 0.0f);
        }
    }
};

// Updates of 16 records for the lane's rows: records 2 (lane % 4) and + 1 of the first eight, then of the others.
template <class F> struct RecordUpdates {
    OwnNumbers<typename F::U, F::OWN> u[4];

    static DEVICE int record(int r, int lane) { return lane % 4 * 2 + r / 2 * 8 + r % 2; }

    // `ring_u`: the record that is the first, of the lane's rows. Only the first `readable` are read.
    DEVICE void fetch(const typename F::U* ring_u, int readable, int lane) {
#pragma unroll
        for (int r = 0; r < 4; ++r) u[r].load(ring_u + (record(r, lane) < readable ? record(r, lane) : 0) * F::D_V);
    }

    DEVICE float of(int row, int r) const { return row < F::OWN ? u[r].of(row < F::OWN ? row : 0) : 0.0f; }

    // Records r and r + 1 of a row, in 16 bits.
    DEVICE u32 pair(int row, int r) const {
        if (row >= F::OWN) return 0;
        const int word = row < F::OWN ? row / 2 : 0;
        return pick_bytes(u[r].word[word], u[r + 1].word[word], row % 2 ? 0x7632 : 0x5410);
    }
};

// sums += updates · weights for 16 records.
template <class F>
DEVICE void multiply_records(float (&sums)[F::MATRICES][F::TILES][4], const RecordUpdates<F>& updates,
                             const RecordWeights<F, true>& weights, int first, int, int lane) {
#pragma unroll
    for (int tile = 0; tile < F::TILES; ++tile) {
        const int column = tile * 8 + lane / 4, given = column < F::COLUMNS ? column : 0;
#pragma unroll
        for (int t = 2; t >= 0; --t) {  // the small ones first
            const auto& term = weights.pair[first / F::UNITS][t];
            const u32 b0 = term[lane % 4][given], b1 = term[lane % 4 + 4][given];
#pragma unroll
            for (int n = 0; n < F::MATRICES; ++n)
                matrix_product<bf16>(sums[n][tile], updates.pair(2 * n, 0), updates.pair(2 * n + 1, 0),
                                     updates.pair(2 * n, 2), updates.pair(2 * n + 1, 2), b0, b1);
        }
    }
}

template <class F>
DEVICE void multiply_records(float (&sums)[F::MATRICES][F::TILES][4], const RecordUpdates<F>& updates,
                             const RecordWeights<F, false>& weights, int first, int cursor, int lane) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        if (first + s * 8 >= cursor) break;
        const int j = first + s * 8 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n) {
            TwoTerms a[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) a[w] = terms_of<F::EXACT_UPDATES>(updates.of(2 * n + w % 2, 2 * s + w / 2));
#pragma unroll
            for (int tile = 0; tile < F::TILES; ++tile) {
                const int column = tile * 8 + lane / 4, given = column < F::COLUMNS ? column : 0;
                const TwoTerms b[2] = {weights.of[j][given], weights.of[j + 1][given]};
                product_of_terms<F::EXACT_UPDATES, false>(sums[n][tile], a, b);
            }
        }
    }
}

// The records' part of the sums. `updates` are those of the first 16.
template <class F>
DEVICE void replay_records(float (&sums)[F::MATRICES][F::TILES][4], RecordUpdates<F>& updates,
                           const RecordWeights<F>& weights, const typename F::U* ring_u, int cursor, int lane) {
    if (cursor > 0) multiply_records<F>(sums, updates, weights, 0, cursor, lane);
#pragma unroll 1
    for (int first = F::UNITS; first < cursor; first += F::UNITS) {
        updates.fetch(ring_u + first * F::D_V, cursor - first, lane);
        multiply_records<F>(sums, updates, weights, first, cursor, lane);
    }
}
