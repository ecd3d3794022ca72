// The layers' scalar functions. Every one is a pure function of its arguments, so that whoever needs a number again may
// compute it again and gets the same bits.

DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// What a token's gate input, bias included, makes: its log decay, and Δ of Mamba-2.
struct Gate {
    float log_decay, input;
};

template <class F, class P> DEVICE Gate gate_of(const P& p, float a, float rate) {
    if (F::DELTA) return Gate{F::BOUNDED ? p.lower_bound * sigmoid(expf(rate) * a) : -expf(rate) * softplus(a), 0.0f};
    if (F::SOFTPLUS) a = softplus(a);
    a = fminf(fmaxf(a, p.dt_min), p.dt_max);
    return Gate{a * rate, a};
}

// Of q or k, from the sum of its squares.
DEVICE float inverse_norm(float squares) { return inverse_root(squares + 1e-6f); }

// An update as a ring of U holds it: it has the factor that normalises k, and infinity would stay for good.
template <class U> DEVICE float bounded_update(float u) {
    return same<U, f16>::value ? fminf(fmaxf(u, -65504.0f), 65504.0f) : u;
}
