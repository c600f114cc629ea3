/* Matrix products for a panel of rows, in outer-product form: out[n][t] = sum over k of w[n][k] * x[k][t].
 *
 * A panel holds its rows side by side per k, so one vector is the same element of LANES rows and nothing has to be summed across lanes. The
 * result has the same form and is the input of the next product. Weights are read as they lie, row by row. Better than row_dot.h from about
 * three quarters of a panel on; a row's bits do not depend on the other rows of its panel, but differ from those of row_dot.h.
 */
#ifndef CROSSDOCK_PANEL_DOT_H
#define CROSSDOCK_PANEL_DOT_H

#include "row_dot.h"

#define PANEL_VECTORS 3
#define PANEL_ROWS (PANEL_VECTORS * LANES)
#define PANEL_WORTH_IT (PANEL_ROWS * 3 / 4)
#if defined(__AVX512F__)
#define PANEL_OUTPUTS 8
#else
#define PANEL_OUTPUTS 4
#endif

/* out [n, PANEL_ROWS] from x [k, PANEL_ROWS]; n a multiple of PANEL_OUTPUTS. Float32 or fp8-block weights; `wide` [PANEL_OUTPUTS * k] for fp8. */
ALWAYS_INLINE void panel_dots(enum weight_kind kind, const float *x, const struct weights *weights, size_t n, size_t k, float *out,
                              float *wide) {
    for (size_t j = 0; j < n; j += PANEL_OUTPUTS) {
        const float *w = (const float *)weights->data + j * k;
        floats acc[PANEL_OUTPUTS][PANEL_VECTORS];
        if (kind == KIND_FP8_BLOCK) {
            for (size_t part = 0; part < PANEL_OUTPUTS; part += STREAMS) dequantise_rows(weights, j + part, 1, k, wide + part * k);
            w = wide;
        }
        memset(acc, 0, sizeof acc);
        for (size_t i = 0; i < k; i++) {
            floats b[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) b[v] = load_f32(x + i * PANEL_ROWS + v * LANES);
            for (int r = 0; r < PANEL_OUTPUTS; r++)
                for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] += w[r * k + i] * b[v];
        }
        for (int r = 0; r < PANEL_OUTPUTS; r++)
            for (int v = 0; v < PANEL_VECTORS; v++) *(floats_at *)(out + (j + r) * PANEL_ROWS + v * LANES) = (floats_at)acc[r][v];
    }
}

#endif
