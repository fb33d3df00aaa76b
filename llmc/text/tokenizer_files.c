// tokenizer_load: which files a path stands for, and reading them.
#include "llmc/text/tokenizer_internal.h"
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 256 << 20 }; // a vocabulary file has a few MB; more than this is the wrong file

static bool is_folder(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

static bool is_file(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && !S_ISDIR(s.st_mode);
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

// Whole file as malloc'd bytes, or NULL with a message.
static char *read_file(const char *path, size_t *len, Error *e)
{
    int64_t bytes;
    int fd = open_regular("the vocabulary file", path, &bytes, e);
    if (fd < 0)
        return NULL;
    char *text = NULL;
    size_t used = 0;
    if (bytes > MAX_FILE) {
        error_set(e, "%s has more than %d MB: not a vocabulary file", path, MAX_FILE >> 20);
    } else if (bytes == 0) {
        error_set(e, "the vocabulary file %s is empty", path);
    } else {
        text = xcalloc((size_t)bytes, 1);
    }
    while (text && used < (size_t)bytes) {
        ssize_t got = read(fd, text + used, (size_t)bytes - used);
        if (got > 0) {
            used += (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            error_set(e, "cannot read the vocabulary file %s: %s", path,
                      got ? strerror(errno) : "it became shorter");
            free(text);
            text = NULL;
        }
    }
    close(fd);
    *len = used;
    return text;
}

static Tokenizer *load_ranks(const char *path, Error *e)
{
    size_t len;
    char *text = read_file(path, &len, e);
    Tokenizer *t = text ? tokenizer_from_ranks(text, len, path, e) : NULL;
    free(text);
    return t;
}

static Tokenizer *load_merges(const char *merges_path, const char *json_path, Error *e)
{
    size_t merges_len, json_len;
    char *merges = read_file(merges_path, &merges_len, e);
    char *json = merges ? read_file(json_path, &json_len, e) : NULL;
    Tokenizer *t =
        json ? tokenizer_from_merges(merges, merges_len, merges_path, json, json_len, json_path, e) : NULL;
    free(merges);
    free(json);
    return t;
}

// First of two names that is a file in `folder`, as a malloc'd path, or NULL.
static char *either(const char *folder, const char *first, const char *second)
{
    const char *names[2] = {first, second};
    for (int i = 0; i < 2; i++) {
        char *path = format_string("%s/%s", folder, names[i]);
        if (is_file(path))
            return path;
        free(path);
    }
    return NULL;
}

// The *.tiktoken file of a folder; NULL when there is none, or several (*count says).
static char *only_rank_file(const char *folder, int *count)
{
    char *found = NULL;
    *count = 0;
    DIR *d = opendir(folder);
    for (struct dirent *entry; d && (entry = readdir(d));) {
        if (!ends_with(entry->d_name, ".tiktoken"))
            continue;
        free(found);
        found = ++*count == 1 ? format_string("%s/%s", folder, entry->d_name) : NULL;
    }
    if (d)
        closedir(d);
    return found;
}

static Tokenizer *load_folder(const char *folder, Error *e)
{
    Tokenizer *t = NULL;
    int rank_files;
    char *merges = either(folder, "vocab.bpe", "merges.txt"),
         *json = either(folder, "encoder.json", "vocab.json");
    char *ranks = only_rank_file(folder, &rank_files);
    if (merges && json) {
        t = load_merges(merges, json, e);
    } else if (ranks) {
        t = load_ranks(ranks, e);
    } else if (rank_files > 1) {
        error_set(e, "the folder %s has %d *.tiktoken files: name the one to use", folder, rank_files);
    } else {
        error_set(e,
                  "no vocabulary in the folder %s (%s missing): data/gpt2_vocab.sh fetches GPT-2's, or use "
                  "\"bytes\"",
                  folder,
                  merges ? "encoder.json"
                  : json ? "vocab.bpe"
                         : "vocab.bpe and encoder.json");
    }
    free(merges);
    free(json);
    free(ranks);
    return t;
}

// One file of the pair; the other is beside it.
static Tokenizer *load_pair(const char *path, bool given_is_json, Error *e)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? format_string("%.*s", (int)(slash - path + 1), path) : xstrdup(".");
    char *other = given_is_json ? either(folder, "vocab.bpe", "merges.txt")
                                : either(folder, "encoder.json", "vocab.json");
    Tokenizer *t = NULL;
    if (!other) {
        error_set(e, "%s needs %s beside it", path,
                  given_is_json ? "vocab.bpe (or merges.txt)" : "encoder.json (or vocab.json)");
    } else {
        t = given_is_json ? load_merges(other, path, e) : load_merges(path, other, e);
    }
    free(folder);
    free(other);
    return t;
}

Tokenizer *tokenizer_load(const char *path, Error *e)
{
    if (!strcmp(path, "bytes"))
        return tokenizer_bytes();
    if (is_folder(path))
        return load_folder(path, e);
    if (!is_file(path)) {
        error_set(e, "no vocabulary at %s: %s; data/gpt2_vocab.sh fetches GPT-2's, or use \"bytes\"", path,
                  strerror(errno));
        return NULL;
    }
    if (ends_with(path, ".tiktoken"))
        return load_ranks(path, e);
    if (ends_with(path, ".json"))
        return load_pair(path, true, e);
    if (ends_with(path, ".bpe") || ends_with(path, ".txt"))
        return load_pair(path, false, e);
    error_set(
        e,
        "%s: unknown kind of vocabulary; give a folder, a .tiktoken, .bpe, .txt or .json file, or \"bytes\"",
        path);
    return NULL;
}
