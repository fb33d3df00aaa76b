// Checksums of safetensors files: CRC-32C itself, and that no random change of a file loads as something
// else.
#define CRC32C_TABLE
#define crc32c crc32c_by_table
#include "llmc/base/crc32c.c"
#undef crc32c
#include "dev/test/tap.h"
#include "llmc/io/safetensors.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

uint32_t crc32c(uint32_t crc, const void *bytes, size_t count);

static uint64_t random_state = 57721;
static int64_t random_below(int64_t n) // splitmix64
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int64_t)((z ^ z >> 31) % (uint64_t)n);
}

// ---- the function -----------------------------------------------------------------------------------------

static void test_function(void)
{
    uint8_t bytes[1000] = {0};
    int same = 0, pieces = 0;
    ok(crc32c(0, "123456789", 9) == 0xe3069283, "the check value of the polynomial");
    ok(crc32c(0, bytes, 32) == 0x8a9136aa, "32 zeros, as in RFC 3720");
    memset(bytes, 255, 32);
    ok(crc32c(0, bytes, 32) == 0x62a8ab43, "32 bytes of 255, as in RFC 3720");
    for (int i = 0; i < 1000; i++)
        bytes[i] = (uint8_t)random_below(256);
    for (int i = 0; i < 500; i++) {
        size_t first = (size_t)random_below(20), count = (size_t)random_below(900);
        size_t cut = (size_t)random_below((int64_t)count + 1);
        uint32_t sum = crc32c(0, bytes + first, count);
        same += sum == crc32c_by_table(0, bytes + first, count);
        pieces += sum == crc32c(crc32c(0, bytes + first, cut), bytes + first + cut, count - cut);
    }
    ok(same == 500, "instruction and table agree");
    ok(pieces == 500, "in two pieces as in one");
}

// ---- files ------------------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    SafeDtype dtype;
    int ndim;
    int64_t shape[2], bytes;
    uint8_t *data;
} Sample;
static Sample samples[] = {{"embed.weight", ST_BF16, 2, {1200, 1000}, 2400000, NULL},
                           {"blocks.1.mlp.c_fc", ST_F32, 2, {512, 512}, 1 << 20, NULL},
                           {"embed.weight.adam_m", ST_BF16, 2, {1100, 500}, 1100000, NULL},
                           {"scalars", ST_F32, 1, {64, 0}, 256, NULL},
                           {"one", ST_F32, 0, {0, 0}, 4, NULL},
                           {"empty", ST_F32, 2, {4, 0}, 0, NULL}};
enum { NUM_SAMPLES = sizeof samples / sizeof *samples };
static const char *const texts[][2] = {{"format", "gpt-speedrun checkpoint 2"},
                                       {"step", "1234"},
                                       {"option.out", "runs \"x\" \xc3\xa9"}};
enum { NUM_TEXTS = sizeof texts / sizeof *texts };
static char path[64];

static void write_file(void)
{
    Error e;
    SafeWriter *w = safewriter_begin(path, &e);
    for (int i = 0; i < NUM_TEXTS; i++)
        safewriter_metadata(w, texts[i][0], texts[i][1]);
    for (int i = 0; i < NUM_SAMPLES; i++)
        safewriter_declare(w, samples[i].name, samples[i].dtype, samples[i].ndim, samples[i].shape);
    for (int i = 0; i < NUM_SAMPLES; i++) {
        Sample *s = &samples[i];
        s->data = xcalloc((size_t)s->bytes + 1, 1);
        for (int64_t k = 0; k < s->bytes; k++)
            s->data[k] = (uint8_t)random_below(256);
        for (int64_t at = 0, n; at < s->bytes; at += n) { // in pieces as ranks give them
            n = min_i64(s->bytes - at, 1 + random_below(700000));
            safewriter_write(w, s->name, s->data + at, (size_t)n, &e);
        }
    }
    ok(safewriter_commit(w, &e), "a file of %d tensors is written", NUM_SAMPLES);
}

typedef enum { REFUSED, SAME, OTHER } Outcome;

// What a reader of the bytes [first, first + bytes) of a tensor gets, of all of it for bytes < 0.
static Outcome read_one(const SafeTensors *st, const Sample *s, int64_t first, int64_t bytes)
{
    Error e;
    if (bytes < 0)
        bytes = s->bytes;
    uint8_t *got = xcalloc((size_t)bytes + 1, 1);
    bool good = safetensors_expect(st, s->name, s->dtype, s->ndim, s->shape, &e) &&
                safetensors_read_part(st, s->name, first, got, (size_t)bytes, &e);
    Outcome outcome = !good ? REFUSED : memcmp(got, s->data + first, (size_t)bytes) ? OTHER : SAME;
    free(got);
    return outcome;
}

static Outcome worse(Outcome a, Outcome b)
{
    if (a == OTHER || b == OTHER)
        return OTHER;
    return a == REFUSED || b == REFUSED ? REFUSED : SAME;
}

// What a reader of the whole file gets: header, texts, all tensors, and a part of each.
static Outcome read_file(void)
{
    Error e;
    Outcome all = SAME;
    SafeTensors *st = safetensors_open(path, &e);
    if (!st)
        return REFUSED;
    for (int i = 0; i < NUM_TEXTS; i++) {
        const char *text = safetensors_metadata(st, texts[i][0]);
        if (!text || strcmp(text, texts[i][1]) != 0)
            all = OTHER;
    }
    for (int i = 0; i < NUM_SAMPLES; i++) {
        const Sample *s = &samples[i];
        int64_t first = random_below(s->bytes + 1);
        all = worse(all, read_one(st, s, 0, -1));
        if (read_one(st, s, first, random_below(s->bytes - first + 1)) == OTHER)
            all = OTHER;
    }
    safetensors_close(st);
    return all;
}

// ---- random changes ---------------------------------------------------------------------------------------

typedef struct {
    int64_t at, count;
    uint8_t before[4096];
} Change;

// Changes some bytes of [first, end): one bit, one byte, a run of random bytes, or of zeros. False when it
// left all as it was.
static bool change_bytes(int fd, int64_t first, int64_t end, Change *c)
{
    uint8_t after[sizeof c->before];
    int kind = (int)random_below(4);
    c->count = kind < 2 ? 1 : min_i64(1 + random_below(sizeof after), end - first);
    c->at = first + random_below(end - first - c->count + 1);
    if (pread(fd, c->before, (size_t)c->count, c->at) != c->count)
        return false;
    memcpy(after, c->before, (size_t)c->count);
    if (kind == 0)
        after[0] ^= (uint8_t)(1 << random_below(8));
    for (int64_t i = 0; i < c->count && kind; i++)
        after[i] = (uint8_t)(kind == 3 ? 0 : random_below(256));
    if (memcmp(after, c->before, (size_t)c->count) == 0)
        return false;
    return pwrite(fd, after, (size_t)c->count, c->at) == c->count;
}

static void test_changes(const char *where, int64_t first, int64_t end, int changes)
{
    int count[3] = {0}, done = 0;
    int fd = open(path, O_RDWR);
    while (done < changes) {
        Change c;
        if (!change_bytes(fd, first, end, &c))
            continue;
        count[read_file()]++;
        done++;
        if (pwrite(fd, c.before, (size_t)c.count, c.at) != c.count)
            ok(false, "cannot write");
    }
    close(fd);
    ok(count[OTHER] == 0,
       "%d random changes of the %s: %d refused, %d changed nothing that is read, %d loaded as something "
       "else",
       changes, where, count[REFUSED], count[SAME], count[OTHER]);
    ok(read_file() == SAME, "undone, the file is whole again");
}

// Who reads a part is told of changes in its blocks, and of no others.
static void test_parts(int64_t data_start)
{
    Error e;
    int fd = open(path, O_RDWR);
    uint8_t *whole = xcalloc(2400000, 1);
    SafeTensors *st = safetensors_open(path, &e);
    const TensorInfo *t = safetensors_find(st, "embed.weight");
    uint8_t byte = (uint8_t)~samples[0].data[2000000];
    if (pwrite(fd, &byte, 1, t->offset + 2000000) != 1)
        ok(false, "cannot write");
    ok(t->offset >= data_start && read_one(st, &samples[0], 0, 1 << 20) == SAME,
       "a part whose blocks are intact is read");
    ok(read_one(st, &samples[0], 5, 1000) == SAME, "so is a small one");
    ok(read_one(st, &samples[0], 0, 2000000) == REFUSED,
       "one that ends before the changed byte, in its block, is refused");
    ok(read_one(st, &samples[0], 2000000, 1) == REFUSED && read_one(st, &samples[0], 2000001, 100) == REFUSED,
       "so are those at and behind it");
    ok(!safetensors_read(st, "embed.weight", whole, 2400000, &e) &&
           strstr(e.text, "'embed.weight' does not have its"),
       "with a line: %s", e.text);
    byte = (uint8_t)~byte;
    if (pwrite(fd, &byte, 1, t->offset + 2000000) != 1)
        ok(false, "cannot write");
    safetensors_close(st);
    close(fd);
    free(whole);
}

int main(void)
{
    uint8_t prefix[8];
    struct stat info;
    PART(test_function());
    snprintf(path, sizeof path, "/tmp/checksums.%ld.safetensors", (long)getpid());
    write_file();
    ok(read_file() == SAME, "and read back");
    int fd = open(path, O_RDONLY);
    if (fstat(fd, &info) != 0 || pread(fd, prefix, 8, 0) != 8)
        ok(false, "cannot read");
    close(fd);
    int64_t data_start = 8 + prefix[0] + 256 * prefix[1] + 65536 * prefix[2];
    PART(test_changes("data", data_start, info.st_size, 300));
    PART(test_changes("header", 0, data_start, 500));
    PART(test_parts(data_start));
    unlink(path);
    return tap_done();
}
