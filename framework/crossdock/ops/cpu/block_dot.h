/* Matrix products for more than a few rows: out[m][n] = x[m] . w[n], the weights turned on the way.
 *
 * Two times LANES rows of w are turned into a block in which one vector holds the same step of LANES outputs; all rows of x then pass over
 * the block, a tile of them at a time, and nothing is summed across lanes. A tile of x is held step by step as well, so that the inner loop walks two
 * runs of memory. The block stays in the L2 cache and is never kept: a second copy
 * of the experts would cost more memory than it saves time. While the first tiles run, the weights of the next block are fetched. A row's
 * bits do not depend on the other rows, but differ from those of row_dot.h.
 *
 * A "word" is what one step of a product takes: a float32, or a pair of bf16 where the processor multiplies pairs.
 */
#ifndef CROSSDOCK_BLOCK_DOT_H
#define CROSSDOCK_BLOCK_DOT_H

#include "row_dot.h"

#define BLOCK_VECTORS 2
#define BLOCK_OUTPUTS (BLOCK_VECTORS * LANES)
#if defined(__AVX512F__)
#define BLOCK_TILE_ROWS 12
/* Rows from which turning the weights pays off, measured on Zen 4. Products of bf16 pairs need half the steps, so it takes longer. */
#define BLOCK_WORTH_IT 7
#define BLOCK_WORTH_IT_BF16 56
#else
#define BLOCK_TILE_ROWS (LANES < 6 ? LANES : 6)
#define BLOCK_WORTH_IT 12
#define BLOCK_WORTH_IT_BF16 56
#endif

#if defined(__AVX512F__)
#define EACH_TILE_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif defined(__AVX__)
#define EACH_TILE_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_TILE_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

/* Where the weights of the next block lie: two runs of LANES rows. */
struct ahead {
    const char *from[BLOCK_VECTORS];
};

/* to[c][r] = from[r][c], LANES by LANES words. */
ALWAYS_INLINE void turn(const words *from, words *to) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32((__m512i)from[r], (__m512i)from[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32((__m512i)from[r], (__m512i)from[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512i top_even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), top_odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i low_even = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), low_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        to[c] = (words)_mm512_shuffle_i32x4(top_even, low_even, 0x88);
        to[4 + c] = (words)_mm512_shuffle_i32x4(top_odd, low_odd, 0x88);
        to[8 + c] = (words)_mm512_shuffle_i32x4(top_even, low_even, 0xdd);
        to[12 + c] = (words)_mm512_shuffle_i32x4(top_odd, low_odd, 0xdd);
    }
#else
    for (int c = 0; c < LANES; c++)
        for (int r = 0; r < LANES; r++) to[c][r] = from[r][c];
#endif
}

/* to[c * stride + r] = from[r * count + c] for LANES rows of `count` words, a multiple of LANES; whole vectors are written, in order of c. */
ALWAYS_INLINE void turn_rows(const uint32_t *from, size_t count, uint32_t *to, size_t stride) {
    for (size_t first = 0; first < count; first += LANES) {
        words in[LANES], out[LANES];
        for (int r = 0; r < LANES; r++) in[r] = *(const words_at *)(from + r * count + first);
        turn(in, out);
        for (int c = 0; c < LANES; c++) *(words_at *)(to + (first + c) * stride) = out[c];
    }
}

/* Words of a row of k weights. */
ALWAYS_INLINE size_t words_of(enum weight_kind kind, size_t k) { return kind == KIND_BF16 ? k * sizeof(bf16_row_t) / 4 : k; }

/* LANES rows of w from `row` on, as words. `wide` [LANES * k] is scratch for weights that are no words. */
ALWAYS_INLINE const uint32_t *weight_words(enum weight_kind kind, const struct weights *weights, size_t row, size_t k, float *wide) {
    const uint32_t *from = (const uint32_t *)wide;
    if (kind == KIND_FP8_BLOCK) {
        for (size_t r = 0; r < LANES; r += STREAMS) dequantise_rows(weights, row + r, 1, k, wide + r * k);
    } else if (kind == KIND_BF16 && sizeof(bf16_row_t) == 4) {
        const uint16_t *halves_in = (const uint16_t *)weights->data + row * k;
        for (size_t i = 0; i < LANES * k; i += LANES) *(floats_at *)(wide + i) = (floats_at)load_bf16(halves_in + i);
    } else {
        from = (const uint32_t *)weights->data + row * words_of(kind, k);
    }
    return from;
}

/* sums[m] = x[m] times the block, for `rows` rows (a constant after inlining), fetching a line of either run of `ahead` each step.
 * x [words, rows]. */
ALWAYS_INLINE void block_tile(int rows, int is_pairs, const uint32_t *x, const uint32_t *block, size_t words,
                              const struct ahead *ahead, size_t ahead_step, float sums[][BLOCK_OUTPUTS]) {
    floats acc[BLOCK_TILE_ROWS][BLOCK_VECTORS];
    memset(acc, 0, sizeof acc);
    for (size_t i = 0; i < words; i++) {
        for (int v = 0; v < BLOCK_VECTORS; v++) __builtin_prefetch(ahead->from[v] + i * ahead_step, 0, 2);
#if defined(__AVX512BF16__)
        if (is_pairs) {
            __m512bh b[BLOCK_VECTORS];
            for (int v = 0; v < BLOCK_VECTORS; v++) b[v] = (__m512bh)_mm512_loadu_si512(block + i * BLOCK_OUTPUTS + v * LANES);
            for (int m = 0; m < rows; m++) {
                __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[i * rows + m]);
                for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] = (floats)_mm512_dpbf16_ps((__m512)acc[m][v], a, b[v]);
            }
            continue;
        }
#endif
        floats b[BLOCK_VECTORS];
        for (int v = 0; v < BLOCK_VECTORS; v++) b[v] = load_f32((const float *)block + i * BLOCK_OUTPUTS + v * LANES);
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] += ((const float *)x)[i * rows + m] * b[v];
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < BLOCK_VECTORS; v++) *(floats_at *)(sums[m] + v * LANES) = (floats_at)acc[m][v];
}

/* Products of up to BLOCK_TILE_ROWS rows, x [words, rows], with a block of `words` steps. */
static void block_dots(int rows, int is_pairs, const uint32_t *x, const uint32_t *block, size_t words,
                       const struct ahead *ahead, size_t ahead_step, float sums[][BLOCK_OUTPUTS]) {
#define CASE(n)                                                                             \
    case n:                                                                                 \
        if (is_pairs) block_tile(n, 1, x, block, words, ahead, ahead_step, sums);           \
        else block_tile(n, 0, x, block, words, ahead, ahead_step, sums);                    \
        break;
    switch (rows) { EACH_TILE_HEIGHT(CASE) }
#undef CASE
}

#endif
