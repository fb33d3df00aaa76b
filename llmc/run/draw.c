#include "llmc/run/draw.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t z) // splitmix64
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double draw_uniform(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return (double)(mix(*state) >> 11) * 0x1p-53;
}

// Seeds are below 2^53: the low 11 bits of a text's number fill the bits above. The others, of which mix()
// keeps none as none, tell apart texts whose low bits are equal.
uint64_t draw_state(uint64_t seed, uint64_t text) { return seed ^ text << 53 ^ mix(text >> 11); }

// heap (n): no entry is below those at 2 i + 1 and 2 i + 2. Restores that below i.
static void sift_down(float *heap, int n, int i)
{
    float x = heap[i];
    for (int child = 2 * i + 1; child < n; child = 2 * i + 1) {
        child += child + 1 < n && heap[child + 1] > heap[child];
        if (heap[child] <= x)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
}

static void make_heap(float *heap, int n)
{
    for (int i = n / 2 - 1; i >= 0; i--)
        sift_down(heap, n, i);
}

// ---- what may be drawn ------------------------------------------------------------------------------------

// The k-th largest of z: what is below it is not drawn. Ties with it are. The k largest so far are in a heap
// with their signs changed, so that the smallest of them is the first.
static float top_k_threshold(const float *z, int vocab, int top_k)
{
    if (top_k <= 0 || top_k >= vocab)
        return -INFINITY;
    float *heap = xcalloc((size_t)top_k, sizeof *heap);
    for (int i = 0; i < top_k; i++)
        heap[i] = -z[i];
    make_heap(heap, top_k);
    for (int i = top_k; i < vocab; i++) {
        if (z[i] <= -heap[0])
            continue;
        heap[0] = -z[i];
        sift_down(heap, top_k, 0);
    }
    float threshold = -heap[0];
    free(heap);
    return threshold;
}

// The smallest weight of those that together reach the share p of the sum. Ties with it are drawn, too.
static float top_p_threshold(const float *weight, int n, double p, double sum)
{
    if (p >= 1 || !n)
        return 0;
    float *heap = xcalloc((size_t)n, sizeof *heap);
    memcpy(heap, weight, (size_t)n * sizeof *heap);
    make_heap(heap, n);
    double reached = heap[0];
    while (n > 1 && reached < p * sum) {
        heap[0] = heap[--n];
        sift_down(heap, n, 0);
        reached += heap[0];
    }
    float threshold = heap[0];
    free(heap);
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

// Tokens that may be drawn, in their order, and e^(logit / temperature) of each, the likeliest's 1.
typedef struct {
    int *id;
    float *weight;
    int count;
    double sum; // of the weights
} Candidates;

// Of z >= threshold. Owned by the caller.
static Candidates candidates_of(const float *z, int vocab, float threshold, float max, double temperature)
{
    int most = 0;
    for (int i = 0; i < vocab; i++)
        most += z[i] >= threshold;
    Candidates c = {xcalloc((size_t)most, sizeof *c.id), xcalloc((size_t)most, sizeof *c.weight), 0, 0};
    for (int i = 0; i < vocab; i++) {
        if (!(z[i] >= threshold)) // also what is no number
            continue;
        c.id[c.count] = i;
        c.weight[c.count] = (float)exp((z[i] - max) / temperature);
        c.sum += c.weight[c.count++];
    }
    return c;
}

static void keep_from(Candidates *c, float threshold)
{
    int count = 0;
    c->sum = 0;
    for (int i = 0; i < c->count; i++) {
        if (!(c->weight[i] >= threshold))
            continue;
        c->id[count] = c->id[i];
        c->weight[count] = c->weight[i];
        c->sum += c->weight[count++];
    }
    c->count = count;
}

// `otherwise`: when `uniform` lies behind all, as the sum is rounded.
static int draw_candidate(const Candidates *c, double uniform, int otherwise)
{
    double at = uniform * c->sum;
    for (int i = 0; i < c->count; i++) {
        at -= c->weight[i];
        if (at < 0 && c->weight[i] > 0)
            return c->id[i];
    }
    return otherwise;
}

int draw_token(const DrawRule *rule, float *z, int vocab, const bool *seen, double uniform)
{
    if (rule->repetition_penalty != 1)
        penalise(z, vocab, seen, rule->repetition_penalty);
    int best = likeliest(z, vocab);
    if (rule->temperature <= 0)
        return best;

    Candidates c =
        candidates_of(z, vocab, top_k_threshold(z, vocab, rule->top_k), z[best], rule->temperature);
    keep_from(&c, top_p_threshold(c.weight, c.count, rule->top_p, c.sum));
    int id = draw_candidate(&c, uniform, best);
    free(c.id);
    free(c.weight);
    return id;
}
