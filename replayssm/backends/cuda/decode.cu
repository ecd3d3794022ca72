// One decode step by replay, for both gates and both rules (equations: replayssm/backends/torch/decode.py, same letters);
// or a verify window of one token, which is the same but for what a flush folds.
//
// A slot's states are one matrix [H_v d_v, d_k]. An item is some of its rows; a block takes item after item. A block first
// works out what the item's rows share: the decays, and the products of the ring's keys with q and k. A thread answers
// for rows of its own. An output's order of summation depends on nothing but types and d_k, so neither batch nor cut
// changes a bit.

// The records' part of S q and S k, for the thread's own rows.
template <class F>
DEVICE void replay_records(const Memory<F>& m, const Row& at, int in_tile, int head, Pair (&sums)[F::OWN]) {
    using U = typename F::U;
    const U* ring_u = m.ring_u + head * (F::RING * F::WIDTH) + in_tile % F::WIDTH;
#pragma unroll 3  // with four, registers would be spilled
    for (int j = 0; j < at.cursor; ++j) {
        const auto record = *reinterpret_cast<const Few<U, F::OWN>*>(ring_u + j * F::WIDTH);
        const Pair score = m.scores[j];
        const float decay = F::CHANNEL ? 1.0f : m.after[head][j];
#pragma unroll
        for (int r = 0; r < F::OWN; ++r) {
            const float u = to_float(record.x[r]) * decay;
            sums[r].q = fmaf(u, score.q, sums[r].q);
            if (F::DELTA) sums[r].k = fmaf(u, score.k, sums[r].k);
        }
    }
}

template <class F> DEVICE bool must_flush(const Params& p, const Row& at) {
    if (F::WINDOW) return at.cursor == F::RING;
    bool flush = at.cursor >= p.flush_period - 1;
    if (F::FORCE_BYTES == 1) flush |= static_cast<const unsigned char*>(p.force_flush)[at.row] != 0;
    if (F::FORCE_BYTES == 4) flush |= static_cast<const int*>(p.force_flush)[at.row] != 0;
    return flush;
}

// Where this token's record goes.
template <class F> DEVICE int ring_row(const Row& at) { return F::WINDOW && at.flush ? 0 : at.cursor; }

// Output and record of the thread's rows, from S q and S k. Leaves the update in m.sums for a flush.
template <class F>
DEVICE void finish_rows(const Params& p, Memory<F>& m, const Row& at, int row, int in_tile, const Head& h,
                        const Products& shared, const Inputs<F>& in, const Pair (&ring)[F::OWN]) {
    Few<typename F::X, F::OWN> out;
    Few<typename F::U, F::OWN> record;
#pragma unroll
    for (int r = 0; r < F::OWN; ++r) {
        const float v = to_float(in.v[r]), apart = F::WINDOW && !F::CHANNEL ? h.token : 1.0f;
        const Pair state = m.sums[in_tile + r];
        const float sq = fmaf(state.q, h.total, ring[r].q) * apart;
        float y, update, kept;
        if (F::DELTA) {
            const float sk = fmaf(state.k, h.total, ring[r].k) * apart;
            const float change = h.beta * (v - shared.k_norm * sk);
            update = change * shared.k_norm;
            y = fmaf(update, shared.kq, sq) * (shared.q_norm * p.scale);
            kept = F::NORMAL_KEYS ? change : update;
        } else {
            update = h.input * v;
            y = fmaf(update, shared.kq, sq);
            if (!same<typename F::D, none>::value) y = fmaf(number(in.skip[r]), v, y);
            if (!same<typename F::Z, none>::value) y *= number(in.z[r]) * sigmoid(number(in.z[r]));
            kept = F::INPUT_RECORDS ? v : update;
        }
        out.x[r] = convert<typename F::X>::from(y);
        record.x[r] = convert<typename F::U>::from(bounded_update<typename F::U>(kept));
        m.sums[in_tile + r].q = update;
    }
    auto* y = static_cast<typename F::X*>(p.y) + static_cast<i64>(at.row) * (F::V_HEADS * F::D_V) + row;
    *reinterpret_cast<Few<typename F::X, F::OWN>*>(y) = out;
    if (!at.flush || F::WINDOW) {  // here the row is the thread's own, so that a flush need not wait for others to read it
        typename F::U* ring_u = ring_u_of<F>(p, at.slot, row) + ring_row<F>(at) * F::D_V;
        *reinterpret_cast<Few<typename F::U, F::OWN>*>(ring_u) = record;
    }
}

// What an item's rows share, from staged inputs and the ring's keys: decays and products. All threads together.
template <class F>
DEVICE void prepare(const Params& p, Memory<F>& m, const Row& at, int first_head, bool append, u32 phase,
                    const GateInputs<F>& gate, int warp, int lane) {
    const bool last_warp = warp == F::WARPS - 1;
    if (last_warp) share_products<F>(m, lane);
    if constexpr (F::CHANNEL) {
        channel_decays<F>(p, m, at, first_head, append, gate, phase);
    } else {
        if (warp < F::HEADS) head_decays<F>(p, m, at, first_head + warp, warp, append, gate, lane);
        for (int n = warp + F::WARPS; n < F::HEADS; n += F::WARPS) {
            GateInputs<F> other;
            other.fetch(p, at, first_head + n, at.cursor, lane);
            head_decays<F>(p, m, at, first_head + n, n, append, other, lane);
        }
    }
    barrier_wait(&m.keys_come, phase);
    if constexpr (F::SPLIT) {
        if (F::CHANNEL && same<typename F::C, f16>::value) sync_block();  // its scale looks at all channels
        split_into_terms<F>(m, lane);
    }
    if (F::CHANNEL || F::SPLIT) sync_block();
    if constexpr (F::MATRIX_SCORES) {
        if (last_warp) matrix_scores<F>(m, at, lane);
    } else {
        share_scores<F>(m, at, warp, lane);
    }
}

// This token's key into the ring.
template <class F> DEVICE void append_key(const Params& p, const Memory<F>& m, const Row& at, int key_head) {
    const float factor = F::DELTA && F::NORMAL_KEYS ? m.products.k_norm : 1.0f;
    typename F::X* to = ring_k_of<F>(p, at.slot, key_head) + ring_row<F>(at) * F::D_K;
#pragma unroll 1
    for (int c = threadIdx.x; c < F::D_K; c += F::THREADS)
        to[c] = convert<typename F::X>::from(to_float(m.k[c]) * factor);
}

// A window's key and decays go where the records were that it folds. Other blocks may still read these, so it is the last
// of a key head's blocks to come that puts them there. Whether this one is, which has read what it needs and then waited
// at a barrier.
template <class F> DEVICE bool comes_last(const Params& p, Memory<F>& m, const Row& at, int key_head) {
    constexpr int SHARERS = F::GROUP * F::D_V / F::ROWS;
    if (SHARERS == 1) return true;
    if (threadIdx.x == 0) {
        int* arrivals = p.arrivals + static_cast<i64>(at.slot) * (F::V_HEADS / F::GROUP) + key_head;
        m.products.last = count_arrival(arrivals) == SHARERS - 1;
        if (m.products.last) *arrivals = 0;
    }
    sync_block();
    return m.products.last;
}

// The decays of all heads of a key head, into the ring's first row.
template <class F> DEVICE void append_decays(const Params& p, const Row& at, int key_head) {
#pragma unroll 1
    for (int n = threadIdx.x; n < F::GROUP * F::GATES; n += F::THREADS) {
        const int head = key_head * F::GROUP + n / F::GATES, channel = n % F::GATES;
        ring_g_of<F>(p, at.slot, head)[channel] = token_log_decay<F>(p, at.row, head, channel);
    }
}

// An item without a slot.
template <class F> DEVICE void pad(const Params& p, const Item<F>& item) {
    using X = typename F::X;
    if (!F::ZERO_PADDING) return;
    X* y = static_cast<X*>(p.y) + static_cast<i64>(item.row()) * (F::V_HEADS * F::D_V) + item.first_row();
    for (int i = threadIdx.x; i < F::ROWS; i += F::THREADS) y[i] = convert<X>::from(0.0f);
}

template <class F> DEVICE void multiply_tile(Memory<F>& m, const Thread<F>& me) {
    if constexpr (F::MATRIX)
        multiply_matrix<F>(m, me.warp, me.lane);
    else
        multiply<F>(m, me.warp, me.lane);
}

template <class F> DEVICE void decode(const Params& p, Memory<F>& m) {
    Item<F> now{static_cast<u32>(blockIdx.x)};
    now.slot = Slot<F>(p, now.number, true).used();
    Inputs<F> in;
    GateInputs<F> gate;
    u32 phases;  // of the barriers: the lowest bit that of the tile's, the next that of the others
    {
        const Thread<F> me(threadIdx.x);
        in.fetch_keys(p, now);
        if (me.owner) in.fetch_rows(p, now, me.in_tile);
        phases = start<F>(p, m, now, me);
        fetch_gate<F>(p, now, F::EAGER ? F::RING : now.cursor, me, gate);
    }
    Slot<F> ahead(p, now.number + p.blocks, F::STAYS);

#pragma unroll 1
    while (true) {
        const Thread<F> me(fresh(threadIdx.x));
        Item<F> next{now.number + p.blocks, ahead.used()};
        if (F::STAYS) {
            next.look_up(p);
            ahead = Slot<F>(p, next.number + p.blocks, true);
        }
        in.stage_keys(m);
        if (F::STAYS && next.number < p.items) in.fetch_keys(p, next);
        sync_block();

        bool early = false;  // whether the next copies have started
        if (now.slot < 0) {
            pad<F>(p, now);
            if (F::STAYS) fetch_gate<F>(p, next, next.cursor, me, gate);
        } else {
            Row at = now.at();
            at.flush = must_flush<F>(p, at);
            const int first_head = now.first_head(), head = F::HEADS > 1 && me.owner ? me.in_tile / F::D_V : 0;
            const bool append = !at.flush && (F::ROWS >= F::D_V || now.first_row() % F::D_V == 0);
            Pair ring[F::OWN] = {};
            prepare<F>(p, m, at, first_head, append, phases >> 1, gate, me.warp, me.lane);
            if (!F::STAYS) {  // the tile comes last
                sync_block();
                barrier_wait(&m.updates_come, phases >> 1);
                if (me.owner) replay_records<F>(m, at, me.in_tile, head, ring);
            }
            barrier_wait(&m.tile_comes, phases & 1);
            multiply_tile<F>(m, me);
            if (F::STAYS) {  // it is used, and makes room for the next
                if (F::CHANNEL) fence_copies();  // the keys were written where log decays come next
                sync_block();
                early = !at.flush;
                if (early && next.slot >= 0) {
                    if (me.copies_tile()) copy_tile<F>(p, m, next, next.source);
                    if (me.copies_keys()) copy_keys<F>(p, m, next, next.cursor);
                }
                fetch_gate<F>(p, next, next.cursor, me, gate);
                barrier_wait(&m.updates_come, phases >> 1);
                if (me.owner) replay_records<F>(m, at, me.in_tile, head, ring);
            }
            bool appends = append && first_head % F::GROUP == 0;
            if (F::WINDOW && at.flush) {
                appends = comes_last<F>(p, m, at, first_head / F::GROUP);
                if (appends) append_decays<F>(p, at, first_head / F::GROUP);
            }
            if (appends) append_key<F>(p, m, at, first_head / F::GROUP);
            sync_warp();
            if (me.owner)
                finish_rows<F>(p, m, at, now.first_row() + me.in_tile, me.in_tile, m.heads[head], m.products, in, ring);
            sync_warp();
            if (at.flush) fold_tile<F>(m, at, checkpoint_of<F>(p, at.slot, now.first_row()), me.warp, me.lane);
            phases ^= 3;
            if (F::STAYS) sync_block();
        }
        if (!F::STAYS || next.number >= p.items) return;
        now = next;
        if (now.slot >= 0) {
            if (!early && me.copies_tile()) copy_tile<F>(p, m, now, now.source);
            if (!early && me.copies_keys()) copy_keys<F>(p, m, now, now.cursor);
            if (me.copies_updates()) copy_updates<F>(p, m, now, now.cursor, me.lane);
        }
        if (me.owner) in.fetch_rows(p, now, me.in_tile);
    }
}

KERNEL(replayssm_decode, Params, Memory<Case>, decode<Case>)
