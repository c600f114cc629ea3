/* One query row a sequence against keys and values that lie in pages: read once, where they are, nothing gathered.
 *
 * LANES tokens are taken at a time, under a running maximum, so a sequence may be as long as it likes. Slots behind a sequence's end may
 * hold anything, NaN too: their scores are computed with those of their neighbours and thrown away.
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
    float *weights;            /* [rows, LANES] of the tokens at hand */
    float *sums;               /* [rows, value_dim] */
    float *totals;             /* [rows, LANES] */
    float *maxima;             /* [rows] */
};

/* LANES tokens with the same distance from each to the next. */
struct run {
    const char *keys, *values; /* of the first token, for one key head */
    size_t key_stride, value_stride;
    size_t tokens;             /* how many of them exist */
};

ALWAYS_INLINE size_t item_of(enum weight_kind kind) { return kind == KIND_BF16 ? 2 : 4; }

ALWAYS_INLINE floats load_value(enum weight_kind kind, const void *from, size_t at) {
    return kind == KIND_BF16 ? load_bf16((const uint16_t *)from + at) : load_f32((const float *)from + at);
}

/* Which token an accumulator belongs to, so that `all_lane_sums` puts the tokens in order. */
ALWAYS_INLINE int token_of(int i) {
#if defined(__AVX512F__)
    return (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3;
#else
    return i;
#endif
}

/* Lane t of the result is the sum over the lanes of the accumulator of token t. */
ALWAYS_INLINE floats all_lane_sums(const floats *a) {
#if defined(__AVX512F__)
    __m512 b[8], c[4], d[2];
    for (int i = 0; i < 8; i++) b[i] = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a[i], (__m512)a[i + 8]), _mm512_unpackhi_ps((__m512)a[i], (__m512)a[i + 8]));
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(b[i]), high = _mm512_castps_pd(b[i + 4]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    for (int i = 0; i < 2; i++) d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[i], c[i + 2], 0x88), _mm512_shuffle_f32x4(c[i], c[i + 2], 0xdd));
    return (floats)_mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
#else
    float sums[LANES];
    for (int i = 0; i < LANES; i += STREAMS) lane_sums(a + i, sums + i);
    return load_f32(sums);
#endif
}

/* query . keys[t] for the tokens of a run. */
ALWAYS_INLINE floats run_scores(enum weight_kind kind, const struct run *run, const void *query, size_t key_dim) {
    floats acc[LANES];
    memset(acc, 0, sizeof acc);
#if defined(__AVX512BF16__)
    if (kind == KIND_BF16) {
        for (size_t i = 0; i < key_dim; i += BF16_STEP) {
            __m512bh q = (__m512bh)_mm512_loadu_si512((const uint16_t *)query + i);
            for (int t = 0; t < LANES; t++)
                acc[t] = (floats)_mm512_dpbf16_ps((__m512)acc[t], q, (__m512bh)_mm512_loadu_si512((const uint16_t *)(run->keys + token_of(t) * run->key_stride) + i));
        }
        return all_lane_sums(acc);
    }
#endif
    for (size_t i = 0; i < key_dim; i += LANES) {
        floats q = load_f32((const float *)query + i);
        for (int t = 0; t < LANES; t++) acc[t] += q * load_value(kind, run->keys + token_of(t) * run->key_stride, i);
    }
    return all_lane_sums(acc);
}

ALWAYS_INLINE floats pick(ints where, floats yes, floats no) { return (floats)(((ints)yes & where) | ((ints)no & ~where)); }

/* Scores of a run become weights; sums taken under a smaller maximum are scaled down. */
ALWAYS_INLINE void run_softmax(const struct paged_attention *a, struct group *g, size_t m, floats scores, ints exists) {
    floats none = (floats){} - INFINITY;
    scores = pick(exists, scores * a->scale, none);
    float top = scores[0];
#if defined(__AVX512F__)
    top = _mm512_reduce_max_ps((__m512)scores);
#else
    for (int t = 1; t < LANES; t++) top = scores[t] > top ? scores[t] : top;
#endif
    floats *totals = (floats *)(g->totals + m * LANES);
    if (top > g->maxima[m]) {
        float shrink = expf(g->maxima[m] - top);
        for (int64_t i = 0; i < a->value_dim; i++) g->sums[m * a->value_dim + i] *= shrink;
        *totals *= shrink;
        g->maxima[m] = top;
    }
    floats weights = pick(exists, exp_lanes(scores - g->maxima[m]), (floats){});
    *totals += weights;
    *(floats *)(g->weights + m * LANES) = weights;
}

/* sums[m] += weights[m][t] * values[t] over a run, for a few query rows and `vectors` vectors of the value (constants after inlining). */
ALWAYS_INLINE void value_tile(int rows, int vectors, enum weight_kind kind, const struct paged_attention *a, struct group *g, size_t first,
                              const struct run *run, size_t column) {
    floats acc[MOST_VALUE_ROWS][VALUE_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < vectors; i++) acc[m][i] = load_f32(g->sums + (first + m) * a->value_dim + column + i * LANES);
    for (size_t t = 0; t < run->tokens; t++) {
        floats v[VALUE_VECTORS];
        for (int i = 0; i < vectors; i++) v[i] = load_value(kind, run->values + t * run->value_stride, column + i * LANES);
        for (int m = 0; m < rows; m++) {
            float weight = g->weights[(first + m) * LANES + t];
            for (int i = 0; i < vectors; i++) acc[m][i] += v[i] * weight;
        }
    }
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < vectors; i++) *(floats_at *)(g->sums + (first + m) * a->value_dim + column + i * LANES) = (floats_at)acc[m][i];
}

ALWAYS_INLINE void run_values(enum weight_kind kind, const struct paged_attention *a, struct group *g, const struct run *run) {
    for (size_t first = 0; first < g->rows; first += MOST_VALUE_ROWS) {
        size_t rows = g->rows - first < MOST_VALUE_ROWS ? g->rows - first : MOST_VALUE_ROWS;
        size_t column = 0, step = VALUE_VECTORS * LANES;
        for (; column + step <= (size_t)a->value_dim; column += step)
            switch (rows) {
            case 1: value_tile(1, VALUE_VECTORS, kind, a, g, first, run, column); break;
            case 2: value_tile(2, VALUE_VECTORS, kind, a, g, first, run, column); break;
            case 3: value_tile(3, VALUE_VECTORS, kind, a, g, first, run, column); break;
            case 4: value_tile(4, VALUE_VECTORS, kind, a, g, first, run, column); break;
            }
        for (; column < (size_t)a->value_dim; column += LANES)
            for (size_t m = 0; m < rows; m++) value_tile(1, 1, kind, a, g, first + m, run, column);
    }
}

/* One run of tokens for all query heads of one key head; `next` is fetched meanwhile. */
ALWAYS_INLINE void attend(enum weight_kind kind, const struct paged_attention *a, struct group *g, const struct run *run, const struct run *next) {
    size_t row_item = kind == KIND_BF16 ? sizeof(bf16_row_t) : sizeof(float), item = item_of(kind);
    ints exists;
    for (int t = 0; t < LANES; t++) exists[t] = (size_t)t < run->tokens ? -1 : 0;
    for (size_t m = 0; m < g->rows; m++) {
        for (size_t t = m * LANES / g->rows; t < (m + 1) * LANES / g->rows; t++) {
            for (size_t i = 0; i < a->key_dim * item; i += 64) __builtin_prefetch(next->keys + t * next->key_stride + i, 0, 2);
            for (size_t i = 0; i < a->value_dim * item; i += 64) __builtin_prefetch(next->values + t * next->value_stride + i, 0, 2);
        }
        run_softmax(a, g, m, run_scores(kind, run, (const char *)g->queries + m * a->key_dim * row_item, a->key_dim), exists);
    }
    run_values(kind, a, g, run);
}

/* Where tokens `first` to `first + LANES - 1` of a sequence lie. Pages that hold no whole runs are copied together into `copies`. */
ALWAYS_INLINE struct run run_at(enum weight_kind kind, const struct paged_attention *a, int64_t sequence, int64_t kv_head, size_t first, char *copies) {
    size_t item = item_of(kind), left = a->lengths[sequence] - first, page_tokens = a->page_tokens;
    size_t key_bytes = a->key_dim * item, value_bytes = a->value_dim * item;
    const int32_t *pages = a->pages + sequence * a->max_pages;
    const char *keys = (const char *)a->keys + kv_head * key_bytes, *values = (const char *)a->values + kv_head * a->value_head_stride * item;
    struct run run = {.tokens = left < LANES ? left : LANES, .key_stride = a->key_stride * item, .value_stride = a->value_stride * item};
    if (page_tokens % LANES == 0 || copies == NULL) {
        size_t slot = pages[first / page_tokens] * page_tokens + first % page_tokens;
        run.keys = keys + slot * run.key_stride;
        run.values = values + slot * run.value_stride;
        return run;
    }
    char *copied_values = copies + LANES * key_bytes;
    for (size_t t = 0; t < run.tokens; t++) {
        size_t slot = pages[(first + t) / page_tokens] * page_tokens + (first + t) % page_tokens;
        memcpy(copies + t * key_bytes, keys + slot * run.key_stride, key_bytes);
        memcpy(copied_values + t * value_bytes, values + slot * run.value_stride, value_bytes);
    }
    return (struct run){copies, copied_values, key_bytes, value_bytes, run.tokens};
}

ALWAYS_INLINE void write_out(enum weight_kind kind, const struct paged_attention *a, const struct group *g, size_t at) {
    for (size_t m = 0; m < g->rows; m++) {
        float total = 0;
        for (int lane = 0; lane < LANES; lane++) total += g->totals[m * LANES + lane];
        for (int64_t i = 0; i < a->value_dim; i += LANES, at += LANES) {
            floats value = load_f32(g->sums + m * a->value_dim + i) * (1.0f / total);
            if (kind == KIND_BF16) store_bf16((uint16_t *)a->out + at, value);
            else *(floats_at *)((float *)a->out + at) = (floats_at)value;
        }
    }
}

/* All heads of a sequence go through its tokens together: a page is read in one piece. */
ALWAYS_INLINE void attend_sequence(enum weight_kind kind, const struct paged_attention *a, int64_t sequence, struct group *groups, char *copies) {
    size_t length = a->lengths[sequence];
    for (size_t first = 0; first < length; first += LANES)
        for (int64_t head = 0; head < a->kv_heads; head++) {
            struct run run = run_at(kind, a, sequence, head, first, copies), next = run;
            if (first + LANES < length) next = run_at(kind, a, sequence, head, first + LANES, NULL);
            else if (sequence + 1 < a->batch) next = run_at(kind, a, sequence + 1, head, 0, NULL);
            attend(kind, a, &groups[head], &run, &next);
        }
    for (int64_t head = 0; head < a->kv_heads; head++)
        write_out(kind, a, &groups[head], (sequence * a->heads + head * groups[head].rows) * a->value_dim);
}

/* 0, or 1 when there is no memory. */
int crossdock_paged_attention(const struct paged_attention *a) {
    size_t heads = a->heads, rows = heads / a->kv_heads, wide = heads * a->key_dim, sums = heads * a->value_dim;
    size_t copies = LANES * (a->key_dim + a->value_dim), numbers = wide + sums + 2 * heads * LANES + heads + copies;
    float *memory = aligned_alloc(64, (numbers * sizeof(float) + 63) / 64 * 64);
    struct group *groups = malloc(a->kv_heads * sizeof *groups);
    int failed = !memory || !groups;
    float *all_sums = memory + wide, *totals = all_sums + sums, *weights = totals + heads * LANES, *copied = weights + heads * LANES;
    float *maxima = copied + copies;
    for (int64_t sequence = 0; sequence < a->batch && !failed; sequence++) {
        const char *queries = (const char *)a->queries + sequence * a->query_stride * (a->kind == KIND_BF16 ? 2 : 4);
        size_t row_item = a->kind == KIND_BF16 ? sizeof(bf16_row_t) : sizeof(float);
        if (a->kind == KIND_BF16 && sizeof(bf16_row_t) == 4) {
            for (size_t i = 0; i < wide; i++) memory[i] = from_bf16(((const uint16_t *)queries)[i]);
            queries = (const char *)memory;
        }
        memset(all_sums, 0, (sums + heads * LANES) * sizeof(float));
        for (size_t m = 0; m < heads; m++) maxima[m] = -INFINITY;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            size_t m = head * rows;
            groups[head] = (struct group){rows, queries + m * a->key_dim * row_item, weights + m * LANES, all_sums + m * a->value_dim, totals + m * LANES, maxima + m};
        }
        if (a->kind == KIND_F32) attend_sequence(KIND_F32, a, sequence, groups, (char *)copied);
        else attend_sequence(KIND_BF16, a, sequence, groups, (char *)copied);
    }
    free(groups);
    free(memory);
    return failed;
}
