// A fold: the committed records go into the warp's rows of a tile, which lies in shared memory, and these are written.

// The updates of 16 rows and 16 records as a left operand, decayed for a head gate.
template <class F>
DEVICE void decay_updates(const WindowMemory<F>& m, const WindowRow& at, const RecordUpdates<F>& updates, int n, int local,
                          int first, int lane, TwoTerms (&terms)[2][4]) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int j = first + s * 8 + lane % 4 * 2 + w / 2;
            const float u = updates.of(n, s, w, first, at.cursor, lane);
            terms[s][w] = two_terms(F::CHANNEL ? u : u * m.after[local][j]);
        }
}

// VECTOR numbers of a record's key, every second of them: the lane's columns of VECTOR / 2 right operands.
template <class F> struct FoldKey {
    float x[F::VECTOR / 2];

    DEVICE void load(const WindowMemory<F>& m, const typename F::X* ring_k, int j, int column, bool odd, bool committed) {
        float all[F::VECTOR];
        if constexpr (F::CHANNEL) {
            load_floats<F::VECTOR>(m.keys[committed ? j : 0] + column, all);
        } else {
            packed<typename F::X, F::VECTOR> piece;
            piece.load(ring_k + (committed ? j : 0) * F::D_K + column);
            piece.unpack(all);
        }
#pragma unroll
        for (int i = 0; i < F::VECTOR / 2; ++i) x[i] = !committed ? 0.0f : odd ? all[2 * i + 1] : all[2 * i];
    }
};

// Of 16 rows, on the matrix units, 16 records at a time; the sum over all is added to the state in float32. A lane holds
// VECTOR consecutive columns of two rows.
template <class F>
DEVICE void fold_rows(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                      RecordUpdates<F>& updates, int n, int in_block, int lane) {
    using C = typename F::C;
    constexpr int VECTOR = F::VECTOR, HALVES = F::HALF ? 1 : 2;
    const bool odd = lane / 4 & 1;
    const typename F::X* ring_k = ring_k_of<F>(p, at.slot, place.key_head);
    C* own = checkpoint_of<F>(p, at.slot, place.first_row);
    const int local = WindowPlace<F>::head_of(in_block), row = in_block + n * 16 + lane / 4;
    TwoTerms terms[2][4];
    decay_updates<F>(m, at, updates, n, local, 0, lane, terms);
#pragma unroll 1
    for (int group = 0; group < F::D_K; group += 4 * VECTOR) {
        float sums[VECTOR / 2][4] = {};
#pragma unroll 1
        for (int first = 0; first < at.cursor; first += F::UNITS) {
            if (at.cursor > F::UNITS) {
                updates.fetch(p, at.slot, place.first_row + in_block, first, at.cursor, lane);
                decay_updates<F>(m, at, updates, n, local, first, lane, terms);
            }
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                if (first + s * 8 >= at.cursor) break;
                FoldKey<F> key[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int j = first + s * 8 + lane % 4 * 2 + i;
                    key[i].load(m, ring_k, j, group + lane / 8 * VECTOR, odd, j < at.cursor);
                }
#pragma unroll
                for (int i = 0; i < VECTOR / 2; ++i) {
                    const TwoTerms b[2] = {terms_of<F::EXACT_KEYS>(key[0].x[i]), terms_of<F::EXACT_KEYS>(key[1].x[i])};
                    product_of_terms<false, F::EXACT_KEYS>(sums[i], terms[s], b);
                }
            }
        }
        const int column = group + lane % 4 * VECTOR;
        float total[VECTOR];
        if constexpr (F::CHANNEL) load_floats<VECTOR>(m.channels + column, total);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int at_row = row + half * 8;
            packed<C, VECTOR> held;
            float s[VECTOR];
            held.load(m.tile + at_row * F::D_K + column);
            held.unpack(s);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const float of_all = F::CHANNEL ? total[e] : m.total[local];
                s[e] = fmaf(s[e], of_all, sums[e / 2][2 * half + e % 2]);
            }
            held.pack(s);
            held.store(own + at_row * F::D_K + column);
        }
    }
}

// The same where all is bfloat16: keys are exact, a decayed update is the sum of two numbers, which leaves 2^-17 of it.
template <class F>
DEVICE void fold_bf16(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                      RecordUpdates<F>& updates, int in_block, int lane) {
    constexpr int HALVES = F::HALF ? 1 : 2;
    const bf16* ring_k = ring_k_of<F>(p, at.slot, place.key_head);
    bf16* own = checkpoint_of<F>(p, at.slot, place.first_row);
    const u32 selector = lane / 4 & 1 ? 0x7632 : 0x5410;  // the lane's of two neighbouring columns
    u32 terms[F::MATRICES][4][2];
    const auto decay = [&](int first) {
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float* after = m.after[WindowPlace<F>::head_of(in_block)] + first + w / 2 * 8 + lane % 4 * 2;
                float u[2];
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    u[e] = updates.of(n, w / 2, e * 2 + w % 2, first, at.cursor, lane) * after[e];
                split(u[0], u[1], terms[n][w]);
            }
    };
    decay(0);
#pragma unroll 1
    for (int group = 0; group < F::D_K; group += 32) {
        float sums[F::MATRICES][4][4] = {};
#pragma unroll 1
        for (int first = 0; first < at.cursor; first += F::UNITS) {
            if (at.cursor > F::UNITS) {
                updates.fetch(p, at.slot, place.first_row + in_block, first, at.cursor, lane);
                decay(first);
            }
            packed<bf16, 8> keys[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int j = first + r / 2 * 8 + lane % 4 * 2 + r % 2;
                if (j < at.cursor)
                    keys[r].load(ring_k + j * F::D_K + group + lane / 8 * 8);
                else
                    keys[r].clear();
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 b0 = pick_bytes(keys[0].word[e], keys[1].word[e], selector);
                const u32 b1 = pick_bytes(keys[2].word[e], keys[3].word[e], selector);
#pragma unroll
                for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
                    for (int t = 1; t >= 0; --t)  // the small ones first
                        matrix_product<bf16>(sums[n][e], terms[n][0][t], terms[n][1][t], terms[n][2][t], terms[n][3][t], b0, b1);
            }
        }
        const int column = group + lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int row = in_block + n * 16 + lane / 4 + half * 8;
                const float total = m.total[WindowPlace<F>::head_of(in_block)];
                packed<bf16, 8> held;
                float s[8];
                held.load(m.tile + row * F::D_K + column);
                held.unpack(s);
#pragma unroll
                for (int e = 0; e < 8; ++e) s[e] = fmaf(s[e], total, sums[n][e / 2][2 * half + e % 2]);
                held.pack(s);
                held.store(own + row * F::D_K + column);
            }
    }
}
