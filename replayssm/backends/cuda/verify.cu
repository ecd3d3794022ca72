// One verify window by replay, for both gates and both rules, chains and trees (equations:
// replayssm/backends/torch/verify.py, same letters).
//
// A block takes some rows of one slot's states. A bulk copy brings them into shared memory; meanwhile the block computes
// what its rows share. All of that ends up in factors: each row's S x is weighted with `of_state`, a record's update with
// `of_record`, and so on; then a row solves for its tokens' updates alone, one thread a row.
//
// Where a row's ring is full, its blocks fold the committed records into their rows of the checkpoint. The window's
// records then go where the committed ones were, which other blocks of the key head may still read: the last block to
// come, by a counter, appends keys and decays. A number's order of summation depends on nothing but types and d_k, so
// neither batch, cut nor T changes a bit.

// A thread's part of the window's q and k, zeros where a token isn't used: fetched first, and put into shared memory when
// everything else is on its way. 16 bytes at a time where all lie at multiples of that.
template <class F> struct WindowInputs {
    using X = typename F::X;
    static constexpr int PIECE = F::ALIGNED ? 16 / static_cast<int>(sizeof(X)) : 2, PIECES = F::D_K / PIECE;
    static constexpr int ALL = 2 * F::TOKENS * PIECES, EACH = (ALL + F::THREADS - 1) / F::THREADS;
    Few<X, PIECE> piece[EACH];

    DEVICE void fetch(const WindowParams& p, const WindowRow& at, int key_head, int thread) {
        const X* q = static_cast<const X*>(p.q) + static_cast<i64>(at.row) * p.q_row + key_head * p.q_head;
        const X* k = static_cast<const X*>(p.k) + static_cast<i64>(at.row) * p.k_row + key_head * p.k_head;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int i = n * F::THREADS + thread, token = i / PIECES / 2, c = i % PIECES * PIECE;
            const X* from = i / PIECES % 2 ? k + static_cast<i64>(token) * p.k_token : q + static_cast<i64>(token) * p.q_token;
            const bool used = token < at.count && token < F::TOKENS;
            if constexpr (F::ALIGNED) {
                if (used) piece[n] = *reinterpret_cast<const Few<X, PIECE>*>(from + c);
            } else {
#pragma unroll
                for (int e = 0; e < PIECE; ++e)
                    if (used) piece[n].x[e] = from[c + e];
            }
            if (!used)
#pragma unroll
                for (int e = 0; e < PIECE; ++e) piece[n].x[e] = convert<X>::from(0.0f);
        }
    }

    DEVICE void store(WindowMemory<F>& m, int thread) const {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int i = n * F::THREADS + thread, vector = i / PIECES;
            if (ALL % F::THREADS && i >= ALL) break;
            X* to = m.x[F::DELTA ? vector : vector % 2 * F::TOKENS + vector / 2];
            *reinterpret_cast<Few<X, PIECE>*>(to + i % PIECES * PIECE) = piece[n];
        }
    }
};

// The factors, from products, decays and norms; all threads together.
template <class F> DEVICE void weigh(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int thread) {
    constexpr int NUMBERS = F::HEADS * F::COLUMNS;
    // What column `c` of head `h` is taken by: k's enters the update with a minus.
    const auto factor = [&](int h, int c) {
        const int i = c / F::VECTORS;
        if (!F::DELTA) return 1.0f;
        if (c % 2) return -m.input[h][i] * m.k_norm[i] * m.k_norm[i];
        return m.q_norm[i] * p.scale;
    };
    // Eight records are taken at once: those behind the cursor take nothing.
    const int records = (at.cursor + 7) / 8 * 8;
#pragma unroll 1
    for (int n = thread; n < records * NUMBERS; n += F::THREADS) {
        const int c = n % F::COLUMNS, h = n / F::COLUMNS % F::HEADS, j = n / NUMBERS;
        const float decay = F::CHANNEL ? 1.0f : m.after[h][j] * m.decay[h][c / F::VECTORS];
        float score = 0.0f;
#pragma unroll
        for (int part = 0; part < F::PARTS; ++part) score += m.scores[part][j][c];
        m.of_record[h][j][c] = two_terms(j < at.cursor ? score * (decay * factor(h, c)) : 0.0f);
    }
    // From the last thread on, which had less to do.
    const int from_last = F::THREADS - 1 - thread;
#pragma unroll 1
    for (int n = from_last; n < F::TOKENS * NUMBERS; n += F::THREADS) {
        const int c = n % F::COLUMNS, h = n / F::COLUMNS % F::HEADS, j = n / NUMBERS, i = c / F::VECTORS;
        float product = 0.0f;
#pragma unroll
        for (int part = 0; part < F::PARTS; ++part) product += m.pairs[part][j][c];
        if (!F::CHANNEL) product = m.between[h][i][j] > 0.0f ? product * m.between[h][i][j] : 0.0f;
        m.of_token[h][j][c] = product * factor(h, c);
        if (j) continue;
        m.of_state[h][c] = factor(h, c) * (F::CHANNEL ? 1.0f : m.total[h] * m.decay[h][i]);
        m.of_value[h][i] = F::DELTA ? m.input[h][i] * m.k_norm[i] : m.input[h][i];
    }
}

// The window's keys into the ring, from row `start` on.
template <class F>
DEVICE void append_keys(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, int key_head, int start,
                        int thread) {
    typename F::X* ring_k = ring_k_of<F>(p, at.slot, key_head) + start * F::D_K;
    constexpr int PIECE = 16 / static_cast<int>(sizeof(typename F::X));
#pragma unroll 1
    for (int n = thread * PIECE; n < at.count * F::D_K; n += F::THREADS * PIECE) {
        packed<typename F::X, PIECE> piece;
        piece.load(window_key<F>(m, n / F::D_K) + n % F::D_K);
        piece.store(ring_k + n);
    }
}

// The window's keys and decays into ring rows 0 and on, after a fold: by the tile that comes last, for all of its key
// head's value heads.
template <class F>
DEVICE void append_after_fold(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                              int thread) {
    sync_block();
    if (F::SHARERS > 1) {
        if (thread == 0) {
            int* arrivals = p.arrivals + static_cast<i64>(at.slot) * (F::V_HEADS / F::GROUP) + place.key_head;
            m.last = count_arrival(arrivals) == F::SHARERS - 1;
            if (m.last) *arrivals = 0;
        }
        sync_block();
        if (!m.last) return;
    }
    append_keys<F>(p, m, at, place.key_head, 0, thread);
    constexpr int GATES = F::GATES;
#pragma unroll 1
    for (int n = thread; n < F::GROUP * at.count * GATES; n += F::THREADS) {
        const int c = n % GATES, i = n / GATES % at.count, head = place.key_head * F::GROUP + n / GATES / at.count;
        ring_g_of<F>(p, at.slot, head)[i * GATES + c] = window_log_decay<F>(p, at.row, i, head, c);
    }
}

// A row's own: outputs of all tokens, and their records, from its sums.
template <class F>
DEVICE void finish_row(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int row, int in_block,
                       const float (&v)[F::TOKENS], bool folds) {
    using X = typename F::X;
    const int local = WindowPlace<F>::head_of(in_block), head = row / F::D_V, dim = row % F::D_V;
    float sums[F::COLUMNS];
    load_floats<F::COLUMNS>(m.sums[in_block], sums);
    X* y = static_cast<X*>(p.y) + static_cast<i64>(at.row) * p.tokens * (F::V_HEADS * F::D_V) + row;
    typename F::U* ring_u = ring_u_of<F>(p, at.slot, row) + at.cursor * F::D_V;
#pragma unroll
    for (int i = 0; i < F::TOKENS; ++i) {
        if (i >= at.count) break;
        float update = m.of_value[local][i] * v[i];
        if (F::DELTA) update += sums[2 * i + 1];
        float weights[F::COLUMNS];
        load_floats<F::COLUMNS>(m.of_token[local][i], weights);
#pragma unroll
        for (int c = F::VECTORS * i; c < F::COLUMNS; ++c)
            if (!F::TREE || weights[c] != 0.0f)  // what isn't on the path may have overflowed
                sums[c] = fmaf(update, weights[c], sums[c]);
        float out = sums[F::VECTORS * i];
        if (!same<typename F::D, none>::value)
            out = fmaf(load_number<typename F::D>(p.d, static_cast<i64>(head) * p.d_head + dim * p.d_dim), v[i], out);
        if (!same<typename F::Z, none>::value) {
            const i64 of_token = static_cast<i64>(at.row) * p.z_row + static_cast<i64>(i) * p.z_token;
            const float z = load_number<typename F::Z>(p.z, of_token + head * p.z_head + dim);
            out *= z * sigmoid(z);
        }
        y[i * (F::V_HEADS * F::D_V)] = convert<X>::from(out);
        const float record = bounded_update<typename F::U>(update);
        if (folds)
            m.sums[in_block][i] = record;
        else
            ring_u[i * F::D_V] = convert<typename F::U>::from(record);
    }
}

// Zeros for the tokens from `count` on.
template <class F> DEVICE void clear_outputs(const WindowParams& p, const WindowRow& at, int first_row, int count, int thread) {
    using X = typename F::X;
    X* y = static_cast<X*>(p.y) + static_cast<i64>(at.row) * p.tokens * (F::V_HEADS * F::D_V) + first_row;
#pragma unroll 1
    for (int i = count; i < p.tokens; ++i)
#pragma unroll 1
        for (int row = thread; row < F::ROWS; row += F::THREADS)
            y[i * (F::V_HEADS * F::D_V) + row] = convert<X>::from(0.0f);
}

// What a warp computes for its block, so that none waits long for another: of a head gate's decays, those of the records
// or those of the tokens; products of the ring's keys, or of the window's.
template <class F> struct WindowRoles {
    static constexpr int STEP = F::WARPS > 1 ? F::WARPS / 2 : 1;  // from one of its heads to the next
    int head;                                                     // its first
    bool records, tokens, scores, pairs;

    DEVICE explicit WindowRoles(int warp)
        : head(warp / 2),
          records((F::WARPS == 1 || warp % 2 == 0) && head < STEP),
          tokens((F::WARPS == 1 || warp % 2 == 1) && head < STEP),
          scores(warp == F::WARPS - 1),
          pairs(warp == (F::WARPS > 1 ? F::WARPS - 2 : 0)) {}
};

// What a tile's rows share, into m: everything but the state. Also the window's keys and decays into the ring, where it
// has room. `updates`: of the warp's rows, which it fetches.
template <class F, class Next>
DEVICE void prepare_tile(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                         Next& next, RecordUpdates<F>& updates) {
    const int thread = thread_of_round(), lane = thread % 32, warp = same_in_warp(thread / 32);
    next.find_slot(p);
    const bool append = !at.folds<F>() && (F::ROWS >= F::D_V || place.first_row % F::D_V == 0);
    const WindowRoles<F> roles(warp);
    WindowInputs<F> inputs;
    inputs.fetch(p, at, place.key_head, thread);
    // What isn't needed before is fetched now, if there are the registers. (What only some warps fetch is set for all:
    // else the compiler keeps it from round to round.)
    const int readable = F::EAGER ? F::RING : at.cursor;
    Keys<F> keys;
    RecordDecays<F> records;
    TokenDecays<F> tokens{};
    if constexpr (F::EXACT_KEYS)
        keys.fetch(ring_k_of<F>(p, at.slot, place.key_head), F::D_K, roles.scores ? readable : 0, lane);
    if constexpr (!F::CHANNEL) {
        records.fetch(p, at, place.head + roles.head, roles.records && roles.head < F::HEADS, lane);
        if (roles.tokens && roles.head < F::HEADS) tokens.fetch(p, at, place.head + roles.head, lane);
    }
    const auto fetch_updates = [&] { updates.fetch(p, at.slot, place.first_row + warp * F::RPW, 0, readable, lane); };
    if (F::EARLY_UPDATES) fetch_updates();
    inputs.store(m, thread);
    next.keep_slot(p, m);
    if constexpr (F::CHANNEL) channel_gates<F>(p, m, at, place.head, append, thread);
    sync_block();

    if constexpr (F::CHANNEL) {
        channel_pairs<F>(p, m, at, warp, lane);
        sync_block();
        multiply_channels<F>(m, at, warp, lane);
    } else {
        for (int h = roles.head; roles.records && h < F::HEADS; h += roles.STEP) {
            if (h != roles.head) records.fetch(p, at, place.head + h, true, lane);
            records.finish(m, at, h, lane);
        }
        for (int h = roles.head; roles.tokens && h < F::HEADS; h += roles.STEP) {
            if (h != roles.head) tokens.fetch(p, at, place.head + h, lane);
            tokens.finish(p, m, at, place.head + h, h, append, lane);
        }
    }
    if constexpr (F::EXACT_KEYS) {
        if (roles.scores) {
            keys.multiply(m, m.scores[0], at.cursor, F::UNITS, lane);
            for (int first = F::UNITS; first < at.cursor; first += F::UNITS) {
                const typename F::X* ring_k = ring_k_of<F>(p, at.slot, place.key_head) + first * F::D_K;
                keys.fetch(ring_k, F::D_K, at.cursor - first, lane);
                keys.multiply(m, m.scores[0] + first, at.cursor - first, F::UNITS, lane);
            }
        }
        if constexpr (F::PAIRED_NORMS) {
            if (roles.pairs) multiply_pairs<F>(m, lane);
        } else if (roles.pairs) {
            keys.fetch(window_key<F>(m, 0), F::DELTA ? 2 * F::PITCH : F::PITCH, F::TOKENS, lane);
            keys.multiply(m, m.pairs[0], F::TOKENS, F::TOKENS, lane);
        }
    } else if constexpr (!F::CHANNEL) {
        multiply_keys<F>(p, m, at, place.key_head, warp, lane);
    }
    if (F::DELTA && !F::PAIRED_NORMS) window_norms<F>(m, warp, lane);
    if (!F::EARLY_UPDATES) fetch_updates();  // together with the keys, or a channel's decays, they take too many registers
    next.find_cursor(p, m);
    sync_block();
    weigh<F>(p, m, at, thread);
    next.keep_cursor(p, m);
    if (append && place.head % F::GROUP == 0) append_keys<F>(p, m, at, place.key_head, at.cursor, thread);
    if (at.count < p.tokens) clear_outputs<F>(p, at, place.first_row, at.count, thread);
    sync_block();
}

// The tile's own part: its rows' sums, outputs and records. Where there is no fold, the next copy starts in between.
template <class F, class Next>
DEVICE void answer_tile(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                        const Next& next, RecordUpdates<F>& updates) {
    const int thread = thread_of_round(), lane = thread % 32, first = same_in_warp(thread / 32) * F::RPW;
    const int row = place.first_row + first + lane;
    const bool owner = lane < F::RPW;
    float v[F::TOKENS];
#pragma unroll
    for (int i = 0; i < F::TOKENS; ++i) {
        const i64 of_token = static_cast<i64>(at.row) * p.v_row + static_cast<i64>(i) * p.v_token;
        v[i] = owner && i < at.count
                   ? load_number<typename F::X>(p.v, of_token + row / F::D_V * p.v_head + row % F::D_V)
                   : 0.0f;
    }
    float sums[F::MATRICES][F::TILES][4] = {};
    replay_records<F>(p, m, at, place.first_row, first, updates, sums, lane);
    barrier_wait(&m.barrier, m.copies - 1 & 1);
    multiply_state<F>(m, sums, first, lane);
    if (!at.folds<F>()) {
        sync_block();
        next.go_on(p, m);
    }
    sync_warp();
    if (owner) finish_row<F>(p, m, at, row, first + lane, v, at.folds<F>());
}

// A tile whose copy is on its way.
template <class F, class Next>
DEVICE void verify_tile(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                        Next& next) {
    RecordUpdates<F> updates;
    prepare_tile<F>(p, m, at, place, next, updates);
    answer_tile<F>(p, m, at, place, next, updates);
    if (!at.folds<F>()) return;

    const int thread = thread_of_round(), lane = thread % 32, first = same_in_warp(thread / 32) * F::RPW;
    if constexpr (F::BF16_FOLD) {
        fold_bf16<F>(p, m, at, place, updates, first, lane);
    } else {
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n) fold_rows<F>(p, m, at, place, updates, n, first, lane);
    }
    sync_warp();  // the records have been read that the window's overwrite
    if (lane < F::RPW)
#pragma unroll 1
        for (int i = 0; i < at.count; ++i)
            ring_u_of<F>(p, at.slot, place.first_row + first + lane)[i * F::D_V] =
                convert<typename F::U>::from(m.sums[first + lane][i]);
    append_after_fold<F>(p, m, at, place, thread);
    fence_copies();
    sync_block();
    next.go_on(p, m);
}

template <class F> DEVICE void copy_tile(const WindowParams& p, WindowMemory<F>& m, int item, int slot) {
    const WindowPlace<F> place(item % F::TILES_OF_SLOT);
    ++m.copies;
    bulk_copy(m.tile, checkpoint_of<F>(p, slot, place.first_row), sizeof(m.tile), &m.barrier);
}

// The tile that a block takes in round `round`. Its first thread finds out where it is while the block works on the one
// before, in parts that lie so far apart that it never waits; `go_on` when that one's memory is free.
template <class F> struct NextTile {
    int round, first, second;

    DEVICE explicit NextTile(int round) : round(round) {}
    DEVICE int item(const WindowParams& p) const { return blockIdx.x + round * p.blocks; }
    DEVICE bool wanted(const WindowParams& p) const { return threadIdx.x == 0 && item(p) < p.items; }
    DEVICE WindowRow& place(WindowMemory<F>& m) const { return m.rows[round & 3]; }

    DEVICE void find_slot(const WindowParams& p) {
        first = second = -1;
        if (!wanted(p)) return;
        first = p.slots[item(p) / F::TILES_OF_SLOT];
        second = p.num_tokens[item(p) / F::TILES_OF_SLOT];
    }
    DEVICE void keep_slot(const WindowParams& p, WindowMemory<F>& m) const {
        if (!wanted(p)) return;
        place(m).row = item(p) / F::TILES_OF_SLOT;
        place(m).slot = first;
        place(m).count = second;
    }
    DEVICE void find_cursor(const WindowParams& p, WindowMemory<F>& m) {
        first = second = 0;
        if (!wanted(p) || !place(m).used()) return;
        first = p.write_pos[place(m).slot];
        second = p.checkpoint_slot[place(m).slot];
    }
    DEVICE void keep_cursor(const WindowParams& p, WindowMemory<F>& m) const {
        if (!wanted(p)) return;
        place(m).cursor = first;
        place(m).source = second;
        if (place(m).used() && first > 0) prefetch_records(p, place(m));
    }
    DEVICE void prefetch_records(const WindowParams& p, const WindowRow& at) const {
        const WindowPlace<F> tile(item(p) % F::TILES_OF_SLOT);
        prefetch(ring_k_of<F>(p, at.slot, tile.key_head), at.cursor * F::D_K * sizeof(typename F::X));
        for (int h = 0; h < F::HEADS; ++h)
            prefetch(ring_u_of<F>(p, at.slot, (tile.head + h) * F::D_V), at.cursor * F::D_V * sizeof(typename F::U));
        if (F::CHANNEL) prefetch(ring_g_of<F>(p, at.slot, tile.head), at.cursor * F::D_K * sizeof(float));
    }
    DEVICE void go_on(const WindowParams& p, WindowMemory<F>& m) const {
        if (wanted(p) && place(m).used()) copy_tile<F>(p, m, item(p), place(m).source);
    }
};

// The first tile of a block. Its copy starts from the slot's own checkpoint, where it nearly always lies, before it is
// known to.
template <class F> DEVICE void begin(const WindowParams& p, WindowMemory<F>& m) {
    NextTile<F> first(0);
    first.find_slot(p);
    first.keep_slot(p, m);
    WindowRow& at = m.rows[0];
    if (threadIdx.x == 0) {
        barrier_init(&m.barrier);
        m.copies = 0;
        if (at.used()) copy_tile<F>(p, m, first.item(p), at.slot);
    }
    first.find_cursor(p, m);
    first.keep_cursor(p, m);
    if (threadIdx.x == 0 && at.used() && at.source != at.slot) {
        barrier_wait(&m.barrier, 0);
        copy_tile<F>(p, m, first.item(p), at.source);
    }
    sync_block();
}

// A block takes one tile after the other. While it works on one it finds out where the next is, whose copy starts as soon
// as this one's memory is free: so of the chain slot, cursor, records only the last is waited for.
template <class F> DEVICE void verify(const WindowParams& p, WindowMemory<F>& m) {
    begin<F>(p, m);
#pragma unroll 1
    for (int round = 0; blockIdx.x + round * p.blocks < p.items; ++round) {
        NextTile<F> next(round + 1);
        const WindowRow& at = m.rows[round & 3];
        const WindowPlace<F> place((blockIdx.x + round * p.blocks) % F::TILES_OF_SLOT);
        if (at.used()) {
            verify_tile<F>(p, m, at, place, next);
        } else {
            next.find_slot(p);
            next.keep_slot(p, m);
            next.find_cursor(p, m);
            next.keep_cursor(p, m);
            clear_outputs<F>(p, at, place.first_row, 0, threadIdx.x);
            next.go_on(p, m);
            sync_block();
        }
    }
}

KERNEL(replayssm_verify, WindowParams, WindowMemory<WindowCase>, verify<WindowCase>)
