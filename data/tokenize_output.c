#include "data/tokenize_output.h"
#include "llmc/base/grow.h"
#include "llmc/base/temporary.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// The folder of a path, owned by the caller.
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? format_string("%.*s", (int)(slash - path) + 1, path) : xstrdup(".");
}

static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static char *val_path(const Output *out)
{
    return out->o->val_out ? xstrdup(out->o->val_out) : format_string("%s_val_000000.bin", out->prefix);
}

static char *train_path(const Output *out, int number)
{
    return format_string("%s_train_%06d.bin", out->prefix, number);
}

// The number in the name of a training shard; -1: it is none of this data set.
static int shard_number(const Output *out, const char *name)
{
    const char *begin = name_of(out->prefix);
    size_t length = strlen(begin);
    char again[32];
    if (strncmp(name, begin, length) != 0 || strncmp(name + length, "_train_", 7) != 0)
        return -1;
    long number = strtol(name + length + 7, NULL, 10);
    if (number < 1 || number > INT32_MAX)
        return -1;
    snprintf(again, sizeof again, "_train_%06ld.bin", number);
    return strcmp(name + length, again) ? -1 : (int)number;
}

// The numbers of the training shards in the folder, (*count), owned by the caller.
static int *shards_there(const Output *out, int *count)
{
    char *folder = folder_of(out->prefix);
    DIR *dir = opendir(folder);
    size_t capacity = 0;
    int *numbers = grow(NULL, &capacity, 1, sizeof *numbers);
    *count = 0;
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        int number = shard_number(out, entry->d_name);
        if (number < 0)
            continue;
        numbers = grow(numbers, &capacity, (size_t)*count + 1, sizeof *numbers);
        numbers[(*count)++] = number;
    }
    if (dir)
        closedir(dir);
    free(folder);
    return numbers;
}

// ---- opening ----------------------------------------------------------------------------------------------

// Whether --val-out is one of the files that NAME_train_*.bin finds: they would be trained on, or removed.
static bool val_is_training_shard(const Output *out)
{
    struct stat s, t;
    char *folder = folder_of(out->o->val_out), *own = folder_of(out->prefix),
         *begins = format_string("%s_train_", name_of(out->prefix));
    bool same = !stat(folder, &s) && !stat(own, &t) && s.st_dev == t.st_dev && s.st_ino == t.st_ino &&
                !strncmp(name_of(out->o->val_out), begins, strlen(begins));
    free(folder);
    free(own);
    free(begins);
    return same;
}

// Two calls at once would mix their shards, so this file is locked until output_free.
static bool lock_data_set(Output *out, Error *e)
{
    char *folder = folder_of(out->prefix);
    out->lock_path = format_string("%s.%s_tokenize.lock", folder, name_of(out->prefix));
    free(folder);
    for (;;) {
        int fd = open(out->lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0)
            return error_set(e, "cannot write %s: %s", out->lock_path, strerror(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) { // some file systems have no locks at all
            close(fd);
            return error_set(e, "another tokenize is writing this data set, %s", out->prefix);
        }
        struct stat s, t;
        if (!fstat(fd, &s) && !stat(out->lock_path, &t) && s.st_dev == t.st_dev && s.st_ino == t.st_ino) {
            out->lock = fd;
            return true;
        }
        close(fd); // the call that held it has just removed it
    }
}

static bool is_training_shard(const void *context, const char *name)
{
    return *name == '.' && shard_number(context, name + 1) > 0;
}

static bool is_validation_shard(const void *context, const char *name)
{
    const Output *out = context;
    char *path = val_path(out);
    bool same = *name == '.' && !strcmp(name + 1, name_of(path));
    free(path);
    return same;
}

static void remove_stale(const Output *out)
{
    char *val = val_path(out), *val_folder = folder_of(val), *folder = folder_of(out->prefix);
    temporary_remove_stale(folder, is_training_shard, out);
    temporary_remove_stale(val_folder, is_validation_shard, out);
    free(val);
    free(val_folder);
    free(folder);
}

// The files that are read, as the system tells them apart: another name or a link is the same file.
typedef struct {
    struct stat *files; // (count), owned
    size_t count;
} Inputs;

static Inputs stat_inputs(const TextFileList *list, const char *vocab)
{
    Inputs in = {.files = xcalloc(list->count + 1, sizeof *in.files)};
    in.count = stat(vocab, in.files) == 0;
    for (size_t i = 0; i < list->count; i++) {
        const char *path = list->files[i].path;
        struct stat *s = &in.files[in.count];
        in.count += (strcmp(path, "-") ? stat(path, s) : fstat(STDIN_FILENO, s)) == 0;
    }
    return in;
}

// Whether a file may be put at the path, which may be taken by an older one.
static bool check_target(const char *path, const Inputs *in, Error *e)
{
    struct stat s;
    if (!*name_of(path))
        return error_set(e, "'%s' is no name for a file to write; give another", path);
    if (stat(path, &s))
        return true;
    if (!S_ISREG(s.st_mode))
        return error_set(e, "%s is no regular file and cannot be replaced; give another name", path);
    for (size_t i = 0; i < in->count; i++) {
        if (in->files[i].st_dev == s.st_dev && in->files[i].st_ino == s.st_ino)
            return error_set(e, "%s is read and would be replaced; give the output another name", path);
    }
    return true;
}

// Everything that publishing replaces or removes.
static bool check_targets(const Output *out, const TextFileList *list, Error *e)
{
    const TokenizeOptions *o = out->o;
    Inputs in = stat_inputs(list, o->vocab);
    int count;
    int *numbers = shards_there(out, &count);
    bool good = true, trains = o->val_fraction < 1;
    bool validates = o->val_fraction > 0 || o->val_tokens > 0;
    for (int i = 0; i < count && trains && good; i++) {
        char *path = train_path(out, numbers[i]);
        good = check_target(path, &in, e);
        free(path);
    }
    char *val = val_path(out), *log = format_string("%s_tokenize.txt", out->prefix);
    good = good && (!validates || check_target(val, &in, e)) && check_target(log, &in, e);
    free(val);
    free(log);
    free(numbers);
    free(in.files);
    return good;
}

bool output_open(Output *out, const TokenizeOptions *o, const Tokenizer *t, const TextFileList *inputs,
                 Error *e)
{
    *out = (Output){.o = o, .t = t, .lock = -1};
    struct stat s;
    size_t len = strlen(o->out);
    if (len == 0)
        return error_set(e, "--out is empty");
    bool slash = o->out[len - 1] == '/';
    if (o->name || slash || (stat(o->out, &s) == 0 && S_ISDIR(s.st_mode))) {
        out->prefix = format_string("%s%s%s", o->out, slash ? "" : "/", o->name ? o->name : "text");
        int failed = make_folders(o->out);
        if (failed)
            return error_set(e, "cannot make the folder %s: %s", o->out, strerror(failed));
    } else {
        out->prefix = xstrdup(o->out);
    }
    if (o->val_out && val_is_training_shard(out))
        return error_set(e, "--val-out %s has the name of a shard of the training set; give another",
                         o->val_out);
    if (!lock_data_set(out, e))
        return false;
    remove_stale(out);
    return check_targets(out, inputs, e);
}

// ---- writing ----------------------------------------------------------------------------------------------

static bool for_validation(const Output *out)
{
    double f = out->o->val_fraction, i = (double)out->documents;
    if (f > 0)
        return floor((i + 1) * f) > floor(i * f);
    return out->val.tokens < out->o->val_tokens;
}

static bool open_train(Output *out, Error *e)
{
    if (out->train_count && !shard_writer_finish(&out->train[out->train_count - 1], e))
        return false;
    out->train = xrealloc(out->train, (size_t)out->train_count + 1, sizeof *out->train);
    char *path = train_path(out, out->train_count + 1);
    ShardWriter *w = &out->train[out->train_count++];
    bool good = shard_writer_open(w, path, tokenizer_vocab_size(out->t), tokenizer_document(out->t), e);
    free(path);
    return good;
}

static bool open_val(Output *out, Error *e)
{
    char *path = val_path(out);
    bool good =
        shard_writer_open(&out->val, path, tokenizer_vocab_size(out->t), tokenizer_document(out->t), e);
    free(path);
    return good;
}

void output_end_document(Output *out)
{
    out->used += min_i64(out->document_tokens, MAX_DOCUMENT);
    out->document_tokens = 0;
}

bool output_begin_document(Output *out, Error *e)
{
    bool val = for_validation(out);
    output_end_document(out);
    out->documents++;
    if (val) {
        out->current = &out->val;
        return out->val.path || open_val(out, e);
    }
    bool full = out->train_count && out->train[out->train_count - 1].tokens >= out->o->shard_tokens;
    if ((full || !out->train_count) && !open_train(out, e))
        return false;
    out->current = &out->train[out->train_count - 1];
    return true;
}

// ---- publishing -------------------------------------------------------------------------------------------

// Data sets are replaced as a whole: shards of an older, larger one would be picked up by NAME_train_*.bin.
static bool remove_older(const Output *out, Error *e)
{
    int removed = 0, count;
    bool good = true;
    int *numbers = shards_there(out, &count);
    for (int i = 0; i < count && good; i++) {
        if (numbers[i] <= out->train_count)
            continue;
        char *path = train_path(out, numbers[i]);
        good =
            !unlink(path) || error_set(e, "cannot remove %s, which is of the older data set: %s; remove it",
                                       path, strerror(errno));
        removed += good;
        free(path);
    }
    free(numbers);
    if (removed)
        note("removed %d shards of an older %s data set", removed, out->prefix);
    return good;
}

// A call that writes one of the two sets leaves the other, which may be of the same text.
static void note_other_set(const Output *out)
{
    if (out->val.path && out->train_count)
        return;
    char *other = out->val.path ? train_path(out, 1) : val_path(out), shown[1024];
    escape_text(shown, sizeof shown, other);
    if (!access(other, F_OK))
        note("%s is of an earlier call and stays: training and validation must not have the same text",
             shown);
    free(other);
}

// Complaints that can only be made once everything was read.
static bool output_check(const Output *out, Error *e)
{
    const TokenizeOptions *o = out->o;
    if (out->tokens == out->documents)
        return error_set(e, "the input holds no text (%lld documents)", (long long)out->documents);
    if (o->val_tokens && (out->val.tokens < o->val_tokens || !out->train_count)) {
        return error_set(
            e,
            "--val-tokens %lld takes the whole input of %lld tokens and leaves none for training; "
            "lower it, add text, make more documents of a text file with --split, or use "
            "--val-fraction 1 for a validation set alone",
            (long long)o->val_tokens, (long long)out->tokens);
    }
    if (o->val_fraction > 0 && !out->val.path) {
        return error_set(
            e,
            "--val-fraction %g of %lld documents is not one document; raise it, use --val-tokens, or "
            "make more documents of a text file with --split",
            o->val_fraction, (long long)out->documents);
    }
    return true;
}

static void print_shard(const ShardWriter *w)
{
    char path[1024];
    escape_text(path, sizeof path, w->path);
    printf("%s: %lld tokens\n", path, (long long)w->tokens);
}

bool output_publish(Output *out, Error *e)
{
    ShardWriter *last = out->train_count ? &out->train[out->train_count - 1] : NULL;
    if (!output_check(out, e) || (last && !shard_writer_finish(last, e)))
        return false;
    if (out->val.path && !shard_writer_finish(&out->val, e))
        return false;
    if (out->val.path && !shard_writer_publish(&out->val, e))
        return false;
    for (int i = 0; i < out->train_count; i++) {
        if (!shard_writer_publish(&out->train[i], e))
            return false;
    }
    return !out->train_count || remove_older(out, e);
}

void output_print(const Output *out)
{
    for (int i = 0; i < out->train_count; i++)
        print_shard(&out->train[i]);
    if (out->val.path)
        print_shard(&out->val);
    note_other_set(out);
    if (out->train_count > 1 && out->train[out->train_count - 1].tokens < out->o->shard_tokens / 20) {
        note("the last shard is small; training needs one whole step (8 micro-batches) from every shard, or "
             "move it away");
    }
}

void output_free(Output *out)
{
    for (int i = 0; i < out->train_count; i++)
        shard_writer_free(&out->train[i]);
    shard_writer_free(&out->val);
    if (out->lock >= 0) {
        unlink(out->lock_path);
        close(out->lock);
    }
    free(out->train);
    free(out->lock_path);
    free(out->prefix);
}
