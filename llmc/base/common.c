#include "llmc/base/common.h"
#include "llmc/base/utf8.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct {
    const char *program;
    int rank;
    void (*abort_hook)(int);
    void (*error_sink)(int, const char *);
    int output_failure; // errno; 0: none
} process = {"train_gpt", -1, NULL, NULL, 0};

void set_program_name(const char *name, int rank)
{
    process.program = name;
    process.rank = rank;
}

void set_abort_hook(void (*hook)(int)) { process.abort_hook = hook; }
void set_error_sink(void (*sink)(int, const char *)) { process.error_sink = sink; }

// The escape for the byte at p, or the character there as it is; `valid`: it begins a character. Returns the
// bytes taken.
static size_t escape_character(char out[8], const char *p, bool valid)
{
    unsigned char c = (unsigned char)*p;
    size_t length = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    bool c1 = valid && c == 0xC2 && (unsigned char)p[1] < 0xA0; // U+0080 to U+009F
    if (c == '\n' || c == '\r' || c == '\t') {
        snprintf(out, 8, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    } else if (!valid || c < 0x20 || c == 0x7F) {
        snprintf(out, 8, "\\x%02x", c);
        length = 1;
    } else if (c1) {
        snprintf(out, 8, "\\u%04x", (unsigned char)p[1]);
    } else {
        snprintf(out, 8, "%.*s", (int)length, p);
    }
    return length;
}

void escape_text(char *out, size_t size, const char *text)
{
    size_t used = 0, length = strlen(text), valid = utf8_valid_prefix(text, length);
    for (size_t at = 0; at < length;) {
        char shown[8];
        at += escape_character(shown, text + at, at < valid);
        size_t n = strlen(shown);
        if (used + n >= size)
            break;
        memcpy(out + used, shown, n);
        used += n;
        if (at > valid)
            valid = at + utf8_valid_prefix(text + at, length - at);
    }
    out[used] = 0;
}

static void format_escaped(char *out, size_t size, const char *format, va_list args)
{
    char text[2048];
    vsnprintf(text, sizeof text, format, args);
    escape_text(out, size, text);
}

bool error_set(Error *e, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    format_escaped(e->text, sizeof e->text, format, args);
    va_end(args);
    return false;
}

static void print_line(int rank, const char *kind, const char *text)
{
    char where[32] = "";
    if (rank >= 0)
        snprintf(where, sizeof where, " (rank %d)", rank);
    flush_output(stdout);
    fprintf(stderr, "%s%s: %s: %s\n", process.program, where, kind, text);
}

// When all ranks fail alike, one line is enough: rank 0 speaks at once, and its abort ends the others before
// their time is up.
static void let_rank_0_speak_first(void)
{
    struct timespec wait = {.tv_nsec = 300000000};
    if (process.rank <= 0)
        return;
    signal(SIGTERM, SIG_DFL); // by which the abort ends ranks; there is nothing left to save
    nanosleep(&wait, NULL);
}

void fatal(int status, const char *format, ...)
{
    static _Atomic int ending;
    va_list args;
    char text[2048];
    while (atomic_exchange(&ending, 1))
        pause(); // one thread speaks, and ends the others
    let_rank_0_speak_first();
    va_start(args, format);
    format_escaped(text, sizeof text, format, args);
    va_end(args);
    if (process.error_sink)
        process.error_sink(status, text);
    else
        print_line(process.rank, "error", text);
    if (process.abort_hook)
        process.abort_hook(status);
    _exit(status); // other threads may still run: no destructors
}

void print_error(int rank, const char *format, ...)
{
    va_list args;
    char text[2048];
    va_start(args, format);
    format_escaped(text, sizeof text, format, args);
    va_end(args);
    print_line(rank, "error", text);
}

void note(const char *format, ...)
{
    va_list args;
    char text[2048];
    if (process.rank > 0)
        return;
    va_start(args, format);
    format_escaped(text, sizeof text, format, args);
    va_end(args);
    print_line(process.rank, "note", text);
}

void *xcalloc(size_t count, size_t size)
{
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (!p)
        fatal(EXIT_BAD_INPUT, "out of host memory: could not allocate %zu x %zu bytes", count, size);
    return p;
}

void *xrealloc(void *old, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        fatal(EXIT_BAD_INPUT, "out of host memory: %zu x %zu bytes", count, size);
    void *p = realloc(old, bytes ? bytes : 1);
    if (!p)
        fatal(EXIT_BAD_INPUT, "out of host memory: could not allocate %zu bytes", bytes);
    return p;
}

char *xstrdup(const char *s)
{
    size_t n = strlen(s) + 1;
    return memcpy(xcalloc(n, 1), s, n);
}

char *format_string(const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *s = xcalloc((size_t)n + 1, 1);
    vsnprintf(s, (size_t)n + 1, format, again);
    va_end(again);
    va_end(args);
    return s;
}

char *format_number(double x)
{
    char text[40];
    snprintf(text, sizeof text, "%.0f", fabs(x) < 1e15 ? x : 0); // not 1e+05
    for (int digits = 1; digits <= 17 && strtod(text, NULL) != x; digits++)
        snprintf(text, sizeof text, "%.*g", digits, x);
    return xstrdup(text);
}

int make_folders(const char *path)
{
    struct stat info;
    char *copy = xstrdup(path);
    for (char *p = *copy ? strchr(copy + 1, '/') : NULL; p; p = strchr(p + 1, '/')) {
        *p = 0;
        mkdir(copy, 0777); // what goes wrong here shows at the end of the path
        *p = '/';
    }
    int failed = mkdir(copy, 0777) && errno != EEXIST ? errno
                 : stat(copy, &info)                  ? errno
                 : S_ISDIR(info.st_mode)              ? 0
                                                      : ENOTDIR;
    free(copy);
    return failed;
}

uint64_t fingerprint_bytes(uint64_t seed, const void *bytes, size_t count)
{
    uint64_t h = seed ? seed : 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; i++)
        h = (h ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    return h;
}

void open_standard_streams(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            return; // nothing can be said
}

int open_regular(const char *what, const char *path, int64_t *bytes, Error *e)
{
    // O_NONBLOCK: opening a FIFO must not wait for its writer.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        error_set(e, "cannot read %s %s: %s", what, path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        const char *kind = S_ISDIR(info.st_mode) ? "folder" : S_ISFIFO(info.st_mode) ? "FIFO" : "device";
        error_set(e, "cannot read %s %s: it is a %s; name a regular file", what, path, kind);
    } else {
        *bytes = info.st_size;
        return fd;
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

void flush_output(FILE *f)
{
    bool failed = fflush(f) != 0 || ferror(f); // a full buffer may have failed before: nothing is in it now
    if (failed && f == stdout && !process.output_failure)
        process.output_failure = errno ? errno : EIO;
}

int finish_output(void)
{
    flush_output(stdout);
    if (process.output_failure && process.output_failure != EPIPE)
        fatal(EXIT_BAD_INPUT, "standard output: %s", strerror(process.output_failure));
    return process.output_failure ? EXIT_BAD_INPUT : 0;
}

double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- timeline of the start --------------------------------------------------------------------------------

enum { MAX_STRETCHES = 16 };
static struct {
    const char *name[MAX_STRETCHES];
    double seconds[MAX_STRETCHES], last;
    int count;
} timeline;

// Seconds since the process began, libraries loaded before main included; 0 where /proc does not tell.
static double process_age(void)
{
    char text[1024];
    unsigned long long start = 0;
    struct timespec now;
    FILE *f = fopen("/proc/self/stat", "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = 0;
    const char *p =
        strrchr(text, ')'); // the name before it may hold anything; "start time" is the 20th field after it
    for (int field = 0; p && field < 20; field++)
        p = strchr(p + 1, ' ');
    if (!p || sscanf(p, "%llu", &start) != 1 || clock_gettime(CLOCK_BOOTTIME, &now))
        return 0;
    double age =
        (double)now.tv_sec + 1e-9 * (double)now.tv_nsec - (double)start / (double)sysconf(_SC_CLK_TCK);
    return age > 0 && age < 3600 ? age : 0;
}

static double process_start(void) // on the clock of seconds_now
{
    static double start;
    if (!start)
        start = seconds_now() - process_age();
    return start;
}

double process_seconds(void)
{
    double start = process_start();
    return seconds_now() - start;
}

void timeline_mark(const char *stretch)
{
    int i = 0;
    double now = seconds_now();
    if (!timeline.last)
        timeline.last = process_start();
    while (i < timeline.count && strcmp(timeline.name[i], stretch))
        i++;
    assert(i < MAX_STRETCHES);
    if (i == timeline.count)
        timeline.name[timeline.count++] = stretch;
    timeline.seconds[i] += now - timeline.last;
    timeline.last = now;
}

char *timeline_text(void)
{
    char text[1024] = "";
    size_t n = 0;
    double sum = 0;
    for (int i = 0; i < timeline.count; i++) {
        sum += timeline.seconds[i];
        n += (size_t)snprintf(text + n, sizeof text - n, "%s %.2f, ", timeline.name[i], timeline.seconds[i]);
        if (n >= sizeof text)
            n = sizeof text - 1;
    }
    return format_string("%sin all %.2f s", text, sum);
}
