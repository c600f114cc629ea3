/* The small row operations between the big products, one pass each: residual addition with the norm behind it, and the norm and rotation of
 * query and key heads. Computed in float32, written in the dtype of the rows.
 */
#include "row_dot.h"

struct add_rms_norm {
    const void *residual;      /* [n, h] */
    const void *update;        /* [n, h], or NULL for a norm alone */
    const void *weight;        /* [h], or NULL */
    void *total;               /* [n, h], only with update */
    void *out;                 /* [n, h] */
    int64_t n, h, residual_stride, update_stride;
    float eps;
    int32_t kind;
};

struct norm_rotate {
    const void *rows;          /* [n, heads, dim], rows and heads apart as the strides say */
    const void *weight;        /* [heads, dim], or NULL for no norm */
    const float *rotation;     /* [n, dim / 2] pairs of cosine and sine */
    void *out;                 /* [n, heads, dim] */
    int64_t n, heads, dim, row_stride, head_stride;
    float eps;
    int32_t kind;
};

ALWAYS_INLINE const void *offset(enum weight_kind kind, const void *base, size_t elements) {
    return (const char *)base + elements * (kind == KIND_BF16 ? 2 : 4);
}

ALWAYS_INLINE float load(enum weight_kind kind, const void *from, size_t at) {
    return kind == KIND_BF16 ? from_bf16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

ALWAYS_INLINE void store(enum weight_kind kind, void *to, size_t at, float value) {
    if (kind == KIND_BF16) ((uint16_t *)to)[at] = to_bf16(value);
    else ((float *)to)[at] = value;
}

/* Sum of squares, lane by lane; `count` is a multiple of LANES. */
ALWAYS_INLINE float squares(enum weight_kind kind, const void *row, size_t count) {
    floats acc = {0};
    for (size_t i = 0; i < count; i += LANES) {
        floats x = kind == KIND_BF16 ? load_bf16((const uint16_t *)row + i) : load_f32((const float *)row + i);
        acc += x * x;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += acc[lane];
    return sum;
}

ALWAYS_INLINE void add_norm_rows(enum weight_kind kind, const struct add_rms_norm *a) {
    for (int64_t r = 0; r < a->n; r++) {
        const void *row = offset(kind, a->residual, r * a->residual_stride);
        if (a->update) {
            const void *update = offset(kind, a->update, r * a->update_stride);
            void *total = (void *)offset(kind, a->total, r * a->h);
            for (int64_t i = 0; i < a->h; i++) store(kind, total, i, load(kind, row, i) + load(kind, update, i));
            row = total;
        }
        float inverse = 1.0f / sqrtf(squares(kind, row, a->h) / a->h + a->eps);
        void *out = (void *)offset(kind, a->out, r * a->h);
        if (a->weight)
            for (int64_t i = 0; i < a->h; i++) store(kind, out, i, load(kind, row, i) * inverse * load(kind, a->weight, i));
        else
            for (int64_t i = 0; i < a->h; i++) store(kind, out, i, load(kind, row, i) * inverse);
    }
}

ALWAYS_INLINE void rotate_rows(enum weight_kind kind, const struct norm_rotate *a) {
    for (int64_t r = 0; r < a->n; r++) {
        const float *rotation = a->rotation + r * a->dim;
        for (int64_t head = 0; head < a->heads; head++) {
            const void *row = offset(kind, a->rows, r * a->row_stride + head * a->head_stride);
            void *out = (void *)offset(kind, a->out, (r * a->heads + head) * a->dim);
            float inverse = a->weight ? 1.0f / sqrtf(squares(kind, row, a->dim) / a->dim + a->eps) : 1.0f;
            for (int64_t i = 0; i < a->dim; i += 2) {
                float x = load(kind, row, i) * inverse, y = load(kind, row, i + 1) * inverse;
                if (a->weight) {
                    x *= load(kind, a->weight, head * a->dim + i);
                    y *= load(kind, a->weight, head * a->dim + i + 1);
                }
                store(kind, out, i, x * rotation[i] - y * rotation[i + 1]);
                store(kind, out, i + 1, y * rotation[i] + x * rotation[i + 1]);
            }
        }
    }
}

void crossdock_add_rms_norm(const struct add_rms_norm *a) {
    if (a->kind == KIND_BF16) add_norm_rows(KIND_BF16, a);
    else add_norm_rows(KIND_F32, a);
}

void crossdock_norm_rotate(const struct norm_rotate *a) {
    if (a->kind == KIND_BF16) rotate_rows(KIND_BF16, a);
    else rotate_rows(KIND_F32, a);
}
