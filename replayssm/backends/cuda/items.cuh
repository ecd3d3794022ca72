// Items, and how what they need comes to a block: rows and records by bulk copies into shared memory, which start as soon
// as the block has room; slot, cursor and the token's inputs into registers, one item ahead.

// Some rows of a slot's states, and what must be known before their copies can start.
template <class F> struct Item {
    u32 number;
    int slot, cursor, source;

    DEVICE Row at() const { return Row{static_cast<int>(row()), slot, cursor, false}; }
    // Of the batch. (Were a window's kept, other registers would be spilled.)
    DEVICE u32 row() const { return (F::WINDOW ? fresh(number) : number) / F::TILES_OF_SLOT; }
    DEVICE u32 first_row() const { return number % F::TILES_OF_SLOT * F::ROWS; }
    DEVICE u32 first_head() const { return first_row() / F::D_V; }
    DEVICE void look_up(const Params& p) {
        if (slot < 0) return;
        constexpr bool ROW_CURSOR = F::ROW_CURSORS;
        cursor = p.write_pos[ROW_CURSOR ? row() : slot];
        source = ROW_CURSOR ? slot : p.checkpoint_slot[slot];
    }
};

// An item's slot as it comes from memory: what is done with it waits for it.
template <class F> struct Slot {
    int slot, tokens;

    DEVICE Slot(const Params& p, u32 number, bool wanted) {
        const u32 row = number / F::TILES_OF_SLOT;
        const bool there = wanted && number < p.items;
        slot = there ? p.slots[row] : -1;
        if (F::WINDOW) tokens = there ? p.num_tokens[row] : 0;
    }
    DEVICE int used() const { return F::WINDOW && tokens <= 0 ? -1 : slot; }
};

// Where a thread stands.
template <class F> struct Thread {
    int warp, lane;
    int in_tile;  // the first of its own rows
    bool owner;   // whether there are any

    explicit DEVICE Thread(u32 number) {
        warp = number / 32;
        lane = number % 32;
        in_tile = warp * F::RPW + lane * F::OWN;
        owner = F::RPW >= 32 || lane < F::RPW;
    }
    // The first warp has the decays to work out, the last the products.
    DEVICE bool copies_tile() const { return warp == 1 && lane == 0; }
    DEVICE bool copies_keys() const { return warp == 2 % F::WARPS && lane == 0; }
    DEVICE bool copies_updates() const { return warp == 1; }
};

// By one thread.
template <class F> DEVICE void copy_tile(const Params& p, Memory<F>& m, const Item<F>& item, int source) {
    bulk_copy(m.tile, checkpoint_of<F>(p, source, item.first_row()), sizeof(m.tile), &m.tile_comes);
}

// By one thread: the first rows of the ring's keys, and of a channel gate's log decays.
template <class F> DEVICE void copy_keys(const Params& p, Memory<F>& m, const Item<F>& item, int rows) {
    constexpr u32 KEY = F::D_K * sizeof(typename F::X), GATES = F::CHANNEL ? F::D_K * sizeof(float) : 0;
    expect_copies(&m.keys_come, rows * (KEY + GATES));
    if (rows == 0) return;
    const int head = item.first_head();
    bulk_copy_part(m.ring_k, ring_k_of<F>(p, item.slot, head / F::GROUP), rows * KEY, &m.keys_come);
    if (F::CHANNEL) bulk_copy_part(m.keys, ring_g_of<F>(p, item.slot, head), rows * GATES, &m.keys_come);
}

// By one warp: of the ring's updates.
template <class F> DEVICE void copy_updates(const Params& p, Memory<F>& m, const Item<F>& item, int rows, int lane) {
    constexpr u32 PIECE = F::WIDTH * sizeof(typename F::U);
    if (lane == 0) expect_copies(&m.updates_come, rows * (F::HEADS * PIECE));
    sync_warp();
    if (rows == 0) return;
    if constexpr (F::WIDTH == F::D_V) {
        if (lane < F::HEADS)
            bulk_copy_part(m.ring_u + lane * (F::RING * F::WIDTH),
                           ring_u_of<F>(p, item.slot, item.first_row() + lane * F::D_V), rows * PIECE,
                           &m.updates_come);
    } else {
        const typename F::U* from = ring_u_of<F>(p, item.slot, item.first_row());
        for (int j = lane; j < rows; j += 32)
            bulk_copy_part(m.ring_u + j * F::WIDTH, from + j * F::D_V, PIECE, &m.updates_come);
    }
}

template <class F>
DEVICE void copy_records(const Params& p, Memory<F>& m, const Item<F>& item, int rows, const Thread<F>& me) {
    if (me.copies_keys()) copy_keys<F>(p, m, item, rows);
    if (me.copies_updates()) copy_updates<F>(p, m, item, rows, me.lane);
}

// A token's inputs: what a thread's own rows have of them, and its share of q and k.
template <class F> struct Inputs {
    static constexpr int SHARE = (F::D_K + F::THREADS - 1) / F::THREADS;
    typename F::X v[F::OWN];
    typename F::Z z[F::OWN];
    typename F::D skip[F::OWN];
    typename F::X q[SHARE], k[SHARE];

    static DEVICE bool has(int column) { return F::D_K % F::THREADS == 0 || column < F::D_K; }

    DEVICE void fetch_rows(const Params& p, const Item<F>& at, int in_tile) {
        const u32 head = (at.first_row() + in_tile) / F::D_V, dim = (at.first_row() + in_tile) % F::D_V;
#pragma unroll
        for (int r = 0; r < F::OWN; ++r) {
            v[r] = fetched<typename F::X>(p.v, static_cast<i64>(at.row()) * p.v_row + head * p.v_head + dim + r);
            z[r] = fetched<typename F::Z>(p.z, static_cast<i64>(at.row()) * p.z_row + head * p.z_head + dim + r);
            skip[r] = fetched<typename F::D>(p.d, static_cast<i64>(head) * p.d_head + (dim + r) * p.d_dim);
        }
    }
    DEVICE void fetch_keys(const Params& p, const Item<F>& at) {
        using X = typename F::X;
        const int head = at.first_head() / F::GROUP;
        const X* from_q = static_cast<const X*>(p.q) + static_cast<i64>(at.row()) * p.q_row + head * p.q_head;
        const X* from_k = static_cast<const X*>(p.k) + static_cast<i64>(at.row()) * p.k_row + head * p.k_head;
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            const int column = n * F::THREADS + threadIdx.x;
            if (!has(column)) continue;
            q[n] = from_q[column];
            k[n] = from_k[column];
        }
    }
    DEVICE void stage_keys(Memory<F>& m) const {
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            const int column = n * F::THREADS + threadIdx.x;
            if (!has(column)) continue;
            m.q[column] = q[n];
            m.k[column] = k[n];
        }
    }
};

// What a gate is made from, for an item of which the first `rows` rows of the ring may be read.
template <class F>
DEVICE void fetch_gate(const Params& p, const Item<F>& item, int rows, const Thread<F>& me, GateInputs<F>& in) {
    if (item.slot < 0 || (!F::CHANNEL && me.warp >= F::HEADS)) return;
    in.fetch(p, item.at(), item.first_head() + (F::CHANNEL ? 0 : me.warp), rows, me.lane);
}

// The first item's copies. Where blocks stay, all of them start at once: the records come first, so that nobody waits for
// his behind the tiles of all. Elsewhere the tile's starts from the slot's own checkpoint, where it nearly always lies,
// before it is known to; whether it had to be made again.
template <class F> DEVICE bool start(const Params& p, Memory<F>& m, Item<F>& item, const Thread<F>& me) {
    if (threadIdx.x == 0) {
        barrier_init(&m.keys_come);
        barrier_init(&m.updates_come);
        barrier_init(&m.tile_comes);
    }
    sync_block();
    if (item.slot < 0) return false;
    if (F::STAYS && !F::EAGER) {
        item.look_up(p);
        copy_records<F>(p, m, item, item.cursor, me);
        if (me.copies_tile()) copy_tile<F>(p, m, item, item.source);
        return false;
    }
    if (me.copies_tile()) copy_tile<F>(p, m, item, item.slot);
    if (F::EAGER) copy_records<F>(p, m, item, F::RING, me);
    item.look_up(p);
    if (!F::EAGER) copy_records<F>(p, m, item, item.cursor, me);
    if (item.source == item.slot) return false;
    if (me.copies_tile()) {
        barrier_wait(&m.tile_comes, 0);
        copy_tile<F>(p, m, item, item.source);
    }
    return true;
}
