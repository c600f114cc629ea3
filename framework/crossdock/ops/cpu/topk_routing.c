/* Scores, choice and weights of a token's experts, row by row. Of equal experts the first one wins. */
#include <stdlib.h>

#include "row_dot.h"

struct topk_routing {
    const float *logits;       /* [rows, experts] */
    const float *bias;         /* [experts], for the choice only, or NULL */
    const int64_t *slots;      /* [experts], what stands for an expert in the ids, or NULL */
    int64_t *ids;              /* [rows, top_k] */
    float *weights;            /* [rows, top_k] */
    int64_t rows, experts, row_stride, slots_stride, top_k, groups, kept_groups;
    float scaling;
    int32_t is_softmax, renormalise, group_is_sum_of_two;
};

/* The first index of the largest of `count` values, a multiple of LANES. */
static size_t first_largest(const float *values, size_t count) {
    floats top = load_f32(values);
    for (size_t i = LANES; i < count; i += LANES) {
        floats x = load_f32(values + i);
        top = (floats)(((ints)x & (x > top)) | ((ints)top & ~(x > top)));
    }
#if defined(__AVX512F__)
    __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps((__m512)top));
    for (size_t i = 0; i < count; i += LANES) {
        unsigned equal = _mm512_cmpeq_ps_mask(_mm512_loadu_ps(values + i), largest);
        if (equal) return i + __builtin_ctz(equal);
    }
#else
    float largest = top[0];
    for (int lane = 1; lane < LANES; lane++) largest = top[lane] > largest ? top[lane] : largest;
    for (size_t i = 0; i < count; i++)
        if (values[i] == largest) return i;
#endif
    return 0; /* Only with NaN, which the weights then show. */
}

/* Scores of one row in `scores`, of no account behind the last expert. */
static void row_scores(const struct topk_routing *a, const float *logits, float *scores, size_t padded) {
    memcpy(scores, logits, a->experts * sizeof(float));
    for (size_t e = a->experts; e < padded; e++) scores[e] = -INFINITY;
    if (!a->is_softmax) {
        for (size_t e = 0; e < padded; e += LANES)
            *(floats_at *)(scores + e) = (floats_at)(1.0f / (1.0f + exp_lanes(-load_f32(scores + e))));
        return;
    }
    float top = scores[first_largest(scores, padded)], total = 0;
    floats totals = {0};
    for (size_t e = 0; e < padded; e += LANES) {
        /* Behind the last expert this is the least that exp_lanes gives, 1e-38. */
        floats x = exp_lanes(load_f32(scores + e) - top);
        *(floats_at *)(scores + e) = (floats_at)x;
        totals += x;
    }
    for (int lane = 0; lane < LANES; lane++) total += totals[lane];
    for (size_t e = 0; e < padded; e += LANES) *(floats_at *)(scores + e) = (floats_at)(load_f32(scores + e) * (1.0f / total));
}

/* Experts outside the best groups cannot be chosen: -inf, for with a negative bias every score may lie below zero. */
static void mask_groups(const struct topk_routing *a, float *choice, float *group_scores) {
    size_t size = a->experts / a->groups;
    for (int64_t g = 0; g < a->groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (size_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > best) second = best, best = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        group_scores[g] = a->group_is_sum_of_two && size > 1 ? best + second : best;
    }
    for (int64_t g = 0; g < a->groups; g++) {
        int64_t better = 0;
        for (int64_t other = 0; other < a->groups; other++)
            better += group_scores[other] > group_scores[g] || (group_scores[other] == group_scores[g] && other < g);
        if (better < a->kept_groups) continue;
        for (size_t e = g * size; e < (g + 1) * size; e++) choice[e] = -INFINITY;
    }
}

/* 0, or 1 when there is no memory. Ids stay in range whatever the logits are. */
int crossdock_topk_routing(const struct topk_routing *a) {
    size_t padded = (a->experts + LANES - 1) / LANES * LANES;
    float *scores = aligned_alloc(64, ((2 * padded + a->groups) * sizeof(float) + 63) / 64 * 64);
    if (!scores) return 1;
    float *choice = scores + padded, *group_scores = choice + padded;
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t *ids = a->ids + row * a->top_k;
        float *weights = a->weights + row * a->top_k, total = 1e-20f;
        row_scores(a, a->logits + row * a->row_stride, scores, padded);
        memcpy(choice, scores, a->experts * sizeof(float));
        if (a->bias)
            for (int64_t e = 0; e < a->experts; e++) choice[e] += a->bias[e];
        for (size_t e = a->experts; e < padded; e++) choice[e] = -INFINITY;
        if (a->kept_groups < a->groups) mask_groups(a, choice, group_scores);
        for (int64_t k = 0; k < a->top_k; k++) {
            size_t expert = first_largest(choice, padded);
            ids[k] = a->slots ? a->slots[expert * a->slots_stride] : (int64_t)expert;
            weights[k] = scores[expert];
            total += scores[expert];
            choice[expert] = -INFINITY;
        }
        float factor = a->renormalise ? a->scaling / total : a->scaling;
        for (int64_t k = 0; k < a->top_k; k++) weights[k] *= factor;
    }
    free(scores);
    return 0;
}
