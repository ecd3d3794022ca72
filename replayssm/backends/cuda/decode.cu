// One decode step by replay, for both gates and both rules (equations: replayssm/backends/torch/decode.py, same letters).
//
// A slot's states are one matrix [H_v d_v, d_k]. A block takes some of its rows, tile after tile; bulk copies bring the
// next tiles in while it works on one. Before the first it computes what its rows share: the products of the ring's
// keys with q and k, and the decays. A thread answers for rows of its own. An output's order of summation depends on
// nothing but types and d_k, so neither batch nor cut changes a bit.

// Updates of 16 records, for the thread's rows.
template <class F> struct Updates {
    Few<typename F::U, F::OWN> record[F::UNITS];

    DEVICE void fetch(const typename F::U* ring_u, int first, int rows, bool owner) {
#pragma unroll
        for (int i = 0; i < F::UNITS; ++i)
            if (owner && first + i < rows)
                record[i] = *reinterpret_cast<const Few<typename F::U, F::OWN>*>(ring_u + (first + i) * F::D_V);
    }
};

// The records' part of S q and S k, for the thread's own rows.
template <class F>
DEVICE void replay_records(const Row& at, const Pair* scores, const float* after, const typename F::U* ring_u,
                           Updates<F>& updates, bool owner, Pair (&sums)[F::OWN]) {
    for (int first = 0; first < at.cursor; first += F::UNITS) {
        if (first) updates.fetch(ring_u, first, at.cursor, owner);
#pragma unroll
        for (int i = 0; i < F::UNITS; ++i) {
            if (first + i < at.cursor) {
                const Pair score = scores[first + i];
                const float decay = F::CHANNEL ? 1.0f : after[first + i];
#pragma unroll
                for (int r = 0; r < F::OWN; ++r) {
                    const float u = to_float(updates.record[i].x[r]) * decay;
                    sums[r].q = fmaf(u, score.q, sums[r].q);
                    if (F::DELTA) sums[r].k = fmaf(u, score.k, sums[r].k);
                }
            }
        }
    }
}

// What a thread's own rows have of a token's inputs.
template <class F> struct Inputs {
    float v[F::OWN], z[F::OWN], skip[F::OWN];

    DEVICE void fetch(const Params& p, const Row& at, int row) {
        const int head = row / F::D_V, dim = row % F::D_V;
#pragma unroll
        for (int r = 0; r < F::OWN; ++r) {
            v[r] = load<typename F::X>(p.v, static_cast<i64>(at.row) * p.v_row + head * p.v_head + dim + r);
            z[r] = load<typename F::Z>(p.z, static_cast<i64>(at.row) * p.z_row + head * p.z_head + dim + r);
            skip[r] = load<typename F::D>(p.d, static_cast<i64>(head) * p.d_head + (dim + r) * p.d_dim);
        }
    }
};

template <class F> DEVICE bool must_flush(const Params& p, const Row& at) {
    bool flush = at.cursor >= p.flush_period - 1;
    if (F::FORCE_BYTES == 1) flush |= static_cast<const unsigned char*>(p.force_flush)[at.row] != 0;
    if (F::FORCE_BYTES == 4) flush |= static_cast<const int*>(p.force_flush)[at.row] != 0;
    return flush;
}

// Output and record of the thread's rows, from S q and S k. Leaves the update in m.sums for a flush.
template <class F>
DEVICE void finish_rows(const Params& p, Memory<F>& m, const Row& at, int row, int in_tile, const Head& h,
                        const Products& shared, const Inputs<F>& in, const Pair (&ring)[F::OWN]) {
    Few<typename F::X, F::OWN> out;
    Few<typename F::U, F::OWN> record;
#pragma unroll
    for (int r = 0; r < F::OWN; ++r) {
        const Pair state = m.sums[in_tile + r];
        const float sq = fmaf(state.q, h.total, ring[r].q);
        float y, update, kept;
        if (F::DELTA) {
            const float sk = fmaf(state.k, h.total, ring[r].k);
            const float change = h.beta * (in.v[r] - shared.k_norm * sk);
            update = change * shared.k_norm;
            y = fmaf(update, shared.kq, sq) * (shared.q_norm * p.scale);
            kept = F::FLAGS & NORMAL_KEYS ? change : update;
        } else {
            update = h.input * in.v[r];
            y = fmaf(update, shared.kq, sq);
            if (!same<typename F::D, none>::value) y = fmaf(in.skip[r], in.v[r], y);
            if (!same<typename F::Z, none>::value) y *= in.z[r] * sigmoid(in.z[r]);
            kept = F::FLAGS & INPUT_RECORDS ? in.v[r] : update;
        }
        // u holds the factor that normalises k: infinity would stay for good
        if (same<typename F::U, f16>::value) kept = fminf(fmaxf(kept, -65504.0f), 65504.0f);
        out.x[r] = convert<typename F::X>::from(y);
        record.x[r] = convert<typename F::U>::from(kept);
        m.sums[in_tile + r].q = update;
    }
    auto* y = static_cast<typename F::X*>(p.y) + static_cast<i64>(at.row) * (F::V_HEADS * F::D_V) + row;
    *reinterpret_cast<Few<typename F::X, F::OWN>*>(y) = out;
    if (!at.flush)
        *reinterpret_cast<Few<typename F::U, F::OWN>*>(ring_u_of<F>(p, at.slot, row) + at.cursor * F::D_V) = record;
}

// q and k of a part's key heads into shared memory.
template <class F> DEVICE void stage_inputs(const Params& p, Memory<F>& m, const Row& at, int key_head) {
    using X = typename F::X;
    const X* q = static_cast<const X*>(p.q) + static_cast<i64>(at.row) * p.q_row + key_head * p.q_head;
    const X* k = static_cast<const X*>(p.k) + static_cast<i64>(at.row) * p.k_row + key_head * p.k_head;
#pragma unroll
    for (int n = 0; n < F::KEY_HEADS * F::D_K; n += F::THREADS) {
        const int i = n + threadIdx.x, local = i / F::D_K, c = i % F::D_K;
        if (F::KEY_HEADS * F::D_K % F::THREADS == 0 || i < F::KEY_HEADS * F::D_K) {
            m.q[local][c] = q[local * p.q_head + c];
            m.k[local][c] = k[local * p.k_head + c];
        }
    }
}

// What a part's rows share, from staged inputs: decays and products. `keys`: of the warp's first key head.
template <class F>
DEVICE void prepare(const Params& p, Memory<F>& m, const Row& at, int first_head, bool append, KeyTile<F>& keys, int warp,
                    int lane) {
    const int key_head = first_head / F::GROUP;
    if constexpr (!F::CHANNEL)
        for (int n = warp; n < F::PART_HEADS; n += F::WARPS)
            head_decays<F>(p, m, at, first_head + n, n, append, lane);
    for (int n = F::WARPS - 1 - warp; n < F::KEY_HEADS; n += F::WARPS) {
        share_products<F>(m, n, lane);
        if constexpr (F::MATRIX_SCORES) {
            const typename F::K* ring_k = ring_k_of<F>(p, at.slot, key_head + n);
            const Vectors<F::D_K> vectors = plain_vectors<F>(m, n, lane);
            if (n >= F::WARPS) keys.fetch(ring_k, 0, at.cursor, lane);
            keys.multiply(m.scores[n], vectors, 0, at.cursor, lane);
            for (int first = 16; first < at.cursor; first += 16) {
                keys.fetch(ring_k, first, at.cursor, lane);
                keys.multiply(m.scores[n], vectors, first, at.cursor, lane);
            }
        }
    }
    if constexpr (F::SPLIT)
        for (int n = 0; n < F::KEY_HEADS; ++n) split_into_terms<F>(m, n, lane);
    if constexpr (!F::MATRIX_SCORES)
        for (int n = 0; n < F::KEY_HEADS; ++n)
            share_scores<F>(m, at, ring_k_of<F>(p, at.slot, key_head + n), n, warp, lane);
}

// This token's keys into the ring.
template <class F> DEVICE void append_keys(const Params& p, const Memory<F>& m, const Row& at, int key_head) {
#pragma unroll 1
    for (int i = threadIdx.x; i < F::KEY_HEADS * F::D_K; i += F::THREADS) {
        const int local = i / F::D_K, c = i % F::D_K;
        const float factor = F::DELTA && (F::FLAGS & NORMAL_KEYS) ? m.products[local].k_norm : 1.0f;
        ring_k_of<F>(p, at.slot, key_head + local)[at.cursor * F::D_K + c] =
            convert<typename F::K>::from(to_float(m.k[local][c]) * factor);
    }
}

template <class F> DEVICE void decode(const Params& p, Memory<F>& m) {
    using X = typename F::X;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Row at;
    at.row = blockIdx.y;
    at.slot = p.slots[at.row];
    const int span_row = blockIdx.x * F::SPAN;
    const int span_head = span_row / F::D_V;
    stage_inputs<F>(p, m, at, span_head / F::GROUP);
    if (at.slot < 0) {
        X* y = static_cast<X*>(p.y) + static_cast<i64>(at.row) * (F::V_HEADS * F::D_V) + span_row;
        if (F::FLAGS & ZERO_PADDING)
            for (int i = threadIdx.x; i < F::SPAN; i += F::THREADS) y[i] = convert<X>::from(0.0f);
        return;
    }

    // The copies start from the slot's own checkpoint, where it nearly always lies, before it is known to.
    constexpr bool ROW_CURSOR = F::FLAGS & ROW_CURSORS;
    const auto copy = [&](int tile, int slot) {
        bulk_copy(m.tile[tile % F::STAGES], checkpoint_of<F>(p, slot, span_row + tile * F::ROWS), sizeof(m.tile[0]),
                  m.barrier + tile % F::STAGES);
    };
    if (threadIdx.x == 0) {
#pragma unroll
        for (int n = 0; n < F::STAGES; ++n) {
            barrier_init(m.barrier + n);
            copy(n, at.slot);
        }
    }
    at.cursor = p.write_pos[ROW_CURSOR ? at.row : at.slot];
    const int source = ROW_CURSOR ? at.slot : p.checkpoint_slot[at.slot];
    const int readable = F::EAGER ? F::RING : at.cursor;

    const int in_tile = warp * F::RPW + lane * F::OWN;  // the first of the thread's own rows
    const bool owner = F::RPW >= 32 || lane < F::RPW;
    Updates<F> updates;
    Inputs<F> in;
    KeyTile<F> keys;
    if constexpr (F::MATRIX_SCORES)
        if (F::WARPS - 1 - warp < F::KEY_HEADS)
            keys.fetch(ring_k_of<F>(p, at.slot, span_head / F::GROUP + F::WARPS - 1 - warp), 0, readable, lane);
    const auto fetch_updates = [&] { updates.fetch(ring_u_of<F>(p, at.slot, span_row + in_tile), 0, readable, owner); };
    if (!F::CHANNEL) fetch_updates();
    if (owner) in.fetch(p, at, span_row + in_tile);
    at.flush = must_flush<F>(p, at);
    const bool redo = source != at.slot;

#pragma unroll 1
    for (int part = 0; part < F::PARTS; ++part) {
        const int first_head = span_head + part * F::PART_HEADS;
        const bool first_of_heads = F::SPAN >= F::D_V || span_row % F::D_V == 0;
        if (part) {
            sync_block();
            stage_inputs<F>(p, m, at, first_head);
        }
        if constexpr (F::CHANNEL) {
            channel_decays<F>(p, m, at, first_head, first_of_heads && !at.flush);
            if (part == 0) fetch_updates();  // not before: a channel's decays take the registers
        }
        sync_block();
        prepare<F>(p, m, at, first_head, first_of_heads && !at.flush, keys, warp, lane);
        if (redo && part == 0 && threadIdx.x == 0) {
            for (int n = 0; n < F::STAGES; ++n) {
                barrier_wait(m.barrier + n, 0);
                copy(n, source);
            }
        }
        sync_block();
        if (!at.flush && first_of_heads && first_head % F::GROUP == 0) append_keys<F>(p, m, at, first_head / F::GROUP);

#pragma unroll 1
        for (int tile = part * F::PART_TILES; tile < (part + 1) * F::PART_TILES; ++tile) {
            typename F::C* held = m.tile[tile % F::STAGES];
            const int row = span_row + tile * F::ROWS + in_tile;
            Place place;
            place.first_row = span_row + tile * F::ROWS;
            place.head = (tile - part * F::PART_TILES) * F::ROWS / F::D_V;
            place.key_head = F::KEY_HEADS > 1 ? place.head / F::GROUP : 0;
            const int local = place.head + (F::HEADS > 1 && owner ? in_tile / F::D_V : 0);

            Pair ring[F::OWN] = {};
            replay_records<F>(at, m.scores[place.key_head], m.after[local], ring_u_of<F>(p, at.slot, row), updates, owner,
                              ring);
            const Inputs<F> now = in;
            if (tile + 1 < F::TILES) {
                updates.fetch(ring_u_of<F>(p, at.slot, row + F::ROWS), 0, at.cursor, owner);
                if (owner) in.fetch(p, at, row + F::ROWS);
            }
            barrier_wait(m.barrier + tile % F::STAGES, (tile / F::STAGES + redo) & 1);
            if constexpr (F::MATRIX)
                multiply_matrix<F>(m, held, place.key_head, warp, lane);
            else
                multiply<F>(m, held, place.key_head, warp, lane);
            sync_warp();
            if (owner)
                finish_rows<F>(p, m, at, row, in_tile, m.heads[local], m.products[place.key_head], now, ring);
            sync_warp();
            if (at.flush) {
                const typename F::K* ring_k = ring_k_of<F>(p, at.slot, first_head / F::GROUP + place.key_head);
                if constexpr (F::MATRIX_FLUSH)
                    flush_matrix<F>(p, m, at, held, place, ring_k, warp, lane);
                else
                    flush_rows<F>(p, m, at, held, place, ring_k, warp, lane);
                fence_copies();
                sync_warp();
            }
            if (tile + F::STAGES < F::TILES) {
                sync_block();  // all warps have read the tile that the next copy overwrites
                if (threadIdx.x == 0) copy(tile + F::STAGES, source);
            }
        }
    }
}

#ifndef REPLAYSSM_EMULATED
// The bound is Hopper's: there it decides how many blocks share a multiprocessor.
#if __CUDA_ARCH__ == 900
#define BOUND __maxnreg__(CASE_REGISTERS)
#else
#define BOUND __launch_bounds__(Case::THREADS, 1)
#endif

extern "C" __global__ void BOUND replayssm_decode(const __grid_constant__ Params p) {
    SHARED_MEMORY(shared);
    decode<Case>(p, *reinterpret_cast<Memory<Case>*>(shared));
}
#endif
