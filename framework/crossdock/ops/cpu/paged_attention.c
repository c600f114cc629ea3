/* One query row a sequence against keys and values that lie in pages: read once, where they are, nothing gathered.
 *
 * Softmax is taken page by page with a running maximum, so a sequence may be as long as it likes. Slots behind a sequence's end may hold
 * anything, NaN too: their scores are computed with those of their neighbours and thrown away.
 */
#include <stdlib.h>

#include "row_dot.h"

#define MOST_VALUE_ROWS 4
#define VALUE_VECTORS 4

struct paged_attention {
    const void *queries;       /* [batch, heads, key_dim], sequences query_stride elements apart */
    const void *keys;          /* [slots, kv_heads, key_dim], slots key_stride elements apart */
    const void *values;        /* [slots, kv_heads, >= value_dim], slots value_stride apart, heads value_head_stride */
    void *out;                 /* [batch, heads, value_dim] */
    const int32_t *pages;      /* [batch, max_pages] */
    const int64_t *lengths;    /* [batch] tokens of each sequence, at least 1 */
    int64_t batch, heads, kv_heads, key_dim, value_dim, page_tokens, max_pages;
    int64_t query_stride, key_stride, value_stride, value_head_stride;
    float scale;
    int32_t kind;
};

/* State of the query heads that share a key head. */
struct group {
    size_t rows;
    const void *queries;       /* [rows, key_dim], float32 or bf16_row_t */
    float *scores;             /* [rows, page_tokens] */
    float *sums;               /* [rows, value_dim] */
    float *maxima, *totals;    /* [rows] */
};

ALWAYS_INLINE floats load_value(enum weight_kind kind, const void *from, size_t at) {
    return kind == KIND_BF16 ? load_bf16((const uint16_t *)from + at) : load_f32((const float *)from + at);
}

/* scores[m][t] = queries[m] . keys[t] for one page; `tokens` is rounded up to STREAMS inside the page. */
ALWAYS_INLINE void page_scores(enum weight_kind kind, const struct paged_attention *a, const struct group *g, const void *keys, size_t tokens) {
    size_t item = kind == KIND_BF16 ? 2 : 4, row_item = kind == KIND_BF16 ? sizeof(bf16_row_t) : sizeof(float);
    size_t tiles = (g->rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS, row = 0;
    for (size_t t = 0; t < tiles; t++) {
        size_t rows = (g->rows - row + tiles - t - 1) / (tiles - t);
        const char *from = (const char *)g->queries + row * a->key_dim * row_item;
        for (size_t token = 0; token < tokens; token += STREAMS) {
            const char *key = (const char *)keys + token * a->key_stride * item;
            float sums[MOST_TILE_ROWS][STREAMS];
            switch (rows) {
            case 1: tile(1, kind, from, a->key_dim, key, a->key_stride, a->key_dim, sums); break;
            case 2: tile(2, kind, from, a->key_dim, key, a->key_stride, a->key_dim, sums); break;
#if MOST_TILE_ROWS > 2
            case 3: tile(3, kind, from, a->key_dim, key, a->key_stride, a->key_dim, sums); break;
            case 4: tile(4, kind, from, a->key_dim, key, a->key_stride, a->key_dim, sums); break;
#endif
#if MOST_TILE_ROWS > 4
            case 5: tile(5, kind, from, a->key_dim, key, a->key_stride, a->key_dim, sums); break;
            case 6: tile(6, kind, from, a->key_dim, key, a->key_stride, a->key_dim, sums); break;
#endif
            }
            for (size_t m = 0; m < rows; m++)
                for (size_t s = 0; s < STREAMS; s++) g->scores[(row + m) * a->page_tokens + token + s] = sums[m][s] * a->scale;
        }
        row += rows;
    }
}

/* Scores of one page become weights; sums taken under a smaller maximum are scaled down. */
ALWAYS_INLINE void page_softmax(const struct paged_attention *a, struct group *g, size_t tokens) {
    for (size_t m = 0; m < g->rows; m++) {
        float *scores = g->scores + m * a->page_tokens;
        float top = g->maxima[m];
        for (size_t t = 0; t < tokens; t++) top = scores[t] > top ? scores[t] : top;
        if (top > g->maxima[m]) {
            float shrink = expf(g->maxima[m] - top);
            for (int64_t i = 0; i < a->value_dim; i++) g->sums[m * a->value_dim + i] *= shrink;
            g->totals[m] *= shrink;
            g->maxima[m] = top;
        }
        for (size_t t = 0; t < tokens; t += LANES) {
            floats lanes = {0};
            size_t count = tokens - t < LANES ? tokens - t : LANES;
            memcpy(&lanes, scores + t, count * sizeof(float));
            lanes = exp_lanes(lanes - top);
            memcpy(scores + t, &lanes, count * sizeof(float));
        }
        for (size_t t = 0; t < tokens; t++) g->totals[m] += scores[t];
    }
}

/* sums[m] += weights[m][t] * values[t] over one page, for a few query rows and `vectors` vectors of the value (constants after inlining). */
ALWAYS_INLINE void value_tile(int rows, int vectors, enum weight_kind kind, const struct paged_attention *a, struct group *g, size_t first,
                              const void *values, size_t tokens, size_t column) {
    floats acc[MOST_VALUE_ROWS][VALUE_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < vectors; i++) acc[m][i] = load_f32(g->sums + (first + m) * a->value_dim + column + i * LANES);
    for (size_t t = 0; t < tokens; t++) {
        floats v[VALUE_VECTORS];
        for (int i = 0; i < vectors; i++) v[i] = load_value(kind, values, t * a->value_stride + column + i * LANES);
        for (int m = 0; m < rows; m++) {
            float weight = g->scores[(first + m) * a->page_tokens + t];
            for (int i = 0; i < vectors; i++) acc[m][i] += v[i] * weight;
        }
    }
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < vectors; i++) *(floats_at *)(g->sums + (first + m) * a->value_dim + column + i * LANES) = (floats_at)acc[m][i];
}

ALWAYS_INLINE void page_values(enum weight_kind kind, const struct paged_attention *a, struct group *g, const void *values, size_t tokens) {
    for (size_t first = 0; first < g->rows; first += MOST_VALUE_ROWS) {
        size_t rows = g->rows - first < MOST_VALUE_ROWS ? g->rows - first : MOST_VALUE_ROWS;
        size_t column = 0, step = VALUE_VECTORS * LANES;
        for (; column + step <= (size_t)a->value_dim; column += step)
            switch (rows) {
            case 1: value_tile(1, VALUE_VECTORS, kind, a, g, first, values, tokens, column); break;
            case 2: value_tile(2, VALUE_VECTORS, kind, a, g, first, values, tokens, column); break;
            case 3: value_tile(3, VALUE_VECTORS, kind, a, g, first, values, tokens, column); break;
            case 4: value_tile(4, VALUE_VECTORS, kind, a, g, first, values, tokens, column); break;
            }
        for (; column < (size_t)a->value_dim; column += LANES)
            for (size_t m = 0; m < rows; m++) value_tile(1, 1, kind, a, g, first + m, values, tokens, column);
    }
}

ALWAYS_INLINE void attend(enum weight_kind kind, const struct paged_attention *a, int64_t sequence, int64_t kv_head, struct group *g) {
    size_t item = kind == KIND_BF16 ? 2 : 4;
    const char *keys = (const char *)a->keys + kv_head * a->key_dim * item;
    const char *values = (const char *)a->values + kv_head * a->value_head_stride * item;
    memset(g->sums, 0, g->rows * a->value_dim * sizeof(float));
    for (size_t m = 0; m < g->rows; m++) g->maxima[m] = -INFINITY, g->totals[m] = 0;
    const int32_t *page = a->pages + sequence * a->max_pages;
    for (int64_t left = a->lengths[sequence]; left > 0; left -= a->page_tokens, page++) {
        size_t tokens = left < a->page_tokens ? left : a->page_tokens;
        size_t slot = (size_t)*page * a->page_tokens;
        page_scores(kind, a, g, keys + slot * a->key_stride * item, tokens);
        page_softmax(a, g, tokens);
        page_values(kind, a, g, values + slot * a->value_stride * item, tokens);
    }
    size_t at = (sequence * a->heads + kv_head * g->rows) * a->value_dim;
    for (size_t m = 0; m < g->rows; m++) {
        float share = 1.0f / g->totals[m];
        for (int64_t i = 0; i < a->value_dim; i++, at++) {
            float value = g->sums[m * a->value_dim + i] * share;
            if (kind == KIND_BF16) ((uint16_t *)a->out)[at] = to_bf16(value);
            else ((float *)a->out)[at] = value;
        }
    }
}

/* 0, or 1 when there is no memory. */
int crossdock_paged_attention(const struct paged_attention *a) {
    struct group g = {.rows = a->heads / a->kv_heads};
    size_t wide = g.rows * a->key_dim;
    float *scratch = malloc((wide + g.rows * (a->page_tokens + a->value_dim + 2)) * sizeof(float));
    if (!scratch) return 1;
    g.scores = scratch + wide;
    g.sums = g.scores + g.rows * a->page_tokens;
    g.maxima = g.sums + g.rows * a->value_dim;
    g.totals = g.maxima + g.rows;
    for (int64_t sequence = 0; sequence < a->batch; sequence++)
        for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++) {
            size_t at = sequence * a->query_stride + kv_head * wide;
            if (a->kind == KIND_F32) {
                g.queries = (const float *)a->queries + at;
                attend(KIND_F32, a, sequence, kv_head, &g);
                continue;
            }
            const uint16_t *queries = (const uint16_t *)a->queries + at;
            g.queries = queries;
            if (sizeof(bf16_row_t) == 4) {
                for (size_t i = 0; i < wide; i++) scratch[i] = from_bf16(queries[i]);
                g.queries = scratch;
            }
            attend(KIND_BF16, a, sequence, kv_head, &g);
        }
    free(scratch);
    return 0;
}
