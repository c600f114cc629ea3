/* Causal attention of one sequence's new rows over all its keys, in one pass with a running maximum; no matrix of scores is ever kept.
 *
 * Query rows that share a key head go through it together, a tile of them at a time: scores against a block of turned keys, softmax, and the
 * weighted sum of the block's values. Computed in float32 whatever the dtype of the rows.
 */
#include <stdlib.h>

#include "block_dot.h"

struct prefill_attention {
    const void *queries;       /* [rows, heads, key_dim] */
    const void *keys;          /* [prefix + rows, kv_heads, key_dim] */
    const void *values;        /* [prefix + rows, kv_heads, value_dim] */
    void *out;                 /* [rows, heads, value_dim] */
    int64_t rows, prefix, heads, kv_heads, key_dim, value_dim;
    int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
    float scale;
    int32_t kind;
};

/* One key head, in the forms that the products read. */
struct head {
    uint32_t *keys;            /* [blocks, key_dim, BLOCK_OUTPUTS] */
    float *values;             /* [blocks, BLOCK_OUTPUTS, value_dim], zero behind the end */
    uint32_t *queries;         /* [key_dim, rows of the tile] and room for a vector */
    float *wide;               /* [LANES, key_dim] */
    float *sums;               /* [BLOCK_TILE_ROWS, value_dim] */
};

/* State of a tile's rows. */
struct tile_state {
    float weights[BLOCK_TILE_ROWS][BLOCK_OUTPUTS];
    floats totals[BLOCK_TILE_ROWS];
    float maxima[BLOCK_TILE_ROWS];
};

ALWAYS_INLINE void load_row(enum weight_kind kind, const void *base, size_t at, size_t count, float factor, float *to) {
    for (size_t i = 0; i < count; i += LANES) {
        floats x = kind == KIND_BF16 ? load_bf16((const uint16_t *)base + at + i) : load_f32((const float *)base + at + i);
        *(floats_at *)(to + i) = (floats_at)(x * factor);
    }
}

/* Keys turned and values side by side, all of one head. */
ALWAYS_INLINE void load_head(enum weight_kind kind, const struct prefill_attention *a, int64_t kv_head, struct head *h) {
    size_t tokens = a->prefix + a->rows, d = a->key_dim, dv = a->value_dim, blocks = (tokens + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
    for (size_t first = 0; first < blocks * BLOCK_OUTPUTS; first += LANES) {
        for (size_t t = 0; t < LANES; t++) {
            float *value = h->values + (first + t) * dv, *key = h->wide + t * d;
            if (first + t < tokens) {
                load_row(kind, a->keys, (first + t) * a->key_stride + kv_head * a->key_head_stride, d, 1.0f, key);
                load_row(kind, a->values, (first + t) * a->value_stride + kv_head * a->value_head_stride, dv, 1.0f, value);
            } else {
                memset(key, 0, d * sizeof(float));
                memset(value, 0, dv * sizeof(float));
            }
        }
        turn_rows((const uint32_t *)h->wide, d, h->keys + first / BLOCK_OUTPUTS * d * BLOCK_OUTPUTS + first % BLOCK_OUTPUTS, BLOCK_OUTPUTS);
    }
}

ALWAYS_INLINE float largest(floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int lane = 1; lane < LANES; lane++) top = x[lane] > top ? x[lane] : top;
    return top;
#endif
}

/* Lanes of vector v of a block whose token is one of the first `seen`. */
ALWAYS_INLINE ints lanes_seen(int v, int64_t seen) {
    ints token;
    for (int lane = 0; lane < LANES; lane++) token[lane] = v * LANES + lane;
    return token < (ints){} + (int32_t)(seen < BLOCK_OUTPUTS ? seen : BLOCK_OUTPUTS);
}

/* Scores of a block become weights of a row that sees `seen` of its tokens; sums taken under a smaller maximum are scaled down. */
ALWAYS_INLINE void block_softmax(struct tile_state *state, size_t m, int64_t seen, float *sums, size_t value_dim) {
    float *scores = state->weights[m];
    const floats nothing = (floats){} - INFINITY;
    floats x[BLOCK_VECTORS];
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        ints shown = lanes_seen(v, seen);
        x[v] = (floats)(((ints)load_f32(scores + v * LANES) & shown) | ((ints)nothing & ~shown));
    }
    float top = state->maxima[m];
    for (int v = 0; v < BLOCK_VECTORS; v++) top = fmaxf(top, largest(x[v]));
    if (top > state->maxima[m]) {
        float shrink = expf(state->maxima[m] - top);
        for (size_t i = 0; i < value_dim; i += LANES) *(floats_at *)(sums + i) = (floats_at)(load_f32(sums + i) * shrink);
        state->totals[m] *= shrink;
        state->maxima[m] = top;
    }
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        floats weights = (floats)((ints)exp_lanes(x[v] - top) & lanes_seen(v, seen));
        *(floats_at *)(scores + v * LANES) = (floats_at)weights;
        state->totals[m] += weights;
    }
}

/* sums[m] += weights[m] . values, for `rows` rows (a constant after inlining) and one block of tokens. */
ALWAYS_INLINE void add_values(int rows, const struct tile_state *state, const float *values, size_t value_dim, float *sums) {
    for (size_t c = 0; c < value_dim; c += BLOCK_OUTPUTS) {
        floats acc[BLOCK_TILE_ROWS][BLOCK_VECTORS];
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] = load_f32(sums + m * value_dim + c + v * LANES);
        for (size_t t = 0; t < BLOCK_OUTPUTS; t++) {
            floats value[BLOCK_VECTORS];
            for (int v = 0; v < BLOCK_VECTORS; v++) value[v] = load_f32(values + t * value_dim + c + v * LANES);
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < BLOCK_VECTORS; v++) acc[m][v] += state->weights[m][t] * value[v];
        }
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < BLOCK_VECTORS; v++) *(floats_at *)(sums + m * value_dim + c + v * LANES) = (floats_at)acc[m][v];
    }
}

static void add_block(int rows, const struct tile_state *state, const float *values, size_t value_dim, float *sums) {
#define CASE(n) \
    case n: add_values(n, state, values, value_dim, sums); break;
    switch (rows) { EACH_TILE_HEIGHT(CASE) }
#undef CASE
}

/* A tile: query rows `first` to `first + rows - 1` of a key head, counted position by position, its query heads side by side. */
ALWAYS_INLINE void attend_tile(enum weight_kind kind, const struct prefill_attention *a, int64_t kv_head, size_t first, int rows, struct head *h) {
    size_t d = a->key_dim, dv = a->value_dim, group = a->heads / a->kv_heads;
    struct tile_state state;
    struct ahead nothing = {{(const char *)h->queries, (const char *)h->queries}};

    for (int m = 0; m < rows; m++) {
        size_t row = (first + m) / group, head = kv_head * group + (first + m) % group;
        load_row(kind, a->queries, row * a->query_stride + head * a->query_head_stride, d, a->scale, h->wide + m * d);
        state.maxima[m] = -INFINITY;
        state.totals[m] = (floats){};
    }
    turn_rows((const uint32_t *)h->wide, d, h->queries, rows);
    memset(h->sums, 0, rows * dv * sizeof(float));

    size_t tokens = a->prefix + (first + rows - 1) / group + 1;
    for (size_t start = 0; start < tokens; start += BLOCK_OUTPUTS) {
        block_dots(rows, 0, h->queries, h->keys + start * d, d, &nothing, 0, state.weights);
        for (int m = 0; m < rows; m++)
            block_softmax(&state, m, (int64_t)(a->prefix + (first + m) / group + 1) - (int64_t)start, h->sums + m * dv, dv);
        add_block(rows, &state, h->values + start * dv, dv, h->sums);
    }
    for (int m = 0; m < rows; m++) {
        size_t at = ((first + m) / group * a->heads + kv_head * group + (first + m) % group) * dv;
        float total = 0;
        for (int lane = 0; lane < LANES; lane++) total += state.totals[m][lane];
        for (size_t i = 0; i < dv; i += LANES, at += LANES) {
            floats value = load_f32(h->sums + m * dv + i) * (1.0f / total);
            if (kind == KIND_BF16) store_bf16((uint16_t *)a->out + at, value);
            else *(floats_at *)((float *)a->out + at) = (floats_at)value;
        }
    }
}

ALWAYS_INLINE void attend_head(enum weight_kind kind, const struct prefill_attention *a, int64_t kv_head, struct head *h) {
    size_t all = a->rows * (a->heads / a->kv_heads), tiles = (all + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS;
    load_head(kind, a, kv_head, h);
    for (size_t t = 0, first = 0, rows; t < tiles; t++, first += rows) {
        rows = (all - first + tiles - t - 1) / (tiles - t);
        attend_tile(kind, a, kv_head, first, rows, h);
    }
}

/* 0, or 1 when there is no memory. */
int crossdock_prefill_attention(const struct prefill_attention *a) {
    size_t d = a->key_dim, dv = a->value_dim, blocks = (a->prefix + a->rows + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
    size_t tokens = blocks * BLOCK_OUTPUTS, numbers = tokens * (d + dv) + (BLOCK_TILE_ROWS + 1) * d + LANES * d + LANES + BLOCK_TILE_ROWS * dv;
    float *memory = aligned_alloc(64, (numbers * sizeof(float) + 63) / 64 * 64);
    if (!memory) return 1;
    struct head h = {.keys = (uint32_t *)memory, .values = memory + tokens * d};
    h.sums = h.values + tokens * dv;
    h.wide = h.sums + BLOCK_TILE_ROWS * dv;
    h.queries = (uint32_t *)(h.wide + LANES * d);
    for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++) {
        if (a->kind == KIND_F32) attend_head(KIND_F32, a, kv_head, &h);
        else attend_head(KIND_BF16, a, kv_head, &h);
    }
    free(memory);
    return 0;
}
