// Products with the window's columns, its tokens' q and k: of keys (the ring's, the window's) and of the state.

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

// 16 keys as a left operand: of rows lane / 4 and lane / 4 + 8, 8 consecutive numbers of each 32.
template <class F> struct Keys {
    packed<typename F::X, 8> upper[F::D_K / 32], lower[F::D_K / 32];

    // Rows from `rows` on count as zero.
    DEVICE void fetch(const typename F::X* key, int pitch, int rows, int lane) {
        const int j = lane / 4;
        const typename F::X* from = key + j * pitch + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < F::D_K / 32; ++i) {
            if (j < rows)
                upper[i].load(from + i * 32);
            else
                upper[i].clear();
            if (j + 8 < rows)
                lower[i].load(from + 8 * pitch + i * 32);
            else
                lower[i].clear();
        }
    }

    // Their products with eight columns.
    DEVICE void multiply_tile(const WindowMemory<F>& m, int tile, float (&to)[4], int lane) const {
        float sums[2][4] = {};
        const int column = tile * 8 + lane / 4;
        const typename F::X* x = m.x[column < F::COLUMNS ? column : 0] + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < F::D_K / 32; ++i) {
            packed<typename F::X, 8> b;
            b.load(x + i * 32);
            multiply_eights<typename F::X>(sums[i % 2], upper[i], lower[i], b);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = sums[0][e] + sums[1][e];
    }

    // With all columns, to `to`; zero from row `rows` on, of `limit` rows that there are.
    DEVICE void multiply(const WindowMemory<F>& m, float (*to)[F::COLUMNS], int rows, int limit, int lane) const {
#pragma unroll
        for (int n = 0; n < F::TILES; ++n) {
            float sums[4];
            multiply_tile(m, n, sums, lane);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = lane / 4 + e / 2 * 8, c = n * 8 + lane % 4 * 2 + e % 2;
                if (j < limit && c < F::COLUMNS) to[j][c] = j < rows ? sums[e] : 0.0f;
            }
        }
    }
};

// The window's pairs by one warp, and the norms: rows 0 to 7 of the left operand are keys, rows 8 to 15 the q.
template <class F> DEVICE void multiply_pairs(WindowMemory<F>& m, int lane) {
    const int token = lane / 4, quarter = lane % 4;
    Keys<F> rows;
#pragma unroll
    for (int i = 0; i < F::D_K / 32; ++i) {
        const int own = token < F::TOKENS ? token : 0, at = i * 32 + quarter * 8;
        rows.upper[i].load(m.x[2 * own + 1] + at);
        rows.lower[i].load(m.x[2 * own] + at);
    }
#pragma unroll
    for (int n = 0; n < F::TILES; ++n) {
        float sums[4];
        rows.multiply_tile(m, n, sums, lane);
        if (token >= F::TOKENS) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int c = n * 8 + quarter * 2 + e;
            if (c < F::COLUMNS) m.pairs[0][token][c] = sums[e];
        }
        if (n * 4 + quarter == token) {
            m.q_norm[token] = F::L2_NORM ? inverse_norm(sums[2]) : 1.0f;
            m.k_norm[token] = F::L2_NORM ? inverse_norm(sums[1]) : 1.0f;
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
template <class F>
DEVICE void multiply_keys(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int key_head, int warp, int lane) {
    const typename F::X* ring_k = ring_k_of<F>(p, at.slot, key_head);
#pragma unroll 1
    for (int j = warp; j < at.cursor; j += F::WARPS)
        multiply_key<F>(ring_k + j * F::D_K, m.x[0], m.scores[0][j], lane);
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
                if (c < F::COLUMNS) m.scores[part][upper + e / 2 * 8][c] = sums[e];
            }
        }
    }
}

// A lane's numbers of a column that go with a half of a granule, as terms.
template <class F> struct ColumnPiece {
    TwoTerms x[F::VECTOR];

    DEVICE void load(const WindowMemory<F>& m, int column, int at) {
        const int given = column < F::COLUMNS ? column : 0;
        if constexpr (F::CHANNEL) {
            packed<float, F::VECTOR> high, low;
            high.load(m.high[given] + at);
            low.load(m.low[given] + at);
#pragma unroll
            for (int i = 0; i < F::VECTOR; ++i) x[i] = TwoTerms{high.word[i], low.word[i]};
        } else {
            packed<typename F::X, F::VECTOR> piece;
            float numbers[F::VECTOR];
            piece.load(m.x[given] + at);
            piece.unpack(numbers);
#pragma unroll
            for (int i = 0; i < F::VECTOR; ++i) x[i] = terms_of<F::EXACT_KEYS>(numbers[i]);
        }
    }
};

// sums += rows · columns for the numbers in one half of a granule, as tf32.
template <class F>
DEVICE void multiply_half(float (&sums)[F::TILES][4], const WindowMemory<F>& m,
                          const packed<typename F::C, F::VECTOR>& upper, const packed<typename F::C, F::VECTOR>& lower,
                          int at, int lane) {
    constexpr int VECTOR = F::VECTOR;
    float x[2][VECTOR];
    upper.unpack(x[0]);
    lower.unpack(x[1]);
    TwoTerms a[VECTOR / 2][4];
#pragma unroll
    for (int s = 0; s < VECTOR / 2; ++s)
#pragma unroll
        for (int w = 0; w < 4; ++w) a[s][w] = F::EXACT_STATE ? terms_of<true>(x[w % 2][2 * s + w / 2]) : cut_terms(x[w % 2][2 * s + w / 2]);
#pragma unroll
    for (int n = 0; n < F::TILES; ++n) {
        ColumnPiece<F> piece;
        piece.load(m, n * 8 + lane / 4, at);
#pragma unroll
        for (int s = 0; s < VECTOR / 2; ++s) {
            const TwoTerms b[2] = {piece.x[2 * s], piece.x[2 * s + 1]};
            product_of_terms<F::EXACT_STATE, F::EXACT_KEYS>(sums[n], a[s], b);
        }
    }
}

template <class F> DEVICE void add_to(float (&total)[F::TILES][4], const float (&sums)[F::TILES][4]) {
#pragma unroll
    for (int n = 0; n < F::TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) total[n][e] += sums[n][e];
}

// S x of 16 of the tile's rows, `upper` the lane's first, one granule of the columns after the other. Sums of one half
// (tf32) or granule (16 bits) are added to the total in float32.
template <class F>
DEVICE void multiply_rows(const WindowMemory<F>& m, const typename F::C* upper, float (&total)[F::TILES][4], int lane) {
    constexpr int VECTOR = F::VECTOR;
    const bool odd = lane / 4 & 1;
    const int quarter = lane % 4 * VECTOR;
#pragma unroll 1
    for (int first = 0; first < F::D_K; first += 8 * VECTOR) {
        Granule<typename F::C> a, b;
        a.load(upper + first + quarter, odd);
        if (F::HALF)
            b.clear();
        else
            b.load(upper + 8 * F::D_K + first + quarter, odd);
        if constexpr (F::SAME) {
            float sums[F::TILES][4] = {};
#pragma unroll
            for (int n = 0; n < F::TILES; ++n) {
                const int column = n * 8 + lane / 4;
                const typename F::X* x = m.x[column < F::COLUMNS ? column : 0] + first + quarter;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    packed<typename F::X, 8> c;
                    c.load(x + half * 32);
                    multiply_eights<typename F::C>(sums[n], a.half[half], b.half[half], c);
                }
            }
            add_to<F>(total, sums);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sums[F::TILES][4] = {};
                multiply_half<F>(sums, m, a.half[half], b.half[half], first + half * 4 * VECTOR + quarter, lane);
                add_to<F>(total, sums);
            }
        }
    }
}

// Updates of 16 records for the warp's rows, as left operands: of rows lane / 4 and + 8, of records 2 (lane % 4) and + 1
// of each eight, which count as columns lane % 4 and + 4 there.
template <class F> struct RecordUpdates {
    typename F::U u[F::MATRICES][2][4];

    DEVICE void fetch(const WindowParams& p, int slot, int first_row, int first, int rows, int lane) {
        // A warp's rows lie in one head.
        const typename F::U* ring_u = ring_u_of<F>(p, slot, first_row + lane / 4) + (first + lane % 4 * 2) * F::D_V;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int record = i / 2 * 8 + i % 2;
            const bool there = first + record + lane % 4 * 2 < rows;
#pragma unroll
            for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
                for (int w = 0; w < (F::HALF ? 1 : 2); ++w)
                    u[n][i / 2][i % 2 * 2 + w] =
                        there ? ring_u[record * F::D_V + n * 16 + w * 8] : convert<typename F::U>::from(0.0f);
        }
    }

    // Number w of the operand for matrix n and records 8 s and on; zero where there is no record.
    DEVICE float of(int n, int s, int w, int first, int cursor, int lane) const {
        if (F::HALF && w % 2) return 0.0f;
        const bool there = !F::EAGER || first + s * 8 + lane % 4 * 2 + w / 2 < cursor;
        return there ? to_float(u[n][s][w]) : 0.0f;
    }
};

// The records' part of the warp's rows' sums, before their tile is there.
template <class F>
DEVICE void replay_records(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, int first_row, int in_block,
                           RecordUpdates<F>& updates, float (&sums)[F::MATRICES][F::TILES][4], int lane) {
#pragma unroll 1
    for (int first = 0; first < at.cursor; first += F::UNITS) {
        if (first) updates.fetch(p, at.slot, first_row + in_block, first, at.cursor, lane);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            if (first + s * 8 >= at.cursor) break;
            const int j = first + s * 8 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < F::MATRICES; ++n) {
                const auto weights = m.of_record[WindowPlace<F>::head_of(in_block)];
                TwoTerms a[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) a[w] = terms_of<F::EXACT_UPDATES>(updates.of(n, s, w, first, at.cursor, lane));
#pragma unroll
                for (int tile = 0; tile < F::TILES; ++tile) {
                    const int column = tile * 8 + lane / 4, given = column < F::COLUMNS ? column : 0;
                    const TwoTerms b[2] = {weights[j][given], weights[j + 1][given]};
                    product_of_terms<F::EXACT_UPDATES, false>(sums[n][tile], a, b);
                }
            }
        }
    }
}

// Their S x on top, into m.sums.
template <class F>
DEVICE void multiply_state(WindowMemory<F>& m, const float (&records)[F::MATRICES][F::TILES][4], int in_block, int lane) {
#pragma unroll
    for (int n = 0; n < F::MATRICES; ++n) {
        float total[F::TILES][4] = {};
        const int row = in_block + n * 16 + lane / 4;
        multiply_rows<F>(m, m.tile + row * F::D_K, total, lane);
        const float* weights = m.of_state[WindowPlace<F>::head_of(in_block)];
#pragma unroll
        for (int tile = 0; tile < F::TILES; ++tile)
#pragma unroll
            for (int e = 0; e < (F::HALF ? 2 : 4); ++e) {
                const int c = tile * 8 + lane % 4 * 2 + e % 2;
                if (c < F::COLUMNS) m.sums[row + e / 2 * 8][c] = fmaf(total[tile][e], weights[c], records[n][tile][e]);
            }
    }
}
