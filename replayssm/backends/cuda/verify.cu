// One verify window by replay, for both gates and both rules, chains and trees (equations:
// replayssm/backends/torch/verify.py, same letters).
//
// A tile is some rows of one slot's states, an item some tiles that share a key head. First a block works out what all rows
// of an item share. All of that ends up in factors: S x is weighted with `of_state`, a record's update with `of_record`,
// and so on. Then, for each tile, the matrix units give every lane the sums of some rows for some tokens, and the four
// lanes that have a row's sums solve for its tokens' updates.
//
// Where a row's ring is full, its blocks fold the committed records into their rows of the checkpoint. The window's keys
// then go where the committed ones were, which other blocks of the key head may still have to copy: the last block to
// come, by a counter, appends keys and decays. A number's order of summation depends on nothing but types and d_k, so
// neither batch, cut nor T changes a bit. (Windows of one token are decode's.)

// An item: its tiles. Items of SPAN tiles come first, as many as all blocks have; then each tile is an item.
template <class F> struct WindowItem {
    int number;

    DEVICE int tile(const WindowParams& p) const {
        return number < p.whole ? number * F::SPAN : number + p.whole * (F::SPAN - 1);
    }
    DEVICE int tiles(const WindowParams& p) const { return number < p.whole ? F::SPAN : 1; }
    DEVICE bool exists(const WindowParams& p) const { return tile(p) < p.tiles; }
    DEVICE int row(const WindowParams& p) const { return tile(p) / F::TILES_OF_SLOT; }
    DEVICE WindowPlace<F> place(const WindowParams& p) const { return WindowPlace<F>(tile(p) % F::TILES_OF_SLOT); }
};

template <class F> DEVICE int heads_of(int tiles) { return tiles == F::SPAN ? F::ITEM_HEADS : F::HEADS; }

// One thread starts the copies of a tile's rows.
template <class F> DEVICE void copy_tile(const WindowParams& p, WindowMemory<F>& m, int first_row, int source) {
    constexpr int NUMBERS = F::PART * F::D_K, BYTES = NUMBERS * sizeof(typename F::C);
    const typename F::C* from = checkpoint_of<F>(p, source, first_row);
    expect_copies(&m.tile_comes, F::PARTS_OF_TILE * BYTES);
#pragma unroll 8
    for (int part = 0; part < F::PARTS_OF_TILE; ++part)
        bulk_copy_part(m.tile + part * (NUMBERS + F::PAD), from + part * NUMBERS, BYTES, &m.tile_comes);
}

// All threads start the copies of an item's q and k, zeros for tokens that aren't used, and of the first `rows` keys of its
// ring.
template <class F>
DEVICE void copy_keys(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int key_head, int rows, int thread) {
    using X = typename F::X;
    // So many threads take a line, and so many lines are taken at once.
    constexpr int PIECE = 16 / static_cast<int>(sizeof(X)), PIECES = F::D_K / PIECE;
    constexpr int WIDE = PIECES < F::THREADS ? PIECES : F::THREADS, AT_ONCE = F::THREADS / WIDE;
    const X* q = static_cast<const X*>(p.q) + static_cast<i64>(at.row) * p.q_row + key_head * p.q_head;
    const X* k = static_cast<const X*>(p.k) + static_cast<i64>(at.row) * p.k_row + key_head * p.k_head;
    const X* ring_k = ring_k_of<F>(p, at.slot, key_head);
    const int line = thread / WIDE;
#pragma unroll
    for (int c = thread % WIDE * PIECE; c < F::D_K; c += WIDE * PIECE) {
#pragma unroll
        for (int n = 0; n < 2 * F::TOKENS; n += AT_ONCE) {
            const int token = (n + line) / 2, is_k = (n + line) % 2, used = token < at.count ? token : 0;
            const X* from = is_k ? k + static_cast<i64>(used) * p.k_token : q + static_cast<i64>(used) * p.q_token;
            X* to = m.x[F::DELTA ? n + line : is_k * F::TOKENS + token] + c;
            if (2 * F::TOKENS % AT_ONCE && n + line >= 2 * F::TOKENS) break;
            if constexpr (F::ALIGNED) {
                copy_16_bytes(to, from + c, token < at.count);
            } else {
#pragma unroll
                for (int e = 0; e < PIECE; ++e) to[e] = token < at.count ? from[c + e] : convert<X>::from(0.0f);
            }
        }
        if constexpr (!F::CHANNEL) {
#pragma unroll 4
            for (int j = line; j < F::RING; j += AT_ONCE)
                if (j < rows) copy_16_bytes(m.ring_k[j] + c, ring_k + j * F::D_K + c, true);
        }
    }
}

// The factors, from products, decays and norms; all threads together.
template <class F>
DEVICE void weigh(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int heads, int thread) {
    // What column `c` of head `h` is taken by: k's enters the update with a minus.
    const auto factor = [&](int h, int c) {
        const int i = c / F::VECTORS;
        if (!F::DELTA) return 1.0f;
        if (c % 2) return -m.input[h][i] * m.k_norm[i] * m.k_norm[i];
        return m.q_norm[i] * p.scale;
    };
    const auto of_record = [&](int h, int j, int c, float shared) {
        if (j >= at.cursor) return 0.0f;
        float score = 0.0f;
#pragma unroll
        for (int part = 0; part < F::PARTS; ++part) score += m.scores[part][j][c];
        return score * (F::CHANNEL ? shared : m.after[h][F::CHANNEL ? 0 : j] * shared);
    };
    // Records behind the cursor are taken with others, so they have to take nothing.
    constexpr int AT_ONCE = F::BF16_UPDATES ? 2 : 1, UNIT = F::UNITS / AT_ONCE, NUMBERS = F::ITEM_HEADS * F::COLUMNS * UNIT;
    const int units = (at.cursor + F::UNITS - 1) / F::UNITS;
#pragma unroll 1
    for (int n = thread; n < units * NUMBERS; n += F::THREADS) {
        const int c = n % F::COLUMNS, in_unit = n / F::COLUMNS % UNIT, h = n / (F::COLUMNS * UNIT) % F::ITEM_HEADS;
        const int unit = n / NUMBERS, j = unit * F::UNITS + in_unit * AT_ONCE;
        if (h >= heads) continue;
        const float shared = (F::CHANNEL ? 1.0f : m.decay[h][c / F::VECTORS]) * factor(h, c);
        if constexpr (F::BF16_UPDATES) {
            u32 terms[3];
            split(of_record(h, j, c, shared), of_record(h, j + 1, c, shared), terms);
#pragma unroll
            for (int t = 0; t < 3; ++t) m.of_record[h].pair[unit][t][in_unit][c] = terms[t];
        } else {
            m.of_record[h].of[j][c] = two_terms(of_record(h, j, c, shared));
        }
    }
    // From the last thread on, which had less to do.
    const int from_last = F::THREADS - 1 - thread;
#pragma unroll 1
    for (int n = from_last; n < heads * F::TOKENS * F::COLUMNS; n += F::THREADS) {
        const int c = n % F::COLUMNS, j = n / F::COLUMNS % F::TOKENS, h = n / (F::COLUMNS * F::TOKENS), i = c / F::VECTORS;
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

// The window's keys and decays into ring rows 0 and on, after a fold: with the last tiles to come, for all of the key
// head's value heads.
template <class F>
DEVICE void append_after_fold(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int key_head, int tiles,
                              int thread) {
    sync_block();
    if (tiles < F::SHARERS) {
        if (thread == 0) {
            int* arrivals = p.arrivals + static_cast<i64>(at.slot) * (F::V_HEADS / F::GROUP) + key_head;
            m.last = count_arrival(arrivals, tiles) + tiles == F::SHARERS;
            if (m.last) *arrivals = 0;
        }
        sync_block();
        if (!m.last) return;
    }
    append_keys<F>(p, m, at, key_head, 0, thread);
    constexpr int GATES = F::GATES;
#pragma unroll 1
    for (int n = thread; n < F::GROUP * at.count * GATES; n += F::THREADS) {
        const int c = n % GATES, i = n / GATES % at.count, head = key_head * F::GROUP + n / GATES / at.count;
        ring_g_of<F>(p, at.slot, head)[i * GATES + c] = window_log_decay<F>(p, at.row, i, head, c);
    }
}

// What is a lane's own of a tile: of some tokens, for its rows. A lane's sums are those of two columns of every eight.
template <class F> struct Answers {
    static constexpr int COUNT = F::TILES * 2 / F::VECTORS, OWN = F::OWN;  // tokens
    OwnNumbers<typename F::X, OWN> v[COUNT];
    OwnNumbers<typename F::U, OWN> record[COUNT];
    int row;    // the first of the lane's rows in its slot
    int local;  // its head among the item's
    int lane;

    static DEVICE int token(int n, int lane) { return F::DELTA ? n * 4 + lane % 4 : n / 2 * 8 + lane % 4 * 2 + n % 2; }
    DEVICE bool has(const WindowRow& at, int n) const { return token(n, lane) < at.count && token(n, lane) < F::TOKENS; }

    DEVICE void fetch(const WindowParams& p, const WindowRow& at) {
        const typename F::X* from = static_cast<const typename F::X*>(p.v) + static_cast<i64>(at.row) * p.v_row +
                                    row / F::D_V * p.v_head + row % F::D_V;
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            v[n].clear();
            if (!has(at, n)) continue;
            const typename F::X* of_token = from + static_cast<i64>(token(n, lane)) * p.v_token;
            if constexpr (F::ALIGNED) {
                v[n].load(of_token);
            } else {
                float x[OWN];
#pragma unroll
                for (int r = 0; r < OWN; ++r) x[r] = to_float(of_token[r]);
                v[n].pack(x);
            }
        }
    }

    // One token's output and record.
    DEVICE void finish(const WindowParams& p, const WindowRow& at, int n, const float (&out)[OWN],
                       const float (&update)[OWN]) {
        const int i = token(n, lane), head = row / F::D_V, dim = row % F::D_V;
        float y[OWN], kept[OWN];
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            y[r] = out[r];
            if (!same<typename F::D, none>::value)
                y[r] = fmaf(load_number<typename F::D>(p.d, static_cast<i64>(head) * p.d_head + (dim + r) * p.d_dim),
                            v[n].of(r), y[r]);
            if (!same<typename F::Z, none>::value) {
                const i64 of_token = static_cast<i64>(at.row) * p.z_row + static_cast<i64>(i) * p.z_token;
                const float z = has(at, n) ? load_number<typename F::Z>(p.z, of_token + head * p.z_head + dim + r) : 0.0f;
                y[r] *= z * sigmoid(z);
            }
            kept[r] = bounded_update<typename F::U>(update[r]);
        }
        record[n].pack(kept);
        if (!has(at, n)) return;
        OwnNumbers<typename F::X, OWN> rounded;
        rounded.pack(y);
        rounded.store(static_cast<typename F::X*>(p.y) +
                      (static_cast<i64>(at.row) * p.tokens + i) * (F::V_HEADS * F::D_V) + row);
    }

    DEVICE void store_records(typename F::U* ring_u, const WindowRow& at, int start) const {
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            if (has(at, n)) record[n].store(ring_u + (start + token(n, lane)) * F::D_V);
    }
};

// Delta rule: token after token, the lane that has it gives its update to the three others. A token's own sums are done
// when all before it have been added; weights of what isn't on a tree's path are zero, but the update may have overflowed.
// What isn't used is zero throughout.
template <class F>
DEVICE void solve(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, Answers<F>& mine,
                  float (&sums)[F::MATRICES][F::TILES][4]) {
    const int lane = mine.lane, own = lane % 4;
    const auto update_of = [&](int n, int r) {
        const int i = mine.token(n, lane);
        return fmaf(m.of_value[mine.local][i < F::TOKENS ? i : 0], mine.v[n].of(r), sums[r / 2][n][r % 2 * 2 + 1]);
    };
#pragma unroll
    for (int i = 0; i < F::TOKENS; ++i) {
        float update[F::OWN];
#pragma unroll
        for (int r = 0; r < F::OWN; ++r) update[r] = from_lane(update_of(i / 4, r), (lane & 28) + i % 4);
#pragma unroll
        for (int n = i / 4; n < F::TILES; ++n) {
            const int token = mine.token(n, lane);
            const float* weights = m.of_token[mine.local][i] + 2 * (token < F::TOKENS ? token : 0);
            const float of_q = weights[0], of_k = weights[1];
            const bool at_or_after = n > i / 4 || own >= i % 4, after = n > i / 4 || own > i % 4;
#pragma unroll
            for (int r = 0; r < F::OWN; ++r) {
                float* sum = sums[r / 2][n] + r % 2 * 2;
                if (F::TREE ? of_q != 0.0f : at_or_after) sum[0] = fmaf(update[r], of_q, sum[0]);
                if (after && (!F::TREE || of_k != 0.0f)) sum[1] = fmaf(update[r], of_k, sum[1]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < F::TILES; ++n) {
        float out[F::OWN], update[F::OWN];
#pragma unroll
        for (int r = 0; r < F::OWN; ++r) {
            out[r] = sums[r / 2][n][r % 2 * 2];
            update[r] = update_of(n, r);
        }
        mine.finish(p, at, n, out, update);
    }
}

// Additive rule: the updates are known.
template <class F>
DEVICE void add_up(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, Answers<F>& mine,
                   float (&sums)[F::MATRICES][F::TILES][4]) {
    const int lane = mine.lane;
    const auto update_of = [&](int n, int r) {
        const int i = mine.token(n, lane);
        return m.of_value[mine.local][i < F::TOKENS ? i : 0] * mine.v[n].of(r);
    };
#pragma unroll
    for (int i = 0; i < F::TOKENS; ++i) {
        float update[F::OWN];
#pragma unroll
        for (int r = 0; r < F::OWN; ++r)
            update[r] = from_lane(update_of(i / 8 * 2 + i % 2, r), (lane & 28) + i % 8 / 2);
#pragma unroll
        for (int n = i / 8 * 2; n < Answers<F>::COUNT; ++n) {
            const int token = mine.token(n, lane);
            const float weight = m.of_token[mine.local][i][token < F::TOKENS ? token : 0];
#pragma unroll
            for (int r = 0; r < F::OWN; ++r) {
                float& sum = sums[r / 2][n / 2][r % 2 * 2 + n % 2];
                if (F::TREE ? weight != 0.0f : token >= i) sum = fmaf(update[r], weight, sum);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < Answers<F>::COUNT; ++n) {
        float out[F::OWN], update[F::OWN];
#pragma unroll
        for (int r = 0; r < F::OWN; ++r) {
            out[r] = sums[r / 2][n / 2][r % 2 * 2 + n % 2];
            update[r] = update_of(n, r);
        }
        mine.finish(p, at, n, out, update);
    }
}

// Zeros for the tokens of some rows from `count` on.
template <class F>
DEVICE void clear_outputs(const WindowParams& p, int row, int first_row, int rows, int count, int thread) {
    using X = typename F::X;
    X* y = static_cast<X*>(p.y) + static_cast<i64>(row) * p.tokens * (F::V_HEADS * F::D_V) + first_row;
#pragma unroll 1
    for (int i = count; i < p.tokens; ++i)
#pragma unroll 1
        for (int r = thread; r < rows; r += F::THREADS) y[i * (F::V_HEADS * F::D_V) + r] = convert<X>::from(0.0f);
}

// The item that a staying block takes in round `round`. Its first thread finds out where it is while the block works on the
// one before, in parts that lie so far apart that it never waits.
template <class F> struct NextItem {
    WindowItem<F> item;
    int round, first, second;

    DEVICE NextItem(const WindowParams& p, int round)
        : item{static_cast<int>(blockIdx.x) + round * p.blocks}, round(round), first(-1), second(-1) {}
    DEVICE WindowRow& kept(WindowMemory<F>& m) const { return m.rows[round & 3]; }

    DEVICE void find_slot(const WindowParams& p) {
        if (threadIdx.x != 0 || !item.exists(p)) return;
        first = p.slots[item.row(p)];
        second = p.num_tokens[item.row(p)];
    }
    DEVICE void keep_slot(const WindowParams& p, WindowMemory<F>& m) const {
        if (threadIdx.x != 0) return;
        kept(m).row = item.row(p);
        kept(m).slot = first;
        kept(m).count = second;
    }
    DEVICE void find_cursor(const WindowParams& p, WindowMemory<F>& m) {
        if (threadIdx.x != 0 || !kept(m).used()) return;
        first = p.write_pos[kept(m).slot];
        second = p.checkpoint_slot[kept(m).slot];
    }
    DEVICE void keep_cursor(const WindowParams& p, WindowMemory<F>& m) const {
        if (threadIdx.x != 0) return;
        kept(m).cursor = first;
        kept(m).source = second;
        if (kept(m).used() && first > 0) prefetch_records(p, kept(m));
    }
    // Into the L2 cache.
    DEVICE void prefetch_records(const WindowParams& p, const WindowRow& at) const {
        const WindowPlace<F> place = item.place(p);
        prefetch(ring_k_of<F>(p, at.slot, place.key_head), at.cursor * F::D_K * sizeof(typename F::X));
#pragma unroll 1
        for (int h = 0; h < heads_of<F>(item.tiles(p)); ++h)
            prefetch(ring_u_of<F>(p, at.slot, (place.head + h) * F::D_V), at.cursor * F::D_V * sizeof(typename F::U));
        if (F::CHANNEL) prefetch(ring_g_of<F>(p, at.slot, place.head), at.cursor * F::D_K * sizeof(float));
    }
    // Start its copies, the block's memory being free.
    DEVICE void start(const WindowParams& p, WindowMemory<F>& m, int thread) const {
        const WindowRow at = kept(m);
        if (!at.used()) return;
        const WindowPlace<F> place = item.place(p);
        if (thread == 0) copy_tile<F>(p, m, place.first_row, at.source);
        copy_keys<F>(p, m, at, place.key_head, at.cursor, thread);
    }
};

// What an item's rows share, into m: decays and products.
template <class F>
DEVICE void multiply_shared(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                            int heads, NextItem<F>& next, int warp, int lane) {
    if (F::STAYS) next.find_slot(p);
    if constexpr (!F::CHANNEL) {
        GateInputs<F> gates;
        gates.fetch(p, at, place.head, heads, warp, lane);
        gates.finish(p, m, at, place, heads, warp, lane);
    }
    wait_for_own_copies();
    sync_block();
    if (F::STAYS) next.keep_slot(p, m);
    if constexpr (F::CHANNEL) {
        channel_gates<F>(p, m, at, place.head, !at.folds<F>() && place.first_row % F::D_V == 0, warp * 32 + lane);
        sync_block();
        channel_pairs<F>(p, m, at, warp, lane);
        sync_block();
        multiply_channels<F>(m, at, warp, lane);
    } else if constexpr (F::EXACT_KEYS) {
        if (warp == F::WARPS - 1) multiply_ring<F>(m, at.cursor, lane);
        if (warp == (F::WARPS > 1 ? F::WARPS - 2 : 0)) multiply_window<F>(m, lane);
    } else {
        multiply_keys<F>(m, at, warp, lane);
    }
    if constexpr (F::TERMS && !F::CHANNEL) split_columns<F>(m, warp * 32 + lane);
    if (F::DELTA && !F::PAIRED_NORMS) window_norms<F>(m, warp, lane);
    if (F::STAYS) next.find_cursor(p, m);
    sync_block();
}

// What follows from them: the factors. Also the window's keys into the ring, where it has room.
template <class F>
DEVICE void share_factors(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                          int heads, const NextItem<F>& next, int thread) {
    weigh<F>(p, m, at, heads, thread);
    if (F::STAYS) next.keep_cursor(p, m);
    if (!at.folds<F>() && place.first_row % (F::GROUP * F::D_V) == 0)
        append_keys<F>(p, m, at, place.key_head, at.cursor, thread);
    sync_block();
}

template <class F>
DEVICE void fold_tile(const WindowParams& p, const WindowMemory<F>& m, const WindowRow& at, const typename F::C* held,
                      int row, int local, int lane) {
#pragma unroll 1
    for (int n = 0; n < F::OWN; n += 2) {
        const Folding<F> to{ring_u_of<F>(p, at.slot, row) + n, held + n * F::D_K,
                            checkpoint_of<F>(p, at.slot, row) + n * F::D_K, local, at.cursor};
        if constexpr (F::BF16_KEYS)
            fold_bf16_keys<F>(m, to, lane);
        else
            fold_terms<F>(m, to, lane);
    }
}

// sums += of_state · weights, number by number.
template <class F> DEVICE void weigh_state(Sums<F> sums, Sums<F> of_state, const float* weights, int lane) {
#pragma unroll
    for (int tile = 0; tile < F::TILES; ++tile) {
        const int c = tile * 8 + lane % 4 * 2, given = c < F::COLUMNS ? c : 0;
        const float weight[2] = {weights[given], weights[given + (F::COLUMNS > 1)]};
#pragma unroll
        for (int n = 0; n < F::MATRICES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][tile][e] = fmaf(of_state[n][tile][e], weight[e % 2], sums[n][tile][e]);
    }
}

// An item whose copies are on their way, tile after tile. The next copy starts as soon as all warps have multiplied and,
// where the ring is full, folded.
template <class F>
DEVICE void verify_item(const WindowParams& p, WindowMemory<F>& m, WindowRow at, const WindowPlace<F>& first, int tiles,
                        u32& tile_phase, NextItem<F>& next) {
    {
        const int thread = thread_of_round(), lane = thread % 32, warp = same_in_warp(thread / 32);
        const int heads = heads_of<F>(tiles);
        multiply_shared<F>(p, m, at, first, heads, next, warp, lane);
        share_factors<F>(p, m, at, first, heads, next, thread);
    }
    const bool folds = at.folds<F>();
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
        at.row = fresh(at.row);  // addresses are worked out again: there aren't the registers to keep them
        at.slot = fresh(at.slot);
        const int thread = thread_of_round(), lane = thread % 32, warp = same_in_warp(thread / 32);
        const WarpRows<F> rows(warp);
        const int first_row = first.first_row + n * F::ROWS, in_tile = rows.in_tile(lane / 4), row = first_row + in_tile;
        const bool last = n + 1 == tiles;
        typename F::U* ring_u = ring_u_of<F>(p, at.slot, row);
        RecordUpdates<F> updates;
        updates.fetch(ring_u, at.cursor, lane);
        Answers<F> mine;
        mine.row = row;
        mine.local = F::ITEM_HEADS > 1 ? (n * F::ROWS + in_tile) / F::D_V : 0;
        mine.lane = lane;
        mine.fetch(p, at);
        float sums[F::MATRICES][F::TILES][4] = {}, of_state[F::MATRICES][F::TILES][4] = {};
        barrier_wait(&m.tile_comes, tile_phase);
        tile_phase ^= 1;
        replay_records<F>(sums, updates, m.of_record[mine.local], ring_u, at.cursor, lane);
        multiply_state<F>(of_state, m, warp, lane);
        weigh_state<F>(sums, of_state, m.of_state[mine.local], lane);
        if (folds) {
            fold_tile<F>(p, m, at, rows.in(m, lane / 4), row, mine.local, lane);
            if (last) append_after_fold<F>(p, m, at, first.key_head, tiles, thread);
        }
        if (F::STAYS || !last || folds) sync_block();
        if (!last && thread == 0) copy_tile<F>(p, m, first_row + F::ROWS, at.source);
        if (F::STAYS && last) next.start(p, m, thread);
        if constexpr (F::DELTA)
            solve<F>(p, m, at, mine, sums);
        else
            add_up<F>(p, m, at, mine, sums);
        mine.store_records(ring_u, at, folds ? 0 : at.cursor);
        if (at.count < p.tokens) clear_outputs<F>(p, at.row, first_row, F::ROWS, at.count, thread);
    }
}

// A block's only item. Its copies start before it is known where its slot stands: the rows' from the slot's own checkpoint,
// where they nearly always lie; the keys', if the batch is small, of all the ring. Gives the number of copies of rows that
// have come already.
template <class F>
DEVICE u32 start_only(const WindowParams& p, WindowMemory<F>& m, WindowRow& at, const WindowPlace<F>& place) {
    if (threadIdx.x == 0) copy_tile<F>(p, m, place.first_row, at.slot);
    if (F::EAGER) copy_keys<F>(p, m, at, place.key_head, F::RING, threadIdx.x);
    at.cursor = same_in_warp(p.write_pos[at.slot]);
    at.source = same_in_warp(p.checkpoint_slot[at.slot]);
    if (!F::EAGER) copy_keys<F>(p, m, at, place.key_head, at.cursor, threadIdx.x);
    if (at.source == at.slot) return 0;
    if (threadIdx.x == 0) {
        barrier_wait(&m.tile_comes, 0);
        copy_tile<F>(p, m, place.first_row, at.source);
    }
    return 1;
}

template <class F> DEVICE void verify_only(const WindowParams& p, WindowMemory<F>& m) {
    NextItem<F> none(p, 0);
    const WindowPlace<F> place = none.item.place(p);
    const int row = none.item.row(p), tiles = none.item.tiles(p);
    WindowRow at = WindowRow{row, p.slots[row], p.num_tokens[row], 0, 0}.same_in_lanes();
    if (!at.used()) {
        clear_outputs<F>(p, row, place.first_row, tiles * F::ROWS, 0, threadIdx.x);
        return;
    }
    u32 phase = start_only<F>(p, m, at, place);
    verify_item<F>(p, m, at, place, tiles, phase, none);
}

// A block takes one item after the other. While it works on one it finds out where the next is, whose copies start as soon
// as this one's memory is free: so of the chain slot, cursor, records only the last is waited for. In the first round there
// is nothing to work on.
template <class F> DEVICE void verify_all(const WindowParams& p, WindowMemory<F>& m) {
    u32 tile_phase = 0;
    if (threadIdx.x == 0) m.rows[3] = WindowRow{0, -1, 0, 0, 0};
    sync_block();
#pragma unroll 1
    for (int round = -1;; ++round) {
        const WindowItem<F> item{static_cast<int>(blockIdx.x) + round * p.blocks};
        if (round >= 0 && !item.exists(p)) return;
        NextItem<F> next(p, round + 1);
        const WindowRow at = m.rows[round & 3].same_in_lanes();
        if (at.used()) {
            verify_item<F>(p, m, at, item.place(p), item.tiles(p), tile_phase, next);
            continue;
        }
        next.find_slot(p);
        next.keep_slot(p, m);
        next.find_cursor(p, m);
        next.keep_cursor(p, m);
        if (round >= 0)
            clear_outputs<F>(p, at.row, item.place(p).first_row, item.tiles(p) * F::ROWS, 0, threadIdx.x);
        sync_block();
        next.start(p, m, thread_of_round());
    }
}

template <class F> DEVICE void verify(const WindowParams& p, WindowMemory<F>& m) {
    if (threadIdx.x == 0) barrier_init(&m.tile_comes);
    sync_block();
    if constexpr (F::STAYS)
        verify_all<F>(p, m);
    else
        verify_only<F>(p, m);
}

KERNEL(replayssm_verify, WindowParams, WindowMemory<WindowCase>, verify<WindowCase>)
