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
    const float* ring_g;
    float fetched;

    DEVICE void fetch(const WindowParams& p, const WindowRow& at, int head, bool wanted, int lane) {
        ring_g = ring_g_of<F>(p, at.slot, head);
        fetched = wanted && NEWEST + lane < at.cursor ? ring_g[NEWEST + lane] : 0.0f;
    }

    DEVICE void finish(WindowMemory<F>& m, const WindowRow& at, int local, int lane) {
        float newer = 0.0f;  // log decay from behind the records at hand to the committed state
#pragma unroll
        for (int first = NEWEST; first >= 0; first -= 32) {
            const int j = first + lane;
            const float g = fetched;
            if (first) fetched = j - 32 < at.cursor ? ring_g[j - 32] : 0.0f;
            const Suffix sums = suffix_sums(g, lane);
            if (j < F::UNIT_ROWS) m.after[local][j] = j < at.cursor ? expf(sums.behind + newer) : 0.0f;
            newer += from_lane(sums.from, 0);
        }
        if (lane == 0) m.total[local] = expf(newer);
    }
};

// Head gate, the tokens of one head, by one warp, a lane for each: gates, and decays along their paths, which all walk
// back together.
template <class F> struct TokenDecays {
    float a, bias, rate, b;

    DEVICE void fetch(const WindowParams& p, const WindowRow& at, int head, int lane) {
        if (lane >= at.count || lane >= F::TOKENS) return;
        a = gate_input<F>(p, at.row, lane, head, 0);
        bias = load_number<typename F::BIAS>(p.bias, head);
        rate = load_number<typename F::RATE>(p.rate, head);
        b = beta_input<F>(p, at.row, lane, head);
    }

    DEVICE void finish(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, int local, bool append,
                       int lane) const {
        Gate gate{0.0f, 0.0f};
        float input = 0.0f;
        if (lane < at.count && lane < F::TOKENS) {
            gate = gate_of<F>(p, a + bias, rate);
            input = F::DELTA ? p.beta_scale * sigmoid(b) : gate.input;
            if (append) ring_g_of<F>(p, at.slot, head)[at.cursor + lane] = gate.log_decay;
        }
        float behind = 0.0f;
        int next = lane < at.count && lane < F::TOKENS ? lane : -1;
        const bool used = next >= 0;
#pragma unroll
        for (int j = F::TOKENS - 1; j >= 0; --j) {
            const float g = from_lane(gate.log_decay, j);
            const bool met = j == next;
            if (lane < F::TOKENS) m.between[local][lane][j] = met ? expf(behind) : 0.0f;
            if (met) {
                behind += g;
                next = parent_of<F>(p, at, j);
            }
        }
        if (lane < F::TOKENS) {
            m.decay[local][lane] = used ? expf(behind) : 0.0f;
            m.input[local][lane] = input;
        }
    }
};

// Channel gate: all threads, each for some channels: decayed keys of the ring, and the tokens' log decays.
template <class F>
DEVICE void channel_gates(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int head, bool append,
                          int thread) {
    const typename F::X* ring_k = ring_k_of<F>(p, at.slot, head);
    float* ring_g = ring_g_of<F>(p, at.slot, head);
#pragma unroll 1
    for (int c = thread; c < F::D_K; c += F::THREADS) {
        float decay = 0.0f;
#pragma unroll 1
        for (int first = F::UNIT_ROWS - F::UNITS; first >= 0; first -= F::UNITS) {
            if (first >= at.cursor) continue;
            float g[F::UNITS], key[F::UNITS];
#pragma unroll
            for (int i = 0; i < F::UNITS; ++i) {
                const bool committed = first + i < at.cursor;
                g[i] = committed ? ring_g[(first + i) * F::D_K + c] : 0.0f;
                key[i] = committed ? to_float(ring_k[(first + i) * F::D_K + c]) : 0.0f;
            }
#pragma unroll
            for (int i = F::UNITS - 1; i >= 0; --i) {
                if (first + i < at.cursor) m.keys[first + i][c] = key[i] * fast_exp(decay);
                decay += g[i];
            }
        }
        m.channels[c] = expf(decay);
#pragma unroll
        for (int i = 0; i < F::TOKENS; ++i) {
            if (i >= at.count) break;
            const float g = window_log_decay<F>(p, at.row, i, head, c);
            m.gates[i][c] = g;
            if (append) ring_g[(at.cursor + i) * F::D_K + c] = g;
        }
    }
    if (thread < F::TOKENS) {
        const bool used = thread < at.count;
        m.input[0][thread] = used ? p.beta_scale * sigmoid(beta_input<F>(p, at.row, thread, head)) : 0.0f;
    }
}

// Channel gate: a warp takes 32 channels, one a lane. Decayed columns, and their products with the window's keys.
template <class F>
DEVICE void channel_pairs(const WindowParams& p, WindowMemory<F>& m, const WindowRow& at, int warp, int lane) {
    constexpr int NUMBERS = F::COLUMNS, SHARE = 32 / NUMBERS;
#pragma unroll 1
    for (int part = warp; part < F::PARTS; part += F::WARPS) {
        const int c = part * 32 + lane;
#pragma unroll 1
        for (int i = 0; i < F::TOKENS; ++i) {
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
                const TwoTerms terms = two_terms(x * m.channels[c]);
                m.columns[2 * i + n][c] = x;
                m.high[2 * i + n][c] = terms.high;
                m.low[2 * i + n][c] = terms.low;
            }
            // Number n is the product of token n / 2 with q or k of token i.
            const float sum = sums_over_lanes<NUMBERS, 32>(products, lane);
            const int number = lane / SHARE;
            if (lane % SHARE == 0) m.pairs[part][number / 2][2 * i + number % 2] = sum;
        }
    }
}
