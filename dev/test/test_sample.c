// Drawing a token: the likeliest at temperature 0, else exactly the shares of the softmax, over the top k
// only.
#include "dev/test/tap.h"
#include "llmc/run/sample.h"
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 7, DRAWS = 100000 };
static const float logits[VOCAB] = {1, -2, 3, 0.5f, 3, -30, 2};

static int draw(double temperature, int top_k, double uniform)
{
    float z[VOCAB]; // overwritten by the draw
    memcpy(z, logits, sizeof z);
    return sample_token(z, VOCAB, temperature, top_k, uniform);
}

// Draws with evenly spread uniform numbers hit a token as often as its share says, to within one draw at
// either end.
static void check_shares(double temperature, int top_k, const int *kept)
{
    int hits[VOCAB] = {0};
    double sum = 0, worst = 0;
    for (int i = 0; i < VOCAB; i++)
        sum += kept[i] ? exp(logits[i] / temperature) : 0;
    for (int i = 0; i < DRAWS; i++)
        hits[draw(temperature, top_k, (i + 0.5) / DRAWS)]++;
    for (int i = 0; i < VOCAB; i++) {
        double share = kept[i] ? exp(logits[i] / temperature) / sum : 0;
        worst = fmax(worst, fabs(hits[i] - share * DRAWS));
        if (!kept[i])
            ok(hits[i] == 0, "temperature %g, top %d: token %d is never drawn", temperature, top_k, i);
    }
    ok_at_most(worst, 2, "draws away from the softmax's share");
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
    float single = -5, far[2] = {-1e30f, 1e30f};
    ok(sample_token(&single, 1, 0.7, 50, 0.5) == 0, "a vocabulary of one");
    ok(sample_token(far, 2, 1, 0, 0) == 1, "a token of probability 0 is not drawn, even by 0");
    return tap_done();
}
