// What a verify kernel is compiled for, its arguments, and a block's shared memory.

// As `_PARAMS` in verify.py. Strides in elements.
struct WindowParams {
    const void *q, *k, *v, *a, *b, *rate, *bias, *d, *z;
    void *y, *checkpoint, *ring_u, *ring_k;
    float* ring_g;
    const int *write_pos, *checkpoint_slot, *slots, *num_tokens, *parents;
    int* arrivals;  // [N, H_k], zeros between launches
    int q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, a_row, a_token, a_head;
    int b_row, b_token, b_head, z_row, z_token, z_head, d_head, d_dim, parents_row;
    int checkpoint_stride, ring_u_stride, ring_k_stride, ring_g_stride;
    float scale, beta_scale, lower_bound, dt_min, dt_max;
    int tokens;  // T
    int items, blocks;  // an item is a tile of a row; each block takes every `blocks`-th
};

struct WindowCase : Layer {
    static constexpr bool L2_NORM = CASE_L2_NORM, SOFTPLUS = CASE_SOFTPLUS, BOUNDED = CASE_BOUNDED, TREE = CASE_TREE;
    static constexpr bool ALIGNED = CASE_ALIGNED;  // q and k of all tokens lie at multiples of 16 bytes
    static constexpr int TOKENS = CASE_TOKENS;  // of a window, at most

    static constexpr int SHARERS = GROUP * D_V / ROWS;  // tiles that share a key head
    // What the state and the keys are multiplied with: q and, for the delta rule, k of each token, as columns.
    static constexpr int VECTORS = DELTA ? 2 : 1;
    static constexpr int COLUMNS = VECTORS * TOKENS;
    static constexpr int TILES = (COLUMNS + 7) / 8;  // right operands that they make
    // A column's pitch in shared memory is such that the lanes that read together read from different banks.
    static constexpr int PITCH = D_K + 4 * VECTOR;
    static constexpr int CHANNEL_PITCH = D_K + 16;  // likewise, of float32 columns and keys
    static constexpr int SUMS_PITCH = COLUMNS + (COLUMNS >= 8 ? 4 : 0);
    static constexpr int RECORD_PITCH = COLUMNS + (COLUMNS >= 8 ? 2 : 0);
    static constexpr bool EARLY_UPDATES = !CHANNEL && (EAGER || MATRICES == 1);  // fetch the records' with their keys
    // Products on the matrix units as they are; what isn't exact there is taken as the sum of two tf32 numbers.
    static constexpr bool EXACT_STATE = sizeof(C) == 2, EXACT_UPDATES = sizeof(U) == 2;
    static constexpr bool EXACT_KEYS = !CHANNEL && sizeof(X) == 2;  // and columns
    static constexpr bool SAME = EXACT_KEYS && same<C, X>::value;
    static constexpr bool BF16_FOLD = SAME && same<C, bf16>::value;
    // Norms from the same product as the window's pairs, whose left operand then has the q, too.
    static constexpr bool PAIRED_NORMS = EXACT_KEYS && DELTA && TOKENS <= 8;
    static constexpr int PARTS = CHANNEL ? D_K / 32 : 1;  // in which products of keys and columns are summed

    static_assert(!CHANNEL || DELTA, "there is no such layer");
    static_assert(RPW == 8 || RPW == 16 || RPW == 32, "a warp takes 8, 16 or 32 rows");
    static_assert(HEADS == 1 || (!CHANNEL && D_V % RPW == 0), "a warp's rows lie in one head");
    static_assert(TOKENS <= 16 && TOKENS <= UNIT_ROWS, "windows are no longer");
};

// Which row of the batch, where its slot stands, whose checkpoint it reads, and how many tokens it has. Found in two
// steps, because the second wants the slot.
struct WindowRow {
    int row, slot, count, cursor, source;

    DEVICE bool used() const { return slot >= 0 && count > 0; }
    template <class F> DEVICE bool folds() const { return cursor + count > F::RING; }
};

// `shared_bytes` in windows.py counts the same.
template <class F> struct alignas(128) WindowMemory {
    typename F::C tile[F::ROWS * F::D_K];
    alignas(16) typename F::X x[2 * F::TOKENS][F::PITCH];  // columns; for the additive rule, the keys behind them
    // Channel gate: decayed keys of the ring and columns, decays of the checkpoint, log decays of the tokens.
    float keys[F::CHANNEL ? F::RING : 1][F::CHANNEL ? F::CHANNEL_PITCH : 4];
    float columns[F::CHANNEL ? F::COLUMNS : 1][F::CHANNEL ? F::CHANNEL_PITCH : 4];
    u32 high[F::CHANNEL ? F::COLUMNS : 1][F::CHANNEL ? F::CHANNEL_PITCH : 4];  // columns for the checkpoint, two terms
    u32 low[F::CHANNEL ? F::COLUMNS : 1][F::CHANNEL ? F::CHANNEL_PITCH : 4];
    float channels[F::CHANNEL ? F::D_K : 4];
    float gates[F::CHANNEL ? F::TOKENS : 1][F::CHANNEL ? F::D_K : 4];
    union {
        float sums[F::ROWS][F::SUMS_PITCH];                // S x; then the window's records
        float scores[F::PARTS][F::UNIT_ROWS][F::COLUMNS];  // before: k_j·x of the ring's keys
    };
    // What a row of the state multiplies S x, a record's u, a token's u and its v with.
    float of_state[F::HEADS][F::COLUMNS];
    TwoTerms of_record[F::HEADS][F::UNIT_ROWS][F::RECORD_PITCH];
    float of_token[F::HEADS][F::TOKENS][F::COLUMNS];
    // All before this begins at multiples of 16 bytes where it is read in vectors.
    float of_value[F::HEADS][F::TOKENS];
    float pairs[F::PARTS][F::TOKENS][F::COLUMNS];  // k_j·x of the window's keys
    float after[F::HEADS][F::CHANNEL ? 4 : F::UNIT_ROWS];                             // head gate: decays of the records
    float between[F::HEADS][F::CHANNEL ? 1 : F::TOKENS][F::CHANNEL ? 4 : F::TOKENS];  // e^γ_ij, [i][j]
    float decay[F::HEADS][F::TOKENS];                                                 // e^γ_i
    float input[F::HEADS][F::TOKENS];                                                 // β, or Δ of Mamba-2
    float q_norm[F::TOKENS], k_norm[F::TOKENS];
    float total[F::HEADS];  // decay of the checkpoint
    WindowRow rows[4];  // of this tile, of the next, and of the last, which some warp may still be at
    u64 barrier;
    int copies;  // that were started
    int last;
};

// Where a tile is: its first row in the slot, and that one's head and key head.
template <class F> struct WindowPlace {
    int first_row, head, key_head;

    DEVICE explicit WindowPlace(int tile)
        : first_row(tile * F::ROWS), head(first_row / F::D_V), key_head(head / F::GROUP) {}
    // Of a row of the tile: which of its heads.
    static DEVICE int head_of(int row) { return F::HEADS > 1 ? row / F::D_V : 0; }
};

// Token that token i follows, below i in any case, so that walks end; −1: the committed state.
template <class F> DEVICE int parent_of(const WindowParams& p, const WindowRow& at, int i) {
    int parent = i - 1;
    if (F::TREE) {
        const int given = p.parents[static_cast<i64>(at.row) * p.parents_row + i];
        parent = given < parent ? given : parent;
    }
    return parent < -1 ? -1 : parent;
}

// Row j of the window's keys in shared memory.
template <class F> DEVICE const typename F::X* window_key(const WindowMemory<F>& m, int j) {
    return m.x[F::DELTA ? 2 * j + 1 : F::TOKENS + j];
}

// N consecutive floats of shared memory.
template <int N> DEVICE void load_floats(const float* from, float (&x)[N]) {
    if constexpr (N % 4 == 0) {
        packed<float, N> words;
        words.load(from);
        words.unpack(x);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = from[i];
    }
}
