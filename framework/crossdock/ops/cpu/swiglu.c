/* silu(gate) * up of float32 rows, with the same exponential for every element: torch's vectors and the elements behind its last whole vector
 * round differently, so an element's bits would depend on where it lies.
 */
#include "row_dot.h"

struct swiglu {
    const float *rows;         /* [n, 2 * inner], gates first */
    float *out;                /* [n, inner] */
    int64_t n, inner, row_stride;
};

ALWAYS_INLINE floats activate(floats gate, floats up) { return gate / (exp_lanes(-gate) + 1.0f) * up; }

void crossdock_swiglu(const struct swiglu *a) {
    size_t inner = a->inner, whole = inner / LANES * LANES, rest = (inner - whole) * sizeof(float);
    for (int64_t r = 0; r < a->n; r++) {
        const float *gates = a->rows + r * a->row_stride, *ups = gates + inner;
        float *out = a->out + r * inner;
        for (size_t i = 0; i < whole; i += LANES) *(floats_at *)(out + i) = (floats_at)activate(load_f32(gates + i), load_f32(ups + i));
        if (rest) {
            floats gate = {0}, up = {0};
            memcpy(&gate, gates + whole, rest);
            memcpy(&up, ups + whole, rest);
            floats last = activate(gate, up);
            memcpy(out + whole, &last, rest);
        }
    }
}
