/* The exponential race: of each row, the token with the largest probability / draw, draws being functions of (seed, position, token).
 *
 * Draws are those of noise.py, bit for bit up to the logarithm. One pass finds every token's place in the race to within RACE_SLACK, in
 * float32 and in the log domain; only those that could still win are then computed in float64, as the torch form computes all of them.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN 0x9E3779B97F4A7C15ull
#define LN2 0.69314718f
/* More than the error of a place: 2e-6 of a logarithm, and rounding of scores up to 1e3. */
#define RACE_SLACK 1e-3f

struct sample_race {
    const float *scores;       /* [rows, columns], rows score_stride apart */
    const int64_t *token_ids;  /* [columns], or [rows, columns] with rows ids_stride apart */
    const int64_t *seeds, *positions; /* [rows] */
    int64_t *winners;          /* [rows] columns */
    int64_t rows, columns, score_stride, ids_stride;
};

static inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* 53 bits; the exponential draw is -log((bits + 0.5) / 2^53). */
static inline uint64_t draw_bits(uint64_t key, uint64_t token) { return mix(key + token * GOLDEN) >> 11; }

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* -log(1 - v) for v in [0, 1/2], relative error below 1e-6: twice the area tangent of v / (2 - v). */
static inline float minus_log1m(float v) {
    float z = v / (2.0f - v), zz = z * z;
    return 2.0f * z * (1.0f + zz * (1.0f / 3 + zz * (1.0f / 5 + zz * (1.0f / 7 + zz * (1.0f / 9 + zz * (1.0f / 11))))));
}

/* Mantissa in [1/2, 1) and exponent of a normal float. */
static inline float mantissa(float x) { return float_of((bits_of(x) & 0x007fffff) | 0x3f000000); }
static inline float exponent(float x) { return (float)((bits_of(x) >> 23) - 126); }

/* Logarithm of the draw. Near u = 1, where winners are, the distance to 1 is taken from the integer. */
static inline float log_draw(uint64_t bits) {
    float u = ((float)(int64_t)bits + 0.5f) * 0x1p-53f, rest = ((float)(int64_t)((1ull << 53) - 1 - bits) + 0.5f) * 0x1p-53f;
    float draw = rest <= 0.5f ? minus_log1m(rest) : minus_log1m(1.0f - mantissa(u)) - exponent(u) * LN2;
    return exponent(draw) * LN2 - minus_log1m(1.0f - mantissa(draw));
}

static void places_of(const float *scores, const int64_t *ids, uint64_t key, float *places, int64_t columns) {
    for (int64_t c = 0; c < columns; c++) places[c] = scores[c] - log_draw(draw_bits(key, (uint64_t)ids[c]));
}

static int64_t winner_of(const struct sample_race *a, int64_t row, float *places) {
    const float *scores = a->scores + row * a->score_stride;
    const int64_t *ids = a->token_ids + row * a->ids_stride;
    uint64_t key = mix(mix((uint64_t)a->seeds[row] + GOLDEN) + (uint64_t)a->positions[row] * GOLDEN);
    places_of(scores, ids, key, places, a->columns);
    float best = -INFINITY, top = -INFINITY;
    int64_t winner = 0;
    for (int64_t c = 0; c < a->columns; c++) {
        if (scores[c] != scores[c]) return c;
        best = places[c] > best ? places[c] : best;
        top = scores[c] > top ? scores[c] : top;
    }
    double most = -1;
    for (int64_t c = 0; c < a->columns; c++) {
        if (places[c] < best - RACE_SLACK) continue;
        double uniform = ((double)draw_bits(key, (uint64_t)ids[c]) + 0.5) * 0x1p-53;
        double value = exp((double)(scores[c] - top)) / -log(uniform);
        if (value > most) most = value, winner = c;
    }
    return winner;
}

/* 0, or 1 when there is no memory. */
int crossdock_sample_race(const struct sample_race *a) {
    float *places = malloc((a->columns + 1) * sizeof(float));
    if (!places) return 1;
    for (int64_t row = 0; row < a->rows; row++) a->winners[row] = winner_of(a, row, places);
    free(places);
    return 0;
}
