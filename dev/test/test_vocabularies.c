// Vocabularies that must be refused, each in one line that says why.
#include "dev/test/tap.h"
#include "dev/test/vocabulary_material.h"
#include <sys/stat.h>

static void refuses(const char *name, const char *expected, const char *what)
{
    Error e = {""};
    char *path = name[0] == '/' ? xstrdup(name) : in_folder(name);
    Tokenizer *t = tokenizer_load(path, &e);
    ok(!t && strstr(e.text, expected) && !strchr(e.text, '\n'), "%s: %s", what, t ? "was accepted" : e.text);
    tokenizer_free(t);
    free(path);
}

// A file's text, what its refusal says, what the text is.
typedef struct {
    const char *text, *expected, *what;
} Bad;

static void refuse_texts(const char *file, const char *loaded, const Bad *bad, int count)
{
    for (int i = 0; i < count; i++) {
        write_file(file, bad[i].text, strlen(bad[i].text));
        refuses(loaded, bad[i].expected, bad[i].what);
    }
}

static void check_refused_ranks(void)
{
    static const Bad bad[] = {
        {"", "empty", "empty rank file"},
        {"IQ== 0\nIg=\n", "bad.tiktoken:2", "rank line that is none"},
        {"IQ== 0\nI!== 1\n", "bad.tiktoken:2", "rank line with bad base64"},
        {"IQ== 0\nIg== 0\n", "given twice", "one rank for two tokens"},
        {"IQ== 0\nIQ== 1\n", "same token", "one token with two ranks"},
        {"IQ== 0\nIg== 2\n", "missing", "a rank left out"},
        {"IQ== 0\nIg== 1\n", "single byte", "bytes without a token"},
    };
    Buffer b = {0};
    refuse_texts("bad.tiktoken", "bad.tiktoken", bad, sizeof bad / sizeof *bad);
    put_byte_ranks(&b);
    for (int i = 256; i < 65536; i++)
        put_rank(&b, (char[]){(char)(i >> 8), (char)i, 'x'}, 3, i);
    write_file("bad.tiktoken", b.text, b.len);
    refuses("bad.tiktoken", "16 bits", "65536 ranks and a document token");
    char *path = in_folder("bad.tiktoken");
    unlink(path);
    free(path);
    free(b.text);
}

static void check_refused_merges(void)
{
    static const Bad bad_json[] = {
        {"[1]", "not a JSON object", "encoder.json with something else"},
        {"{\"a\": 0, \"b\": 1, \"<|endoftext|>\": 3}", "missing", "encoder.json with a hole"},
        {"{\"a\": 0, \"b\": 70000}", "16 bits", "encoder.json with an id of 70000"},
        {"{\"a\": 0, \"b\": \"x\"}", "not an integer", "encoder.json with an id that is no number"},
    };
    Buffer json = {0}, good = {0}, bad = {0};
    small_json(&json);
    small_merges(&good, MERGES);
    write_file("vocab.bpe", good.text, good.len);
    write_file("encoder.json", json.text, json.len / 2);
    refuses("vocab.bpe", "not valid JSON", "truncated encoder.json");
    refuse_texts("encoder.json", "vocab.bpe", bad_json, sizeof bad_json / sizeof *bad_json);
    write_file("encoder.json", json.text, json.len);
    small_merges(&bad, MERGES - 1);
    write_file("vocab.bpe", bad.text, bad.len);
    refuses("vocab.bpe", "truncated", "vocab.bpe without its last line");
    puts_to(&bad, "bb\n");
    write_file("vocab.bpe", bad.text, bad.len);
    refuses("vocab.bpe", "vocab.bpe:19", "a merge of one token");
    bad.len -= 3;
    puts_to(&bad, "x y\n");
    write_file("vocab.bpe", bad.text, bad.len);
    refuses("vocab.bpe", "do not belong together", "a merge that makes no token");
    bad.len -= 4;
    puts_to(&bad, "a b\n");
    write_file("vocab.bpe", bad.text, bad.len);
    refuses("vocab.bpe", "given twice", "a merge given twice");
    free(json.text);
    free(good.text);
    free(bad.text);
}

static void check_missing(void)
{
    char *empty = in_folder("empty");
    if (mkdir(empty, 0777))
        fatal(1, "cannot make %s", empty);
    free(empty);
    write_file("empty.bpe", "x", 1);
    write_file("empty.dat", "x", 1);
    refuses("/nonexistent/vocabulary", "no vocabulary at", "a path that is not there");
    refuses("empty", "vocab.bpe and encoder.json missing", "a folder without vocabulary");
    refuses("empty.bpe", "needs encoder.json", "merges without their JSON");
    refuses("empty.dat", "unknown kind", "a file of unknown kind");
}

int main(void)
{
    make_folder();
    if (have_pcre2) {
        PART(check_missing());
        PART(check_refused_merges());
        PART(check_refused_ranks());
    } else {
        write_file("any.tiktoken", "IQ== 0\n", 7);
        refuses("any.tiktoken", "without PCRE2", "a build without PCRE2");
    }
    remove_folder();
    return tap_done();
}
