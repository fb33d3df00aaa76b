// Drawing a token: the likeliest at temperature 0, else exactly the shares of the softmax, over the top k, or
// the fewest that reach the share p.
#include "dev/test/tap.h"
#include "llmc/run/draw.h"
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 7, DRAWS = 100000 };
static const float logits[VOCAB] = {1, -2, 3, 0.5f, 3, -30, 2};

static int draw_by(const DrawRule *rule, double uniform)
{
    static const bool seen[VOCAB] = {[2] = true, [5] = true};
    float z[VOCAB]; // overwritten by the draw
    memcpy(z, logits, sizeof z);
    return draw_token(rule, z, VOCAB, seen, uniform);
}

static int draw(double temperature, int top_k, double uniform)
{
    DrawRule rule = {.temperature = temperature, .top_k = top_k, .top_p = 1, .repetition_penalty = 1};
    return draw_by(&rule, uniform);
}

// Draws with evenly spread uniform numbers hit a token as often as its share says, to within one draw at
// either end.
static void check_rule(const DrawRule *rule, const double *z, const int *kept)
{
    int hits[VOCAB] = {0};
    double sum = 0, worst = 0;
    for (int i = 0; i < VOCAB; i++)
        sum += kept[i] ? exp(z[i] / rule->temperature) : 0;
    for (int i = 0; i < DRAWS; i++)
        hits[draw_by(rule, (i + 0.5) / DRAWS)]++;
    for (int i = 0; i < VOCAB; i++) {
        double share = kept[i] ? exp(z[i] / rule->temperature) / sum : 0;
        worst = fmax(worst, fabs(hits[i] - share * DRAWS));
        if (!kept[i])
            ok(hits[i] == 0, "temperature %g, top %d, p %g: token %d is never drawn", rule->temperature,
               rule->top_k, rule->top_p, i);
    }
    ok_at_most(worst, 2, "draws away from the softmax's share");
}

static void check_shares(double temperature, int top_k, const int *kept)
{
    double z[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        z[i] = logits[i];
    check_rule(&(DrawRule){temperature, 1, 1, top_k}, z, kept);
}

// At temperature 1 the shares are 0.38, 0.38, 0.14, 0.05, 0.03, 0.003 and none; of the three largest 0.42,
// 0.42 and 0.16.
static void check_top_p(void)
{
    static const double z[VOCAB] = {1, -2, 3, 0.5, 3, -30, 2};
    static const int two[VOCAB] = {[2] = 1, [4] = 1}, three[VOCAB] = {[2] = 1, [4] = 1, [6] = 1},
                     four[VOCAB] = {1, [2] = 1, [4] = 1, [6] = 1};
    check_rule(&(DrawRule){1, 0.75, 1, 0}, z, two);
    check_rule(&(DrawRule){1, 0.001, 1, 0}, z, two); // equal ones stay together
    check_rule(&(DrawRule){1, 0.78, 1, 0}, z, three);
    check_rule(&(DrawRule){1, 0.9, 1, 0}, z, three);
    check_rule(&(DrawRule){1, 0.94, 1, 0}, z, four);
    check_rule(&(DrawRule){1, 0.8, 1, 3}, z, two); // of what top-k leaves
    check_rule(&(DrawRule){1, 0.86, 1, 3}, z, three);
}

// Tokens 2 and 5 are in the text.
static void check_penalty(void)
{
    static const double z[VOCAB] = {1, -2, 2, 0.5, 3, -45, 2};
    static const int all[VOCAB] = {1, 1, 1, 1, 1, 1, 1};
    check_rule(&(DrawRule){2, 1, 1.5, 0}, z, all);
    DrawRule greedy = {0, 1, 1.01, 0}, praise = {0, 1, 0.5, 0};
    ok(draw_by(&greedy, 0) == 4 && draw_by(&praise, 0) == 2, "a penalty decides between equal ones");
}

static int compare_down(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// How many of the sorted values are at least the one at which `reached` of the sum is reached, and of the
// first top_k.
static int kept_of(const float *sorted, int n, int top_k, double share)
{
    double sum = 0, reached = 0;
    int kept = top_k, at = 0;
    while (kept < n && sorted[kept] == sorted[kept - 1])
        kept++;
    for (int i = 0; i < kept; i++)
        sum += exp((double)sorted[i] - sorted[0]);
    while (at < kept && reached < share * sum)
        reached += exp((double)sorted[at++] - sorted[0]);
    while (at < kept && sorted[at] == sorted[at - 1])
        at++;
    return at;
}

// A vocabulary like GPT-2's, with many equal logits: what is drawn by many numbers are exactly the tokens
// that a sorted list gives.
static void check_many(int top_k, double share)
{
    enum { MANY = 50257, NUMBERS = 2000 };
    float *z = xcalloc(MANY, sizeof *z), *copy = xcalloc(MANY, sizeof *copy),
          *sorted = xcalloc(MANY, sizeof *sorted);
    DrawRule rule = {.temperature = 1, .top_k = top_k, .top_p = share, .repetition_penalty = 1};
    uint64_t random = 5;
    for (int i = 0; i < MANY; i++)
        sorted[i] = z[i] = (float)(int)(12000 * draw_uniform(&random)) / 1000;
    qsort(sorted, MANY, sizeof *sorted, compare_down);
    int kept = kept_of(sorted, MANY, top_k ? top_k : MANY, share), outside = 0, first = MANY, last = -1;
    for (int i = 0; i < NUMBERS; i++) {
        memcpy(copy, z, MANY * sizeof *z);
        int id = draw_token(&rule, copy, MANY, NULL, (double)i / (NUMBERS - 1) * 0.999999);
        outside += z[id] < sorted[kept - 1];
        first = id < first ? id : first;
        last = id > last ? id : last;
    }
    int lowest = 0, highest = MANY - 1;
    while (z[lowest] < sorted[kept - 1])
        lowest++;
    while (z[highest] < sorted[kept - 1])
        highest--;
    ok(!outside, "of %d tokens top %d, p %g: only the %d likeliest are drawn", MANY, top_k, share, kept);
    ok(first == lowest && last == highest, "from the first of them to the last");
    free(z);
    free(copy);
    free(sorted);
}

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Texts of two seeds, more than the 2048 that the bits above a seed number.
static void check_states(void)
{
    enum { TEXTS = 20000 };
    static uint64_t states[2 * TEXTS];
    bool first = true;
    int equal = 0;
    for (uint64_t i = 0; i < TEXTS; i++) {
        states[2 * i] = draw_state(1337, i);
        states[2 * i + 1] = draw_state(1338, i);
        first = first && (i >= 2048 || states[2 * i] == (1337 ^ i << 53));
    }
    qsort(states, 2 * TEXTS, sizeof *states, ascending);
    for (int i = 1; i < 2 * TEXTS; i++)
        equal += states[i] == states[i - 1];
    ok(first, "the first 2048 texts have the states of earlier programs");
    ok(equal == 0, "%d of %d texts have the random numbers of another one", equal, 2 * TEXTS);
}

int main(void)
{
    static const int all[VOCAB] = {1, 1, 1, 1, 1, 1, 1}, three[VOCAB] = {0, 0, 1, 0, 1, 0, 1},
                     two[VOCAB] = {0, 0, 1, 0, 1, 0, 0};
    ok(draw(0, 0, 0.99) == 2 && draw(0, 3, 0) == 2,
       "temperature 0: the first of the likeliest, whatever is drawn");
    PART(check_shares(1, 0, all));
    PART(check_shares(0.8, 0, all));
    PART(check_shares(3, 7, all));
    PART(check_shares(1, 100, all));
    PART(check_shares(1, 3, three));
    PART(check_shares(0.5, 2, two));
    PART(check_shares(1, 1, two)); // the two largest are equal: a tie is not broken
    ok(draw(1e-3, 0, 0.25) == 2 && draw(1e-3, 0, 0.75) == 4,
       "a temperature near 0 shares out among the likeliest, without overflow");
    ok(draw(100, 0, 0) == 0 && draw(100, 0, nextafter(1, 0)) == 6,
       "the ends of the interval are the first and last token");
    PART(check_top_p());
    PART(check_states());
    PART(check_penalty());
    PART(check_many(50, 1));
    PART(check_many(50, 0.5));
    PART(check_many(1, 1));
    PART(check_many(20000, 1));
    PART(check_many(0, 0.01));
    PART(check_many(0, 0.9));
    float nowhere[3] = {NAN, NAN, NAN};
    int id = draw_token(&(DrawRule){1, 0.5, 1, 2}, nowhere, 3, NULL, 0.5);
    ok(id >= 0 && id < 3, "logits that are no numbers give some token");
    float single = -5, far[2] = {-1e30f, 1e30f};
    ok(draw_token(&(DrawRule){0.7, 0.5, 1, 50}, &single, 1, NULL, 0.5) == 0, "a vocabulary of one");
    ok(draw_token(&(DrawRule){1, 1, 1, 0}, far, 2, NULL, 0) == 1,
       "a token of probability 0 is not drawn, even by 0");
    return tap_done();
}
