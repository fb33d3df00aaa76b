#include "llmc/run/draw.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

double draw_uniform(uint64_t *state) // splitmix64
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static int compare_down(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// Owned by the caller.
static float *sorted_down(const float *x, int n)
{
    float *sorted = xcalloc((size_t)n, sizeof *sorted);
    memcpy(sorted, x, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_down);
    return sorted;
}

// The k-th largest of z: what is below it is not drawn. Ties with it are.
static float top_k_threshold(const float *z, int vocab, int top_k)
{
    if (top_k <= 0 || top_k >= vocab)
        return -INFINITY;
    float *sorted = sorted_down(z, vocab), threshold = sorted[top_k - 1];
    free(sorted);
    return threshold;
}

// The smallest weight of those that together reach the share p of the sum. Ties with it are drawn, too.
static float top_p_threshold(const float *weight, int vocab, double p, double sum)
{
    if (p >= 1)
        return 0;
    float *sorted = sorted_down(weight, vocab);
    double reached = sorted[0];
    int i = 0;
    while (i + 1 < vocab && reached < p * sum)
        reached += sorted[++i];
    float threshold = sorted[i];
    free(sorted);
    return threshold;
}

static void penalise(float *z, int vocab, const bool *seen, double penalty)
{
    for (int i = 0; i < vocab; i++) {
        if (seen[i])
            z[i] = (float)(z[i] > 0 ? z[i] / penalty : z[i] * penalty);
    }
}

static int likeliest(const float *z, int vocab)
{
    int best = 0;
    for (int i = 1; i < vocab; i++) {
        if (z[i] > z[best])
            best = i;
    }
    return best;
}

// Weights of at least the threshold stay. Returns their sum.
static double keep_from(float *weight, int vocab, float threshold)
{
    double sum = 0;
    for (int i = 0; i < vocab; i++) {
        weight[i] = weight[i] >= threshold ? weight[i] : 0;
        sum += weight[i];
    }
    return sum;
}

int draw_token(const DrawRule *rule, float *z, int vocab, const bool *seen, double uniform)
{
    if (rule->repetition_penalty != 1)
        penalise(z, vocab, seen, rule->repetition_penalty);
    int best = likeliest(z, vocab);
    if (rule->temperature <= 0)
        return best;

    float threshold = top_k_threshold(z, vocab, rule->top_k), max = z[best];
    for (int i = 0; i < vocab; i++)
        z[i] = z[i] >= threshold ? (float)exp((z[i] - max) / rule->temperature) : 0;
    double sum = keep_from(z, vocab, 0);
    sum = keep_from(z, vocab, top_p_threshold(z, vocab, rule->top_p, sum));

    double at = uniform * sum;
    for (int i = 0; i < vocab; i++) {
        at -= z[i];
        if (at < 0 && z[i] > 0)
            return i;
    }
    return best; // the sum is rounded
}
