/* One decode step by replay, for both gates and both rules: the equation of backends/torch/decode.py,
 *
 *     S_h x = S_c (exp(G_h) x) + sum_j ((exp(G_h - G_j) k_j) . x) u_j
 *
 * A value head of a row is computed alone, with nothing that another row or the number of threads could change. What a
 * key head's value heads have in common (its products with the ring, for a head gate) is computed once if they follow
 * each other, to the same bits each time.
 */
#include <pthread.h>
#include <stdlib.h>

#include "numbers.h"

enum records { UPDATES, NORMALISED, INPUTS }; /* as in backends/step.py */
enum result { DONE, NO_MEMORY, BAD_SLOT, BAD_CURSOR, BAD_SOURCE };

/* For the additive rule q, k, v, a, rate are C, B, x, dt, A. */
typedef struct {
    tensor q, k, v, a, b, rate, dt_bias, D, z, checkpoint, ring_u, ring_k, ring_g;
    tensor write_pos, checkpoint_slot, slots, force_flush, out;
    int64_t batch, num_slots, k_heads, v_heads, ring_rows, v_dim, k_dim, flush_period;
    int64_t channel, additive, bounded, l2norm, softplus, records, zero_padding, threads;
    double lower_bound, beta_scale, scale, dt_min, dt_max;
} step;

typedef struct {
    int64_t slot, source, count; /* slot < 0: padding; count: committed records */
    int flush;
    float *copy; /* the checkpoint, if another row overwrites it */
} row;

/* What one thread works with. All arrays of floats begin at a multiple of 64 bytes. */
typedef struct {
    const step *s;
    float *memory;
    int64_t row, k_head;                 /* whose columns and keys are here; row -1: nobody's */
    float *q, *k, *raw_k, *decayed_q, *decayed_k; /* k_dim */
    float *g, *total;                    /* this token's log decay and the checkpoint's decay; k_dim or 1 */
    float *after;                        /* decays of the records, then of the token (1); max_count + 1 */
    float *scores_q, *scores_k;          /* k_j . q and k_j . k; max_count */
    float *sq, *sk, *u, *v;              /* v_dim */
    float *buffer;                       /* four rows of k_dim, or one of v_dim */
    float *keys, *decayed, *updates;     /* max_count + 1 rows of k_dim, k_dim, v_dim */
    const float **key, **flushed_key;    /* where these rows are */
    float k_norm, kq;
} scratch;

typedef struct {
    const step *s;
    row *rows;
    int64_t max_count, items, next, chunk;
} work;

static int64_t at_multiple(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

static int prepare(scratch *w, const step *s, int64_t max_count) {
    int64_t d_k = at_multiple(s->k_dim), d_v = at_multiple(s->v_dim), rows = max_count + 1;
    int64_t widest = 4 * d_k > d_v ? 4 * d_k : d_v, flat = at_multiple(rows);
    int64_t sizes[] = {d_k, d_k, d_k, d_k, d_k, d_k, d_k, flat, flat, flat, d_v, d_v, d_v, d_v, widest,
                       rows * d_k, s->channel ? rows * d_k : 0, rows * d_v};
    float **places[] = {&w->q, &w->k, &w->raw_k, &w->decayed_q, &w->decayed_k, &w->g, &w->total, &w->after,
                        &w->scores_q, &w->scores_k, &w->sq, &w->sk, &w->u, &w->v, &w->buffer,
                        &w->keys, &w->decayed, &w->updates};
    enum { PLACES = sizeof(places) / sizeof(places[0]) };
    int64_t numbers = 0;
    for (int i = 0; i < PLACES; i++) numbers += sizes[i];
    void *memory = NULL;
    size_t bytes = (size_t)numbers * sizeof(float) + (size_t)(2 * rows) * sizeof(float *);
    if (posix_memalign(&memory, 64, bytes)) return NO_MEMORY;
    w->s = s;
    w->memory = memory;
    w->row = -1;
    float *free_place = memory;
    for (int i = 0; i < PLACES; i++) {
        *places[i] = free_place;
        free_place += sizes[i];
    }
    w->key = (const float **)free_place;
    w->flushed_key = w->key + rows;
    return DONE;
}

/* ---- sums over k_dim ---- */

INLINE float dot(const float *x, const float *y, int64_t n) {
    floats total = {0};
    for (int64_t i = 0; i < n; i += LANES) total += load(x + i, n - i) * load(y + i, n - i);
    return sum(total);
}

/* Products of `rows` rows with one column or with two. */
INLINE void products(const float *const *x, int rows, const float *q, const float *k, int64_t n, float *sq, float *sk) {
    floats with_q[4] = {{0}}, with_k[4] = {{0}};
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats q_part = *(const floats *)(q + i), k_part = sk ? *(const floats *)(k + i) : q_part;
        for (int r = 0; r < rows; r++) {
            floats part = *(const loose_floats *)(x[r] + i);
            with_q[r] += part * q_part;
            if (sk) with_k[r] += part * k_part;
        }
    }
    if (whole < n) {
        for (int r = 0; r < rows; r++) {
            floats part = load(x[r] + whole, n - whole);
            with_q[r] += part * load(q + whole, n - whole);
            if (sk) with_k[r] += part * load(k + whole, n - whole);
        }
    }
    for (int r = 0; r < rows; r++) {
        sq[r] = sum(with_q[r]);
        if (sk) sk[r] = sum(with_k[r]);
    }
}

INLINE void all_products(const float *const *x, int64_t rows, const float *q, const float *k, int64_t n, float *sq,
                         float *sk) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) products(x + r, 4, q, k, n, sq + r, sk ? sk + r : NULL);
    for (; r < rows; r++) products(x + r, 1, q, k, n, sq + r, sk ? sk + r : NULL);
}

/* y += factor x */
INLINE void add_scaled(float *restrict y, const float *restrict x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(y + i, load(y + i, n - i) + load(x + i, n - i) * factor, n - i);
}

/* ---- a key head ---- */

static void own_row(const tensor *t, int64_t at, int64_t stride, int64_t n, float *place) {
    const float *there = read_row(t, at, stride, n, place);
    if (there != place) memcpy(place, there, (size_t)n * sizeof(float));
}

static float normalise(float *x, int64_t n) {
    float factor = 1.0f / sqrtf(dot(x, x, n) + 1e-6f);
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
    return factor;
}

/* The columns q and k of a row's key head, its keys in the ring, and for a head gate their products. */
static void load_k_head(scratch *w, const row *r, int64_t b, int64_t k_head) {
    const step *s = w->s;
    int64_t n = s->k_dim;
    w->row = b;
    w->k_head = k_head;
    own_row(&s->q, b * s->q.stride[0] + k_head * s->q.stride[1], s->q.stride[2], n, w->q);
    own_row(&s->k, b * s->k.stride[0] + k_head * s->k.stride[1], s->k.stride[2], n, w->raw_k);
    memcpy(w->k, w->raw_k, (size_t)n * sizeof(float));
    w->k_norm = 1.0f;
    if (s->l2norm) {
        normalise(w->q, n);
        w->k_norm = normalise(w->k, n);
    }
    if (s->records == NORMALISED) {
        memcpy(w->raw_k, w->k, (size_t)n * sizeof(float));
        w->k_norm = 1.0f;
    }
    w->kq = dot(w->k, w->q, n);
    int64_t ring = r->slot * s->ring_k.stride[0] + k_head * s->ring_k.stride[1], padded = at_multiple(n);
    for (int64_t j = 0; j < r->count; j++)
        w->key[j] = read_row(&s->ring_k, ring + j * s->ring_k.stride[2], s->ring_k.stride[3], n, w->keys + j * padded);
    w->key[r->count] = w->raw_k;
    if (!s->channel) all_products(w->key, r->count, w->q, w->k, n, w->scores_q, s->additive ? NULL : w->scores_k);
}

/* ---- gates ---- */

/* Decays of checkpoint and records for a head gate. The sums run from the newest record back to the oldest: as
 * differences of one running sum, a small decay behind a large one would lose its digits. */
static void head_decays(scratch *w, const row *r, int64_t head, float rate) {
    const step *s = w->s;
    int64_t ring = r->slot * s->ring_g.stride[0] + head * s->ring_g.stride[1];
    double behind = w->g[0];
    for (int64_t j = r->count - 1; j >= 0; j--) {
        float g = number(&s->ring_g, ring + j * s->ring_g.stride[2]);
        w->after[j] = (float)behind;
        behind += s->records == INPUTS ? g * rate : g;
    }
    w->total[0] = OF_ONE(exponential, (float)behind);
    for (int64_t j = 0; j < r->count; j += LANES)
        store(w->after + j, exponential(load(w->after + j, r->count - j)), r->count - j);
    w->after[r->count] = 1.0f;
}

/* For a channel gate: the keys times their decays, the checkpoint's decay, and the columns times that. */
static void channel_decays(scratch *w, const row *r, int64_t head) {
    const step *s = w->s;
    int64_t n = s->k_dim, padded = at_multiple(n), ring = r->slot * s->ring_g.stride[0] + head * s->ring_g.stride[1];
    memcpy(w->total, w->g, (size_t)n * sizeof(float));
    for (int64_t j = r->count - 1; j >= 0; j--) {
        const float *g = read_row(&s->ring_g, ring + j * s->ring_g.stride[2], s->ring_g.stride[3], n, w->buffer);
        float *decayed = w->decayed + j * padded;
        for (int64_t i = 0; i < n; i += LANES) {
            floats behind = load(w->total + i, n - i);
            store(decayed + i, load(w->key[j] + i, n - i) * exponential(behind), n - i);
            store(w->total + i, behind + load(g + i, n - i), n - i);
        }
        w->flushed_key[j] = decayed;
        w->after[j] = 1.0f;
    }
    w->flushed_key[r->count] = w->raw_k;
    w->after[r->count] = 1.0f;
    for (int64_t i = 0; i < n; i += LANES) {
        floats total = exponential(load(w->total + i, n - i));
        store(w->total + i, total, n - i);
        store(w->decayed_q + i, load(w->q + i, n - i) * total, n - i);
        store(w->decayed_k + i, load(w->k + i, n - i) * total, n - i);
    }
}

static void channel_gate(scratch *w, int64_t b, int64_t head) {
    const step *s = w->s;
    int64_t n = s->k_dim;
    float rate = OF_ONE(exponential, number(&s->rate, head * s->rate.stride[0]));
    own_row(&s->a, b * s->a.stride[0] + head * s->a.stride[1], s->a.stride[2], n, w->g);
    const float *bias = read_row(&s->dt_bias, head * s->dt_bias.stride[0], s->dt_bias.stride[1], n, w->buffer);
    for (int64_t i = 0; i < n; i += LANES) {
        floats x = load(w->g + i, n - i) + load(bias + i, n - i);
        floats g = s->bounded ? (float)s->lower_bound * sigmoid(rate * x) : -rate * softplus(x);
        store(w->g + i, g, n - i);
    }
}

static float time_step(const step *s, int64_t b, int64_t head) {
    float delta = number(&s->a, b * s->a.stride[0] + head * s->a.stride[1]);
    if (s->dt_bias.data) delta += number(&s->dt_bias, head * s->dt_bias.stride[0]);
    if (s->softplus) delta = OF_ONE(softplus, delta);
    delta = delta < (float)s->dt_min ? (float)s->dt_min : delta;
    return delta > (float)s->dt_max ? (float)s->dt_max : delta;
}

/* ---- a value head ---- */

static const float *checkpoint_row(const step *s, const row *r, int64_t head, int64_t i, float *buffer) {
    const tensor *t = &s->checkpoint;
    if (r->copy) return r->copy + (head * s->v_dim + i) * s->k_dim;
    int64_t at = r->source * t->stride[0] + head * t->stride[1] + i * t->stride[2];
    return read_row(t, at, t->stride[3], s->k_dim, buffer);
}

/* sq = S_c q and sk = S_c k, before the decay of a head gate. */
static void read_checkpoint(scratch *w, const row *r, int64_t head) {
    const step *s = w->s;
    const float *q = s->channel ? w->decayed_q : w->q, *k = s->channel ? w->decayed_k : w->k;
    int64_t n = s->k_dim, padded = at_multiple(n);
    for (int64_t i = 0; i < s->v_dim; i += 4) {
        const float *rows[4];
        int64_t count = s->v_dim - i < 4 ? s->v_dim - i : 4;
        for (int64_t j = 0; j < count; j++) rows[j] = checkpoint_row(s, r, head, i + j, w->buffer + j * padded);
        all_products(rows, count, q, k, n, w->sq + i, s->additive ? NULL : w->sk + i);
    }
}

/* The ring's part of S_h q and S_h k. */
static void read_ring(scratch *w, const row *r, int64_t head, const float *factor) {
    const step *s = w->s;
    int64_t base = r->slot * s->ring_u.stride[0] + head * s->ring_u.stride[1];
    for (int64_t j = 0; j < r->count; j++) {
        const float *u = read_row(&s->ring_u, base + j * s->ring_u.stride[2], s->ring_u.stride[3], s->v_dim, w->buffer);
        add_scaled(w->sq, u, w->scores_q[j] * factor[j], s->v_dim);
        if (!s->additive) add_scaled(w->sk, u, w->scores_k[j] * factor[j], s->v_dim);
    }
}

/* Sums that fit the registers: 4 rows by 4 vectors where these have 16 numbers. */
#ifdef __AVX512F__
enum { FOLDED_ROWS = 4, FOLDED_VECTORS = 4 };
#else
enum { FOLDED_ROWS = 2, FOLDED_VECTORS = 2 };
#endif

/* Columns `at` and on of `rows` rows of the state: total * old + sum_j u_j k_j, with the u_j `step` apart. */
INLINE void fold_part(const float *const *old, float *const *new, int rows, int vectors, const float *const *key,
                      int64_t count, const float *u, int64_t step, const float *total, int channel, int64_t at,
                      int64_t n) {
    floats part[FOLDED_ROWS][FOLDED_VECTORS];
    for (int v = 0; v < vectors; v++) {
        int64_t c = at + v * LANES;
        floats decay = channel ? load(total + c, n - c) : every(total[0]);
        for (int i = 0; i < rows; i++) part[i][v] = load(old[i] + c, n - c) * decay;
    }
    for (int64_t j = 0; j < count; j++)
        for (int v = 0; v < vectors; v++) {
            int64_t c = at + v * LANES;
            floats k = load(key[j] + c, n - c);
            for (int i = 0; i < rows; i++) part[i][v] += k * u[j * step + i];
        }
    for (int v = 0; v < vectors; v++)
        for (int i = 0; i < rows; i++) store(new[i] + at + v * LANES, part[i][v], n - at - v * LANES);
}

INLINE void fold_rows(const float *const *old, float *const *new, int rows, const float *const *key, int64_t count,
                      const float *u, int64_t step, const float *total, int channel, int64_t n) {
    int64_t at = 0, wide = FOLDED_VECTORS * LANES;
    /* n told as at + wide, the compiler knows that these vectors are whole. */
    for (; at + wide <= n; at += wide)
        fold_part(old, new, rows, FOLDED_VECTORS, key, count, u, step, total, channel, at, at + wide);
    for (; at < n; at += LANES) fold_part(old, new, rows, 1, key, count, u, step, total, channel, at, n);
}

/* Checkpoint, records and this token folded into the slot's own checkpoint. */
static void flush(scratch *w, const row *r, int64_t head, const float *factor) {
    const step *s = w->s;
    const tensor *t = &s->checkpoint;
    int64_t n = s->k_dim, d_v = at_multiple(s->v_dim);
    int64_t base = r->slot * s->ring_u.stride[0] + head * s->ring_u.stride[1];
    for (int64_t j = 0; j < r->count; j++) {
        float *place = w->updates + j * d_v;
        const float *u = read_row(&s->ring_u, base + j * s->ring_u.stride[2], s->ring_u.stride[3], s->v_dim, w->buffer);
        for (int64_t i = 0; i < s->v_dim; i++) place[i] = u[i] * factor[j];
    }
    memcpy(w->updates + r->count * d_v, w->u, (size_t)s->v_dim * sizeof(float));
    const float **key = s->channel ? w->flushed_key : w->key;
    int64_t target = r->slot * t->stride[0] + head * t->stride[1];
    for (int64_t i = 0; i < s->v_dim; i += FOLDED_ROWS) {
        int64_t rows = s->v_dim - i < FOLDED_ROWS ? s->v_dim - i : FOLDED_ROWS;
        const float *old[FOLDED_ROWS], *u = w->updates + i;
        float *new[FOLDED_ROWS];
        for (int64_t k = 0; k < rows; k++) {
            new[k] = w->buffer + k * at_multiple(n);
            old[k] = checkpoint_row(s, r, head, i + k, new[k]);
        }
        if (rows == FOLDED_ROWS) fold_rows(old, new, FOLDED_ROWS, key, r->count + 1, u, d_v, w->total, s->channel, n);
        else for (int64_t k = 0; k < rows; k++)
            fold_rows(old + k, new + k, 1, key, r->count + 1, u + k, d_v, w->total, s->channel, n);
        for (int64_t k = 0; k < rows; k++) write_row(t, target + (i + k) * t->stride[2], t->stride[3], n, new[k]);
    }
}

/* One record at the row's cursor; the first value head of a key head writes its key. */
static void append(scratch *w, const row *r, int64_t head, float delta) {
    const step *s = w->s;
    int64_t j = r->count, k_head = w->k_head;
    float *u = s->records == INPUTS ? w->v : w->u;
    if (s->ring_u.dtype == FLOAT16 && s->records != INPUTS)
        for (int64_t i = 0; i < s->v_dim; i++) /* the norm factor of a tiny key may take it past the largest number */
            u[i] = u[i] > 65504.0f ? 65504.0f : u[i] < -65504.0f ? -65504.0f : u[i];
    int64_t at = r->slot * s->ring_u.stride[0] + head * s->ring_u.stride[1] + j * s->ring_u.stride[2];
    write_row(&s->ring_u, at, s->ring_u.stride[3], s->v_dim, u);
    at = r->slot * s->ring_g.stride[0] + head * s->ring_g.stride[1] + j * s->ring_g.stride[2];
    if (s->channel) write_row(&s->ring_g, at, s->ring_g.stride[3], s->k_dim, w->g);
    else write_row(&s->ring_g, at, 1, 1, s->records == INPUTS ? &delta : w->g);
    if (head % (s->v_heads / s->k_heads)) return;
    at = r->slot * s->ring_k.stride[0] + k_head * s->ring_k.stride[1] + j * s->ring_k.stride[2];
    write_row(&s->ring_k, at, s->ring_k.stride[3], s->k_dim, w->raw_k);
}

/* y = (y + D x) silu(z) */
static void skip_and_gate(scratch *w, int64_t b, int64_t head, float *y) {
    const step *s = w->s;
    if (s->D.data)
        for (int64_t i = 0; i < s->v_dim; i++)
            y[i] += number(&s->D, head * s->D.stride[0] + i * s->D.stride[1]) * w->v[i];
    if (!s->z.data) return;
    const float *z = read_row(&s->z, b * s->z.stride[0] + head * s->z.stride[1], s->z.stride[2], s->v_dim, w->buffer);
    for (int64_t i = 0; i < s->v_dim; i += LANES)
        store(y + i, load(y + i, s->v_dim - i) * silu(load(z + i, s->v_dim - i)), s->v_dim - i);
}

static void step_head(scratch *w, const row *r, int64_t b, int64_t head) {
    const step *s = w->s;
    int64_t k_head = head / (s->v_heads / s->k_heads), n = s->v_dim;
    int64_t out = b * s->out.stride[0] + head * s->out.stride[1];
    if (r->slot < 0) {
        memset(w->sq, 0, (size_t)n * sizeof(float));
        if (s->zero_padding) write_row(&s->out, out, s->out.stride[2], n, w->sq);
        return;
    }
    if (w->row != b || w->k_head != k_head) load_k_head(w, r, b, k_head);
    own_row(&s->v, b * s->v.stride[0] + head * s->v.stride[1], s->v.stride[2], n, w->v);

    float delta = 0.0f, beta = 0.0f, rate = 0.0f;
    if (s->additive) {
        rate = number(&s->rate, head * s->rate.stride[0]);
        delta = time_step(s, b, head);
        w->g[0] = delta * rate;
    } else {
        beta = (float)s->beta_scale * OF_ONE(sigmoid, number(&s->b, b * s->b.stride[0] + head * s->b.stride[1]));
        if (s->channel) {
            channel_gate(w, b, head);
        } else {
            float a = number(&s->a, b * s->a.stride[0] + head * s->a.stride[1]);
            a += number(&s->dt_bias, head * s->dt_bias.stride[0]);
            rate = OF_ONE(exponential, number(&s->rate, head * s->rate.stride[0]));
            w->g[0] = -rate * OF_ONE(softplus, a);
        }
    }
    if (s->channel) {
        channel_decays(w, r, head);
        all_products(w->flushed_key, r->count, w->q, w->k, s->k_dim, w->scores_q, w->scores_k);
    } else {
        head_decays(w, r, head, rate);
    }
    if (s->records == INPUTS) { /* the ring holds x in place of u = delta x */
        int64_t ring = r->slot * s->ring_g.stride[0] + head * s->ring_g.stride[1];
        for (int64_t j = 0; j < r->count; j++) w->after[j] *= number(&s->ring_g, ring + j * s->ring_g.stride[2]);
    }

    read_checkpoint(w, r, head);
    if (!s->channel)
        for (int64_t i = 0; i < n; i++) {
            w->sq[i] *= w->total[0];
            if (!s->additive) w->sk[i] *= w->total[0];
        }
    read_ring(w, r, head, w->after);
    for (int64_t i = 0; i < n; i++) w->u[i] = s->additive ? delta * w->v[i] : (w->v[i] - w->sk[i]) * beta;
    for (int64_t i = 0; i < n; i++) w->sq[i] = (w->sq[i] + w->u[i] * w->kq) * (float)s->scale;
    if (!s->additive)
        for (int64_t i = 0; i < n; i++) w->u[i] *= w->k_norm;

    if (r->flush) flush(w, r, head, w->after);
    else append(w, r, head, delta);
    if (s->additive) skip_and_gate(w, b, head, w->sq);
    write_row(&s->out, out, s->out.stride[2], n, w->sq);
}

/* ---- all rows ---- */

/* Slots, cursors and sources of all rows; nothing is written before all of them are known to be in range. */
static int read_rows(const step *s, row *rows, int64_t *max_count) {
    *max_count = 0;
    for (int64_t b = 0; b < s->batch; b++) {
        row *r = rows + b;
        r->slot = integer(&s->slots, b * s->slots.stride[0]);
        if (r->slot < 0) continue;
        if (r->slot >= s->num_slots) return BAD_SLOT;
        int own = !s->checkpoint_slot.data;
        r->count = integer(&s->write_pos, (own ? b : r->slot) * s->write_pos.stride[0]);
        if (r->count < 0 || r->count > s->ring_rows) return BAD_CURSOR;
        r->source = own ? r->slot : integer(&s->checkpoint_slot, r->slot * s->checkpoint_slot.stride[0]);
        if (r->source < 0 || r->source >= s->num_slots) return BAD_SOURCE;
        int forced = s->force_flush.data && integer(&s->force_flush, b * s->force_flush.stride[0]);
        r->flush = forced || r->count >= s->flush_period - 1;
        if (r->count > *max_count) *max_count = r->count;
    }
    return DONE;
}

/* A row that reads another slot's checkpoint, which this step overwrites, keeps a copy of it. */
static int copy_overwritten(const step *s, row *rows) {
    const tensor *t = &s->checkpoint;
    for (int64_t b = 0; b < s->batch; b++) {
        row *r = rows + b;
        int overwritten = 0;
        if (r->slot < 0 || r->source == r->slot) continue;
        for (int64_t other = 0; other < s->batch && !overwritten; other++)
            overwritten = rows[other].slot == r->source && rows[other].flush;
        if (!overwritten) continue;
        int64_t n = s->k_dim, count = s->v_heads * s->v_dim;
        r->copy = malloc((size_t)(count * n) * sizeof(float));
        if (!r->copy) return NO_MEMORY;
        for (int64_t i = 0; i < count; i++) {
            int64_t at = r->source * t->stride[0] + i / s->v_dim * t->stride[1] + i % s->v_dim * t->stride[2];
            own_row(t, at, t->stride[3], n, r->copy + i * n);
        }
    }
    return DONE;
}

/* Takes heads of rows until there are none left. */
static void *run(void *argument) {
    work *all = argument;
    const step *s = all->s;
    scratch w = {0};
    if (prepare(&w, s, all->max_count)) return NULL;
    for (;;) {
        int64_t first = __atomic_fetch_add(&all->next, all->chunk, __ATOMIC_RELAXED);
        if (first >= all->items) break;
        int64_t end = first + all->chunk < all->items ? first + all->chunk : all->items;
        for (int64_t i = first; i < end; i++) step_head(&w, all->rows + i / s->v_heads, i / s->v_heads, i % s->v_heads);
    }
    free(w.memory);
    return NULL;
}

/* One thread for each this many numbers of the state: below, a thread costs more to start than it takes off. */
enum { PER_THREAD = 1 << 19, MOST_THREADS = 256 };

static int run_threads(work *all) {
    const step *s = all->s;
    int64_t threads = all->items * s->v_dim * s->k_dim / PER_THREAD;
    threads = threads > s->threads ? s->threads : threads;
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    int64_t group = s->v_heads / s->k_heads;
    all->chunk = threads > 1 && all->items / group < 4 * threads ? 1 : group;
    pthread_t started[MOST_THREADS];
    int64_t count = 0;
    while (count < threads - 1 && !pthread_create(&started[count], NULL, run, all)) count++;
    run(all);
    for (int64_t i = 0; i < count; i++) pthread_join(started[i], NULL);
    return all->next < all->items ? NO_MEMORY : DONE; /* no thread had memory to work with */
}

/* See replayssm.backends.torch.layers: gdn_decode, kda_decode, mamba2_decode. */
int replayssm_decode(const step *s) {
    row *rows = calloc((size_t)s->batch + 1, sizeof(row));
    if (!rows) return NO_MEMORY;
    work all = {.s = s, .rows = rows, .items = s->batch * s->v_heads};
    int result = read_rows(s, rows, &all.max_count);
    if (!result) result = copy_overwritten(s, rows);
    if (!result) result = run_threads(&all);
    for (int64_t b = 0; b < s->batch; b++) free(rows[b].copy);
    free(rows);
    return result;
}
