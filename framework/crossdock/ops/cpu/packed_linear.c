/* x [m, k] times w [n, k] transposed, float32, for any number of rows, with weights that were turned once.
 *
 * An output is one chain of additions along k, whatever the number of rows and wherever a row lies: its bits are those that it has alone.
 */
#include <stdlib.h>

#include "block_dot.h"

/* Floats of x that are kept turned while all weights pass: half of a usual L2 cache. */
#define CHUNK_FLOATS (1 << 17)
#define MOST_CHUNK_TILES 16
/* Steps of weights that are fetched ahead of their use. */
#define AHEAD_STEPS (4 * LANES)

struct packed_linear {
    const float *rows;         /* [m, k] */
    const float *packed;       /* [blocks, steps, BLOCK_OUTPUTS], zero behind n and k */
    const float *bias;         /* [n] or NULL */
    float *out;                /* [m, n] */
    int64_t m, n, k, row_stride, out_stride, first_block, end_block;
    int64_t groups, row_group, out_group; /* products side by side: elements from the rows and outputs of one to those of the next */
};

/* k in whole vectors. */
static size_t steps_of(int64_t k) { return (k + LANES - 1) / LANES * LANES; }

int64_t crossdock_packed_outputs(void) { return BLOCK_OUTPUTS; }

/* Floats of a packed weight. */
int64_t crossdock_packed_floats(int64_t n, int64_t k) {
    return (n + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS * BLOCK_OUTPUTS * steps_of(k);
}

/* w [n, k], rows side by side -> packed. */
int crossdock_pack_weight(const float *weight, float *packed, int64_t n, int64_t k) {
    size_t steps = steps_of(k);
    float *wide = aligned_alloc(64, LANES * steps * sizeof(float));
    if (!wide) return 1;
    for (int64_t row = 0; row < (n + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS * BLOCK_OUTPUTS; row += LANES) {
        memset(wide, 0, LANES * steps * sizeof(float));
        for (int64_t r = 0; r < LANES && row + r < n; r++) memcpy(wide + r * steps, weight + (row + r) * k, k * sizeof(float));
        turn_rows((const uint32_t *)wide, steps, (uint32_t *)packed + row / BLOCK_OUTPUTS * BLOCK_OUTPUTS * steps + row % BLOCK_OUTPUTS, BLOCK_OUTPUTS);
    }
    free(wide);
    return 0;
}

/* `rows` rows of x from `first` on as [steps, rows]; behind them is room for a vector. */
static void turn_tile(const struct packed_linear *a, size_t first, size_t rows, size_t steps, float *wide, float *to) {
    for (size_t r = 0; r < rows; r++) memcpy(wide + r * steps, a->rows + (first + r) * a->row_stride, a->k * sizeof(float));
    if (rows == 1) memcpy(to, wide, steps * sizeof(float));
    else turn_rows((const uint32_t *)wide, steps, (uint32_t *)to, rows);
}

static void store_sums(const struct packed_linear *a, size_t first, size_t rows, size_t column, float sums[][BLOCK_OUTPUTS]) {
    size_t count = a->n - column < BLOCK_OUTPUTS ? a->n - column : BLOCK_OUTPUTS;
    for (size_t r = 0; r < rows; r++) {
        float *out = a->out + (first + r) * a->out_stride + column;
        if (a->bias)
            for (size_t c = 0; c < count; c++) out[c] = sums[r][c] + a->bias[column + c];
        else memcpy(out, sums[r], count * sizeof(float));
    }
}

/* One product: outputs of the blocks from first_block to end_block; 0, or 1 when there is no memory. */
static int multiply(const struct packed_linear *a) {
    size_t steps = steps_of(a->k), m = a->m, all_tiles = (m + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
    size_t tile_floats = BLOCK_TILE_ROWS * steps + LANES, most_tiles = CHUNK_FLOATS / tile_floats;
    most_tiles = most_tiles < 1 ? 1 : most_tiles > MOST_CHUNK_TILES ? MOST_CHUNK_TILES : most_tiles;
    if (most_tiles > all_tiles) most_tiles = all_tiles;
    float *wide = aligned_alloc(64, ((LANES * steps + most_tiles * tile_floats) * sizeof(float) + 63) / 64 * 64);
    if (!wide) return 1;
    memset(wide, 0, LANES * steps * sizeof(float));
    float *turned = wide + LANES * steps, sums[BLOCK_TILE_ROWS][BLOCK_OUTPUTS];
    size_t starts[MOST_CHUNK_TILES + 1];
    for (size_t done = 0, row = 0, tiles; done < all_tiles; done += tiles, row = starts[tiles]) {
        tiles = all_tiles - done < most_tiles ? all_tiles - done : most_tiles;
        /* 1. A chunk of x, in tiles of nearly equal height. */
        starts[0] = row;
        for (size_t t = 0; t < tiles; t++) {
            size_t left = all_tiles - done - t, rows = (m - starts[t] + left - 1) / left;
            turn_tile(a, starts[t], rows, steps, wide, turned + t * tile_floats);
            starts[t + 1] = starts[t] + rows;
        }
        /* 2. Every block of weights passes once; the first tile fetches what follows. */
        for (int64_t block = a->first_block; block < a->end_block; block++) {
            const float *weights = a->packed + block * BLOCK_OUTPUTS * steps;
            const char *fetched = (const char *)(weights + BLOCK_OUTPUTS * AHEAD_STEPS);
            struct ahead ahead = {{fetched, fetched + LANES * sizeof(float)}};
            for (size_t t = 0; t < tiles; t++) {
                size_t rows = starts[t + 1] - starts[t];
                block_dots(rows, 0, (const uint32_t *)(turned + t * tile_floats), (const uint32_t *)weights, steps, &ahead,
                           t ? 0 : BLOCK_OUTPUTS * sizeof(float), sums);
                store_sums(a, starts[t], rows, block * BLOCK_OUTPUTS, sums);
            }
        }
    }
    free(wide);
    return 0;
}

/* All groups; each has a packed weight of its own behind the one before it. 0, or 1 when there is no memory. */
int crossdock_packed_linear(const struct packed_linear *a) {
    struct packed_linear one = *a;
    for (int64_t group = 0; group < a->groups; group++) {
        if (multiply(&one)) return 1;
        one.rows += a->row_group;
        one.out += a->out_group;
        one.packed += crossdock_packed_floats(a->n, a->k);
    }
    return 0;
}
