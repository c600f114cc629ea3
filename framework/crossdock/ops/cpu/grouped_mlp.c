/* All local experts of a layer on rows by token: group, gate and up, SwiGLU, down, weighted sum, in one call. */
#include <stdlib.h>

#include "lane_dot.h"

/* Rows handled at once: their copies stay in the L2 cache while the expert's weights stream past. */
#define CHUNK_ROWS 256
/* The most rows that are computed by dots. */
#define DOT_ROWS (BLOCK_WORTH_IT_BF16 - 1)
/* Rows of scratch: a tile takes LANES of them where its steps lie lane by lane. */
#define SCRATCH_ROWS ((CHUNK_ROWS + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS * LANES)
/* Elements between rows in scratch. Not a multiple of a page: the rows of a tile would share one set of the L1 cache. */
#define ROW_PAD 32

struct grouped_mlp {
    const void *rows;      /* [num_rows, hidden], float32 or bf16 */
    const int64_t *ids;    /* [num_rows, top_k] local expert ids, -1 none */
    const float *weights;  /* [num_rows, top_k] */
    const void *gate_up;   /* [experts, 2 * intermediate, hidden], gate rows first */
    const void *down;      /* [experts, hidden, intermediate] */
    const float *gate_up_scale, *down_scale;
    float *out;            /* [num_rows, hidden], written fully */
    int64_t num_rows, row_stride, ids_stride, weights_stride, top_k;
    int64_t hidden, intermediate, first_expert, end_expert;
    int32_t kind, rows_are_bf16;
    int32_t row_invariant; /* sums in one order whatever the number of rows: a row's bits do not depend on the rows beside it */
};

struct scratch {
    void *hidden;      /* [SCRATCH_ROWS, hidden + ROW_PAD] float32 or bf16_row_t, the rows of an expert */
    void *inner;       /* [SCRATCH_ROWS, intermediate + ROW_PAD] the same, after SwiGLU */
    float *both, *out; /* [DOT_ROWS, 2 * intermediate + ROW_PAD] and [DOT_ROWS, hidden], for dots */
    uint32_t *block;   /* [longest, BLOCK_OUTPUTS] */
    float *wide;       /* [LANES, longest] */
};

static size_t item_bytes(enum weight_kind kind) { return kind == KIND_F32 ? 4 : kind == KIND_BF16 ? 2 : 1; }

/* One row in the form that the tiles of this weight kind read. */
static void copy_row(const struct grouped_mlp *a, size_t row, enum weight_kind kind, void *to) {
    const uint16_t *halves_in = (const uint16_t *)a->rows + row * a->row_stride;
    const float *floats_in = (const float *)a->rows + row * a->row_stride;
    size_t h = a->hidden;
    if (kind == KIND_BF16 && sizeof(bf16_row_t) == 2) {
        if (a->rows_are_bf16) memcpy(to, halves_in, h * 2);
        else for (size_t i = 0; i < h; i++) ((uint16_t *)to)[i] = to_bf16(floats_in[i]);
    } else if (a->rows_are_bf16) {
        for (size_t i = 0; i < h; i++) ((float *)to)[i] = from_bf16(halves_in[i]);
    } else {
        memcpy(to, floats_in, h * 4);
    }
}

ALWAYS_INLINE floats swiglu(floats gate, floats up) { return gate / (exp_lanes(-gate) + 1.0f) * up; }

/* to += weight * from, `count` a multiple of LANES. */
ALWAYS_INLINE void add_weighted(const float *from, float weight, float *to, size_t count) {
    for (size_t c = 0; c < count; c += LANES) *(floats_at *)(to + c) = (floats_at)(load_f32(to + c) + weight * load_f32(from + c));
}

/* The two matrices of an expert. */
ALWAYS_INLINE void expert_weights(enum weight_kind kind, const struct grouped_mlp *a, size_t expert, struct weights *gate_up,
                                  struct weights *down) {
    size_t h = a->hidden, i = a->intermediate, item = item_bytes(kind);
    size_t hidden_blocks = (h + SCALE_BLOCK - 1) / SCALE_BLOCK, inner_blocks = (i + SCALE_BLOCK - 1) / SCALE_BLOCK;
    gate_up->data = (const char *)a->gate_up + expert * 2 * i * h * item;
    gate_up->scales = a->gate_up_scale ? a->gate_up_scale + expert * 2 * inner_blocks * hidden_blocks : NULL;
    gate_up->scale_columns = hidden_blocks;
    gate_up->rows_per_half = i;
    down->data = (const char *)a->down + expert * h * i * item;
    down->scales = a->down_scale ? a->down_scale + expert * hidden_blocks * inner_blocks : NULL;
    down->scale_columns = inner_blocks;
    down->rows_per_half = h;
}

ALWAYS_INLINE float weight_of(const struct grouped_mlp *a, int32_t pair) {
    return a->weights[pair / a->top_k * a->weights_stride + pair % a->top_k];
}

ALWAYS_INLINE float *out_row(const struct grouped_mlp *a, int32_t pair) { return a->out + pair / a->top_k * a->hidden; }

ALWAYS_INLINE void fetch_to_write(const float *from, size_t count) {
    for (size_t c = 0; c < count; c += 16) __builtin_prefetch(from + c, 1, 2);
}

/* A few rows of an expert, by row dots. */
ALWAYS_INLINE void expert_dots(enum weight_kind kind, const struct grouped_mlp *a, size_t expert, const int32_t *pairs, size_t m,
                               const struct scratch *s) {
    size_t h = a->hidden, i = a->intermediate, row_item = kind == KIND_BF16 ? sizeof(bf16_row_t) : 4;
    size_t both_stride = 2 * i + ROW_PAD, inner_stride = i + ROW_PAD;
    struct weights gate_up, down;
    expert_weights(kind, a, expert, &gate_up, &down);

    /* 1. The expert's rows side by side. */
    for (size_t r = 0; r < m; r++) copy_row(a, pairs[r] / a->top_k, kind, (char *)s->hidden + r * (h + ROW_PAD) * row_item);
    /* 2. Gate, up, SwiGLU. */
    row_dots(kind, s->hidden, m, h + ROW_PAD, &gate_up, 2 * i, h, s->both, both_stride, s->wide);
    for (size_t r = 0; r < m; r++)
        for (size_t c = 0; c < i; c += LANES) {
            floats inner = swiglu(load_f32(s->both + r * both_stride + c), load_f32(s->both + r * both_stride + i + c));
            if (row_item == 2) store_bf16((uint16_t *)s->inner + r * inner_stride + c, inner);
            else *(floats_at *)((float *)s->inner + r * inner_stride + c) = (floats_at)inner;
        }
    /* 3. Down, and the weighted sum into each row. */
    row_dots(kind, s->inner, m, inner_stride, &down, h, i, s->out, h, s->wide);
    for (size_t r = 0; r < m; r++) add_weighted(s->out + r * h, weight_of(a, pairs[r]), out_row(a, pairs[r]), h);
}

/* Rows of the next of `tiles` tiles of nearly equal height. */
ALWAYS_INLINE size_t tile_rows(size_t left, size_t tiles) { return (left + tiles - 1) / tiles; }

/* Where a tile begins: behind each of them is room for the last whole vector that is written. */
ALWAYS_INLINE size_t tile_at(int by_lanes, size_t row, size_t tile, size_t words) {
    return by_lanes ? tile * LANES * words : row * words + tile * LANES;
}

/* LANES rows of words into a vector of every step, as the products of this order read them. */
ALWAYS_INLINE void turn_words(int by_lanes, const uint32_t *from, size_t count, uint32_t *to, size_t stride) {
    if (by_lanes) turn_lanes(from, count, to, stride);
    else turn_rows(from, count, to, stride);
}

/* LANES rows of weights from `row` on, into vector `vector` of every step of the block. */
ALWAYS_INLINE void turn_weights(int by_lanes, enum weight_kind kind, const struct weights *weights, size_t row, size_t k, size_t vector,
                                const struct scratch *s) {
    turn_words(by_lanes, weight_words(kind, weights, row, k, s->wide), words_of(kind, k), s->block + vector * LANES, BLOCK_OUTPUTS);
}

ALWAYS_INLINE void tile_dots(int by_lanes, int rows, int is_pairs, const uint32_t *x, const uint32_t *block, size_t words,
                             const struct ahead *ahead, size_t ahead_step, float sums[][BLOCK_OUTPUTS]) {
    if (by_lanes) lane_dots(rows, is_pairs, x, block, words, ahead, ahead_step, sums);
    else block_dots(rows, is_pairs, x, block, words, ahead, ahead_step, sums);
}

/* Up to CHUNK_ROWS rows of an expert, by blocks of turned weights; `next` is what is read after this expert. */
ALWAYS_INLINE void expert_blocks(enum weight_kind kind, const struct grouped_mlp *a, size_t expert, const int32_t *pairs, size_t m,
                                 const void *next, const struct scratch *s) {
    size_t h = a->hidden, i = a->intermediate, item = item_bytes(kind);
    int is_pairs = kind == KIND_BF16 && sizeof(bf16_row_t) == 2, by_lanes = a->row_invariant;
    size_t tiles = (m + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS, step = item * LANES;
    size_t hidden_words = words_of(kind, h), inner_words = words_of(kind, i);
    float sums[BLOCK_TILE_ROWS][BLOCK_OUTPUTS];
    struct weights gate_up, down;
    expert_weights(kind, a, expert, &gate_up, &down);
    const char *gates = gate_up.data, *ups = gates + i * h * item;

    /* 1. The expert's rows in tiles, step by step. */
    for (size_t t = 0, row = 0, rows; t < tiles; t++, row += rows) {
        rows = tile_rows(m - row, tiles - t);
        for (size_t r = 0; r < rows; r++) copy_row(a, pairs[row + r] / a->top_k, kind, (uint32_t *)s->wide + r * hidden_words);
        turn_words(by_lanes, (const uint32_t *)s->wide, hidden_words, (uint32_t *)s->hidden + tile_at(by_lanes, row, t, hidden_words),
                   by_lanes ? LANES : rows);
    }
    /* 2. LANES gates and as many ups at a time, and SwiGLU. */
    for (size_t c = 0; c < i; c += LANES) {
        size_t after = (c + LANES) * h * item;
        struct ahead ahead = {{gates + after, ups + after}};
        if (c + LANES == i) ahead = (struct ahead){{down.data, (const char *)down.data + LANES * i * item}};
        turn_weights(by_lanes, kind, &gate_up, c, h, 0, s);
        turn_weights(by_lanes, kind, &gate_up, i + c, h, 1, s);
        for (size_t t = 0, row = 0, rows; t < tiles; t++, row += rows) {
            rows = tile_rows(m - row, tiles - t);
            tile_dots(by_lanes, rows, is_pairs, (const uint32_t *)s->hidden + tile_at(by_lanes, row, t, hidden_words), s->block, hidden_words,
                      &ahead, t ? 0 : step, sums);
            uint32_t *to = (uint32_t *)s->inner + tile_at(by_lanes, row, t, inner_words);
            words inner[LANES], turned[LANES];
            for (size_t r = 0; r < rows; r++) {
                floats value = swiglu(load_f32(sums[r]), load_f32(sums[r] + LANES));
                if (is_pairs) store_bf16((uint16_t *)&inner[r], value);
                else inner[r] = (words)value;
            }
            turn(inner, turned);
            for (size_t w = 0, first = words_of(kind, c); w < words_of(kind, LANES); w++)
                *(words_at *)(to + (by_lanes ? lane_place(first + w, inner_words) * LANES : (first + w) * rows)) = turned[w];
        }
    }
    /* 3. Down, and the weighted sum into each row. */
    for (size_t c = 0; c < h; c += BLOCK_OUTPUTS) {
        const char *after = (const char *)down.data + (c + BLOCK_OUTPUTS) * i * item;
        struct ahead ahead = {{after, after + LANES * i * item}};
        if (c + BLOCK_OUTPUTS == h) ahead = (struct ahead){{next, (const char *)next + i * h * item}};
        for (size_t v = 0; v < BLOCK_VECTORS; v++) turn_weights(by_lanes, kind, &down, c + v * LANES, i, v, s);
        for (size_t t = 0, row = 0, rows; t < tiles; t++, row += rows) {
            rows = tile_rows(m - row, tiles - t);
            for (size_t r = 0; r < rows; r++) fetch_to_write(out_row(a, pairs[row + r]) + c, BLOCK_OUTPUTS);
            tile_dots(by_lanes, rows, is_pairs, (const uint32_t *)s->inner + tile_at(by_lanes, row, t, inner_words), s->block, inner_words,
                      &ahead, t ? 0 : step, sums);
            for (size_t r = 0; r < rows; r++) add_weighted(sums[r], weight_of(a, pairs[row + r]), out_row(a, pairs[row + r]) + c, BLOCK_OUTPUTS);
        }
    }
}

/* `next`: the weights of the expert after this one. */
static void expert_rows(const struct grouped_mlp *a, size_t expert, const int32_t *pairs, size_t m, const void *next, const struct scratch *s) {
    size_t chunks = (m + CHUNK_ROWS - 1) / CHUNK_ROWS;
    for (size_t chunk = 0, rows; chunk < chunks; chunk++, pairs += rows, m -= rows) {
        rows = (m + chunks - chunk - 1) / (chunks - chunk);
        int by_blocks = rows >= (a->kind == KIND_BF16 ? BLOCK_WORTH_IT_BF16 : a->row_invariant ? LANE_WORTH_IT : BLOCK_WORTH_IT);
        if (a->kind == KIND_BF16) by_blocks ? expert_blocks(KIND_BF16, a, expert, pairs, rows, next, s) : expert_dots(KIND_BF16, a, expert, pairs, rows, s);
        else if (a->kind == KIND_F32) by_blocks ? expert_blocks(KIND_F32, a, expert, pairs, rows, next, s) : expert_dots(KIND_F32, a, expert, pairs, rows, s);
        else by_blocks ? expert_blocks(KIND_FP8_BLOCK, a, expert, pairs, rows, next, s) : expert_dots(KIND_FP8_BLOCK, a, expert, pairs, rows, s);
    }
}

/* Pairs (row, choice) by expert, in the order of rows; starts has one entry more than there are experts in the range. */
static void group_pairs(const struct grouped_mlp *a, int32_t *starts, int32_t *pairs) {
    int64_t experts = a->end_expert - a->first_expert;
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (int64_t pass = 0; pass < 2; pass++) {
        for (int64_t row = 0; row < a->num_rows; row++)
            for (int64_t k = 0; k < a->top_k; k++) {
                int64_t expert = a->ids[row * a->ids_stride + k] - a->first_expert;
                if (expert < 0 || expert >= experts) continue;
                if (pass == 0) starts[expert + 1]++;
                else pairs[starts[expert]++] = (int32_t)(row * a->top_k + k);
            }
        if (pass == 0) for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
    }
    /* The second pass moved each start to its end; move them back. */
    for (int64_t e = experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* The next part of a block of memory, on a cache line. */
static void *take(char **memory, size_t bytes) {
    void *part = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return part;
}

/* 0, or 1 when there is no memory. */
int crossdock_grouped_mlp(const struct grouped_mlp *a) {
    size_t h = a->hidden, i = a->intermediate, experts = a->end_expert - a->first_expert, longest = h > i ? h : i;
    size_t hidden = SCRATCH_ROWS * (h + ROW_PAD) * 4, inner = SCRATCH_ROWS * (i + ROW_PAD) * 4, both = DOT_ROWS * (2 * i + ROW_PAD) * 4;
    size_t out = DOT_ROWS * h * 4, block = longest * BLOCK_OUTPUTS * 4, wide = longest * LANES * 4;
    size_t starts_bytes = (experts + 1) * 4, pairs_bytes = a->num_rows * a->top_k * 4;
    char *memory = aligned_alloc(64, (hidden + inner + both + out + block + wide + starts_bytes + pairs_bytes) / 64 * 64 + 9 * 64);
    if (!memory) return 1;
    char *rest = memory;
    struct scratch s = {take(&rest, hidden), take(&rest, inner), take(&rest, both), take(&rest, out), take(&rest, block), take(&rest, wide)};
    int32_t *starts = take(&rest, starts_bytes), *pairs = take(&rest, pairs_bytes);

    memset(a->out, 0, a->num_rows * h * sizeof(float));
    group_pairs(a, starts, pairs);
    size_t expert_bytes = 2 * i * h * item_bytes(a->kind);
    for (size_t e = 0, next; e < experts; e = next) {
        for (next = e + 1; next < experts && starts[next + 1] == starts[next]; next++) {}
        size_t read_next = a->first_expert + (next < experts ? next : e);
        if (starts[e + 1] > starts[e])
            expert_rows(a, a->first_expert + e, pairs + starts[e], starts[e + 1] - starts[e], (const char *)a->gate_up + read_next * expert_bytes, &s);
    }
    free(memory);
    return 0;
}
