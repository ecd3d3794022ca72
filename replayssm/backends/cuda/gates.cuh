// Gates: log decays of this token, and the decays of the records up to and with it, newest first. A window that flushes
// has them without the token's own, which comes to the products apart: the checkpoint takes its records alone.

// What a head's decays are made from: fetched by a warp for a head; for channels, a thread has its share of them. Kept as
// it lies in memory, so that nothing waits for it before it is used. (KDA, 256 rows in bfloat16: 98 µs, and 115 with the
// parameters fetched where they are used. Of a head gate, they would take registers that are spilled.)
template <class F> struct GateInputs {
    static constexpr int SHARE = F::CHANNEL ? (F::D_K + F::THREADS - 1) / F::THREADS : 1;
    typename F::A a[SHARE];
    typename F::BIAS bias[SHARE];  // channel gate, as rate
    typename F::RATE rate;
    typename F::B b;
    float g;  // head gate: log decay of the record of the lane's number

    DEVICE void fetch(const Params& p, const Row& at, int head, int rows, int lane) {
        const i64 first = static_cast<i64>(at.row) * p.a_row + head * p.a_head;
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            const int c = F::CHANNEL ? n * F::THREADS + threadIdx.x : 0;
            if (F::CHANNEL && F::D_K % F::THREADS && c >= F::D_K) continue;
            a[n] = fetched<typename F::A>(p.a, first + c);
            if (F::CHANNEL) bias[n] = fetched<typename F::BIAS>(p.bias, head * F::D_K + c);
        }
        if (F::CHANNEL) rate = fetched<typename F::RATE>(p.rate, head);
        b = fetched<typename F::B>(p.b, static_cast<i64>(at.row) * p.b_row + head * p.b_head);
        if (!F::CHANNEL && lane < rows) g = ring_g_of<F>(p, at.slot, head)[lane];
    }
};

template <class F> DEVICE float rate_of(const Params& p, const GateInputs<F>& in, int head) {
    return F::CHANNEL ? number(in.rate) : load_number<typename F::RATE>(p.rate, head);
}

// Of the thread's share, the n-th.
template <class F> DEVICE Gate gate_from(const Params& p, const GateInputs<F>& in, int head, int n) {
    const float bias = F::CHANNEL ? number(in.bias[n]) : load_number<typename F::BIAS>(p.bias, head);
    return gate_of<F>(p, number(in.a[n]) + bias, rate_of<F>(p, in, head));
}

template <class F> DEVICE float beta_of(const Params& p, const GateInputs<F>& in) {
    return F::DELTA ? p.beta_scale * sigmoid(number(in.b)) : 0.0f;
}

// The log decay of a row's token, for a head or one of its channels.
template <class F> DEVICE float token_log_decay(const Params& p, int row, int head, int channel) {
    const float a = load_number<typename F::A>(p.a, static_cast<i64>(row) * p.a_row + head * p.a_head + channel);
    const float bias = load_number<typename F::BIAS>(p.bias, head * F::GATES + channel);
    return gate_of<F>(p, a + bias, load_number<typename F::RATE>(p.rate, head)).log_decay;
}

// Channel gate: the records' keys in one channel, decayed to where `newer` leads from the newest of them: into m.keys, where
// the log decays were. The log decay of the checkpoint to there.
template <class F> DEVICE float decay_keys(Memory<F>& m, const Row& at, int c, float newer) {
    constexpr int TOGETHER = 8;  // records
#pragma unroll 1
    for (int first = (at.cursor - 1) & ~(TOGETHER - 1); first >= 0; first -= TOGETHER) {
        float g[TOGETHER], key[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const bool committed = first + i < at.cursor;
            g[i] = committed ? m.keys[(first + i) * F::D_K + c] : 0.0f;
            key[i] = committed ? to_float(m.ring_k[(first + i) * F::D_K + c]) : 0.0f;
        }
#pragma unroll
        for (int i = TOGETHER - 1; i >= 0; --i) {
            if (first + i < at.cursor) m.keys[(first + i) * F::D_K + c] = key[i] * fast_exp(newer);
            newer += g[i];
        }
    }
    return newer;
}

// Head gate, the same by one warp for one head, `local` in the tile: decays of the records into m.after. `stored`: of the
// lane's record. Of records that are inputs, log decays are their `rate`-fold.
template <class F>
DEVICE float decay_records(Memory<F>& m, const Row& at, int local, const float* ring_g, float stored, float rate,
                           float newer, int lane) {
    for (int first = (F::RING - 1) & ~31; first >= 0; first -= 32) {
        const int j = first + lane;
        float held = 0.0f;
        if (j < at.cursor) held = first ? ring_g[j] : stored;
        const float g = F::INPUT_RECORDS ? held * rate : held;
        const Suffix sums = suffix_sums(g, lane);
        const float after = expf(sums.behind + newer) * (F::INPUT_RECORDS ? held : 1.0f);
        if (j < at.cursor) m.after[local][j] = after;
        newer += from_lane(sums.from, 0);
    }
    return newer;
}

// Channel gate: all threads together, each for some channels.
template <class F>
DEVICE void channel_decays(const Params& p, Memory<F>& m, const Row& at, int head, bool append,
                           const GateInputs<F>& in, u32 phase) {
#pragma unroll
    for (int n = 0; n < GateInputs<F>::SHARE; ++n) {
        const int c = n * F::THREADS + threadIdx.x;
        if (F::D_K % F::THREADS && c >= F::D_K) continue;
        const float gate = gate_from<F>(p, in, head, n).log_decay;
        if (append) ring_g_of<F>(p, at.slot, head)[at.cursor * F::D_K + c] = gate;
        barrier_wait(&m.keys_come, phase);
        const float decay = decay_keys<F>(m, at, c, F::WINDOW && at.flush ? 0.0f : gate);
        m.total[c] = expf(decay);
        if constexpr (F::WINDOW) {
            if (!at.flush) continue;
            m.committed[c] = m.total[c];
            m.token[c] = expf(gate);
            m.total[c] *= m.token[c];
        }
    }
    if (threadIdx.x == 0) m.heads[0] = Head{1.0f, beta_of<F>(p, in), 0.0f, 1.0f};
}

// Head gate: one warp, for one head, `local` in the tile.
template <class F>
DEVICE void head_decays(const Params& p, Memory<F>& m, const Row& at, int head, int local, bool append,
                        const GateInputs<F>& in, int lane) {
    float* ring_g = ring_g_of<F>(p, at.slot, head);
    const float rate = rate_of<F>(p, in, head);
    const Gate gate = gate_from<F>(p, in, head, 0);
    const bool apart = F::WINDOW && at.flush;
    const float decay = decay_records<F>(m, at, local, ring_g, in.g, rate, apart ? 0.0f : gate.log_decay, lane);
    if (lane == 0) {
        m.heads[local] = Head{expf(decay), beta_of<F>(p, in), gate.input, apart ? expf(gate.log_decay) : 1.0f};
        if (append) ring_g[at.cursor] = F::INPUT_RECORDS ? gate.input : gate.log_decay;
    }
}
