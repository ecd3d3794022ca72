// A fold: the committed records go into the warp's rows of a tile, which lies in shared memory, and these are written.

// VECTOR numbers of a record's key, every second of them: the lane's columns of VECTOR / 2 right operands.
template <class F> struct FoldKey {
    float x[F::VECTOR / 2];

    DEVICE void load(const WindowMemory<F>& m, int j, int column, bool odd, bool committed) {
        float all[F::VECTOR];
        if constexpr (F::CHANNEL) {
            load_floats<F::VECTOR>(m.keys[committed ? j : 0] + column, all);
        } else {
            packed<typename F::X, F::VECTOR> piece;
            piece.load(m.ring_k[committed ? j : 0] + column);
            piece.unpack(all);
        }
#pragma unroll
        for (int i = 0; i < F::VECTOR / 2; ++i) x[i] = !committed ? 0.0f : odd ? all[2 * i + 1] : all[2 * i];
    }
};

// Two rows of a lane, or its only one, which are folded together with others' in one matrix product: their updates, where
// they lie in the checkpoint and the tile, and their head among the item's.
template <class F> struct Folding {
    static constexpr int ROWS = F::OWN < 2 ? F::OWN : 2;
    const typename F::U* ring_u;
    const typename F::C* held;
    typename F::C* own;
    int local, cursor;
};

// Their updates of 16 records from `first` on, in the order of RecordUpdates, decayed for a head gate; zeros for a second
// row that isn't there.
template <class F>
DEVICE void decayed_updates(const WindowMemory<F>& m, const Folding<F>& to, int first, int lane, float (&u)[2][4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int j = first + RecordUpdates<F>::record(r, lane);
        const float decay = j >= to.cursor ? 0.0f : F::CHANNEL ? 1.0f : m.after[to.local][F::CHANNEL ? 0 : j];
        OwnNumbers<typename F::U, Folding<F>::ROWS> updates;
        updates.load(to.ring_u + (j < to.cursor ? j : 0) * F::D_V);
        u[0][r] = updates.of(0) * decay;
        u[1][r] = F::OWN > 1 ? updates.of(Folding<F>::ROWS - 1) * decay : 0.0f;
    }
}

// The state and what is added, COLUMNS of them from `column` on, a multiple.
template <class F, int COLUMNS>
DEVICE void fold_sums(const WindowMemory<F>& m, const Folding<F>& to, int column, const float (&sums)[COLUMNS / 2][4]) {
    float total[COLUMNS];
    if constexpr (F::CHANNEL) load_floats<COLUMNS>(m.channels + column, total);
#pragma unroll
    for (int row = 0; row < Folding<F>::ROWS; ++row) {
        packed<typename F::C, COLUMNS> held;
        float s[COLUMNS];
        held.load(to.held + row * F::D_K + column);
        held.unpack(s);
#pragma unroll
        for (int e = 0; e < COLUMNS; ++e)
            s[e] = fmaf(s[e], F::CHANNEL ? total[e] : m.total[to.local], sums[e / 2][row * 2 + e % 2]);
        held.pack(s);
        // (Counted in 16 bytes: of the sum of addresses the compiler doesn't see that it is a multiple, and stores words.)
        held.store(reinterpret_cast<words4*>(to.own) + (row * F::D_K + column) / F::VECTOR);
    }
}

// On the matrix units, 16 records at a time; the sum over all is added to the state in float32. A lane holds VECTOR
// consecutive columns of its rows.
template <class F> DEVICE void fold_terms(const WindowMemory<F>& m, const Folding<F>& to, int lane) {
    constexpr int VECTOR = F::VECTOR;
    const bool odd = lane / 4 & 1;
    TwoTerms terms[2][4];
    const auto decay = [&](int first) {
        float u[2][4];
        decayed_updates<F>(m, to, first, lane, u);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int w = 0; w < 4; ++w) terms[s][w] = two_terms(u[w % 2][2 * s + w / 2]);
    };
    decay(0);
#pragma unroll 1
    for (int group = 0; group < F::D_K; group += 4 * VECTOR) {
        float sums[VECTOR / 2][4] = {};
#pragma unroll 1
        for (int first = 0; first < to.cursor; first += F::UNITS) {
            if (to.cursor > F::UNITS) decay(first);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                if (first + s * 8 >= to.cursor) break;
                FoldKey<F> key[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int j = first + s * 8 + lane % 4 * 2 + i;
                    key[i].load(m, j, group + lane / 8 * VECTOR, odd, j < to.cursor);
                }
#pragma unroll
                for (int i = 0; i < VECTOR / 2; ++i) {
                    const TwoTerms b[2] = {terms_of<F::EXACT_KEYS>(key[0].x[i]), terms_of<F::EXACT_KEYS>(key[1].x[i])};
                    product_of_terms<false, F::EXACT_KEYS>(sums[i], terms[s], b);
                }
            }
        }
        fold_sums<F, VECTOR>(m, to, group + lane % 4 * VECTOR, sums);
    }
}

// The same with keys in bfloat16, a decayed update being the sum of so many numbers that 2^-24 of it are left out, or 2^-17
// for a state of 16 bits. A lane holds eight consecutive columns.
template <class F> DEVICE void fold_bf16_keys(const WindowMemory<F>& m, const Folding<F>& to, int lane) {
    constexpr int TERMS = sizeof(typename F::C) == 4 ? 3 : 2;
    const u32 selector = lane / 4 & 1 ? 0x7632 : 0x5410;  // the lane's of two neighbouring columns
    u32 terms[4][TERMS];
    const auto decay = [&](int first) {
        float u[2][4];
        decayed_updates<F>(m, to, first, lane, u);
#pragma unroll
        for (int w = 0; w < 4; ++w) split(u[w % 2][w / 2 * 2], u[w % 2][w / 2 * 2 + 1], terms[w]);
    };
    decay(0);
#pragma unroll 1
    for (int group = 0; group < F::D_K; group += 32) {
        float sums[4][4] = {};
#pragma unroll 1
        for (int first = 0; first < to.cursor; first += F::UNITS) {
            if (to.cursor > F::UNITS) decay(first);
            packed<bf16, 8> keys[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int j = first + RecordUpdates<F>::record(r, lane);
                keys[r].load(m.ring_k[j < to.cursor ? j : 0] + group + lane / 8 * 8);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 b0 = pick_bytes(keys[0].word[e], keys[1].word[e], selector);
                const u32 b1 = pick_bytes(keys[2].word[e], keys[3].word[e], selector);
#pragma unroll
                for (int t = TERMS - 1; t >= 0; --t)  // the small ones first
                    matrix_product<bf16>(sums[e], terms[0][t], terms[1][t], terms[2][t], terms[3][t], b0, b1);
            }
        }
        fold_sums<F, 8>(m, to, group + lane % 4 * 8, sums);
    }
}
