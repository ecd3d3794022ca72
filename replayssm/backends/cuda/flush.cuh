// A flush: the records and this token are folded into the warp's rows of a tile, which lies in shared memory, and these
// are written. This token's updates lie in m.sums, with the key's norm in them. Of a window, only the records are folded.
//
// It runs on the matrix units, 16 rows and 16 records at a time. Both factors are sums of numbers in bfloat16. Their
// products are summed apart from the state, so that what the units round is small beside it. (By multiply-adds a block
// took 10 µs, which at small batches the whole step waited for.)

// How many records there are to fold; the token is the last.
template <class F> DEVICE int num_folded(const Row& at) { return F::WINDOW ? at.cursor : at.cursor + 1; }

// Left operand, of 16 rows and 16 records: the decayed updates.
template <class F> struct FoldedUpdates {
    u32 word[4][F::UPDATE_TERMS];

    DEVICE void load(const Memory<F>& m, const Row& at, int first_row, int first, int lane) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int row = first_row + lane / 4 + w % 2 * 8, head = F::HEADS > 1 ? row / F::D_V : 0;
            const typename F::U* ring_u = m.ring_u + head * (F::RING * F::WIDTH) + row % F::WIDTH;
            float u[2] = {};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (F::HALF && w % 2) continue;
                const int j = first + w / 2 * 8 + lane % 4 * 2 + e, held = j < at.cursor ? j : 0;
                const float kept = to_float(ring_u[held * F::WIDTH]) * (F::CHANNEL ? 1.0f : m.after[head][held]);
                u[e] = j < at.cursor ? kept : j < num_folded<F>(at) ? m.sums[row].q : 0.0f;
            }
            split(u[0], u[1], word[w]);
        }
    }
};

// Column `column` of record j; `token` is this token's.
template <class F> DEVICE float folded_key(const Memory<F>& m, const Row& at, int j, int column, float token) {
    const int held = (j < at.cursor ? j : 0) * F::D_K + column;
    const float kept = F::CHANNEL ? m.keys[held] : to_float(m.ring_k[held]);
    return j < at.cursor ? kept : j < num_folded<F>(at) ? token : 0.0f;
}

// Right operand, of 16 records and 8 columns, of which a lane gives one.
template <class F> struct FoldedKeys {
    u32 word[2][F::KEY_TERMS];

    DEVICE void load(const Memory<F>& m, const Row& at, int column, int first, int lane) {
        const float token = to_float(m.k[column]);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int j = first + w * 8 + lane % 4 * 2;
            split(folded_key<F>(m, at, j, column, token), folded_key<F>(m, at, j + 1, column, token), word[w]);
        }
    }
};

// The decay of the tile's rows in a column.
template <class F> DEVICE float folded_decay(const Memory<F>& m, int row, int column) {
    if constexpr (F::CHANNEL && F::WINDOW)
        return m.committed[column];
    else if constexpr (F::CHANNEL)
        return m.total[column];
    else
        return m.heads[F::HEADS > 1 ? row / F::D_V : 0].total;
}

// Products of all terms but those beyond the precision; the small ones first.
template <class F> DEVICE void add_products(float (&sums)[4], const FoldedUpdates<F>& u, const FoldedKeys<F>& k) {
#pragma unroll
    for (int order = F::UPDATE_TERMS - 1; order >= 0; --order)
#pragma unroll
        for (int t = 0; t <= order; ++t)
            if (order - t < F::KEY_TERMS)
                matrix_product<bf16>(sums, u.word[0][t], u.word[1][t], u.word[2][t], u.word[3][t],
                                     k.word[0][order - t], k.word[1][order - t]);
}

// The warp's rows of the tile, folded, to `out`, where the tile's begin.
template <class F, class Out>
DEVICE void fold_tile(const Memory<F>& m, const Row& at, Out* out, int warp, int lane) {
    const int group = lane / 4, quarter = lane % 4;
#pragma unroll 1
    for (int n = 0; n < F::MATRICES; ++n) {
        const int matrix_row = warp * F::RPW + n * 16;
        FoldedUpdates<F> updates;
        updates.load(m, at, matrix_row, 0, lane);
#pragma unroll 1
        for (int i = 0; i < F::D_K; i += 16) {
            // A lane has 4 neighbouring columns of the state: two of each of two products.
            float sums[2][4] = {};
#pragma unroll 1
            for (int first = 0; first < num_folded<F>(at); first += 16) {
                if (num_folded<F>(at) > 16) updates.load(m, at, matrix_row, first, lane);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    FoldedKeys<F> keys;
                    keys.load(m, at, i + group / 2 * 4 + 2 * e + group % 2, first, lane);
                    add_products<F>(sums[e], updates, keys);
                }
            }
#pragma unroll
            for (int half = 0; half < (F::HALF ? 1 : 2); ++half) {
                const int row = matrix_row + group + half * 8, column = i + quarter * 4;
                packed<typename F::C, 4> held;
                packed<Out, 4> folded;
                float s[4];
                held.load(m.tile + row * F::D_K + column);
                held.unpack(s);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[e] = fmaf(s[e], folded_decay<F>(m, row, column + e), sums[e / 2][half * 2 + e % 2]);
                folded.pack(s);
                if (F::FOLD)
                    folded.store_at_once(out + row * F::D_K + column);
                else
                    folded.store(out + row * F::D_K + column);
            }
        }
    }
}
