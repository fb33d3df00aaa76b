#include "llmc/data/shard_set.h"
#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void shard_set_free(ShardSet *set)
{
    for (int i = 0; i < set->count; i++)
        free(set->paths[i]);
    free(set->paths);
    free(set->files);
}

// ---- finding ----------------------------------------------------------------------------------------------

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

bool shard_set_find(ShardSet *set, const char *pattern, const char *option, Error *e)
{
    struct stat st;
    if (!pattern || !*pattern)
        return error_set(e, "%s is empty; name a token shard or a pattern of them", option);
    if (stat(pattern, &st) == 0) { // first of all a plain name, which may well contain brackets
        set->paths = xcalloc(1, sizeof *set->paths);
        set->paths[set->count++] = xstrdup(pattern);
        return true;
    }
    glob_t found = {0};
    errno = 0;
    int status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status == GLOB_NOMATCH) {
        char *folder = *pattern == '/' ? NULL : getcwd(NULL, 0); // a run that goes on may begin elsewhere
        error_set(e,
                  "%s: no file matches '%s'%s%s; check the path, or make shards with ./tokenize or "
                  "data/fineweb10B.sh",
                  option, pattern, folder ? " in " : "", folder ? folder : "");
        free(folder);
        return false;
    }
    if (status != 0)
        return error_set(e, "%s: cannot look for '%s': %s", option, pattern,
                         strerror(errno ? errno : ENOMEM));
    qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, compare_names);
    set->paths = xcalloc(found.gl_pathc, sizeof *set->paths);
    for (size_t i = 0; i < found.gl_pathc; i++)
        set->paths[set->count++] = xstrdup(found.gl_pathv[i]);
    globfree(&found);
    return true;
}

static bool check_kind(const ShardSet *set, int i, int vocab_size, int document_token, Error *e)
{
    const ShardHeader *h = &set->files[i].header, *first = &set->files[0].header;
    if (vocab_size && h->vocab_size != vocab_size)
        return error_set(e,
                         "%s: holds ids of a vocabulary of %d, but %d is needed here; tokenize it with the "
                         "other vocabulary",
                         set->paths[i], h->vocab_size, vocab_size);
    if (document_token >= 0 && h->document_token != document_token)
        return error_set(e,
                         "%s: its documents begin with token %d, but %d is needed here; tokenize it with the "
                         "other vocabulary",
                         set->paths[i], h->document_token, document_token);
    if (h->vocab_size != first->vocab_size || h->document_token != first->document_token)
        return error_set(e,
                         "%s: vocabulary of %d ids with document token %d, but %s has %d ids and %d; use "
                         "shards of one kind",
                         set->paths[i], h->vocab_size, h->document_token, set->paths[0], first->vocab_size,
                         first->document_token);
    return true;
}

bool shard_set_check(ShardSet *set, int vocab_size, int document_token, Error *e)
{
    set->files = xcalloc((size_t)set->count, sizeof *set->files);
    for (int i = 0; i < set->count; i++) {
        int fd = shard_open(set->paths[i], &set->files[i].header, e);
        if (fd < 0)
            return false;
        bool good = check_kind(set, i, vocab_size, document_token, e) &&
                    shard_identify(fd, set->paths[i], &set->files[i], e);
        close(fd);
        if (!good)
            return false;
        set->num_tokens += set->files[i].header.num_tokens;
    }
    return true;
}

// ---- comparing --------------------------------------------------------------------------------------------

uint64_t shard_set_fingerprint(const ShardSet *set)
{
    uint64_t hash = 0;
    for (int i = 0; i < set->count; i++)
        hash = fingerprint_bytes(hash, &set->files[i].contents, sizeof hash);
    return hash;
}

static const char *name_of(const ShardSet *set, int i)
{
    const char *slash = strrchr(set->paths[i], '/');
    return slash ? slash + 1 : set->paths[i];
}

char *shard_set_text(const ShardSet *set)
{
    char *text = xstrdup("");
    for (int i = 0; i < set->count; i++) {
        char *longer = format_string("%s%lld %016llx %s\n", text, (long long)set->files[i].header.num_tokens,
                                     (unsigned long long)set->files[i].contents, name_of(set, i));
        for (char *name = longer + strlen(longer) - 1 - strlen(name_of(set, i)); name[1]; name++)
            if (*name < ' ' || *name > '~')
                *name = '?';
        free(text);
        text = longer;
    }
    return text;
}

// One line of the text against file i. False with a line when they differ.
static bool same_shard(const ShardSet *set, int i, int64_t tokens, uint64_t contents, const char *name,
                       int length, Error *e)
{
    if (i >= set->count)
        return error_set(e,
                         "its run had a training shard %d, %.*s with %lld tokens, and there are only %d now",
                         i + 1, length, name, (long long)tokens, set->count);
    if (set->files[i].contents == contents)
        return true;
    long long now = set->files[i].header.num_tokens;
    return error_set(e,
                     "its run's training shard %d was %.*s with %lld tokens; now it is %s with %lld%s: give "
                     "the files of that run",
                     i + 1, length, name, (long long)tokens, name_of(set, i), now,
                     now == tokens ? ", others" : "");
}

bool shard_set_continues(const ShardSet *set, const char *text, bool may_grow, Error *e)
{
    int i = 0;
    for (const char *line = text; *line; i++) {
        long long tokens;
        unsigned long long contents;
        int end = 0, length;
        sscanf(line, "%lld %llx%n", &tokens, &contents, &end);
        length = end && line[end] == ' ' ? (int)strcspn(line + end, "\n") - 1 : 0;
        if (length < 1)
            return error_set(e, "its list of training shards is damaged");
        if (!same_shard(set, i, tokens, contents, line + end + 1, length, e))
            return false;
        line += end + 1 + length;
        line += *line == '\n';
    }
    if (!i)
        return error_set(e, "its list of training shards is damaged");
    if (i == set->count || may_grow)
        return true;
    return error_set(e,
                     "its run has begun its %d training shard%s anew; there are %d now, from %s on: give the "
                     "files of that run",
                     i, i > 1 ? "s" : "", set->count, name_of(set, i));
}
