// What both kinds of kernels are compiled for: a layer, whose states are cut into tiles; and where its tensors lie.

struct Layer {
    static constexpr bool CHANNEL = CASE_CHANNEL;  // gate: one decay per key channel
    static constexpr bool DELTA = CASE_DELTA;      // rule
    using C = CASE_C;                              // types: checkpoint,
    using X = CASE_X;                              // activations,
    using U = CASE_U;                              // the ring's updates, its keys being X;
    using A = CASE_A;  // the gate's inputs and the parameters; none for those that aren't there
    using B = CASE_B;
    using RATE = CASE_RATE;
    using BIAS = CASE_BIAS;
    using D = CASE_D;
    using Z = CASE_Z;
    static constexpr int V_HEADS = CASE_V_HEADS, GROUP = CASE_GROUP, D_V = CASE_D_V, D_K = CASE_D_K;
    static constexpr int RING = CASE_RING;  // rows
    static constexpr int ROWS = CASE_ROWS;  // of a block's tile
    static constexpr int WARPS = CASE_WARPS, THREADS = 32 * WARPS;
    static constexpr bool EAGER = CASE_EAGER;  // fetch ring rows before the cursor says which are needed

    static constexpr int TILES_OF_SLOT = V_HEADS * D_V / ROWS;
    static constexpr int RPW = ROWS / WARPS;                   // rows of a warp
    static constexpr int MATRICES = (RPW + 15) / 16;           // left operands that they make
    static constexpr bool HALF = RPW == 8;                     // the lower eight rows of the only one are none
    static constexpr int HEADS = ROWS > D_V ? ROWS / D_V : 1;  // of a tile
    static constexpr int VECTOR = 16 / static_cast<int>(sizeof(C));  // consecutive columns of a lane
    static constexpr int UNITS = 16;                                 // records that are taken at once
    static constexpr int UNIT_ROWS = (RING + UNITS - 1) / UNITS * UNITS;
    static constexpr int GATES = CHANNEL ? D_K : 1;  // numbers of a record's log decay

    static_assert(ROWS % WARPS == 0 && (D_V % ROWS == 0 || ROWS % D_V == 0), "a tile is a part of a head, or whole heads");
    static_assert(GROUP % HEADS == 0 && V_HEADS % HEADS == 0, "a tile has one key head");
};

// A number in its own type, and as a float: 0 where there is none.
template <class T> DEVICE T fetched(const void* from, i64 at) {
    if constexpr (same<T, none>::value)
        return none{};
    else
        return static_cast<const T*>(from)[at];
}

template <class T> DEVICE float number(T x) {
    if constexpr (same<T, none>::value)
        return 0.0f;
    else
        return to_float(x);
}

template <class T> DEVICE float load_number(const void* from, i64 at) { return number(fetched<T>(from, at)); }

// Where a slot's own tensors lie. P: a kernel's arguments.
template <class F, class P> DEVICE typename F::C* checkpoint_of(const P& p, int slot, int first_row) {
    return static_cast<typename F::C*>(p.checkpoint) + static_cast<i64>(slot) * p.checkpoint_stride + first_row * F::D_K;
}

template <class F, class P> DEVICE typename F::X* ring_k_of(const P& p, int slot, int key_head) {
    return static_cast<typename F::X*>(p.ring_k) + static_cast<i64>(slot) * p.ring_k_stride +
           key_head * (F::RING * F::D_K);
}

// Of row `row` of the slot's states, which are numbered through over the heads.
template <class F, class P> DEVICE typename F::U* ring_u_of(const P& p, int slot, int row) {
    return static_cast<typename F::U*>(p.ring_u) + static_cast<i64>(slot) * p.ring_u_stride +
           (row / F::D_V * (F::RING * F::D_V) + row % F::D_V);
}

template <class F, class P> DEVICE float* ring_g_of(const P& p, int slot, int head) {
    return p.ring_g + static_cast<i64>(slot) * p.ring_g_stride + head * (F::RING * F::GATES);
}
