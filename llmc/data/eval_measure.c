#include "llmc/data/eval_measure.h"
#include <math.h>

int eval_choice(const EvalText *texts, const EvalScore *scores, bool by_token)
{
    int best = 0;
    double least = INFINITY;
    for (int i = 0; i < EVAL_ENDINGS; i++) {
        double loss = by_token ? scores[i].loss / texts[i].scored : scores[i].loss;
        if (loss < least) {
            least = loss;
            best = i;
        }
    }
    return best;
}

// sum a / sum b over the items, and its standard error.
typedef struct {
    int64_t n;
    double a, b, aa, ab, bb;
} Ratio;

static void ratio_add(Ratio *r, double a, double b)
{
    r->n++;
    r->a += a;
    r->b += b;
    r->aa += a * a;
    r->ab += a * b;
    r->bb += b * b;
}

static Measure ratio_measure(const char *name, const Ratio *r)
{
    double value = r->a / r->b, n = (double)r->n;
    double squares = fmax(0, r->aa - 2 * value * r->ab + value * value * r->bb);
    return (Measure){name, value, r->n > 1 ? sqrt(n / (n - 1) * squares) / r->b : NAN};
}

static void measure_hellaswag(const EvalSet *s, const EvalScore *scores, Evaluated *out)
{
    Ratio sum = {0}, mean = {0};
    for (int64_t i = 0; i < s->count; i++) {
        int64_t at = i * EVAL_ENDINGS;
        int label = s->items[i].label;
        ratio_add(&sum, eval_choice(s->texts + at, scores + at, false) == label, 1);
        ratio_add(&mean, eval_choice(s->texts + at, scores + at, true) == label, 1);
    }
    out->measure[out->count++] = ratio_measure("accuracy", &sum);
    out->measure[out->count++] = ratio_measure("accuracy_normalised", &mean);
}

static void measure_lambada(const EvalSet *s, const EvalScore *scores, Evaluated *out)
{
    Ratio exact = {0}, loss = {0};
    for (int64_t i = 0; i < s->count; i++) {
        ratio_add(&exact, scores[i].exact, 1);
        ratio_add(&loss, scores[i].loss, 1);
    }
    Measure perplexity = ratio_measure("perplexity", &loss);
    perplexity.value = exp(perplexity.value);
    perplexity.error *= perplexity.value;
    out->measure[out->count++] = ratio_measure("accuracy", &exact);
    out->measure[out->count++] = perplexity;
}

static void measure_text(const EvalSet *s, const EvalScore *scores, Evaluated *out)
{
    Ratio bytes = {0}, tokens = {0};
    for (int64_t i = 0; i < s->count; i++) {
        ratio_add(&bytes, scores[i].loss / log(2), (double)s->texts[i].bytes);
        ratio_add(&tokens, scores[i].loss, s->texts[i].scored);
    }
    out->measure[out->count++] = ratio_measure("bits_per_byte", &bytes);
    out->measure[out->count++] = ratio_measure("loss", &tokens);
}

bool eval_measure(const EvalSet *s, const EvalScore *scores, Evaluated *out, Error *e)
{
    static void (*const measure[EVAL_TASKS])(const EvalSet *, const EvalScore *,
                                             Evaluated *) = {measure_hellaswag, measure_lambada,
                                                             measure_text};
    for (int64_t i = 0; i < s->count * s->per_item; i++) {
        if (!isfinite(scores[i].loss))
            return error_set(e, "%s: the loss of item %lld is %g", s->path, (long long)(i / s->per_item + 1),
                             scores[i].loss);
    }
    *out = (Evaluated){.task = eval_task_name(s->task), .file = s->path, .items = s->count};
    measure[s->task](s, scores, out);
    return true;
}
