/* Tensors, their numbers, and sixteen of them at a time.
 *
 * A sum of n numbers is always sixteen partial sums that are added as a tree, whatever the machine's vectors are; the
 * last numbers are padded with zeros. So a sum depends on its numbers alone.
 */
#ifndef REPLAYSSM_NUMBERS_H
#define REPLAYSSM_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* In the order of _DTYPES in kernels.py. */
enum dtype { FLOAT32, BFLOAT16, FLOAT16, INT32, INT64, BOOL };

/* A tensor as Python packs it; data is 0 where there is none, strides count elements. */
typedef struct {
    int64_t data, dtype, stride[4];
} tensor;

enum { LANES = 16 };

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef float loose_floats __attribute__((vector_size(64), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline, unused))
#define SHARED static __attribute__((noinline, unused)) /* keeps the compilation short */

/* ---- one number ---- */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float of_bfloat16(uint16_t x) { return of_bits((uint32_t)x << 16); }

/* Rounds to nearest, ties to even. */
INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)rounded;
}

INLINE float of_float16(uint16_t x) {
    uint32_t size = x & 0x7fff, sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t normal = (size << 13) + (112u << 23);
    /* A subnormal is size * 2^-24: the digits behind 2^-14, which is taken off again. */
    uint32_t subnormal = bits_of(of_bits((size << 13) + (113u << 23)) - of_bits(113u << 23));
    uint32_t special = (size << 13) | 0x7f800000;
    uint32_t chosen = size >= 0x7c00 ? special : size < 0x400 ? subnormal : normal;
    return of_bits(sign | chosen);
}

/* Rounds to nearest, ties to even. */
INLINE uint16_t to_float16(float x) {
    uint32_t bits = bits_of(x), size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
    uint32_t normal = (size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13;
    /* Behind 0.5, a float32 counts in 2^-24, as the subnormals do. */
    uint32_t subnormal = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f);
    uint32_t chosen = size < 0x38800000 ? subnormal : normal;
    chosen = size >= 0x477ff000 ? 0x7c00 : chosen; /* 65520 and more are infinite */
    chosen = size > 0x7f800000 ? 0x7e00 : chosen;
    return (uint16_t)(sign | chosen);
}

INLINE void *address(const tensor *t, int64_t at) {
    static const int64_t size[] = {4, 2, 2, 4, 8, 1};
    return (char *)(intptr_t)t->data + at * size[t->dtype];
}

INLINE float number_at(const void *p, int64_t dtype) {
    switch (dtype) {
    case FLOAT32: return *(const float *)p;
    case BFLOAT16: return of_bfloat16(*(const uint16_t *)p);
    default: return of_float16(*(const uint16_t *)p);
    }
}

INLINE float number(const tensor *t, int64_t at) { return number_at(address(t, at), t->dtype); }

INLINE int64_t integer(const tensor *t, int64_t at) {
    const void *p = address(t, at);
    switch (t->dtype) {
    case INT32: return *(const int32_t *)p;
    case INT64: return *(const int64_t *)p;
    default: return *(const uint8_t *)p;
    }
}

/* ---- a row of numbers ---- */

/* n numbers as contiguous floats: where they lie if they are that, otherwise in the buffer. */
SHARED const float *read_row(const tensor *t, int64_t at, int64_t stride, int64_t n, float *buffer) {
    const void *p = address(t, at);
    if (t->dtype == FLOAT32) {
        if (stride == 1) return p;
        for (int64_t i = 0; i < n; i++) buffer[i] = ((const float *)p)[i * stride];
    } else if (t->dtype == BFLOAT16) {
        const uint16_t *x = p;
        if (stride == 1) for (int64_t i = 0; i < n; i++) buffer[i] = of_bfloat16(x[i]);
        else for (int64_t i = 0; i < n; i++) buffer[i] = of_bfloat16(x[i * stride]);
    } else {
        const uint16_t *x = p;
        if (stride == 1) for (int64_t i = 0; i < n; i++) buffer[i] = of_float16(x[i]);
        else for (int64_t i = 0; i < n; i++) buffer[i] = of_float16(x[i * stride]);
    }
    return buffer;
}

SHARED void write_row(const tensor *t, int64_t at, int64_t stride, int64_t n, const float *row) {
    void *p = address(t, at);
    if (t->dtype == FLOAT32) {
        if (stride == 1) memmove(p, row, (size_t)n * 4);
        else for (int64_t i = 0; i < n; i++) ((float *)p)[i * stride] = row[i];
    } else if (t->dtype == BFLOAT16) {
        uint16_t *x = p;
        if (stride == 1) for (int64_t i = 0; i < n; i++) x[i] = to_bfloat16(row[i]);
        else for (int64_t i = 0; i < n; i++) x[i * stride] = to_bfloat16(row[i]);
    } else {
        uint16_t *x = p;
        if (stride == 1) for (int64_t i = 0; i < n; i++) x[i] = to_float16(row[i]);
        else for (int64_t i = 0; i < n; i++) x[i * stride] = to_float16(row[i]);
    }
}

/* ---- sixteen numbers ---- */

INLINE floats every(float x) { return x - (floats){0}; }

/* The numbers from p on, zeros behind the last `left`. */
INLINE floats load(const float *p, int64_t left) {
    if (left >= LANES) return *(const loose_floats *)p;
    floats x = {0};
    memcpy(&x, p, (size_t)left * 4);
    return x;
}

INLINE void store(float *p, floats x, int64_t left) {
    if (left >= LANES) *(loose_floats *)p = x;
    else memcpy(p, &x, (size_t)left * 4);
}

INLINE float sum(floats x) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight a, b;
    four c, d;
    memcpy(&a, &x, 32);
    memcpy(&b, (char *)&x + 32, 32);
    a += b;
    memcpy(&c, &a, 16);
    memcpy(&d, (char *)&a + 16, 16);
    c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE floats either(ints condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

/* e^x by 2^n e^r, |r| <= ln(2) / 2; off by about one unit in the last place. */
INLINE floats exponential(floats x) {
    floats bounded = either(x > 89.0f, every(89.0f), x); /* NaN stays NaN */
    bounded = either(bounded < -104.0f, every(-104.0f), bounded);
    const float whole = 12582912.0f; /* 1.5 * 2^23: a sum with it is rounded to a whole number */
    floats shifted = bounded * 1.44269504f + whole;
    floats n = shifted - whole;
    floats r = bounded - n * 0.693359375f; /* ln 2 in two parts, the first of few digits */
    r = r + n * 2.12194440e-4f;
    floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    words power = (words)shifted - bits_of(whole);
    words half = (words)((ints)power >> 1);
    floats first = (floats)((half + 127) << 23), second = (floats)((power - half + 127) << 23);
    return p * first * second; /* in two steps, because 2^n alone may leave the range of a float32 */
}

/* log(1 + e) for 0 <= e <= 1, by the series of 2 artanh(s), s = e / (2 + e) <= 1 / 3. */
INLINE floats log_of_one_plus(floats e) {
    floats s = e / (e + 2.0f), t = s * s;
    floats p = t * (1.0f / 15) + 1.0f / 13;
    p = p * t + 1.0f / 11;
    p = p * t + 1.0f / 9;
    p = p * t + 1.0f / 7;
    p = p * t + 0.2f;
    p = p * t + 1.0f / 3;
    return (s * 2.0f) * (t * p) + s * 2.0f;
}

INLINE floats softplus(floats x) {
    floats positive = either(x < 0.0f, (floats){0}, x);
    return positive + log_of_one_plus(exponential(either(x < 0.0f, x, -x)));
}

INLINE floats sigmoid(floats x) { return 1.0f / (exponential(-x) + 1.0f); }

INLINE floats silu(floats x) { return x / (exponential(-x) + 1.0f); }

/* One of these functions of one number. */
#define OF_ONE(function, x) (function(every(x))[0])

#endif
