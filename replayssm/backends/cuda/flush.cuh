// A flush: the records and this token are folded into the warp's rows of a tile, which lies in shared memory, and these
// are written. This token's updates lie in m.sums, with the key's norm in them.

// Where a tile is: its first row in the slot, and its head and key head in the block's part.
struct Place {
    int first_row, head, key_head;
};

// By multiply-adds, exact in float32.
template <class F>
DEVICE void flush_rows(const Params& p, Memory<F>& m, const Row& at, const typename F::C* tile, const Place& place,
                       const typename F::K* ring_k, int warp, int lane) {
    using C = typename F::C;
    constexpr int PASSES = F::RPW / F::PASS;
    constexpr int BATCH = PASSES < 4 ? PASSES : 4;
    C* own = checkpoint_of<F>(p, at.slot, place.first_row);
    const int in_pass = lane / F::LANES;
#pragma unroll 1
    for (int first = 0; first < PASSES; first += BATCH) {
        float s[BATCH][16];
        int row[BATCH], local[BATCH];
        const typename F::U* ring_u[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            row[n] = warp * F::RPW + (first + n) * F::PASS + in_pass;
            local[n] = place.head + (F::HEADS > 1 ? row[n] / F::D_V : 0);
            ring_u[n] = ring_u_of<F>(p, at.slot, place.first_row + row[n]);
            load_columns<F>(tile + row[n] * F::D_K, lane, s[n]);
            if (!F::CHANNEL) {
                const float total = m.heads[local[n]].total;
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n][i] *= total;
            }
        }
        float key[16];
        if (F::CHANNEL) {
            load_columns<F>(m.total, lane, key);
#pragma unroll
            for (int n = 0; n < BATCH; ++n)
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n][i] *= key[i];
        }
#pragma unroll 1
        for (int j = 0; j < at.cursor; ++j) {
            if constexpr (F::CHANNEL)
                load_columns<F>(m.keys + j * F::D_K, lane, key);
            else
                load_columns<F>(ring_k + j * F::D_K, lane, key);
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                float u = to_float(ring_u[n][j * F::D_V]);
                if (!F::CHANNEL) u *= m.after[local[n]][j];
#pragma unroll
                for (int i = 0; i < 16; ++i) s[n][i] = fmaf(u, key[i], s[n][i]);
            }
        }
        load_columns<F>(m.k[place.key_head], lane, key);
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const float u = m.sums[row[n]].q;
#pragma unroll
            for (int i = 0; i < 16; ++i) s[n][i] = fmaf(u, key[i], s[n][i]);
#pragma unroll
            for (int i = 0; i < F::PIECES; ++i) {
                packed<C, F::VECTOR> piece;
                piece.pack(s[n] + i * F::VECTOR);
                piece.store(own + row[n] * F::D_K + column_of<F>(i, lane));
            }
        }
    }
}

// On the matrix units, for bfloat16: 16 rows and 16 records at a time. Keys are exact; a decayed update is the sum of
// two numbers, which leaves 2^-17 of it. Where there are more records than 16, the state is rounded in between. A lane holds the same columns of the state as in multiply_matrix.
template <class F>
DEVICE void flush_matrix(const Params& p, Memory<F>& m, const Row& at, bf16* tile, const Place& place,
                         const bf16* ring_k, int warp, int lane) {
    constexpr int HALVES = F::HALF ? 1 : 2;
    constexpr int CHUNKS = F::D_K / 32;
    const int group = lane / 4, quarter = lane % 4;
    bf16* own = checkpoint_of<F>(p, at.slot, place.first_row);
    const u32 selector = group & 1 ? 0x7632 : 0x5410;  // the lane's of two neighbouring columns
#pragma unroll 1
    for (int first = 0; first <= at.cursor; first += 16) {
        const bool last = first + 16 > at.cursor;
        // Left operand: updates of rows group and group + 8, of records 2 quarter, + 1, + 8, + 9.
        u32 high[F::MATRICES][4], low[F::MATRICES][4];
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int row = warp * F::RPW + n * 16 + group + w % 2 * 8;
                const int local = place.head + (F::HEADS > 1 ? row / F::D_V : 0);
                const typename F::U* ring_u = ring_u_of<F>(p, at.slot, place.first_row + row);
                float u[2] = {}, rest[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (w % 2 >= HALVES) continue;
                    const int j = first + w / 2 * 8 + quarter * 2 + e;
                    u[e] = j < at.cursor    ? to_float(ring_u[j * F::D_V]) * m.after[local][j]
                           : j == at.cursor ? m.sums[row].q
                                            : 0.0f;
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) rest[e] = u[e] - to_float(convert<bf16>::from(u[e]));
                high[n][w] = two_of<bf16>(u[0], u[1]);
                low[n][w] = two_of<bf16>(rest[0], rest[1]);
            }
        }
#pragma unroll 1
        for (int i = 0; i < CHUNKS; ++i) {
            // Right operand: records 2 quarter, + 1, + 8, + 9, of column 8 (group / 2) + 2e + group % 2 of the chunk.
            packed<bf16, 8> keys[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int j = first + r / 2 * 8 + quarter * 2 + r % 2;
                const int column = i * 32 + group / 2 * 8;
                if (j < at.cursor)
                    keys[r].load(ring_k + j * F::D_K + column);
                else if (j == at.cursor)
                    keys[r].load(m.k[place.key_head] + column);
                else
                    keys[r].clear();
            }
#pragma unroll
            for (int n = 0; n < F::MATRICES; ++n) {
                packed<bf16, 8> held[2];
                float s[2][8] = {};
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    const int row = warp * F::RPW + n * 16 + group + half * 8;
                    held[half].load(tile + row * F::D_K + i * 32 + quarter * 8);
                    held[half].unpack(s[half]);
                    if (first == 0) {
                        const float total = m.heads[place.head + (F::HEADS > 1 ? row / F::D_V : 0)].total;
#pragma unroll
                        for (int e = 0; e < 8; ++e) s[half][e] *= total;
                    }
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float sum[4] = {s[0][2 * e], s[0][2 * e + 1], s[1][2 * e], s[1][2 * e + 1]};
                    const u32 b0 = pick_bytes(keys[0].word[e], keys[1].word[e], selector);
                    const u32 b1 = pick_bytes(keys[2].word[e], keys[3].word[e], selector);
                    matrix_product<bf16>(sum, low[n][0], low[n][1], low[n][2], low[n][3], b0, b1);
                    matrix_product<bf16>(sum, high[n][0], high[n][1], high[n][2], high[n][3], b0, b1);
                    s[0][2 * e] = sum[0];
                    s[0][2 * e + 1] = sum[1];
                    s[1][2 * e] = sum[2];
                    s[1][2 * e + 1] = sum[3];
                }
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    const int row = warp * F::RPW + n * 16 + group + half * 8;
                    held[half].pack(s[half]);
                    held[half].store(last ? own + row * F::D_K + i * 32 + quarter * 8
                                          : tile + row * F::D_K + i * 32 + quarter * 8);
                }
            }
        }
    }
}
