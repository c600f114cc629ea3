/* x [m, k] times w [n, k] transposed, for few rows. */
#include <stdlib.h>

#include "row_dot.h"

/* Elements between rows in scratch. Not a multiple of a page: the rows of a tile would share one set of the L1 cache. */
#define ROW_PAD 32

struct linear {
    const void *rows;     /* [m, k] float32 or bf16, as the weights */
    const void *weight;   /* [n, k] */
    void *out;            /* [m, n], dtype of the rows */
    int64_t m, n, k, row_stride;
    int32_t kind;
};

/* Rows as the dots read them, `stride` apart. */
ALWAYS_INLINE void copy_rows(enum weight_kind kind, const struct linear *a, void *to, size_t stride) {
    for (int64_t r = 0; r < a->m; r++) {
        const char *from = (const char *)a->rows + r * a->row_stride * (kind == KIND_BF16 ? 2 : 4);
        if (kind == KIND_F32) memcpy((float *)to + r * stride, from, a->k * 4);
        else if (sizeof(bf16_row_t) == 2) memcpy((uint16_t *)to + r * stride, from, a->k * 2);
        else
            for (int64_t i = 0; i < a->k; i += LANES) *(floats_at *)((float *)to + r * stride + i) = (floats_at)load_bf16((const uint16_t *)from + i);
    }
}

/* 0, or 1 when there is no memory. */
int crossdock_linear(const struct linear *a) {
    struct weights weight = {a->weight, NULL, 0, (size_t)a->n};
    size_t stride = a->k + ROW_PAD, count = a->m * a->n;
    float *rows = aligned_alloc(64, ((a->m * stride + count) * sizeof(float) + 63) / 64 * 64), *sums = rows + a->m * stride;
    if (!rows) return 1;
    if (a->kind == KIND_F32) {
        copy_rows(KIND_F32, a, rows, stride);
        row_dots(KIND_F32, rows, a->m, stride, &weight, a->n, a->k, a->out, a->n, NULL);
    } else {
        copy_rows(KIND_BF16, a, rows, stride);
        row_dots(KIND_BF16, rows, a->m, stride, &weight, a->n, a->k, sums, a->n, NULL);
        for (size_t c = 0; c < count; c++) ((uint16_t *)a->out)[c] = to_bf16(sums[c]);
    }
    free(rows);
    return 0;
}
