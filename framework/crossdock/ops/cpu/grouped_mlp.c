/* All local experts of a layer on rows by token: group, gate and up, SwiGLU, down, weighted sum, in one call. */
#include <stdlib.h>

#include "panel_dot.h"

/* Rows handled at once: their copies stay in the L2 cache while the expert's weights stream past. */
#define CHUNK_ROWS 48
_Static_assert(CHUNK_ROWS >= PANEL_ROWS, "a panel's buffers are those of a chunk");

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
};

struct scratch {
    float *hidden, *gate_up, *out, *wide;
    uint16_t *gate_up_half;
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

/* gate * sigmoid(gate) * up over the gate half, in place. */
static void swiglu(float *gate_up, size_t intermediate) {
    for (size_t i = 0; i < intermediate; i += LANES) {
        floats gate = load_f32(gate_up + i), up = load_f32(gate_up + intermediate + i);
        *(floats_at *)(gate_up + i) = (floats_at)(gate / (exp_lanes(-gate) + 1.0f) * up);
    }
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

static float weight_of(const struct grouped_mlp *a, int32_t pair) {
    return a->weights[pair / a->top_k * a->weights_stride + pair % a->top_k];
}

/* Up to CHUNK_ROWS rows of an expert, by row dots. */
ALWAYS_INLINE void expert_chunk(enum weight_kind kind, const struct grouped_mlp *a, size_t expert, const int32_t *pairs, size_t m,
                                const struct scratch *s) {
    size_t h = a->hidden, i = a->intermediate, row_item = kind == KIND_BF16 ? sizeof(bf16_row_t) : 4;
    struct weights gate_up, down;
    expert_weights(kind, a, expert, &gate_up, &down);

    /* 1. The expert's rows side by side. */
    for (size_t r = 0; r < m; r++) copy_row(a, pairs[r] / a->top_k, kind, (char *)s->hidden + r * h * row_item);
    /* 2. Gate, up, SwiGLU. */
    row_dots(kind, s->hidden, m, h, &gate_up, 2 * i, h, s->gate_up, 2 * i, s->wide);
    for (size_t r = 0; r < m; r++) swiglu(s->gate_up + r * 2 * i, i);
    const void *inner = s->gate_up;
    if (kind == KIND_BF16 && sizeof(bf16_row_t) == 2) {
        for (size_t r = 0; r < m; r++)
            for (size_t c = 0; c < i; c++) s->gate_up_half[r * 2 * i + c] = to_bf16(s->gate_up[r * 2 * i + c]);
        inner = s->gate_up_half;
    }
    /* 3. Down, and the weighted sum into each row. */
    row_dots(kind, inner, m, 2 * i, &down, h, i, s->out, h, s->wide);
    for (size_t r = 0; r < m; r++) {
        float weight = weight_of(a, pairs[r]);
        float *to = a->out + pairs[r] / a->top_k * h;
        for (size_t c = 0; c < h; c++) to[c] += weight * s->out[r * h + c];
    }
}

/* Up to PANEL_ROWS rows of an expert, by panels; float32 and fp8-block weights. Rows that only fill the panel are zero. */
ALWAYS_INLINE void expert_panel(enum weight_kind kind, const struct grouped_mlp *a, size_t expert, const int32_t *pairs, size_t m,
                                const struct scratch *s) {
    size_t h = a->hidden, i = a->intermediate;
    float *row = s->out; /* not in use before step 3 */
    struct weights gate_up, down;
    expert_weights(kind, a, expert, &gate_up, &down);

    /* 1. The expert's rows side by side, element by element. */
    memset(s->hidden, 0, PANEL_ROWS * h * sizeof(float));
    for (size_t t = 0; t < m; t++) copy_row(a, pairs[t] / a->top_k, kind, row + t * h);
    for (size_t c = 0; c < h; c += LANES)
        for (size_t t = 0; t < m; t++)
            for (size_t lane = 0; lane < LANES; lane++) s->hidden[(c + lane) * PANEL_ROWS + t] = row[t * h + c + lane];
    /* 2. Gate, up, SwiGLU. */
    panel_dots(kind, s->hidden, &gate_up, 2 * i, h, s->gate_up, s->wide);
    swiglu(s->gate_up, i * PANEL_ROWS);
    /* 3. Down, and the weighted sum into each row. */
    panel_dots(kind, s->gate_up, &down, h, i, s->out, s->wide);
    for (size_t c = 0; c < h; c += LANES)
        for (size_t t = 0; t < m; t++) {
            float weight = weight_of(a, pairs[t]);
            float *to = a->out + pairs[t] / a->top_k * h + c;
            for (size_t lane = 0; lane < LANES; lane++) to[lane] += weight * s->out[(c + lane) * PANEL_ROWS + t];
        }
}

static void expert_rows(const struct grouped_mlp *a, size_t expert, const int32_t *pairs, size_t m, const struct scratch *s) {
    size_t rows;
    for (size_t done = 0; done < m; done += rows) {
        int is_panel = a->kind != KIND_BF16 && m - done >= PANEL_WORTH_IT;
        size_t most = is_panel ? PANEL_ROWS : CHUNK_ROWS;
        rows = m - done < most ? m - done : most;
        if (a->kind == KIND_BF16) expert_chunk(KIND_BF16, a, expert, pairs + done, rows, s);
        else if (a->kind == KIND_F32 && is_panel) expert_panel(KIND_F32, a, expert, pairs + done, rows, s);
        else if (a->kind == KIND_F32) expert_chunk(KIND_F32, a, expert, pairs + done, rows, s);
        else if (is_panel) expert_panel(KIND_FP8_BLOCK, a, expert, pairs + done, rows, s);
        else expert_chunk(KIND_FP8_BLOCK, a, expert, pairs + done, rows, s);
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

/* 0, or 1 when there is no memory. */
int crossdock_grouped_mlp(const struct grouped_mlp *a) {
    size_t h = a->hidden, i = a->intermediate, experts = a->end_expert - a->first_expert;
    size_t longest = h > i ? h : i;
    size_t floats_needed = CHUNK_ROWS * (2 * h + 2 * i) + PANEL_OUTPUTS * longest, halves_needed = CHUNK_ROWS * 2 * i;
    size_t numbers = experts + 1 + a->num_rows * a->top_k;
    char *memory = malloc(floats_needed * 4 + halves_needed * 2 + numbers * 4);
    if (!memory) return 1;
    struct scratch s;
    s.hidden = (float *)memory;
    s.gate_up = s.hidden + CHUNK_ROWS * h;
    s.out = s.gate_up + CHUNK_ROWS * 2 * i;
    s.wide = s.out + CHUNK_ROWS * h;
    int32_t *starts = (int32_t *)(s.wide + PANEL_OUTPUTS * longest), *pairs = starts + experts + 1;
    s.gate_up_half = (uint16_t *)(starts + numbers);

    memset(a->out, 0, a->num_rows * h * sizeof(float));
    group_pairs(a, starts, pairs);
    for (size_t e = 0; e < experts; e++)
        if (starts[e + 1] > starts[e])
            expert_rows(a, a->first_expert + e, pairs + starts[e], starts[e + 1] - starts[e], &s);
    free(memory);
    return 0;
}
