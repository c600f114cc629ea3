/* The products of block_dot.h with the sums of row_dot.h, to the last bit: there a vector holds the partial sums of one output, lane by lane, and
 * the lanes are added at the end. Here the steps of a lane come one after the other, so turned rows and weights are kept lane by lane, and the lanes
 * of all outputs are added in the same pairs. Costs a little more than block_dot.h, because accumulators are put away LANES times.
 */
#ifndef CROSSDOCK_LANE_DOT_H
#define CROSSDOCK_LANE_DOT_H

#include "block_dot.h"

/* Levels of the tree in which lanes are added. */
#if LANES == 16
#define LANE_LEVELS 4
#elif LANES == 8
#define LANE_LEVELS 3
#else
#define LANE_LEVELS 2
#endif
/* Rows from which this is faster than row_dot.h. */
#define LANE_WORTH_IT 12

/* Which lane comes at a place, so that neighbours in the tree are those of `lane_sums`. */
ALWAYS_INLINE size_t lane_at(size_t place) {
#if LANES == 16
    return place / 2 + (place & 1) * 8;
#else
    return place;
#endif
}

/* Where a step lies: lane by lane, `count` steps in all. */
ALWAYS_INLINE size_t lane_place(size_t step, size_t count) { return step % LANES * (count / LANES) + step / LANES; }

/* As `turn_rows`, lane by lane; `stride` is at least LANES. */
ALWAYS_INLINE void turn_lanes(const uint32_t *from, size_t count, uint32_t *to, size_t stride) {
    for (size_t first = 0; first < count; first += LANES) {
        words in[LANES], out[LANES];
        for (int r = 0; r < LANES; r++) in[r] = *(const words_at *)(from + r * count + first);
        turn(in, out);
        for (int c = 0; c < LANES; c++) *(words_at *)(to + lane_place(first + c, count) * stride) = out[c];
    }
}

/* sums[m] = x[m] times the block, for `rows` rows (a constant after inlining). x [words, LANES]. */
ALWAYS_INLINE void lane_tile(int rows, int is_pairs, const uint32_t *x, const uint32_t *block, size_t words,
                             const struct ahead *ahead, size_t ahead_step, float sums[][BLOCK_OUTPUTS]) {
    floats parts[LANE_LEVELS + 1][BLOCK_TILE_ROWS][BLOCK_VECTORS];
    size_t steps = words / LANES;
    for (size_t place = 0; place < LANES; place++) {
        size_t first = lane_at(place) * steps;
        floats acc[BLOCK_TILE_ROWS][BLOCK_VECTORS];
        memset(acc, 0, sizeof acc);
        for (size_t i = first; i < first + steps; i++) {
            for (int v = 0; v < BLOCK_VECTORS; v++) __builtin_prefetch(ahead->from[v] + i * ahead_step, 0, 2);
#if defined(__AVX512BF16__)
            if (is_pairs) {
                __m512bh b[BLOCK_VECTORS];
                for (int v = 0; v < BLOCK_VECTORS; v++) b[v] = (__m512bh)_mm512_loadu_si512(block + i * BLOCK_OUTPUTS + v * LANES);
                for (int m = 0; m < rows; m++) {
                    __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[i * LANES + m]);
                    for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] = (floats)_mm512_dpbf16_ps((__m512)acc[m][v], a, b[v]);
                }
                continue;
            }
#endif
            floats b[BLOCK_VECTORS];
            for (int v = 0; v < BLOCK_VECTORS; v++) b[v] = load_f32((const float *)block + i * BLOCK_OUTPUTS + v * LANES);
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] += ((const float *)x)[i * LANES + m] * b[v];
        }
        int level = 0;
        for (; place >> level & 1; level++)
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] += parts[level][m][v];
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < BLOCK_VECTORS; v++) parts[level][m][v] = acc[m][v];
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < BLOCK_VECTORS; v++) *(floats_at *)(sums[m] + v * LANES) = (floats_at)parts[LANE_LEVELS][m][v];
}

/* Products of up to BLOCK_TILE_ROWS rows, x [words, LANES] lane by lane, with a block of `words` steps, lane by lane. */
static void lane_dots(int rows, int is_pairs, const uint32_t *x, const uint32_t *block, size_t words,
                      const struct ahead *ahead, size_t ahead_step, float sums[][BLOCK_OUTPUTS]) {
#define CASE(n)                                                                            \
    case n:                                                                                \
        if (is_pairs) lane_tile(n, 1, x, block, words, ahead, ahead_step, sums);           \
        else lane_tile(n, 0, x, block, words, ahead, ahead_step, sums);                    \
        break;
    switch (rows) { EACH_TILE_HEIGHT(CASE) }
#undef CASE
}

#endif
