// Evaluations: which tokens of a file are scored, what is refused, and what losses amount to.
#include "dev/test/tap.h"
#include "llmc/data/eval_measure.h"
#include <unistd.h>

static char folder[] = "/tmp/test_eval_XXXXXX";

// A file of the test's folder, the last one with that ending.
static char *write_file(const char *name, const char *text, size_t bytes)
{
    char *path = format_string("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (!f || fwrite(text, 1, bytes, f) != bytes || fclose(f))
        fatal(1, "%s cannot be written", path);
    return path;
}

static bool open_text(EvalSet *set, EvalTask task, const char *text, int longest, int piece, Error *e)
{
    char *path = write_file(task == EVAL_TEXT ? "eval.txt" : "eval.jsonl", text, strlen(text));
    Tokenizer *bytes = tokenizer_bytes();
    bool good = eval_set_open(set, &(EvalEntry){task, path}, bytes, longest, piece, e);
    tokenizer_free(bytes);
    free(path);
    return good;
}

// ---- lists ------------------------------------------------------------------------------------------------

static void test_list(void)
{
    EvalEntry entry[MAX_EVALS];
    Error e;
    int count = eval_list_parse("hellaswag=a,b.jsonl,text=c=d,lambada=e,text=f", entry, &e);
    ok(count == 4, "four entries: %d", count);
    ok(entry[0].task == EVAL_HELLASWAG && !strcmp(entry[0].path, "a,b.jsonl"), "a comma in a name");
    ok(entry[1].task == EVAL_TEXT && !strcmp(entry[1].path, "c=d"), "an equals sign in a name");
    ok(entry[2].task == EVAL_LAMBADA && !strcmp(entry[2].path, "e"), "lambada");
    ok(entry[3].task == EVAL_TEXT && !strcmp(entry[3].path, "f"), "a task twice");
    eval_list_free(entry, count);
    ok(eval_list_parse("", entry, &e) == 0, "an empty list");
    static const char *const bad[] = {"hellaswag", "hellaswag=", "mmlu=x", "x", "=x", "text=a,text="};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ok(eval_list_parse(bad[i], entry, &e) == -1 && strstr(e.text, "must be hellaswag=FILE"),
           "refused: %s", bad[i]);
    char many[MAX_EVALS * 10 + 20] = "text=x";
    for (int i = 0; i < MAX_EVALS; i++)
        strcat(many, ",text=x");
    ok(eval_list_parse(many, entry, &e) == -1 && strstr(e.text, "at most 16"), "refused: 17 files");
}

// ---- texts ------------------------------------------------------------------------------------------------

// Text `number` is `all`, of which `scored` tokens at the end are scored. D stands for the document token.
static void is_text(const EvalSet *s, int64_t number, const char *all, int scored)
{
    const EvalText *text = &s->texts[number];
    bool same = text->tokens == (int)strlen(all) && text->scored == scored && text->bytes == scored;
    for (int i = 0; same && i < text->tokens; i++)
        same = s->ids.ids[text->first + i] == (all[i] == 'D' ? BYTE_DOCUMENT : (unsigned char)all[i]);
    ok(same, "text %lld: \"%s\", %d scored", (long long)number, all, scored);
}

static void test_texts(void)
{
    EvalSet s;
    Error e = {""};
    bool good =
        open_text(&s, EVAL_HELLASWAG,
                  "\n{\"ctx\":\"ab\",\"label\":2,\"endings\":[\"c\",\"d e\",\"\",\"f\"],\"ind\":7}\n \n"
                  "{\"endings\":[\"1\",\"2\",\"3\",\"4\"],\"label\":0,\"ctx\":\"x\"}",
                  100, 1, &e);
    ok(good && s.count == 2 && s.per_item == 4, "two items of HellaSwag %s", e.text);
    ok(s.items[0].label == 2 && s.items[0].line == 2 && s.items[1].line == 4, "labels and lines");
    is_text(&s, 0, "ab c", 2);
    is_text(&s, 1, "ab d e", 4);
    is_text(&s, 2, "ab ", 1);
    is_text(&s, 7, "x 4", 2);
    eval_set_close(&s);

    good = open_text(&s, EVAL_LAMBADA, "{\"text\":\"one two three\"}\n{\"text\":\"a b\"}\n", 100, 1, &e);
    ok(good && s.count == 2 && s.per_item == 1, "two items of LAMBADA %s", e.text);
    is_text(&s, 0, "one two three", 6);
    is_text(&s, 1, "a b", 2);
    eval_set_close(&s);

    good = open_text(&s, EVAL_TEXT, "abcdefghijk", 100, 4, &e);
    ok(good && s.count == 3, "a text in pieces of 4 at most %s", e.text);
    is_text(&s, 0, "Dabc", 3);
    is_text(&s, 1, "Ddefg", 4);
    is_text(&s, 2, "Dhijk", 4);
    eval_set_close(&s);
}

static void test_documents(void)
{
    EvalSet s;
    Error e = {""};
    static const char records[] = "{\"text\":\"ab\"}\n{\"text\":\"\"}\n{\"text\":\"cde\"}\n";
    char *path = write_file("docs.jsonl", records, strlen(records));
    Tokenizer *bytes = tokenizer_bytes();
    bool good = eval_set_open(&s, &(EvalEntry){EVAL_TEXT, path}, bytes, 100, 100, &e);
    ok(good && s.count == 2, "records are documents, an empty one is none %s", e.text);
    is_text(&s, 0, "Dab", 2);
    is_text(&s, 1, "Dcde", 3);
    eval_set_close(&s);
    free(path);
    enum { LONG = 3 << 20 };
    char *text = xcalloc(LONG, 1);
    for (int i = 0; i < LONG; i++)
        text[i] = i % 5 == 4 ? ' ' : 'x';
    path = write_file("long.txt", text, LONG);
    good = eval_set_open(&s, &(EvalEntry){EVAL_TEXT, path}, bytes, LONG, LONG, &e);
    ok(good && s.count == 1 && s.texts[0].tokens == LONG + 1, "a file is a document, however it is read");
    eval_set_close(&s);
    free(path);
    free(text);
    tokenizer_free(bytes);
}

// ---- what is refused --------------------------------------------------------------------------------------

static void refuses(EvalTask task, const char *text, const char *why)
{
    EvalSet s;
    Error e = {""};
    bool good = open_text(&s, task, text, 12, 12, &e);
    ok(!good && strstr(e.text, why) && !strchr(e.text, '\n'), "refused: %s", e.text);
    eval_set_close(&s);
}

#define ITEM "{\"ctx\":\"ab\",\"label\":2,\"endings\":[\"c\",\"d\",\"e\",\"f\"]}\n"

static void test_refusals(void)
{
    EvalTask h = EVAL_HELLASWAG, l = EVAL_LAMBADA;
    refuses(h, ITEM "{\"label\":2,\"endings\":[\"c\",\"d\",\"e\",\"f\"]}",
            "eval.jsonl:2: has no \"ctx\" (a string)");
    refuses(h, ITEM "{\"ctx\":\"a\",\"endings\":[\"c\",\"d\",\"e\",\"f\"]}", ":2: has no \"label\"");
    refuses(h, ITEM "{\"ctx\":\"a\",\"label\":1}", ":2: has no \"endings\" (a list)");
    refuses(h, "{\"ctx\":7,\"label\":2,\"endings\":[]}", ":1: \"ctx\" is not a string");
    refuses(h, "{\"ctx\":\"\",\"label\":2,\"endings\":[\"c\",\"d\",\"e\",\"f\"]}", ":1: \"ctx\" is empty");
    refuses(h, "{\"ctx\":\"a\",\"label\":2,\"endings\":[\"c\",\"d\",\"e\"]}", "has 3 entries, not 4");
    refuses(h, "{\"ctx\":\"a\",\"label\":2,\"endings\":[\"c\",\"d\",\"e\",\"f\",\"g\"]}",
            "has 5 entries, not 4");
    refuses(h, "{\"ctx\":\"a\",\"label\":2,\"endings\":[\"c\",\"d\",3,\"f\"]}", "an entry that is no string");
    refuses(h, "{\"ctx\":\"a\",\"label\":4,\"endings\":[\"c\",\"d\",\"e\",\"f\"]}",
            "is 4; 0 to 3 are possible");
    refuses(h, "{\"ctx\":\"a\",\"label\":-1,\"endings\":[\"c\",\"d\",\"e\",\"f\"]}", "\"label\" is -1");
    refuses(h, "{\"ctx\":\"a\",\"label\":\"2\",\"endings\":[\"c\",\"d\",\"e\",\"f\"]}",
            "\"label\" is not a whole number");
    refuses(h, ITEM "{\"ctx\":\"a\",\"label\":2,\"end", ":2: is not a record of JSON");
    refuses(h, ITEM "[1]", ":2: is not one JSON object");
    refuses(h, ITEM "{\"ctx\":\"a\",\"ctx\":\"b\"}", ":2: is not a record of JSON: duplicate");
    refuses(
        h, ITEM "{\"ctx\":\"0123456\",\"label\":2,\"endings\":[\"c\",\"d\",\"01234\",\"012345\"]}",
        ":2: \"ctx\" with ending 3 has 14 tokens, and a batch has room for 13; raise --micro-batch-tokens "
        "(--resume keeps it; --init-from takes the same file)");
    refuses(h, " \n\n", "holds no text");
    refuses(l, "{\"text\":\"one two\"}\n{\"tex\":\"one two\"}", "eval.jsonl:2: ");
    refuses(l, "{\"text\":\"one\"}", ":1: \"text\" has no last word");
    refuses(l, "{\"text\":\" one\"}", ":1: \"text\" has no last word");
    refuses(l, "{\"text\":\"one \"}", ":1: \"text\" has no last word");
    refuses(l, "{\"text\":\"one two\"}\n{\"text\":\"012345 6789012\"}", ":2: \"text\" has 14 tokens");
    refuses(l, "{\"text\":\"one tw", ":1: ");
    refuses(EVAL_TEXT, "", "holds no text");
    EvalSet s;
    Error e = {""};
    char missing[] = "/nowhere/at all";
    Tokenizer *bytes = tokenizer_bytes();
    bool good = eval_set_open(&s, &(EvalEntry){h, missing}, bytes, 10, 10, &e);
    ok(!good && strstr(e.text, "/nowhere/at all: No such file"), "refused: %s", e.text);
    eval_set_close(&s);
    tokenizer_free(bytes);
}

// ---- measures ---------------------------------------------------------------------------------------------

static void is_measure(const Evaluated *r, int i, const char *name, double value, double error)
{
    const Measure *m = &r->measure[i];
    bool same = i < r->count && !strcmp(m->name, name) && fabs(m->value / value - 1) < 1e-12;
    ok(same && (isnan(error) ? isnan(m->error) : fabs(m->error / error - 1) < 1e-9), "%s %.12g +- %.12g",
       m->name, m->value, m->error);
}

static void test_hellaswag(void)
{
    enum { ITEMS = 3 };
    // By the sum the endings 1, 2, 0 win, by token 1, 3, 0; equal ones: the first.
    EvalText texts[ITEMS * 4] = {{.scored = 2}, {.scored = 2}, {.scored = 2}, {.scored = 2}, //
                                 {.scored = 9}, {.scored = 9}, {.scored = 1}, {.scored = 5}, //
                                 {.scored = 1}, {.scored = 1}, {.scored = 1}, {.scored = 1}};
    EvalScore scores[ITEMS * 4] = {{3, false}, {1, false}, {2, false}, {4, false}, //
                                   {9, false}, {9, false}, {2, false}, {3, false}, //
                                   {1, false}, {1, false}, {1, false}, {1, false}};
    EvalItem items[ITEMS] = {{1, 1}, {2, 3}, {3, 2}};
    EvalSet s =
        {.task = EVAL_HELLASWAG, .path = "x", .per_item = 4, .count = ITEMS, .items = items, .texts = texts};
    Evaluated r;
    Error e;
    ok(eval_measure(&s, scores, &r, &e) && r.items == 3 && !strcmp(r.task, "hellaswag"), "HellaSwag");
    is_measure(&r, 0, "accuracy", 1.0 / 3, sqrt(2.0 / 9 / 2));
    is_measure(&r, 1, "accuracy_normalised", 2.0 / 3, sqrt(2.0 / 9 / 2));
    r.seconds = 1.25;
    char *text = evaluated_text(&r);
    ok(!strcmp(text, "hellaswag x: accuracy 0.3333 +- 0.3333, accuracy_normalised 0.6667 +- 0.3333; "
                     "3 items, 1.2 s"),
       "%s", text);
    free(text);
    s.count = 1;
    ok(eval_measure(&s, scores, &r, &e), "one item");
    is_measure(&r, 0, "accuracy", 1, NAN);
    scores[6].loss = NAN;
    s.count = 3;
    ok(!eval_measure(&s, scores, &r, &e) && strstr(e.text, "the loss of item 2 is nan"), "%s", e.text);
}

static void test_lambada_and_text(void)
{
    EvalText texts[3] = {{.scored = 2, .bytes = 5}, {.scored = 4, .bytes = 10}, {.scored = 1, .bytes = 3}};
    EvalScore scores[3] = {{2, true}, {5, false}, {0.5, true}};
    EvalSet s = {.task = EVAL_LAMBADA, .path = "x", .per_item = 1, .count = 3, .texts = texts};
    Evaluated r;
    Error e;
    ok(eval_measure(&s, scores, &r, &e) && r.count == 2, "LAMBADA");
    is_measure(&r, 0, "accuracy", 2.0 / 3, sqrt(2.0 / 9 / 2));
    double mean = 2.5, squares = 0.5 * 0.5 + 2.5 * 2.5 + 2 * 2;
    is_measure(&r, 1, "perplexity", exp(mean), exp(mean) * sqrt(squares / 6));
    s.task = EVAL_TEXT;
    ok(eval_measure(&s, scores, &r, &e) && r.count == 2, "text");
    double rate = 7.5 / 18; // nats a byte
    squares = pow(2 - 5 * rate, 2) + pow(5 - 10 * rate, 2) + pow(0.5 - 3 * rate, 2);
    is_measure(&r, 0, "bits_per_byte", rate / log(2), sqrt(1.5 * squares) / 18 / log(2));
    rate = 7.5 / 7;
    squares = pow(2 - 2 * rate, 2) + pow(5 - 4 * rate, 2) + pow(0.5 - rate, 2);
    is_measure(&r, 1, "loss", rate, sqrt(1.5 * squares) / 7);
}

int main(void)
{
    if (!mkdtemp(folder))
        fatal(1, "%s cannot be made", folder);
    PART(test_list());
    PART(test_texts());
    PART(test_documents());
    PART(test_refusals());
    PART(test_hellaswag());
    PART(test_lambada_and_text());
    char *command = format_string("rm -r '%s'", folder);
    ok(system(command) == 0, "the folder is removed");
    free(command);
    return tap_done();
}
