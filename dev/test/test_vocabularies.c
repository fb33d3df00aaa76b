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

static void check_refused_ranks(void)
{
    Buffer b = {0};
    write_file("bad.tiktoken", "", 0);
    refuses("bad.tiktoken", "empty", "empty rank file");
    write_file("bad.tiktoken", "IQ== 0\nIg=\n", 11);
    refuses("bad.tiktoken", "bad.tiktoken:2", "rank line that is none");
    write_file("bad.tiktoken", "IQ== 0\nI!== 1\n", 14);
    refuses("bad.tiktoken", "bad.tiktoken:2", "rank line with bad base64");
    write_file("bad.tiktoken", "IQ== 0\nIg== 0\n", 14);
    refuses("bad.tiktoken", "given twice", "one rank for two tokens");
    write_file("bad.tiktoken", "IQ== 0\nIQ== 1\n", 14);
    refuses("bad.tiktoken", "same token", "one token with two ranks");
    write_file("bad.tiktoken", "IQ== 0\nIg== 2\n", 14);
    refuses("bad.tiktoken", "missing", "a rank left out");
    write_file("bad.tiktoken", "IQ== 0\nIg== 1\n", 14);
    refuses("bad.tiktoken", "single byte", "bytes without a token");
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
    Buffer json = {0}, good = {0}, bad = {0};
    small_json(&json);
    small_merges(&good, MERGES);
    write_file("vocab.bpe", good.text, good.len);
    write_file("encoder.json", json.text, json.len / 2);
    refuses("vocab.bpe", "not valid JSON", "truncated encoder.json");
    write_file("encoder.json", "[1]", 3);
    refuses("vocab.bpe", "not a JSON object", "encoder.json with something else");
    write_file("encoder.json", "{\"a\": 0, \"b\": 1, \"<|endoftext|>\": 3}", 36);
    refuses("vocab.bpe", "missing", "encoder.json with a hole");
    write_file("encoder.json", "{\"a\": 0, \"b\": 70000}", 20);
    refuses("vocab.bpe", "16 bits", "encoder.json with an id of 70000");
    write_file("encoder.json", "{\"a\": 0, \"b\": \"x\"}", 18);
    refuses("vocab.bpe", "not an integer", "encoder.json with an id that is no number");
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
