/* Water filling of one layer, as in water_fill_torch.py: rows in order, each poured over its ranks up to one level. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

/* The level to which `tokens` fill ranks with these loads, lowest first. */
static double level_of(const double *lowest_first, int64_t count, double tokens) {
    double total = tokens, level = 0.0;
    for (int64_t j = 0; j < count; j++) {
        total += lowest_first[j];
        double candidate = total / (double)(j + 1);
        if (j > 0 && candidate >= level) break;
        level = candidate;
    }
    return level;
}

static void insert(double *sorted, int64_t count, double value) {
    int64_t place = count;
    while (place > 0 && sorted[place - 1] > value) {
        sorted[place] = sorted[place - 1];
        place--;
    }
    sorted[place] = value;
}

static void pour(const int64_t *ranks, int64_t width, int64_t num_ranks, double tokens, double *loads, double *shares,
                 double overshoot, double *sorted) {
    int64_t count = 0;
    while (count < width && ranks[count] < num_ranks) {
        insert(sorted, count, overshoot * loads[ranks[count]] - shares[count]);
        count++;
    }
    double level = level_of(sorted, count, tokens);
    for (int64_t j = 0; j < count; j++) {
        double other = overshoot * loads[ranks[j]] - shares[j];
        double share = level > other ? level - other : 0.0;
        loads[ranks[j]] += share - shares[j];
        shares[j] = share;
    }
}

static double highest_of(const double *loads, int64_t num_ranks) {
    double highest = 0.0;
    for (int64_t rank = 0; rank < num_ranks; rank++)
        if (loads[rank] > highest) highest = loads[rank];
    return highest;
}

/* tokens [rows], ranks [rows, width] padded with num_ranks, loads [num_ranks + 1] of experts without a choice,
   shares [rows, width] zero at first and the result. Returns the sweeps taken, -1 without memory. */
int64_t crossdock_water_fill(const double *tokens, const int64_t *ranks, double *loads, double *shares, int64_t rows,
                             int64_t width, int64_t num_ranks, int64_t max_sweeps, int64_t sweeps_between_checks,
                             double tolerance, double overshoot) {
    if (rows == 0) return 0;
    double *sorted = malloc(sizeof(double) * (size_t)width);
    if (sorted == NULL) return -1;
    double before = -1.0;
    int64_t sweep = 0;
    while (sweep < max_sweeps) {
        for (int64_t row = 0; row < rows; row++)
            pour(ranks + row * width, width, num_ranks, tokens[row], loads, shares + row * width,
                 sweep ? overshoot : 1.0, sorted);
        sweep++;
        if (sweep % sweeps_between_checks) continue;
        double highest = highest_of(loads, num_ranks);
        if (before >= 0.0 && fabs(before - highest) <= tolerance * highest) break;
        before = highest;
    }
    free(sorted);
    return sweep;
}
