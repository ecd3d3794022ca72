/* Causal depthwise convolution of one token, and the cursors' step. */

#include <stdlib.h>

#include "numbers.h"

typedef struct {
    tensor x, state, weight, bias, slots, out;
    int64_t batch, channels, width, silu;
} convolution;

/* Sums of the taps over state and input, and the state one input further. Inlined for a dtype and a width. */
INLINE void convolve_channels(const convolution *c, int64_t row, int64_t slot, const float *taps, float *y,
                              int64_t dtype, int64_t width) {
    const int64_t size = dtype == FLOAT32 ? 4 : 2, next = c->state.stride[2] * size;
    char *state = (char *)(intptr_t)c->state.data + slot * c->state.stride[0] * size;
    const char *x = (const char *)(intptr_t)c->x.data + row * c->x.stride[0] * size;
    for (int64_t channel = 0; channel < c->channels; channel++) {
        const char *newest = x + channel * c->x.stride[1] * size;
        char *kept = state + channel * c->state.stride[1] * size;
        double total = y[channel];
        for (int64_t w = 0; w + 1 < width; w++) {
            total += (double)number_at(kept + w * next, dtype) * taps[channel * width + w];
            memcpy(kept + w * next, w + 2 < width ? kept + (w + 1) * next : newest, (size_t)size);
        }
        y[channel] = (float)(total + (double)number_at(newest, dtype) * taps[channel * width + width - 1]);
    }
}

static void convolve_row(const convolution *c, int64_t row, int64_t slot, const float *taps, float *y) {
    int64_t dtype = c->state.dtype;
    if (dtype == FLOAT32 && c->width == 4) convolve_channels(c, row, slot, taps, y, FLOAT32, 4);
    else if (dtype == BFLOAT16 && c->width == 4) convolve_channels(c, row, slot, taps, y, BFLOAT16, 4);
    else convolve_channels(c, row, slot, taps, y, dtype, c->width);
}

/* See replayssm.ops.causal_conv1d_update. Returns 0, or 1 without memory. */
int replayssm_convolve(const convolution *c) {
    const tensor *weight = &c->weight, *bias = &c->bias;
    int64_t channels = c->channels, width = c->width;
    float *taps = malloc((size_t)(channels * (width + 2) + 1) * sizeof(float));
    if (!taps) return 1;
    float *start = taps + channels * width, *y = start + channels;
    for (int64_t i = 0; i < channels; i++) {
        start[i] = bias->data ? number(bias, i * bias->stride[0]) : 0.0f;
        for (int64_t w = 0; w < width; w++)
            taps[i * width + w] = number(weight, i * weight->stride[0] + w * weight->stride[1]);
    }
    for (int64_t row = 0; row < c->batch; row++) {
        int64_t slot = integer(&c->slots, row * c->slots.stride[0]);
        if (slot < 0) {
            memset(y, 0, (size_t)channels * sizeof(float));
        } else {
            memcpy(y, start, (size_t)channels * sizeof(float));
            convolve_row(c, row, slot, taps, y);
            for (int64_t at = 0; c->silu && at < channels; at += LANES)
                store(y + at, silu(load(y + at, channels - at)), channels - at);
        }
        write_row(&c->out, row * c->out.stride[0], c->out.stride[1], channels, y);
    }
    free(taps);
    return 0;
}

typedef struct {
    tensor write_pos, checkpoint_slot, counters, slots, force_flush;
    int64_t batch, flush_period;
} move;

/* See replayssm.ops.advance. */
void replayssm_advance(const move *m) {
    for (int64_t row = 0; row < m->batch; row++) {
        int64_t slot = integer(&m->slots, row * m->slots.stride[0]);
        if (slot < 0) continue;
        int32_t *cursor = address(&m->write_pos, slot * m->write_pos.stride[0]);
        int forced = m->force_flush.data && integer(&m->force_flush, row * m->force_flush.stride[0]);
        int flush = forced || *cursor >= m->flush_period - 1;
        if (m->counters.data) {
            int64_t count[] = {1, flush, *cursor}, at = slot * m->counters.stride[0];
            for (int64_t i = 0; i < 3; i++)
                *(int64_t *)address(&m->counters, at + i * m->counters.stride[1]) += count[i];
        }
        if (flush) *(int32_t *)address(&m->checkpoint_slot, slot * m->checkpoint_slot.stride[0]) = (int32_t)slot;
        *cursor = flush ? 0 : *cursor + 1;
    }
}
