#include "llmc/io/event_file.h"
#include "llmc/base/crc32c.h"
#include "llmc/io/append_file.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct EventFile {
    AppendFile file;
};

// ---- protobuf ---------------------------------------------------------------------------------------------

typedef struct {
    FILE *f; // writes into bytes
    char *bytes;
    size_t count;
} Message;

static void message_begin(Message *m)
{
    m->f = open_memstream(&m->bytes, &m->count);
    if (!m->f)
        fatal(EXIT_BAD_INPUT, "out of host memory for an event");
}

static void message_end(Message *m)
{
    bool good = !ferror(m->f) && fclose(m->f) == 0;
    if (!good)
        fatal(EXIT_BAD_INPUT, "out of host memory for an event");
}

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 }; // wire types

// Seven bits a byte, the lowest first; the top bit says that another byte follows.
static void put_varint(Message *m, uint64_t x)
{
    for (; x > 127; x >>= 7)
        fputc((int)(x & 127) | 128, m->f);
    fputc((int)x, m->f);
}

static void put_key(Message *m, int field, int type) { put_varint(m, (uint64_t)(field << 3 | type)); }

static void put_integer(Message *m, int field, int64_t x)
{
    put_key(m, field, VARINT);
    put_varint(m, (uint64_t)x);
}

// Numbers are little-endian, as on every machine we run on.
static void put_double(Message *m, int field, double x)
{
    put_key(m, field, FIXED64);
    fwrite(&x, sizeof x, 1, m->f);
}

static void put_float(Message *m, int field, float x)
{
    put_key(m, field, FIXED32);
    fwrite(&x, sizeof x, 1, m->f);
}

static void put_bytes(Message *m, int field, const char *bytes, size_t count)
{
    put_key(m, field, BYTES);
    put_varint(m, count);
    fwrite(bytes, 1, count, m->f);
}

// Ends the inner message and puts it into the outer one.
static void put_message(Message *m, int field, Message *inner)
{
    message_end(inner);
    put_bytes(m, field, inner->bytes, inner->count);
    free(inner->bytes);
}

static void put_scalars(Message *m, int field, const EventScalar *scalars, int count)
{
    Message summary, value;
    message_begin(&summary);
    for (int i = 0; i < count; i++) {
        message_begin(&value);
        put_bytes(&value, 1, scalars[i].tag, strlen(scalars[i].tag));
        put_float(&value, 2, (float)scalars[i].value);
        put_message(&summary, 1, &value);
    }
    put_message(m, field, &summary);
}

static void put_start(Message *m, int field)
{
    Message log;
    message_begin(&log);
    put_integer(&log, 1, 1);
    put_message(m, field, &log);
}

// ---- records ----------------------------------------------------------------------------------------------

static uint32_t masked_sum(const void *bytes, size_t count)
{
    uint32_t crc = crc32c(0, bytes, count);
    return (crc >> 15 | crc << 17) + 0xa282ead8;
}

uint8_t *event_encode(const Event *e, size_t *bytes)
{
    Message m;
    message_begin(&m);
    put_double(&m, 1, e->wall_time);
    if (e->step)
        put_integer(&m, 2, e->step);
    if (e->version)
        put_bytes(&m, 3, e->version, strlen(e->version));
    if (e->count)
        put_scalars(&m, 5, e->scalars, e->count);
    if (e->start)
        put_start(&m, 7);
    message_end(&m);

    uint64_t length = m.count;
    uint32_t length_sum = masked_sum(&length, sizeof length), sum = masked_sum(m.bytes, m.count);
    *bytes = m.count + 16;
    uint8_t *record = xcalloc(*bytes, 1);
    memcpy(record, &length, 8);
    memcpy(record + 8, &length_sum, 4);
    memcpy(record + 12, m.bytes, m.count);
    memcpy(record + 12 + m.count, &sum, 4);
    free(m.bytes);
    return record;
}

// ---- the file ---------------------------------------------------------------------------------------------

static struct timespec clock_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now;
}

static void write_event(EventFile *f, Event e)
{
    struct timespec now = clock_now();
    size_t bytes;
    e.wall_time = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    uint8_t *record = event_encode(&e, &bytes);
    append_file_write(&f->file, record, bytes);
    free(record);
}

EventFile *event_file_create(const char *folder, const char *id, int64_t first_step)
{
    EventFile *f = xcalloc(1, sizeof *f);
    struct timespec now = clock_now();
    append_file_create(&f->file, format_string("%s/events.out.tfevents.%010lld.%06ld.%s", folder,
                                               (long long)now.tv_sec, now.tv_nsec / 1000, id));
    write_event(f, (Event){.version = "brain.Event:2"});
    if (first_step)
        write_event(f, (Event){.step = first_step, .start = true});
    return f;
}

void event_file_write(EventFile *f, int64_t step, const EventScalar *scalars, int count)
{
    write_event(f, (Event){.step = step, .scalars = scalars, .count = count});
}

void event_file_close(EventFile *f)
{
    append_file_close(&f->file);
    free(f);
}
