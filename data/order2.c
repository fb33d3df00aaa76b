// order2 TRAIN VAL: how well the two bytes before it predict a byte. Trains an order-2 byte model on TRAIN,
// evaluates it on VAL and prints bits per byte: the bar that a trained transformer has to get under on the
// same text. The smoothing is the best of its kind, so that the bar is an honest one.
//
// A file is JSONL (name ends in .jsonl; each record's "text" is a document) or plain text (one document). The
// model predicts every byte of a document and its end, as the trainer predicts the token between documents;
// the first bytes of a document see only what is before them in it. All bits count, over bytes alone for bits
// per byte, over bytes and ends for nats per token.
#include "llmc/base/common.h"
#include "llmc/text/jsonl.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SYMBOLS = 257,
    BOUNDARY = 256
}; // bytes and the document boundary, which is also the context before a document

// Interpolated modified Kneser-Ney smoothing (Chen & Goodman 1998, "An Empirical Study of Smoothing
// Techniques for Language Modeling", equations 21 to 28): in the context h, symbol w has the probability
//   p(w|h) = (c(hw) - D(c(hw))) / c(h) + (sum of all D in h) / c(h) * p(w|h'),   h' = h without its oldest
//   symbol,
// with one discount for counts of 1, of 2 and of more. Below order 2, c(hw) is the number of different
// symbols seen before hw, and below order 0 stands the uniform distribution.
typedef struct {
    uint32_t *count;  // (contexts, SYMBOLS)
    double *total;    // (contexts)  c(h); 0: never seen
    double *discount; // (contexts)  sum of all D in h
    double d[4];      // D by count: 0, 1, 2, 3 and more
    int contexts;
} Order;

typedef struct {
    Order order[3];
    uint64_t bytes, documents; // trained on
    int before, last;          // the two symbols before the next one
} Model;

typedef struct {
    const Model *model;
    double bits;
    uint64_t bytes, documents;
    int before, last;
} Evaluation;

// Takes one symbol of a document in order, BOUNDARY at its end.
typedef void (*Consumer)(void *to, int symbol);

// ---- training ---------------------------------------------------------------------------------------------

static void count_symbol(void *to, int symbol)
{
    Model *m = to;
    uint32_t *count = &m->order[2].count[(m->before * SYMBOLS + m->last) * SYMBOLS + symbol];
    if (*count == UINT32_MAX)
        fatal(EXIT_BAD_INPUT,
              "the training text is too long: three bytes occur more than %u times; give less", UINT32_MAX);
    ++*count;
    m->before = m->last;
    m->last = symbol;
    if (symbol != BOUNDARY) {
        m->bytes++;
    } else {
        m->documents++;
        m->before = BOUNDARY;
    }
}

// Fills the counts of an order from the next higher one: how many different symbols stand before each
// sequence.
static void count_continuations(Order *lower, const Order *higher)
{
    int sequences = lower->contexts * SYMBOLS;
    for (int first = 0; first < SYMBOLS; first++)
        for (int i = 0; i < sequences; i++)
            lower->count[i] += higher->count[first * sequences + i] > 0;
}

// The discounts that leave-one-out likelihood suggests, from how many sequences occur once, twice, three and
// four times. Texts too small to say get the customary 0.75; a lower limit keeps every symbol possible in
// every context.
static void estimate_discounts(Order *o)
{
    double n[5] = {0};
    for (int i = 0; i < o->contexts * SYMBOLS; i++)
        if (o->count[i] <= 4)
            n[o->count[i]]++;
    double y = n[1] / (n[1] + 2 * n[2]);
    for (int c = 1; c <= 3; c++) {
        double d = n[1] && n[2] && n[3] && n[4] ? c - (c + 1) * y * n[c + 1] / n[c] : 0.75;
        o->d[c] = fmax(d, 0.05);
    }
}

static void finish_order(Order *o)
{
    estimate_discounts(o);
    for (int h = 0; h < o->contexts; h++)
        for (int w = 0; w < SYMBOLS; w++) {
            uint32_t c = o->count[h * SYMBOLS + w];
            o->total[h] += c;
            o->discount[h] += o->d[min_i64(c, 3)];
        }
}

static void model_init(Model *m)
{
    *m = (Model){.before = BOUNDARY, .last = BOUNDARY};
    for (int k = 0, contexts = 1; k < 3; k++, contexts *= SYMBOLS)
        m->order[k] = (Order){xcalloc((size_t)contexts * SYMBOLS, sizeof(uint32_t)),
                              xcalloc((size_t)contexts, sizeof(double)),
                              xcalloc((size_t)contexts, sizeof(double)),
                              {0},
                              contexts};
}

static void model_finish(Model *m)
{
    count_continuations(&m->order[1], &m->order[2]);
    count_continuations(&m->order[0], &m->order[1]);
    for (int k = 0; k < 3; k++)
        finish_order(&m->order[k]);
}

static void model_free(Model *m)
{
    for (int k = 0; k < 3; k++) {
        free(m->order[k].count);
        free(m->order[k].total);
        free(m->order[k].discount);
    }
}

// ---- evaluation -------------------------------------------------------------------------------------------

static double probability(const Model *m, int before, int last, int symbol)
{
    const int context[3] = {0, last, before * SYMBOLS + last};
    double p = 1.0 / SYMBOLS;
    for (int k = 0; k < 3; k++) {
        const Order *o = &m->order[k];
        int h = context[k];
        if (o->total[h] == 0)
            continue; // context not seen: the lower order's word counts
        uint32_t c = o->count[h * SYMBOLS + symbol];
        p = ((double)c - o->d[min_i64(c, 3)] + o->discount[h] * p) / o->total[h];
    }
    return p;
}

static void evaluate_symbol(void *to, int symbol)
{
    Evaluation *e = to;
    e->bits -= log2(probability(e->model, e->before, e->last, symbol));
    e->before = e->last;
    e->last = symbol;
    if (symbol != BOUNDARY) {
        e->bytes++;
    } else {
        e->documents++;
        e->before = BOUNDARY;
    }
}

// ---- reading ----------------------------------------------------------------------------------------------

static bool read_plain(FILE *in, const char *path, Consumer consume, void *to, Error *e)
{
    for (int c; (c = getc(in)) != EOF;)
        consume(to, c);
    if (ferror(in))
        return error_set(e, "%s cannot be read: %s", path, strerror(errno));
    consume(to, BOUNDARY);
    return true;
}

static bool blank(const char *s, size_t n) { return strspn(s, " \t\r\n") >= n; }

static bool read_jsonl(FILE *in, const char *path, Consumer consume, void *to, Error *e)
{
    JsonlRecord record = {0};
    Error problem;
    char *line = NULL;
    const char *text;
    size_t capacity = 0, length;
    long number = 0;
    ssize_t n;
    bool good = true;
    while (good && (n = getline(&line, &capacity, in)) >= 0) {
        number++;
        if (blank(line, (size_t)n))
            continue;
        good = jsonl_text(&record, line, (size_t)n, &text, &length, &problem);
        for (size_t i = 0; good && i < length; i++)
            consume(to, (unsigned char)text[i]);
        if (good)
            consume(to, BOUNDARY);
    }
    if (!good) {
        error_set(e, "%s: line %ld: %s", path, number, problem.text);
    } else if (!feof(in)) {
        good = error_set(e, "%s cannot be read: %s", path, strerror(errno));
    }
    free(line);
    jsonl_record_free(&record);
    return good;
}

// Hands every symbol of the file to the consumer, each document followed by BOUNDARY. Errors: not a readable
// regular file, a line that is not such a record.
static bool read_text(const char *path, Consumer consume, void *to, Error *e)
{
    int64_t bytes;
    int fd = open_regular("the text", path, &bytes, e);
    if (fd < 0)
        return false;
    FILE *in = fdopen(fd, "rb");
    if (!in)
        fatal(EXIT_BAD_INPUT, "out of host memory for reading %s", path);
    size_t n = strlen(path);
    bool jsonl = n >= 6 && !strcmp(path + n - 6, ".jsonl");
    bool good = (jsonl ? read_jsonl : read_plain)(in, path, consume, to, e);
    fclose(in);
    return good;
}

// ---- the program ------------------------------------------------------------------------------------------

int main(int argc, char **argv)
{
    set_program_name("order2", -1);
    if (argc == 2 && !strcmp(argv[1], "--help")) {
        puts("usage: order2 TRAIN VAL\nBits per byte on VAL of an order-2 byte model trained on TRAIN; text "
             "files or .jsonl with "
             "a \"text\" field.");
        return finish_output();
    }
    if (argc != 3)
        fatal(EXIT_USAGE, "two files are needed: order2 TRAIN VAL");
    Model model;
    Error error;
    model_init(&model);
    if (!read_text(argv[1], count_symbol, &model, &error))
        fatal(EXIT_BAD_INPUT, "%s", error.text);
    if (model.bytes == 0)
        fatal(EXIT_BAD_INPUT, "%s holds no text to train on", argv[1]);
    model_finish(&model);

    Evaluation result = {.model = &model, .before = BOUNDARY, .last = BOUNDARY};
    if (!read_text(argv[2], evaluate_symbol, &result, &error))
        fatal(EXIT_BAD_INPUT, "%s", error.text);
    if (result.bytes == 0)
        fatal(EXIT_BAD_INPUT, "%s holds no text to evaluate", argv[2]);
    double tokens = (double)(result.bytes + result.documents);
    printf("order-2 byte model: %.6f bits per byte, %.6f nats per token\n",
           result.bits / (double)result.bytes, result.bits * M_LN2 / tokens);
    printf("evaluated on %llu bytes in %llu documents, trained on %llu bytes in %llu documents\n",
           (unsigned long long)result.bytes, (unsigned long long)result.documents,
           (unsigned long long)model.bytes, (unsigned long long)model.documents);
    model_free(&model);
    return finish_output();
}
