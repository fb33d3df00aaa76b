// TensorBoard's event file: records byte for byte as TensorBoard writes them itself, whole files, and a full
// disk. tensorboard.t has TensorBoard read them.
#include "dev/test/tap.h"
#include "llmc/base/crc32c.h"
#include "llmc/io/event_file.h"
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

static char folder[] = "/tmp/event_file_XXXXXX";

// ---- bytes ------------------------------------------------------------------------------------------------

// wanted: hexadecimal
static void check_bytes(const char *what, Event e, const char *wanted)
{
    size_t bytes;
    uint8_t *record = event_encode(&e, &bytes);
    char *text = xcalloc(2 * bytes + 1, 1);
    for (size_t i = 0; i < bytes; i++)
        sprintf(text + 2 * i, "%02x", record[i]);
    if (!ok(strcmp(text, wanted) == 0, "%s: %zu bytes", what, bytes))
        printf("# %s\n# %s expected\n", text, wanted);
    free(text);
    free(record);
}

// What RecordWriter and the protobuf classes of tensorboard 2.21.0 write for the same events.
static void test_bytes(void)
{
    check_bytes("the version", (Event){.wall_time = 1.5, .version = "brain.Event:2"},
                "1800000000000000a37f4b22"
                "09000000000000f83f1a0d627261696e2e4576656e743a32"
                "2a28646c");
    EventScalar scalars[] = {{"loss/train", 3.28}, {"t", NAN}};
    check_bytes("two numbers at step 300",
                (Event){.wall_time = 1763900000.25, .step = 300, .scalars = scalars, .count = 2},
                "2b00000000000000861bc34b"
                "0900001098be48da4110ac022a1d0a110a0a6c6f73732f747261696e1585eb51400a080a0174150000c07f"
                "716d17b5");
    check_bytes("the start of a resumed run", (Event){.wall_time = 2, .step = 13, .start = true},
                "0f000000000000006d532b09"
                "090000000000000040100d3a020801"
                "4ad7cc23");
}

// ---- files ------------------------------------------------------------------------------------------------

// The bytes of the folder's only event file, which is removed. Owned by the caller.
static uint8_t *take_file(size_t *bytes)
{
    DIR *dir = opendir(folder);
    uint8_t *data = NULL;
    int files = 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!strstr(entry->d_name, "tfevents"))
            continue;
        char *path = format_string("%s/%s", folder, entry->d_name);
        FILE *f = fopen(path, "rb");
        data = xcalloc(1 << 20, 1);
        *bytes = fread(data, 1, 1 << 20, f);
        fclose(f);
        unlink(path);
        free(path);
        files++;
    }
    closedir(dir);
    ok(files == 1, "one event file");
    return data;
}

static uint32_t unmask(uint32_t sum)
{
    sum -= 0xa282ead8;
    return sum << 15 | sum >> 17;
}

// Whole records with right sums; -1 when anything else is in the file.
static int count_records(const uint8_t *data, size_t bytes)
{
    int n = 0;
    for (size_t at = 0; at < bytes; n++) {
        uint64_t length;
        uint32_t sums[2];
        if (bytes - at < 16)
            return -1;
        memcpy(&length, data + at, 8);
        if (length > bytes - at - 16)
            return -1;
        memcpy(&sums[0], data + at + 8, 4);
        memcpy(&sums[1], data + at + 12 + length, 4);
        if (unmask(sums[0]) != crc32c(0, data + at, 8) ||
            unmask(sums[1]) != crc32c(0, data + at + 12, length))
            return -1;
        at += 16 + length;
    }
    return n;
}

static void test_files(void)
{
    size_t bytes;
    EventScalar scalar = {"loss/train", 2};
    EventFile *f = event_file_create(folder, "id", 0);
    event_file_write(f, 1, &scalar, 1);
    event_file_close(f);
    uint8_t *data = take_file(&bytes);
    ok(count_records(data, bytes) == 2, "a new run: version and event");
    data[bytes - 6] ^= 1;
    ok(count_records(data, bytes) == -1, "a changed bit shows");
    free(data);
    f = event_file_create(folder, "id", 14);
    event_file_close(f);
    data = take_file(&bytes);
    ok(count_records(data, bytes) == 2 && data[bytes - 4 - 5] == 14, "a resumed run: version and start");
    free(data);
}

static void test_full_disk(void)
{
    size_t bytes;
    EventScalar scalar = {"loss/train", 2};
    struct rlimit limit = {1000, RLIM_INFINITY};
    EventFile *f = event_file_create(folder, "id", 0);
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 1; i <= 100; i++)
        event_file_write(f, i, &scalar, 1);
    event_file_close(f);
    limit.rlim_cur = RLIM_INFINITY;
    setrlimit(RLIMIT_FSIZE, &limit);
    uint8_t *data = take_file(&bytes);
    ok(count_records(data, bytes) >= 15, "a full disk: %zu bytes, whole records", bytes);
    free(data);
    rmdir(folder);
    f = event_file_create(folder, "id", 0);
    event_file_write(f, 1, &scalar, 1);
    event_file_close(f);
    ok(true, "a folder that is not there costs a note");
}

int main(void)
{
    if (!mkdtemp(folder))
        fatal(1, "no folder in /tmp");
    test_bytes();
    test_files();
    test_full_disk();
    return tap_done();
}
