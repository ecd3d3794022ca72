// Gates: log decays of this token, and the decays of the records up to and with it, newest first.

DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

template <class F> DEVICE float delta_gate(const Params& p, float a, float rate) {
    if (F::FLAGS & BOUNDED) return p.lower_bound * sigmoid(expf(rate) * a);
    return -expf(rate) * softplus(a);
}

template <class F> DEVICE float delta_beta(const Params& p, const Row& at, int head) {
    return p.beta_scale * sigmoid(load<typename F::B>(p.b, static_cast<i64>(at.row) * p.b_row + head * p.b_head));
}

// Channel gate: all threads together, each for some channels. Also the decayed keys.
template <class F> DEVICE void channel_decays(const Params& p, Memory<F>& m, const Row& at, int head, bool append) {
    constexpr int CHUNK = F::UNITS;  // records that are fetched at once
    const float rate = load<typename F::RATE>(p.rate, head);
    const typename F::K* ring_k = ring_k_of<F>(p, at.slot, head);
    float* ring_g = ring_g_of<F>(p, at.slot, head);
#pragma unroll 1
    for (int c = threadIdx.x; c < F::D_K; c += F::THREADS) {
        float a = load<typename F::A>(p.a, static_cast<i64>(at.row) * p.a_row + head * p.a_head + c);
        a += load<typename F::BIAS>(p.bias, head * F::D_K + c);
        float decay = 0.0f, gate = 0.0f;
        for (int first = (F::UNIT_ROWS - 1) / CHUNK * CHUNK; first >= 0; first -= CHUNK) {
            float g[CHUNK], key[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                const bool committed = first + i < at.cursor;
                g[i] = committed ? ring_g[(first + i) * F::D_K + c] : 0.0f;
                key[i] = committed ? to_float(ring_k[(first + i) * F::D_K + c]) : 0.0f;
            }
            if (first + CHUNK >= F::UNIT_ROWS) decay = gate = delta_gate<F>(p, a, rate);
#pragma unroll
            for (int i = CHUNK - 1; i >= 0; --i) {
                if (first + i < at.cursor) m.keys[(first + i) * F::D_K + c] = key[i] * fast_exp(decay);
                decay += g[i];
            }
        }
        m.total[c] = expf(decay);
        if (append) ring_g[at.cursor * F::D_K + c] = gate;
    }
    if (threadIdx.x == 0) m.heads[0] = Head{1.0f, delta_beta<F>(p, at, head), 0.0f, 0.0f};
}

// Head gate: one warp, for one head, `local` in the block.
template <class F>
DEVICE void head_decays(const Params& p, Memory<F>& m, const Row& at, int head, int local, bool append, int lane) {
    float* ring_g = ring_g_of<F>(p, at.slot, head);
    const float rate = load<typename F::RATE>(p.rate, head);
    float a = load<typename F::A>(p.a, static_cast<i64>(at.row) * p.a_row + head * p.a_head);
    a += load<typename F::BIAS>(p.bias, head);
    constexpr bool INPUTS = F::FLAGS & INPUT_RECORDS;
    float beta = 0.0f, gate;
    if (F::DELTA) {
        beta = delta_beta<F>(p, at, head);
        gate = delta_gate<F>(p, a, rate);
    } else {
        if (F::FLAGS & SOFTPLUS) a = softplus(a);
        a = fminf(fmaxf(a, p.dt_min), p.dt_max);
        gate = a * rate;
    }
    float newer = gate;  // log decay from behind the records at hand to this token
    for (int first = (F::UNIT_ROWS - 1) & ~31; first >= 0; first -= 32) {
        const int j = first + lane;
        const float stored = j < at.cursor ? ring_g[j] : 0.0f;
        const float g = INPUTS ? stored * rate : stored;
        float behind = g;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = from_lane_after(behind, distance);
            if (lane + distance < 32) behind += other;
        }
        float follows = from_lane_after(behind, 1);
        if (lane == 31) follows = 0.0f;
        const float after = expf(follows + newer) * (INPUTS ? stored : 1.0f);
        if (j < F::UNIT_ROWS) m.after[local][j] = j < at.cursor ? after : 0.0f;
        newer += from_lane(behind, 0);
    }
    if (lane == 0) {
        m.heads[local] = Head{expf(newer), beta, a, 0.0f};
        if (append) ring_g[at.cursor] = INPUTS ? a : gate;
    }
}
