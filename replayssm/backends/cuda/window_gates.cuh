// Decays: of the checkpoint and the records to the committed state, and along the paths of the window's tokens. Each is a
// sum of log decays from the newest back, so none is above 0, and none is a difference.

// Projections of one token for a head, or for one channel of it.
template <class F> DEVICE float gate_input(const WindowParams& p, int row, int token, int head, int channel) {
    const i64 of_token = static_cast<i64>(row) * p.a_row + static_cast<i64>(token) * p.a_token;
    return load_number<typename F::A>(p.a, of_token + head * p.a_head + channel);
}

template <class F> DEVICE float beta_input(const WindowParams& p, int row, int token, int head) {
    const i64 of_token = static_cast<i64>(row) * p.b_row + static_cast<i64>(token) * p.b_token;
    return load_number<typename F::B>(p.b, of_token + head * p.b_head);
}

template <class F> DEVICE float window_log_decay(const WindowParams& p, int row, int token, int head, int channel) {
    const float bias = load_number<typename F::BIAS>(p.bias, F::CHANNEL ? head * F::D_K + channel : head);
    const float a = gate_input<F>(p, row, token, head, channel) + bias;
    return gate_of<F>(p, a, load_number<typename F::RATE>(p.rate, head)).log_decay;
}

// Head gate, the records of one head, by one warp, a lane for each of 32: their decays to the committed state.
template <class F> struct RecordDecays {
    static constexpr int NEWEST = (F::UNIT_ROWS - 1) & ~31;
    float newest;

    DEVICE void fetch(const WindowParams& p, const WindowRow& at, int head, bool wanted, int lane) {
        newest = wanted && NEWEST + lane < at.cursor ? ring_g_of<F>(p, at.slot, head)[NEWEST + lane] : 0.0f;
    }

    DEVICE void finish(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, int local,
                       int lane) const {
        float newer = 0.0f;  // log decay from behind the records at hand to the committed state
#pragma unroll
        for (int first = NEWEST; first >= 0; first -= 32) {
            const int j = first + lane;
            const float g = first == NEWEST ? newest : j < at.cursor ? ring_g_of<F>(p, at.slot, head)[j] : 0.0f;
            const Suffix sums = suffix_sums(g, lane);
            if (j < F::UNIT_ROWS) m.after[local][j] = j < at.cursor ? expf(sums.behind + newer) : 0.0f;
            newer += from_lane(sums.from, 0);
        }
        if (lane == 0) m.total[local] = expf(newer);
    }
};

// Head gate, the tokens of some heads, by one warp, a lane for each token of each head: gates, and decays along their
// paths, which all walk back together.
template <class F> struct TokenDecays {
    static constexpr int HEADS = 32 / F::TOKENS;  // that are taken at once
    float a, bias, rate, b, parent;

    DEVICE static bool used(const WindowRow& at, int heads, int lane) {
        return lane / F::TOKENS < heads && lane < HEADS * F::TOKENS && lane % F::TOKENS < at.count;
    }
    DEVICE void fetch(const WindowParams& p, const WindowRow& at, int head, int heads, int lane) {
        a = bias = rate = b = parent = 0.0f;
        if (!used(at, heads, lane)) return;
        const int token = lane % F::TOKENS, own = head + lane / F::TOKENS;
        a = gate_input<F>(p, at.row, token, own, 0);
        bias = load_number<typename F::BIAS>(p.bias, own);
        rate = load_number<typename F::RATE>(p.rate, own);
        b = beta_input<F>(p, at.row, token, own);
        parent = static_cast<float>(parent_of<F>(p, at, token));
    }

    // `first`: whether a head's first rows are taken here, then its decays are appended.
    DEVICE void finish(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, int local, int heads,
                       bool append, int lane) const {
        const int token = lane % F::TOKENS, own = lane / F::TOKENS, first = own * F::TOKENS;
        Gate gate{0.0f, 0.0f};
        float input = 0.0f;
        if (used(at, heads, lane)) {
            gate = gate_of<F>(p, a + bias, rate);
            input = F::DELTA ? p.beta_scale * sigmoid(b) : gate.input;
            if (append) ring_g_of<F>(p, at.slot, head + own)[at.cursor + token] = gate.log_decay;
        }
        const bool there = own < heads && lane < HEADS * F::TOKENS;
        float behind = 0.0f;
        int next = used(at, heads, lane) ? token : -1;
        const bool walks = next >= 0;
#pragma unroll
        for (int j = F::TOKENS - 1; j >= 0; --j) {
            const float g = from_lane(gate.log_decay, first + j);
            const int before = F::TREE ? static_cast<int>(from_lane(parent, first + j)) : j - 1;
            const bool met = j == next;
            if (there) m.between[local + own][token][j] = met ? fast_exp(behind) : 0.0f;
            if (met) {
                behind += g;
                next = before;
            }
        }
        if (!there) return;
        m.decay[local + own][token] = walks ? expf(behind) : 0.0f;
        m.input[local + own][token] = input;
    }
};

// A head gate's inputs: each warp has those of some heads' records, one those of the tokens, too.
template <class F> struct GateInputs {
    RecordDecays<F> records[F::RECORD_HEADS];
    TokenDecays<F> tokens;

    // The warp of the records of an item's head; another one has the tokens'.
    static DEVICE int head_of(int warp, int n) { return (F::WARPS - warp) % F::WARPS + n * F::WARPS; }
    static DEVICE bool has_tokens(int warp) { return warp == 1 % F::WARPS; }

    DEVICE void fetch(const WindowParams& p, const WindowRow& at, int head, int heads, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < F::RECORD_HEADS; ++n)
            records[n].fetch(p, at, head + head_of(warp, n), head_of(warp, n) < heads, lane);
        if (has_tokens(warp))
            tokens.fetch(p, at, head, heads, lane);
        else
            tokens = TokenDecays<F>{};
    }
    DEVICE void finish(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, const WindowPlace<F>& place,
                       int heads, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < F::RECORD_HEADS; ++n)
            if (head_of(warp, n) < heads)
                records[n].finish(p, m, at, place.head + head_of(warp, n), head_of(warp, n), lane);
        if (!has_tokens(warp)) return;
        const bool room = !at.folds<F>(), whole = place.first_row % F::D_V == 0;
#pragma unroll 1
        for (int local = 0; local < heads; local += TokenDecays<F>::HEADS) {
            if (local) tokens.fetch(p, at, place.head + local, heads - local, lane);
            tokens.finish(p, m, at, place.head + local, local, heads - local, room && (whole || local + lane / F::TOKENS > 0),
                          lane);
        }
    }
};

// Channel gate: the ring's keys of one channel, decayed, and the checkpoint's decay.
template <class F>
DEVICE void channel_records(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, int c) {
    const typename F::X* ring_k = ring_k_of<F>(p, at.slot, head) + c;
    const float* ring_g = ring_g_of<F>(p, at.slot, head) + c;
    float decay = 0.0f;
#pragma unroll 1
    for (int first = F::UNIT_ROWS - F::UNITS; first >= 0; first -= F::UNITS) {
        if (first >= at.cursor) continue;
        float g[F::UNITS], key[F::UNITS];
#pragma unroll
        for (int i = 0; i < F::UNITS; ++i) {
            const bool committed = first + i < at.cursor;
            g[i] = committed ? ring_g[(first + i) * F::D_K] : 0.0f;
            key[i] = committed ? to_float(ring_k[(first + i) * F::D_K]) : 0.0f;
        }
#pragma unroll
        for (int i = F::UNITS - 1; i >= 0; --i) {
            if (first + i < at.cursor) m.keys[first + i][c] = key[i] * fast_exp(decay);
            decay += g[i];
        }
    }
    m.channels[c] = expf(decay);
}

// The tokens' log decays of one channel.
template <class F>
DEVICE void channel_tokens(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, bool append, int c) {
    float* ring_g = ring_g_of<F>(p, at.slot, head) + at.cursor * F::D_K + c;
#pragma unroll
    for (int i = 0; i < F::TOKENS; ++i) {
        if (i >= at.count) break;
        const float g = window_log_decay<F>(p, at.row, i, head, c);
        m.gates[i][c] = g;
        if (append) ring_g[i * F::D_K] = g;
    }
}

// All threads, each for some channels; where there are two for each, one of them for its records, one for its tokens.
template <class F>
DEVICE void channel_gates(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, bool append,
                          int thread) {
    constexpr int SHARE = F::THREADS >= 2 * F::D_K ? F::THREADS / 2 : F::THREADS;
#pragma unroll 1
    for (int c = thread % SHARE; c < F::D_K; c += SHARE) {
        if (SHARE == F::THREADS || thread < SHARE) channel_records<F>(p, m, at, head, c);
        if (SHARE == F::THREADS || thread >= SHARE) channel_tokens<F>(p, m, at, head, append, c);
    }
    if (thread < F::TOKENS) {
        const bool used = thread < at.count;
        m.input[0][thread] = used ? p.beta_scale * sigmoid(beta_input<F>(p, at.row, thread, head)) : 0.0f;
    }
}

// A warp takes a token and 32 channels, one a lane. Decayed columns, and their products with the window's keys.
template <class F>
DEVICE void channel_pairs(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int warp, int lane) {
    constexpr int NUMBERS = F::COLUMNS, SHARE = 32 / NUMBERS;
#pragma unroll 1
    for (int n = warp; n < F::PARTS * F::TOKENS; n += F::WARPS) {
        const int part = n % F::PARTS, i = n / F::PARTS, c = part * 32 + lane;
        const float q = to_float(m.x[2 * i][c]), k = to_float(m.x[2 * i + 1][c]);
        float products[NUMBERS], behind = 0.0f;
        int next = i < at.count ? i : -1;
#pragma unroll
        for (int j = F::TOKENS - 1; j >= 0; --j) {
            products[2 * j] = products[2 * j + 1] = 0.0f;
            if (j != next) continue;
            const float key = to_float(m.x[2 * j + 1][c]) * fast_exp(behind);
            products[2 * j] = key * q;
            products[2 * j + 1] = key * k;
            behind += m.gates[j][c];
            next = parent_of<F>(p, at, j);
        }
        const float decay = expf(behind);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float x = (n ? k : q) * decay;
            m.columns[2 * i + n][c] = x;
            float rest = x * m.channels[c];
#pragma unroll
            for (int t = 0; t < F::TERMS; ++t) m.terms[t][2 * i + n][c] = split_off<F>(rest);
        }
        // Number n is the product of token n / 2 with q or k of token i.
        const float sum = sums_over_lanes<NUMBERS, 32>(products, lane);
        const int number = lane / SHARE;
        if (lane % SHARE == 0) m.pairs[part][number / 2][2 * i + number % 2] = sum;
    }
}
