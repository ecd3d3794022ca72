// The layers' scalar functions. Every one is a pure function of its arguments, so that whoever needs a number again may
// compute it again and gets the same bits.

DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// What a token's gate input, bias included, makes: its log decay, and Δ of Mamba-2.
struct Gate {
    float log_decay, input;
};

template <class F> DEVICE Gate gate_of(float a, float rate, float lower_bound, float dt_min, float dt_max) {
    if (F::DELTA) return Gate{F::BOUNDED ? lower_bound * sigmoid(expf(rate) * a) : -expf(rate) * softplus(a), 0.0f};
    if (F::SOFTPLUS) a = softplus(a);
    a = fminf(fmaxf(a, dt_min), dt_max);
    return Gate{a * rate, a};
}

// A float32 as the sum of two tf32 numbers, rounded to nearest: what is left out is 2^-23 of it at most.
struct TwoTerms {
    u32 high, low;
};

DEVICE TwoTerms two_terms(float x) {
    const u32 high = (as_bits(x) + 0x1000) & 0xffffe000;
    return TwoTerms{high, as_bits(x - as_float(high))};
}

// The same in one instruction less, cut in place of rounded: up to 2^-21 are left out, 2^-23 on average.
DEVICE TwoTerms cut_terms(float x) {
    return TwoTerms{as_bits(x), as_bits(x - as_float(as_bits(x) & 0xffffe000))};
}
