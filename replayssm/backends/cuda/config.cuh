// What a decode kernel is compiled for, its arguments, and a block's shared memory.

// As `_PARAMS` in decode.py. Strides in elements.
struct Params {
    const void *q, *k, *v, *a, *b, *rate, *bias, *d, *z;
    void *y, *checkpoint, *ring_u, *ring_k;
    float* ring_g;
    const int *write_pos, *checkpoint_slot, *slots;
    const int* num_tokens;  // of a window, as are the arrivals; of a fold, the slots that it writes
    const void* force_flush;
    int* arrivals;  // [N, H_k], zeros between launches
    int q_row, q_head, k_row, k_head, v_row, v_head, a_row, a_head, b_row, b_head, z_row, z_head, d_head, d_dim;
    int checkpoint_stride, ring_u_stride, ring_k_stride, ring_g_stride;
    float scale, beta_scale, lower_bound, dt_min, dt_max;
    int flush_period;
    u32 items, blocks;  // tiles in the whole batch; blocks, each of which takes every blocks-th of them
};

// Everything that is the same in each step of a layer is a constant here: a block runs so few instructions for each
// byte that working it out costs as much as the arithmetic. (On an H200, a step of 256 rows of Gated DeltaNet took 133 µs
// with options, group and ring length read at run time and more warps for a tile; 90 µs without.)
struct Case : Layer {
    static constexpr bool L2_NORM = CASE_FLAGS & 1, SOFTPLUS = CASE_FLAGS & 2, BOUNDED = CASE_FLAGS & 4;
    static constexpr bool ROW_CURSORS = CASE_FLAGS & 8;     // write_pos is [B], and each slot reads its own checkpoint
    static constexpr bool NORMAL_KEYS = CASE_FLAGS & 16;    // a record is (u, k, g) with the normalised key
    static constexpr bool INPUT_RECORDS = CASE_FLAGS & 32;  // a record is (x, B, Δ)
    static constexpr bool ZERO_PADDING = CASE_FLAGS & 64;
    // The token is a verify window: a row flushes where its ring is full, and then its committed records alone.
    static constexpr bool WINDOW = CASE_FLAGS & 128;
    // There is no token: only the records are folded, which is written to other slots, or as float32.
    static constexpr bool FOLD = CASE_FLAGS & 256, TO_SLOTS = CASE_FLAGS & 512;
    static constexpr int FORCE_BYTES = CASE_FORCE_BYTES;  // of a flag in force_flush, 0 without
    static constexpr bool STAYS = CASE_STAYS;  // take tile after tile

    static constexpr int OWN = RPW > 32 ? RPW / 32 : 1;        // rows of a thread, one after the other
    static constexpr int WIDTH = ROWS < D_V ? ROWS : D_V;      // of a tile's rows, those in one head
    static constexpr int COLUMNS = 16;                         // of a lane, in sums over rows
    static constexpr int LANES = D_K / COLUMNS;                // that share a row
    static constexpr int PASS = 32 / LANES;                    // rows that a warp reads at once
    static constexpr int PIECES = COLUMNS / VECTOR;
    // Products on the matrix units: of a 16-bit checkpoint with q and k; of 16-bit keys with q and k.
    static constexpr bool MATRIX = sizeof(C) == 2;
    static constexpr bool MATRIX_SCORES = !CHANNEL && sizeof(X) == 2;
    // Whether q and k are numbers of the checkpoint's type, or have to be sums of three such.
    static constexpr bool EXACT = !CHANNEL && same<C, X>::value;
    static constexpr bool SPLIT = MATRIX && !EXACT;
    // In a flush: updates and keys as sums of so many numbers in bfloat16, which leaves 2^-24 or, where the checkpoint
    // itself has 16 bits, 2^-16.
    static constexpr int UPDATE_TERMS = sizeof(C) == 4 || FOLD ? 3 : 2;
    static constexpr int KEY_TERMS = !CHANNEL && same<X, bf16>::value ? 1 : UPDATE_TERMS;

    static_assert(WARPS > 1, "one warp has the decays to work out, another the products");
    static_assert(RPW % PASS == 0, "rows don't divide into passes of warps");
    static_assert(RPW <= 32 || RPW == 64 || RPW == 128, "rows don't divide into those of threads");
    static_assert(RPW % 16 == 0 || RPW == 8, "a matrix product takes 16 rows, or 8 and nothing");
    static_assert(HEADS == 1 || (!CHANNEL && D_V % 16 == 0), "a pass lies in one head");
};

struct alignas(8) Pair {
    float q, k;
};

// What a block's rows share.
struct alignas(16) Products {
    float kq, q_norm, k_norm;
    int last;  // whether the block was the last of its key head's to come
};

struct alignas(16) Head {
    float total;  // decay of the checkpoint
    float beta;
    float input;  // Δ of Mamba-2
    float token;  // this token's decay, where the others don't include it
};

// Channel gate, a window that flushes: decays of the checkpoint to the last record, and of this token.
template <class F, bool = F::CHANNEL && F::WINDOW> struct FoldDecays {};
template <class F> struct FoldDecays<F, true> {
    float committed[F::D_K], token[F::D_K];
};

// `shared_bytes` in blocks.py counts the same.
template <class F> struct alignas(128) Memory : FoldDecays<F> {
    typename F::C tile[F::ROWS * F::D_K];
    // The committed records. A channel gate's log decays make way for the decayed keys.
    typename F::X ring_k[F::RING * F::D_K];
    typename F::U ring_u[F::HEADS * F::RING * F::WIDTH];
    float keys[F::CHANNEL ? F::RING * F::D_K : 4];
    float total[F::CHANNEL ? F::D_K : 4];  // and the decay of the checkpoint
    typename F::X q[F::D_K], k[F::D_K];
    typename F::C terms[F::SPLIT ? 6 : 1][F::SPLIT ? F::D_K : 8];  // of q, of k, the next of q, ...
    Pair sums[F::ROWS];                                    // S q and S k of a tile
    Pair scores[F::UNIT_ROWS];                             // k_j·q and k_j·k
    float after[F::HEADS][F::CHANNEL ? 4 : F::UNIT_ROWS];  // head gate: decays of the records
    Products products;
    Head heads[F::HEADS];
    u64 keys_come, updates_come, tile_comes;  // barriers
};

// Which row of the batch, and where its slot stands.
struct Row {
    int row, slot, cursor;
    bool flush;
};
