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
    int tokens;                // T
    int tiles, whole, blocks;  // tiles of the batch; items of SPAN tiles, behind which each tile is an item; blocks
};

template <bool FIRST, class A, class B> struct choose_type {
    using type = A;
};
template <class A, class B> struct choose_type<false, A, B> {
    using type = B;
};

struct WindowCase : Layer {
    static constexpr bool L2_NORM = CASE_L2_NORM, SOFTPLUS = CASE_SOFTPLUS, BOUNDED = CASE_BOUNDED, TREE = CASE_TREE;
    static constexpr bool ALIGNED = CASE_ALIGNED;  // q, k and v of all tokens lie at multiples of 16 bytes
    static constexpr int TOKENS = CASE_TOKENS;     // of a window, at most
    static constexpr int SPAN = CASE_SPAN;         // tiles of an item, which share a key head
    static constexpr bool STAYS = CASE_STAYS;          // take item after item

    static constexpr int SHARERS = GROUP * D_V / ROWS;  // tiles that share a key head
    static constexpr int ITEM_HEADS = SPAN * ROWS > D_V ? SPAN * ROWS / D_V : 1;
    // What the state and the keys are multiplied with: q and, for the delta rule, k of each token, as columns.
    static constexpr int VECTORS = DELTA ? 2 : 1;
    static constexpr int COLUMNS = VECTORS * TOKENS;
    static constexpr int TILES = (COLUMNS + 7) / 8;  // right operands that they make
    static constexpr int WIDTH = ROWS < D_V ? ROWS : D_V;  // of a tile's rows, those in one head
    static constexpr int OWN = RPW / 8;                    // rows of a lane, consecutive ones
    // Rows that are read together have to lie in different banks of shared memory: a tile's rows come in parts, each 16
    // bytes further on than the part before ends, and eight rows that are read together are of eight parts. Likewise each
    // column and key.
    static constexpr int WARPS_OF_HEAD = WIDTH / RPW, PART = OWN * WARPS_OF_HEAD;
    static constexpr int PARTS_OF_TILE = ROWS / PART, PAD = 16 / static_cast<int>(sizeof(C));
    static constexpr int TILE_NUMBERS = ROWS * D_K + (PARTS_OF_TILE - 1) * PAD;
    static constexpr int PITCH = D_K + 16 / static_cast<int>(sizeof(X)), TERM_PITCH = D_K + PAD;
    static constexpr int CHANNEL_PITCH = D_K + 16;  // of float32 columns and keys
    static constexpr int RECORD_PITCH = COLUMNS + (COLUMNS >= 8 ? 2 : 0);
    // Products on the matrix units: as they are; as sums of three numbers in bfloat16; as sums of two in tf32.
    static constexpr bool EXACT_STATE = sizeof(C) == 2, EXACT_UPDATES = sizeof(U) == 2;
    static constexpr bool EXACT_KEYS = !CHANNEL && sizeof(X) == 2;  // and columns
    static constexpr bool SAME = EXACT_KEYS && same<C, X>::value;   // state and columns are of one type
    static constexpr int TERMS = SAME ? 0 : same<C, bf16>::value ? 3 : EXACT_KEYS ? 1 : 2;  // of a column's numbers
    using TERM = typename choose_type<same<C, bf16>::value, bf16, float>::type;
    static constexpr bool BF16_UPDATES = same<U, bf16>::value;
    static constexpr bool BF16_KEYS = !CHANNEL && same<X, bf16>::value;
    // Norms from the same product as the window's pairs, whose left operand then has the q, too.
    static constexpr bool PAIRED_NORMS = EXACT_KEYS && DELTA && TOKENS <= 8;
    static constexpr int PARTS = CHANNEL ? D_K / 32 : 1;  // in which products of keys and columns are summed
    static constexpr int KEYS = CHANNEL ? 1 : RING;       // of the ring that are copied to shared memory
    static constexpr int RECORD_HEADS = (ITEM_HEADS + WARPS - 1) / WARPS;  // whose records' decays are one warp's

    static_assert(!CHANNEL || DELTA, "there is no such layer");
    static_assert(RPW == 8 || RPW == 16 || RPW == 32, "a warp takes 8, 16 or 32 rows");
    static_assert(WIDTH % RPW == 0, "a warp's rows lie in one head");
    static_assert(SHARERS % SPAN == 0, "an item's tiles share a key head");
    static_assert(SPAN * ROWS % D_V == 0 || D_V % (SPAN * ROWS) == 0, "an item is a part of a head, or whole heads");
    static_assert(TOKENS <= 16 && TOKENS <= UNIT_ROWS, "windows are no longer");
};

// Which row of the batch, where its slot stands, whose checkpoint it reads, and how many tokens it has. Found in two
// steps, because the second wants the slot.
struct WindowRow {
    int row, slot, count, cursor, source;

    DEVICE bool used() const { return slot >= 0 && count > 0; }
    // So that the compiler knows that no warp diverges over it.
    DEVICE WindowRow same_in_lanes() const {
        return {same_in_warp(row), same_in_warp(slot), same_in_warp(count), same_in_warp(cursor), same_in_warp(source)};
    }
    template <class F> DEVICE bool folds() const { return cursor + count > F::RING; }
};

// What the records' updates are multiplied with: a right operand for every 16 of them, each number the sum of three in
// bfloat16, in pairs of records; or of two in tf32.
template <class F, bool PAIRS = F::BF16_UPDATES> struct RecordWeights {
    u32 pair[F::UNIT_ROWS / F::UNITS][3][F::UNITS / 2][F::COLUMNS];
};
template <class F> struct RecordWeights<F, false> {
    TwoTerms of[F::UNIT_ROWS][F::RECORD_PITCH];
};

// `shared_bytes` in windows.py counts the same.
template <class F> struct alignas(128) WindowMemory {
    typename F::C tile[F::TILE_NUMBERS];
    alignas(16) typename F::X x[2 * F::TOKENS][F::PITCH];  // columns; for the additive rule, the keys behind them
    alignas(16) typename F::X ring_k[F::KEYS][F::PITCH];
    alignas(16) typename F::TERM terms[F::TERMS ? F::TERMS : 1][F::TERMS ? F::COLUMNS : 1][F::TERMS ? F::TERM_PITCH : 8];
    // Channel gate: decayed keys of the ring and columns, decays of the checkpoint, log decays of the tokens.
    alignas(16) float keys[F::CHANNEL ? F::RING : 1][F::CHANNEL ? F::CHANNEL_PITCH : 4];
    float columns[F::CHANNEL ? F::COLUMNS : 1][F::CHANNEL ? F::CHANNEL_PITCH : 4];
    float channels[F::CHANNEL ? F::D_K : 4];
    float gates[F::CHANNEL ? F::TOKENS : 1][F::CHANNEL ? F::D_K : 4];
    RecordWeights<F> of_record[F::ITEM_HEADS];
    // What a row of the state multiplies S x, a token's u and its v with.
    float of_state[F::ITEM_HEADS][F::COLUMNS];
    float of_token[F::ITEM_HEADS][F::TOKENS][F::COLUMNS];
    float of_value[F::ITEM_HEADS][F::TOKENS];
    float scores[F::PARTS][F::RING][F::COLUMNS];   // k_j·x of the ring's keys
    float pairs[F::PARTS][F::TOKENS][F::COLUMNS];  // and of the window's
    // Head gate: decays of the records; e^γ_ij, [i][j].
    float after[F::ITEM_HEADS][F::CHANNEL ? 4 : F::UNIT_ROWS];
    float between[F::ITEM_HEADS][F::CHANNEL ? 1 : F::TOKENS][F::CHANNEL ? 4 : F::TOKENS];
    float decay[F::ITEM_HEADS][F::TOKENS];  // e^γ_i
    float input[F::ITEM_HEADS][F::TOKENS];  // β, or Δ of Mamba-2
    float q_norm[F::TOKENS], k_norm[F::TOKENS];
    float total[F::ITEM_HEADS];  // decay of the checkpoint
    WindowRow rows[4];           // of this item, of the next, and of the last, which some warp may still be at
    int last;
    u64 tile_comes;  // barrier
};

// Where a tile is, or an item from its first tile on: its first row in the slot, and that one's head and key head.
template <class F> struct WindowPlace {
    int first_row, head, key_head;

    DEVICE explicit WindowPlace(int tile)
        : first_row(tile * F::ROWS), head(first_row / F::D_V), key_head(head / F::GROUP) {}
};

// Where a warp's rows are in a tile: OWN consecutive ones in each of eight parts, those of part i for lanes 4i to 4i + 3.
template <class F> struct WarpRows {
    int first_part, in_part;

    DEVICE explicit WarpRows(int warp) {
        first_part = warp / F::WARPS_OF_HEAD * 8;
        in_part = warp % F::WARPS_OF_HEAD * F::OWN;
    }
    DEVICE int in_tile(int part) const { return (first_part + part) * F::PART + in_part; }
    DEVICE const typename F::C* in(const WindowMemory<F>& m, int part) const {
        return m.tile + (first_part + part) * (F::PART * F::D_K + F::PAD) + in_part * F::D_K;
    }
};

// Row j of the window's keys in shared memory.
template <class F> DEVICE const typename F::X* window_key(const WindowMemory<F>& m, int j) {
    return m.x[F::DELTA ? 2 * j + 1 : F::TOKENS + j];
}

// Token that token i follows, below i in any case, so that walks end; −1: the committed state.
template <class F> DEVICE int parent_of(const WindowParams& p, const WindowRow& at, int i) {
    int parent = i - 1;
    if (F::TREE) {
        const int given = p.parents[static_cast<i64>(at.row) * p.parents_row + i];
        parent = given < parent ? given : parent;
    }
    return parent < -1 ? -1 : parent;
}

// A part of a number that the matrix units take as it is; the rest stays.
template <class F> DEVICE typename F::TERM split_off(float& x) {
    if constexpr (same<typename F::TERM, bf16>::value) {
        const bf16 term = convert<bf16>::from(x);
        x -= to_float(term);
        return term;
    } else {
        const float term = F::TERMS > 1 ? as_float(two_terms(x).high) : x;
        x -= term;
        return term;
    }
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
