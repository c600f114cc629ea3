/* x [m, k] times w [n, k] transposed, for few rows. */
#include <stdlib.h>

#include "row_dot.h"

struct linear {
    const void *rows;     /* [m, k] float32 or bf16, as the weights */
    const void *weight;   /* [n, k] */
    void *out;            /* [m, n], dtype of the rows */
    int64_t m, n, k, row_stride;
    int32_t kind;
};

/* 0, or 1 when there is no memory. */
int crossdock_linear(const struct linear *a) {
    struct weights weight = {a->weight, NULL, 0, (size_t)a->n};
    if (a->kind == KIND_F32) {
        row_dots(KIND_F32, a->rows, a->m, a->row_stride, &weight, a->n, a->k, a->out, a->n, NULL);
        return 0;
    }
    size_t count = a->m * a->n;
    float *out = malloc((count + a->m * a->k) * sizeof(float));
    if (!out) return 1;
    const void *rows = a->rows;
    size_t row_stride = a->row_stride;
    if (sizeof(bf16_row_t) == 4) {
        float *wide = out + count;
        for (int64_t r = 0; r < a->m; r++)
            for (int64_t c = 0; c < a->k; c++) wide[r * a->k + c] = from_bf16(((const uint16_t *)a->rows)[r * a->row_stride + c]);
        rows = wide;
        row_stride = a->k;
    }
    row_dots(KIND_BF16, rows, a->m, row_stride, &weight, a->n, a->k, out, a->n, NULL);
    for (size_t c = 0; c < count; c++) ((uint16_t *)a->out)[c] = to_bf16(out[c]);
    free(out);
    return 0;
}
