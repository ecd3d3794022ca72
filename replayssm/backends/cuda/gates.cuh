// Gates: log decays of this token, and the decays of the records up to and with it, newest first.

// What a head's decays are made from and isn't a parameter: fetched by a warp for a head; for channels, a thread has its
// share of them. Kept as it lies in memory, so that nothing waits for it before it is used.
template <class F> struct GateInputs {
    static constexpr int SHARE = F::CHANNEL ? (F::D_K + F::THREADS - 1) / F::THREADS : 1;
    typename F::A a[SHARE];
    typename F::B b;
    float g;  // head gate: log decay of the record of the lane's number

    DEVICE void fetch(const Params& p, const Row& at, int head, int rows, int lane) {
        const i64 first = static_cast<i64>(at.row) * p.a_row + head * p.a_head;
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            const int c = F::CHANNEL ? n * F::THREADS + threadIdx.x : 0;
            if (!F::CHANNEL || F::D_K % F::THREADS == 0 || c < F::D_K) a[n] = fetched<typename F::A>(p.a, first + c);
        }
        b = fetched<typename F::B>(p.b, static_cast<i64>(at.row) * p.b_row + head * p.b_head);
        if (!F::CHANNEL && lane < rows) g = ring_g_of<F>(p, at.slot, head)[lane];
    }
};

template <class F> DEVICE float beta_of(const Params& p, const GateInputs<F>& in) {
    return F::DELTA ? p.beta_scale * sigmoid(number(in.b)) : 0.0f;
}

// Channel gate: all threads together, each for some channels. The keys come into m.keys, decayed, where the log decays
// were.
template <class F>
DEVICE void channel_decays(const Params& p, Memory<F>& m, const Row& at, int head, bool append,
                           const GateInputs<F>& in, u32 phase) {
    constexpr int TOGETHER = 4;  // records
    const float rate = load_number<typename F::RATE>(p.rate, head);
#pragma unroll
    for (int n = 0; n < GateInputs<F>::SHARE; ++n) {
        const int c = n * F::THREADS + threadIdx.x;
        if (F::D_K % F::THREADS && c >= F::D_K) continue;
        const float a = number(in.a[n]) + load_number<typename F::BIAS>(p.bias, head * F::D_K + c);
        const float gate = gate_of<F>(p, a, rate).log_decay;
        if (append) ring_g_of<F>(p, at.slot, head)[at.cursor * F::D_K + c] = gate;
        barrier_wait(&m.keys_come, phase);
        float decay = gate;
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
                if (first + i < at.cursor) m.keys[(first + i) * F::D_K + c] = key[i] * fast_exp(decay);
                decay += g[i];
            }
        }
        m.total[c] = expf(decay);
    }
    if (threadIdx.x == 0) m.heads[0] = Head{1.0f, beta_of<F>(p, in), 0.0f, 0.0f};
}

// Head gate: one warp, for one head, `local` in the tile.
template <class F>
DEVICE void head_decays(const Params& p, Memory<F>& m, const Row& at, int head, int local, bool append,
                        const GateInputs<F>& in, int lane) {
    float* ring_g = ring_g_of<F>(p, at.slot, head);
    const float rate = load_number<typename F::RATE>(p.rate, head);
    const Gate gate = gate_of<F>(p, number(in.a[0]) + load_number<typename F::BIAS>(p.bias, head), rate);
    float newer = gate.log_decay;  // log decay from behind the records at hand to this token
    for (int first = (F::RING - 1) & ~31; first >= 0; first -= 32) {
        const int j = first + lane;
        float stored = 0.0f;
        if (j < at.cursor) stored = first ? ring_g[j] : in.g;
        const float g = F::INPUT_RECORDS ? stored * rate : stored;
        const Suffix sums = suffix_sums(g, lane);
        const float after = expf(sums.behind + newer) * (F::INPUT_RECORDS ? stored : 1.0f);
        if (j < at.cursor) m.after[local][j] = after;
        newer += from_lane(sums.from, 0);
    }
    if (lane == 0) {
        m.heads[local] = Head{expf(newer), beta_of<F>(p, in), gate.input, 0.0f};
        if (append) ring_g[at.cursor] = F::INPUT_RECORDS ? gate.input : gate.log_decay;
    }
}
