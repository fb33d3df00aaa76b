// The checkpoint container: round trips, files of the public package, everything that must be refused, and
// saves that end badly.
#include "dev/test/tap.h"
#include "llmc/io/safetensors.h"
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[256];

static const char *in_folder(const char *name)
{
    static char path[2][600];
    static int turn;
    turn ^= 1;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static int count_entries(const char *path)
{
    int n = -2; // . and ..
    DIR *dir = opendir(path);
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n;
}

// ---- round trips ------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    SafeDtype dtype;
    int ndim;
    int64_t shape[3];
} samples[] = {
    // the list of safetensors_peer.py
    {"bool", ST_BOOL, 1, {5}},
    {"u8", ST_U8, 2, {3, 1}},
    {"i8", ST_I8, 1, {7}},
    {"e4m3", ST_F8_E4M3, 2, {2, 3}},
    {"i16", ST_I16, 1, {3}},
    {"e5m2", ST_F8_E5M2, 3, {1, 1, 5}},
    {"f16", ST_F16, 3, {2, 2, 3}},
    {"i32", ST_I32, 1, {4}},
    {"blocks.0.\xc3\xa9\"quoted\\", ST_BF16, 2, {3, 5}},
    {"f32", ST_F32, 2, {3, 3}},
    {"i64", ST_I64, 0, {0}},
    {"f64", ST_F64, 1, {2}},
    {"empty", ST_F32, 2, {4, 0}},
};
enum { NUM_SAMPLES = sizeof samples / sizeof *samples };
static const char metadata_text[] = "a \"b\" \\ / \xe4\xb8\xad\n";

static size_t sample_data(int s, uint8_t *data)
{
    int64_t bytes = safetensors_dtype_size(samples[s].dtype);
    for (int i = 0; i < samples[s].ndim; i++)
        bytes *= samples[s].shape[i];
    for (int64_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(samples[s].dtype == ST_BOOL ? i % 2 : (7 * i + 3) % 256);
    return (size_t)bytes;
}

static bool write_samples(const char *path, Error *e)
{
    SafeWriter *w = safewriter_begin(path, e);
    if (!w)
        return false;
    safewriter_metadata(w, "format", "pt");
    safewriter_metadata(w, "options", metadata_text);
    for (int i = 0; i < NUM_SAMPLES; i++)
        safewriter_declare(w, samples[i].name, samples[i].dtype, samples[i].ndim, samples[i].shape);
    for (int i = NUM_SAMPLES - 1; i >= 0; i--) { // another order than declared, and in two parts
        uint8_t data[256];
        size_t bytes = sample_data(i, data), half = bytes / 3;
        if (!safewriter_write(w, samples[i].name, data, half, e))
            break;
        if (!safewriter_write(w, samples[i].name, data + half, bytes - half, e))
            break;
    }
    return safewriter_commit(w, e);
}

static int count_good_samples(const SafeTensors *st)
{
    int good = 0;
    for (int i = 0; i < NUM_SAMPLES; i++) {
        Error e;
        uint8_t wanted[256], found[256];
        size_t bytes = sample_data(i, wanted);
        const TensorInfo *t = safetensors_find(st, samples[i].name);
        bool same = t && t->offset % safetensors_dtype_size(t->dtype) == 0 &&
                    safetensors_expect(st, samples[i].name, samples[i].dtype, samples[i].ndim,
                                       samples[i].shape, &e) &&
                    safetensors_read(st, samples[i].name, found, bytes, &e) &&
                    memcmp(found, wanted, bytes) == 0;
        if (same && bytes >= 3) {
            memset(found, 0, sizeof found);
            same = safetensors_read_part(st, samples[i].name, 1, found, bytes - 2, &e) &&
                   memcmp(found, wanted + 1, bytes - 2) == 0 && found[bytes - 2] == 0;
        }
        good += same;
    }
    return good;
}

static void check_samples(const char *path, const char *who)
{
    Error e = {""};
    SafeTensors *st = safetensors_open(path, &e);
    if (!ok(st != NULL, "opens a file written by %s %s", who, e.text))
        return;
    ok(safetensors_count(st) == NUM_SAMPLES, "%d tensors", safetensors_count(st));
    ok(count_good_samples(st) == NUM_SAMPLES, "all %d have their bits, dtype, shape and alignment",
       NUM_SAMPLES);
    int sums = safetensors_has_checksums(st) ? NUM_SAMPLES + 2 : 0;
    ok(safetensors_metadata_count(st) == 2 + sums, "two metadata texts and %d of checksums", sums);
    const char *text = safetensors_metadata(st, "options");
    ok(text && strcmp(text, metadata_text) == 0, "metadata with quotes, a line end and Chinese");
    ok(safetensors_metadata(st, "no such key") == NULL, "no text for an unknown key");
    for (int i = 0; i < safetensors_metadata_count(st); i++)
        ok(safetensors_metadata(st, safetensors_metadata_key(st, i)) != NULL, "key %s",
           safetensors_metadata_key(st, i));
    safetensors_close(st);
}

static void test_round_trip(void)
{
    Error e = {""};
    const char *path = in_folder("samples.safetensors");
    ok(write_samples(path, &e), "writes all dtypes %s", e.text);
    ok(count_entries(folder) == 1, "and leaves one file");
    check_samples(path, "ourselves");

    uint8_t prefix[8] = {0};
    FILE *f = fopen(path, "rb");
    ok(fread(prefix, 1, 8, f) == 8 && prefix[0] % 8 == 0, "the header is padded to 8 bytes");
    fclose(f);
    unlink(path);
}

static int run_peer(const char *mode, const char *path)
{
    char command[1200];
    snprintf(command, sizeof command, "python3 dev/test/safetensors_peer.py %s '%s' >&2", mode, path);
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_peer(void)
{
    Error e = {""};
    const char *path = in_folder("peer.safetensors");
    if (!write_samples(path, &e))
        ok(false, "%s", e.text);
    int status = run_peer("check", path);
    if (status == 77 || status == 127) {
        skip("python3 with torch and safetensors is not installed");
    } else {
        ok(status == 0, "the public package reads our file, all bits");
        const char *copy = in_folder("copy.safetensors");
        char *both = format_string("%s' '%s", path, copy);
        ok(run_peer("copy", both) == 0, "and writes it again, in an order of its own");
        check_samples(copy, "the public package with our checksums");
        unlink(copy);
        free(both);
        ok(run_peer("write", path) == 0, "and writes one");
        check_samples(path, "the public package");
    }
    unlink(path);
}

static void test_empty_and_repaired(void)
{
    Error e = {""};
    const char *path = in_folder("none.safetensors");
    SafeWriter *w = safewriter_begin(path, &e);
    safewriter_metadata(w, "out", "runs/\xff\xfe");
    ok(safewriter_commit(w, &e), "a file without tensors %s", e.text);
    SafeTensors *st = safetensors_open(path, &e);
    const char *text = st ? safetensors_metadata(st, "out") : NULL;
    ok(text && strcmp(text, "runs/\xef\xbf\xbd\xef\xbf\xbd") == 0,
       "is read, with bytes that are no UTF-8 replaced");
    ok(st && safetensors_count(st) == 0, "and has no tensors");
    safetensors_close(st);
    unlink(path);
}

// ---- what is refused --------------------------------------------------------------------------------------

static void put_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0)
        fatal(1, "cannot write %s", path);
}

static void put_header(const char *path, const char *header, size_t data_bytes)
{
    size_t n = strlen(header);
    uint8_t *file = xcalloc(8 + n + data_bytes, 1);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)(n >> 8 * i);
    memcpy(file + 8, header, n);
    put_file(path, file, 8 + n + data_bytes);
    free(file);
}

static void refused(const char *path, const char *what, const char *wanted)
{
    Error e = {""};
    SafeTensors *st = safetensors_open(path, &e);
    ok(!st && strstr(e.text, wanted) && strstr(e.text, path) == e.text && !strchr(e.text, '\n'), "%s: %s",
       what, st ? "was accepted" : e.text);
    safetensors_close(st);
}

#define TENSOR(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

static const struct {
    const char *what, *header;
    size_t data;
    const char *wanted;
} refusals[] = {
    {"no JSON", "hello", 0, "no JSON object"},
    {"empty header", "", 0, "no JSON object"},
    {"an array", "[1, 2]", 0, "no JSON object"},
    {"cut JSON", "{\"a\":{\"dtype\":\"F32\"", 0, "near end of file"},
    {"broken JSON", "{\"a\" 3}", 0, "no valid JSON at byte"},
    {"a colon without a name", "{: 3}", 0, "no valid JSON"},
    {"comments", "{/* */}", 0, "no valid JSON"},
    {"trailing comma", "{\"__metadata__\":{},}", 0, "no valid JSON"},
    {"single quotes", "{'__metadata__':{}}", 0, "at byte 2"},
    {"text behind", "{} x", 0, "header"},
    {"invalid UTF-8", "{\"__metadata__\":{\"a\":\"\xff\"}}", 0, "no valid JSON"},
    {"deep nesting", "{\"a\":[[[[[[[[1]]]]]]]]}", 0, "not described by dtype"},
    {"unknown dtype", "{" TENSOR("w", "F7", "1", 0, 1) "}", 1, "tensor 'w' has dtype 'F7'"},
    {"negative extent", "{" TENSOR("w", "U8", "-1", 0, 1) "}", 1, "tensor 'w': extent 0"},
    {"fractional extent", "{" TENSOR("w", "U8", "2, 0.5", 0, 1) "}", 1, "tensor 'w': extent 1"},
    {"huge extent", "{" TENSOR("w", "U8", "99999999999999999999,0", 0, 0) "}", 0, "too big integer"},
    {"overflowing shape", "{" TENSOR("w", "F32", "4294967296,4294967296", 0, 0) "}", 0,
     "tensor 'w' has 0 bytes"},
    {"overflow hidden by 0", "{" TENSOR("w", "F32", "4294967296,4294967296,0", 0, 0) "}", 0,
     "tensor 'w' has 0 bytes"},
    {"too many dimensions", "{" TENSOR("w", "U8", "1,1,1,1,1,1,1,1,1", 0, 1) "}", 1,
     "tensor 'w' has 9 dimensions"},
    {"too few bytes", "{" TENSOR("w", "F32", "3", 0, 8) "}", 8,
     "tensor 'w' has 8 bytes of data, but F32 (3)"},
    {"offsets swapped", "{" TENSOR("w", "U8", "4", 4, 0) "}", 4, "tensor 'w' has no valid data_offsets"},
    {"negative offset", "{" TENSOR("w", "U8", "4", -4, 0) "}", 4, "tensor 'w' has no valid data_offsets"},
    {"one offset", "{\"w\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0]}}", 1,
     "no valid data_offsets"},
    {"outside", "{" TENSOR("w", "U8", "4", 0, 4) "}", 3,
     "tensor 'w' ends at byte 4 of the data, but the file has only 3"},
    {"hole in front", "{" TENSOR("w", "U8", "4", 2, 6) "}", 6, "2 bytes before the data of tensor 'w'"},
    {"hole", "{" TENSOR("v", "U8", "2", 4, 6) "," TENSOR("w", "U8", "2", 0, 2) "}", 6,
     "2 bytes before the data of tensor 'v'"},
    {"overlap", "{" TENSOR("v", "U8", "4", 0, 4) "," TENSOR("w", "U8", "4", 3, 7) "}", 7,
     "'w' overlaps that of 'v'"},
    {"same place", "{" TENSOR("v", "U8", "4", 0, 4) "," TENSOR("w", "U8", "4", 0, 4) "}", 4, "overlaps"},
    {"rest", "{" TENSOR("w", "U8", "4", 0, 4) "}", 9, "5 bytes after the last tensor"},
    {"name twice", "{" TENSOR("w", "U8", "4", 0, 4) "," TENSOR("w", "U8", "4", 4, 8) "}", 8,
     "duplicate object key near '\"w\""},
    {"name twice, escaped", "{" TENSOR("w", "U8", "4", 0, 4) "," TENSOR("\\u0077", "U8", "4", 4, 8) "}", 8,
     "duplicate object key"},
    {"dtype twice", "{\"w\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
     "duplicate object key"},
    {"NUL in a name", "{" TENSOR("w\\u0000x", "U8", "1", 0, 1) "}", 1, "NUL"},
    {"no shape", "{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "tensor 'w' is not described"},
    {"tensor is a number", "{\"w\":3}", 0, "tensor 'w' is not described"},
    {"member too many", "{\"w\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1],\"x\":1}}", 1,
     "tensor 'w' is not described"},
    {"metadata is a list", "{\"__metadata__\":[]}", 0, "__metadata__"},
    {"metadata holds a number", "{\"__metadata__\":{\"step\":3}}", 0, "metadata 'step' is no text"},
    {"line end in a name", "{\"a\\nb\\u001b[31m\":3}", 0, "tensor 'a?b?[31m' is not described"},
};

static void test_refusals(void)
{
    const char *path = in_folder("bad.safetensors");
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        put_header(path, refusals[i].header, refusals[i].data);
        refused(path, refusals[i].what, refusals[i].wanted);
    }
    char *deep = xcalloc(1 << 20, 1); // must not run out of stack
    memset(deep, '[', (1 << 20) - 1);
    memcpy(deep, "{\"a\":", 5);
    put_header(path, deep, 0);
    refused(path, "a million brackets", "parsing depth");
    memcpy(deep, "{\"", 2);
    memset(deep + 2, 'n', (1 << 20) - 3);
    memcpy(deep + (1 << 20) - 9, "\":true}", 8);
    put_header(path, deep, 0);
    refused(path, "a name of a million letters", "is not described by dtype");
    free(deep);

    put_file(path, "", 0);
    refused(path, "an empty file", "0 bytes are too few");
    put_file(path, "\5\0\0", 3);
    refused(path, "3 bytes", "3 bytes are too few");
    put_file(path, "\x30\0\0\0\0\0\0\0{}", 10);
    refused(path, "a cut header", "header of 48 bytes does not fit into a file of 10");
    put_file(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    refused(path, "2^64 - 1 bytes of header", "beyond the limit");
    put_file(path, "\0\xe1\xf5\x05\0\0\0\0{}", 10);
    refused(path, "100 MB of header in a small file", "does not fit");
    put_file(path, "\1\xe1\xf5\x05\0\0\0\0{}", 10);
    refused(path, "1 byte more", "beyond the limit");
    unlink(path);
    refused(path, "a missing file", "No such file");
    refused(folder, "a folder", "not a regular file");
    if (mkfifo(path, 0600) == 0)
        refused(path, "a pipe without a writer", "not a regular file");
    unlink(path);

    // Legal, if odd.
    Error e = {""};
    put_header(path,
               "{\"__metadata__\":{\"a\\\\u0000\":\"\\\\u0000 ' : {\"}," TENSOR("w", "U8", "2", 0, 2) "} \n",
               2);
    SafeTensors *st = safetensors_open(path, &e);
    ok(st && strcmp(safetensors_metadata(st, "a\\u0000"), "\\u0000 ' : {") == 0,
       "backslashes, quotes and colons in texts %s", e.text);
    safetensors_close(st);
    unlink(path);
}

static void test_expectations(void)
{
    Error e = {""};
    const char *path = in_folder("expect.safetensors");
    put_header(path, "{" TENSOR("w", "BF16", "2,3", 0, 12) "," TENSOR("v", "U8", "4", 12, 16) "}", 16);
    SafeTensors *st = safetensors_open(path, &e);
    uint8_t data[16];
    if (!ok(st != NULL, "opens %s", e.text))
        return;
    ok(safetensors_expect(st, "w", ST_F32 | ST_BF16, 2, (int64_t[]){2, -1}, &e),
       "one dtype of two, any extent");
    ok(!safetensors_expect(st, "w", ST_F32 | ST_F16, 2, (int64_t[]){2, 4}, &e) &&
           strstr(e.text, "tensor 'w': expected F16 or F32 (2, 4), found BF16 (2, 3)") &&
           strstr(e.text, path),
       "%s", e.text);
    ok(!safetensors_expect(st, "w", ST_BF16, 1, (int64_t[]){-1}, &e) &&
           strstr(e.text, "(any), found BF16 (2, 3)"),
       "%s", e.text);
    ok(!safetensors_expect(st, "x", ST_BF16, 0, NULL, &e) && strstr(e.text, "no tensor 'x' among its 2"),
       "%s", e.text);
    ok(!safetensors_read(st, "x", data, 1, &e) && strstr(e.text, "no tensor 'x'"), "%s", e.text);
    ok(!safetensors_read(st, "w", data, 11, &e) &&
           strstr(e.text, "tensor 'w' has 12 bytes where 11 are needed"),
       "%s", e.text);
    ok(!safetensors_read_part(st, "v", 2, data, 3, &e) &&
           strstr(e.text, "tensor 'v' has 4 bytes; 3 from byte 2"),
       "%s", e.text);
    ok(!safetensors_read_part(st, "v", -1, data, 1, &e) && strstr(e.text, "byte -1"), "%s", e.text);
    if (truncate(path, safetensors_find(st, "v")->offset + 1) != 0)
        fatal(1, "cannot shorten %s", path);
    ok(!safetensors_read(st, "v", data, 4, &e) &&
           strstr(e.text, "ends in the middle of tensor 'v': 1 of 4 bytes"),
       "%s", e.text);
    safetensors_close(st);
    unlink(path);
}

// ---- saves that end badly ---------------------------------------------------------------------------------
// A checkpoint of one generation: every byte of the data and the metadata tell which.

enum { CHECKPOINT_BYTES = 1 << 20, CHECKPOINT_TENSORS = 8 };

static bool save_generation(const char *path, int generation, Error *e)
{
    SafeWriter *w = safewriter_begin(path, e);
    if (!w)
        return false;
    char text[16], name[16];
    snprintf(text, sizeof text, "%d", generation);
    safewriter_metadata(w, "generation", text);
    int64_t shape = CHECKPOINT_BYTES / CHECKPOINT_TENSORS;
    uint8_t *data = xcalloc((size_t)shape, 1);
    memset(data, generation & 255, (size_t)shape);
    for (int i = 0; i < 2 * CHECKPOINT_TENSORS; i++) {
        snprintf(name, sizeof name, "t%d", i % CHECKPOINT_TENSORS);
        if (i < CHECKPOINT_TENSORS)
            safewriter_declare(w, name, ST_U8, 1, &shape);
        else
            safewriter_write(w, name, data, (size_t)shape, e); // commit tells
    }
    free(data);
    return safewriter_commit(w, e);
}

// The generation of a complete, consistent file; -1 otherwise.
static int load_generation(const char *path)
{
    Error e = {""};
    SafeTensors *st = safetensors_open(path, &e);
    if (!st) {
        printf("# %s\n", e.text);
        return -1;
    }
    int generation = atoi(safetensors_metadata(st, "generation")), good = 0;
    uint8_t *data = xcalloc(CHECKPOINT_BYTES, 1);
    for (int i = 0; i < safetensors_count(st); i++) {
        const TensorInfo *t = safetensors_at(st, i);
        bool same = safetensors_read(st, t->name, data, (size_t)t->bytes, &e) &&
                    data[0] == (generation & 255) && memcmp(data, data + 1, (size_t)t->bytes - 1) == 0;
        good += same;
    }
    free(data);
    safetensors_close(st);
    return good == CHECKPOINT_TENSORS ? generation : -1;
}

static void test_kill(void)
{
    enum { KILLS = 60 };
    Error e = {""};
    const char *path = in_folder("killed.safetensors");
    char other[700];
    snprintf(other, sizeof other, "%s.tmp.%d", path, (int)getppid());
    put_file(other, "of a living process", 19);
    save_generation(path, 1, &e);
    int good = 0, stale = 0, newest = 1, at_random = 0;
    srand(20251027);
    for (int k = 0; k < KILLS; k++) {
        pid_t child = fork();
        if (child == 0) {
            for (int g = newest + 1;; g++)
                if (!save_generation(path, g, &e))
                    _exit(1);
        }
        usleep((useconds_t)(rand() % 20000));
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        int g = load_generation(path);
        good += WIFSIGNALED(status) && g >= newest;
        at_random += g > newest;
        newest = g;
        stale += count_entries(folder) > 2;
        if (g < 0)
            break;
    }
    printf("# %d kills, %d during a save, last generation %d\n", KILLS, stale, newest);
    ok(good == KILLS, "after each of %d SIGKILLs the checkpoint is complete and no older than before", good);
    ok(stale > 0 && at_random > 0, "kills fell both into saves and behind finished ones");
    ok(save_generation(path, newest + 1, &e), "the next save works %s", e.text);
    ok(count_entries(folder) == 2, "and has removed what the dead left, but nothing of a living process");
    unlink(path);
    unlink(other);
}

static void test_symlink_and_bad_targets(void)
{
    Error e = {""};
    char link[600];
    const char *path = in_folder("real.safetensors");
    snprintf(link, sizeof link, "%s/link.safetensors", folder);
    save_generation(path, 1, &e);
    if (symlink("real.safetensors", link) != 0)
        fatal(1, "cannot link %s", link);
    struct stat info;
    ok(save_generation(link, 2, &e) && load_generation(path) == 2, "a save through a link %s", e.text);
    ok(lstat(link, &info) == 0 && S_ISLNK(info.st_mode), "leaves it a link");
    unlink(link);
    unlink(path);
    ok(!save_generation(folder, 1, &e) && strstr(e.text, "no regular file"), "%s", e.text);
    ok(!save_generation("/dev/full", 1, &e) && strstr(e.text, "/dev/full: is no regular file"), "%s", e.text);
    ok(!save_generation(in_folder("no/such.safetensors"), 1, &e) && strstr(e.text, "No such file"), "%s",
       e.text);
}

static void failing_save(const char *path, const char *wanted, const char *where)
{
    Error e = {""};
    int before = count_entries(where);
    ok(!save_generation(path, 2, &e) && strstr(e.text, wanted) && strstr(e.text, path) == e.text, "%s",
       e.text);
    ok(load_generation(path) == 1, "the old checkpoint survives");
    ok(count_entries(where) == before, "no part of the new one is left");
}

static void test_full_disk(void)
{
    Error e = {""};
    const char *path = in_folder("limit.safetensors");
    save_generation(path, 1, &e);
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = CHECKPOINT_BYTES / 2 + 77;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    failing_save(path, "File too large", folder);
    setrlimit(RLIMIT_FSIZE, &old);
    unlink(path);

    char disk[600];
    snprintf(disk, sizeof disk, "%s/disk", folder);
    mkdir(disk, 0700);
    if (mount("none", disk, "tmpfs", 0, "size=1600k") != 0) {
        skip("no right to mount a small disk");
    } else {
        path = in_folder("disk/full.safetensors");
        ok(save_generation(path, 1, &e), "fits on a disk of 1.6 MB %s", e.text);
        failing_save(path, "No space left on device", disk);
        umount(disk);
    }
    rmdir(disk);
}

static void test_sticky_error(void)
{
    Error first = {""}, later = {""};
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = 40; // the header is longer
    const char *path = in_folder("sticky.safetensors");
    SafeWriter *w = safewriter_begin(path, &first);
    safewriter_declare(w, "w", ST_F32, 1, (int64_t[]){4});
    float data[4] = {1, 2, 3, 4};
    setrlimit(RLIMIT_FSIZE, &limit);
    bool wrote = safewriter_write(w, "w", data, sizeof data, &first);
    setrlimit(RLIMIT_FSIZE, &old);
    ok(!wrote && count_entries(folder) == 0, "the unfinished file is gone at the first error: %s",
       first.text);
    ok(!safewriter_commit(w, &later) && strcmp(first.text, later.text) == 0, "and commit says the same");
}

int main(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/safetensors-XXXXXX", base ? base : P_tmpdir);
    if (!mkdtemp(folder))
        fatal(1, "cannot make a folder in %s", base ? base : P_tmpdir);
    PART(test_round_trip());
    PART(test_peer());
    PART(test_empty_and_repaired());
    PART(test_refusals());
    PART(test_expectations());
    PART(test_kill());
    PART(test_symlink_and_bad_targets());
    PART(test_full_disk());
    PART(test_sticky_error());
    ok(rmdir(folder) == 0, "nothing is left behind");
    return tap_done();
}
