/* Small matrix products in dot-product form: out[m][n] = x[m] . w[n], both row-major along k.
 *
 * Meant for few rows of x: then the weights are read once from memory, as they lie in a checkpoint, and nothing is repacked. Four rows of w
 * that lie far apart are walked together: the memory system prefetches four streams, adjacent rows would be one. The order of additions for
 * one output does not depend on the number of rows of x, so a row's result is the same alone and in a batch.
 */
#ifndef CROSSDOCK_ROW_DOT_H
#define CROSSDOCK_ROW_DOT_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define MOST_TILE_ROWS 6
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define MOST_TILE_ROWS 2
#else
#define VECTOR_BYTES 16
#define MOST_TILE_ROWS 4
#endif
#define LANES (VECTOR_BYTES / 4)
#define STREAMS 4
/* Rows of w that are fetched ahead of their use, into the L2 cache: measured from 1 to 8 with 512 columns on Zen 4. */
#define AHEAD_ROWS 4
#define SCALE_BLOCK 128

#if defined(__AVX512BF16__)
#define BF16_STEP 32
typedef uint16_t bf16_row_t;
#else
#define BF16_STEP LANES
typedef float bf16_row_t;
#endif

enum weight_kind { KIND_F32 = 0, KIND_BF16 = 1, KIND_FP8_BLOCK = 2 };

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef float floats_at __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words_at __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t halves_at __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint8_t bytes __attribute__((vector_size(VECTOR_BYTES / 4)));
typedef uint8_t bytes_at __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* A weight matrix [n, k] of one expert or layer; scales only for fp8 blocks. */
struct weights {
    const void *data;
    const float *scales;      /* [row blocks, column blocks] */
    size_t scale_columns;     /* column blocks */
    size_t rows_per_half;     /* rows after which blocks start anew: I for gate and up, n for a single matrix */
};

ALWAYS_INLINE floats load_f32(const float *p) { return (floats)(*(const floats_at *)p); }

ALWAYS_INLINE floats load_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
    words raw = (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
    words raw = __builtin_convertvector((halves)(*(const halves_at *)p), words);
#endif
    return (floats)(raw << 16);
}

/* e4m3fn: the bits of exponent and mantissa, moved to fp32's place, are the value times 2^-120, subnormals included. */
ALWAYS_INLINE floats load_fp8(const uint8_t *p) {
#if defined(__AVX512F__)
    words raw = (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    words raw = __builtin_convertvector((bytes)(*(const bytes_at *)p), words);
#endif
    words bits = ((raw & 0x80u) << 24) | ((raw & 0x7fu) << 20);
    return (floats)bits * 0x1p120f;
}

/* Sums of the lanes of four vectors. */
ALWAYS_INLINE void lane_sums(const floats *a, float *out) {
#if defined(__AVX__)
    __m256 half[STREAMS];
    for (int j = 0; j < STREAMS; j++) {
#if defined(__AVX512F__)
        __m512 v = (__m512)a[j];
        half[j] = _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
#else
        half[j] = (__m256)a[j];
#endif
    }
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int j = 0; j < STREAMS; j++) {
        out[j] = (a[j][0] + a[j][1]) + (a[j][2] + a[j][3]);
    }
#endif
}

/* sums[m][j] = x[m] . w[j * stream], `rows` rows of x (a constant after inlining) and four of w. */
ALWAYS_INLINE void tile_f32(int rows, const float *x, size_t x_stride, const float *w, size_t stream, size_t k,
                            float sums[][STREAMS]) {
    floats acc[MOST_TILE_ROWS][STREAMS];
    memset(acc, 0, sizeof acc);
    for (size_t i = 0; i < k; i += LANES) {
        floats b[STREAMS];
        for (int j = 0; j < STREAMS; j++) b[j] = load_f32(w + j * stream + i);
        for (int j = 0; j < STREAMS; j++) __builtin_prefetch(w + j * stream + i + AHEAD_ROWS * k, 0, 2);
        for (int m = 0; m < rows; m++) {
            floats a = load_f32(x + m * x_stride + i);
            for (int j = 0; j < STREAMS; j++) acc[m][j] += a * b[j];
        }
    }
    for (int m = 0; m < rows; m++) lane_sums(acc[m], sums[m]);
}

ALWAYS_INLINE void tile_bf16(int rows, const bf16_row_t *x, size_t x_stride, const uint16_t *w, size_t stream, size_t k,
                             float sums[][STREAMS]) {
    floats acc[MOST_TILE_ROWS][STREAMS];
    memset(acc, 0, sizeof acc);
    for (size_t i = 0; i < k; i += BF16_STEP) {
#if defined(__AVX512BF16__)
        __m512bh b[STREAMS];
        for (int j = 0; j < STREAMS; j++) __builtin_prefetch(w + j * stream + i + AHEAD_ROWS * k, 0, 2);
        for (int j = 0; j < STREAMS; j++) b[j] = (__m512bh)_mm512_loadu_si512(w + j * stream + i);
        for (int m = 0; m < rows; m++) {
            __m512bh a = (__m512bh)_mm512_loadu_si512(x + m * x_stride + i);
            for (int j = 0; j < STREAMS; j++) acc[m][j] = (floats)_mm512_dpbf16_ps((__m512)acc[m][j], a, b[j]);
        }
#else
        floats b[STREAMS];
        for (int j = 0; j < STREAMS; j++) b[j] = load_bf16(w + j * stream + i);
        for (int m = 0; m < rows; m++) {
            floats a = load_f32(x + m * x_stride + i);
            for (int j = 0; j < STREAMS; j++) acc[m][j] += a * b[j];
        }
#endif
    }
    for (int m = 0; m < rows; m++) lane_sums(acc[m], sums[m]);
}

/* Four rows of block-quantised weights, `stream_rows` apart, as float32 [STREAMS, k], scales multiplied in. */
ALWAYS_INLINE void dequantise_rows(const struct weights *weights, size_t first, size_t stream_rows, size_t k, float *out) {
    size_t half = weights->rows_per_half, blocks_per_half = (half + SCALE_BLOCK - 1) / SCALE_BLOCK;
    for (size_t j = 0; j < STREAMS; j++) {
        size_t row = first + j * stream_rows;
        size_t block = row / half * blocks_per_half + row % half / SCALE_BLOCK;
        const uint8_t *from = (const uint8_t *)weights->data + row * k;
        const float *scales = weights->scales + block * weights->scale_columns;
        for (size_t i = 0; i < k; i += LANES) *(floats_at *)(out + j * k + i) = (floats_at)(load_fp8(from + i) * scales[i / SCALE_BLOCK]);
    }
}

ALWAYS_INLINE void tile(int rows, enum weight_kind kind, const void *x, size_t x_stride, const void *w, size_t stream, size_t k,
                        float sums[][STREAMS]) {
    if (kind == KIND_BF16) tile_bf16(rows, (const bf16_row_t *)x, x_stride, (const uint16_t *)w, stream, k, sums);
    else tile_f32(rows, (const float *)x, x_stride, (const float *)w, stream, k, sums);
}

/* out [m, n] float32, rows `out_stride` apart; n a multiple of STREAMS; k a multiple of the kind's step. x: float32, or for bf16 weights
 * bf16_row_t. `wide` [STREAMS * k] float32 is scratch for fp8 only. */
ALWAYS_INLINE void row_dots(enum weight_kind kind, const void *x, size_t m, size_t x_stride, const struct weights *weights, size_t n,
                            size_t k, float *out, size_t out_stride, float *wide) {
    size_t stream_rows = n / STREAMS, tiles = (m + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS, stream = stream_rows * k;
    size_t item = kind == KIND_BF16 ? sizeof(bf16_row_t) : sizeof(float);
    for (size_t j = 0; j < stream_rows; j++) {
        const void *w = (const char *)weights->data + j * k * (kind == KIND_BF16 ? 2 : 4);
        if (kind == KIND_FP8_BLOCK) {
            dequantise_rows(weights, j, stream_rows, k, wide);
            w = wide;
            stream = k;
        }
        size_t row = 0;
        for (size_t t = 0; t < tiles; t++) {
            /* Tiles of nearly equal height: 7 rows are 4 + 3, not 6 + 1. */
            size_t rows = (m - row + tiles - t - 1) / (tiles - t);
            const char *from = (const char *)x + row * x_stride * item;
            float sums[MOST_TILE_ROWS][STREAMS];
            switch (rows) {
            case 1: tile(1, kind, from, x_stride, w, stream, k, sums); break;
            case 2: tile(2, kind, from, x_stride, w, stream, k, sums); break;
#if MOST_TILE_ROWS > 2
            case 3: tile(3, kind, from, x_stride, w, stream, k, sums); break;
            case 4: tile(4, kind, from, x_stride, w, stream, k, sums); break;
#endif
#if MOST_TILE_ROWS > 4
            case 5: tile(5, kind, from, x_stride, w, stream, k, sums); break;
            case 6: tile(6, kind, from, x_stride, w, stream, k, sums); break;
#endif
            }
            for (size_t i = 0; i < rows; i++)
                for (size_t s = 0; s < STREAMS; s++) out[(row + i) * out_stride + s * stream_rows + j] = sums[i][s];
            row += rows;
        }
    }
}

/* Round to nearest even; NaN stays NaN. */
ALWAYS_INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ALWAYS_INLINE void store_bf16(uint16_t *to, floats value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    for (int lane = 0; lane < LANES; lane++) to[lane] = to_bf16(value[lane]);
#endif
}

ALWAYS_INLINE float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp, relative error below 2e-7: 2^n times a polynomial of the rest. */
ALWAYS_INLINE floats exp_lanes(floats x) {
    const floats rounder = (floats){} + 12582912.0f; /* 1.5 * 2^23 */
    floats low = (floats){} - 87.0f, high = (floats){} + 88.0f;
    x = (floats)(((ints)x & ~(x < low)) | ((ints)low & (x < low)));
    x = (floats)(((ints)x & ~(x > high)) | ((ints)high & (x > high)));
    floats n = (x * 1.44269504f + rounder) - rounder;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}

#endif
