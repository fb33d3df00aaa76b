// Any bytes as a token shard: they are refused, or every batch made of them keeps its promises. The first
// bytes choose the sizes and whether the rest is taken as a whole file or as the tokens behind a sound
// header, so that both layers are reached.
#include "llmc/data/dataloader.h"
#include "llmc/data/validation.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CHOICE_BYTES = 6, MAX_STEPS = 20 };

static void check(bool good)
{
    if (!good)
        abort();
}

static void check_batch(const Batch *b, int vocab_size, bool rows)
{
    check(b->num_docs >= 1 && b->num_docs <= b->N && b->cu_seqlens[0] == 0 &&
          b->cu_seqlens[b->num_docs] == b->N);
    for (int i = 0; i < b->num_docs; i++)
        check(b->cu_seqlens[i] < b->cu_seqlens[i + 1]);
    for (int i = 0; i < b->N; i++)
        check(b->tokens[i] >= 0 && b->tokens[i] < vocab_size && b->targets[i] < vocab_size);
    for (int i = 0; i + 1 < b->N; i++)
        check(b->targets[i] == b->tokens[i + 1]);
    if (!rows)
        return;
    check(b->rows.count >= 1 && b->rows.start[0] == 0 && b->rows.start[b->rows.count] == b->N);
    for (int r = 0; r < b->rows.count; r++)
        for (int i = b->rows.start[r]; i < b->rows.start[r + 1]; i++)
            check(b->tokens[b->rows.order[i]] == b->rows.row[r]);
}

// The same bytes as a checkpoint's list of shards; and the loader's own list, which it must accept.
static void compare(const Loader *l, const uint8_t *bytes, size_t count)
{
    Error e;
    char *own = loader_shards(l), *text = xcalloc(count + 1, 1);
    memcpy(text, bytes, count);
    check(loader_continues(l, own, (LoaderPosition){.epoch = 1}, &e));
    for (int epoch = 0; epoch < 2; epoch++)
        check(loader_continues(l, text, (LoaderPosition){.epoch = epoch}, &e) ||
              (*e.text && !strchr(e.text, '\n')));
    free(own);
    free(text);
}

static void train(const char *path, const uint8_t *choice, size_t count)
{
    LoaderOptions o = {.files_glob = path,
                       .micro_batches = 4,
                       .micro_batch_tokens = 1 + choice[1] % 32,
                       .rank = choice[2] % 2,
                       .num_ranks = 2,
                       .max_document = 1 + choice[3],
                       .epochs = 2,
                       .chunk_tokens = 1 + choice[4]};
    Error e;
    Loader *l = loader_open(&o, &e);
    if (!l)
        return;
    compare(l, choice + CHOICE_BYTES, count);
    Batch b;
    batch_alloc(&b, o.micro_batch_tokens, NULL);
    LoaderPosition p = {choice[5] % 3, 0, choice[5] / 3};
    bool good = choice[5] == 0 || loader_seek(l, p, &e);
    for (int i = 0; i < MAX_STEPS && good && (good = loader_next(l, &b, &e)); i++) {
        check_batch(&b, loader_vocab_size(l), true);
        for (int d = 0; d < b.num_docs; d++)
            check(b.tokens[b.cu_seqlens[d]] == loader_document_token(l));
    }
    batch_free(&b);
    loader_close(l);
}

static void validate(const char *path, const uint8_t *choice)
{
    const int S = 1 + choice[1] % 32;
    Error e;
    Validation *v = validation_open(path, (int64_t)S * (1 + choice[3]), S, 0, -1, &e);
    if (!v)
        return;
    Batch b;
    ValidationPart part;
    batch_alloc(&b, (int)min_i64(S, validation_longest(v) + 1 + choice[4] % 8), NULL);
    for (int q = 0; q < validation_num_sequences(v); q++)
        for (int begin = 0; begin < S; begin = part.end) {
            check(validation_part(v, q, begin, &b, &part, &e) && part.begin == begin && part.end > begin &&
                  part.end <= S);
            check_batch(&b, SHARD_MAX_VOCAB, false);
        }
    batch_free(&b);
    validation_close(v);
}

static void write_bytes(int fd, const void *bytes, size_t count)
{
    check(write(fd, bytes, count) == (ssize_t)count);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < CHOICE_BYTES)
        return 0;
    const uint8_t *rest = data + CHOICE_BYTES;
    size_t count = size - CHOICE_BYTES;
    int fd = memfd_create("shard", MFD_CLOEXEC);
    check(fd >= 0);
    if (data[0] & 1) {
        count &= ~(size_t)1;
        int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)(count / 2), 0, 0};
        if (data[0] & 2) { // few ids, so that documents are frequent; now and then an id is outside
            header[3] = SHARD_MAX_VOCAB - (data[0] & 4);
            header[4] = 1 + (data[0] >> 3);
        }
        write_bytes(fd, header, sizeof header);
    }
    write_bytes(fd, rest, count);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    train(path, data, size - CHOICE_BYTES);
    validate(path, data);
    close(fd);
    return 0;
}
