#include "llmc/logger.h"
#include "llmc/command.h"
#include "llmc/utf8.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DIGITS = 9 }; // bring back any fp32

typedef struct {
    char *path; // owned
    int fd;     // -1: given up
    off_t good; // end of the last complete record
} LogFile;

struct Logger {
    LogFile log, json;
    char *uuid, *resumed; // owned; resumed: NULL in a new run
    json_t *options; // NULL once written
    double tokens_per_step;

    // console
    bool terminal, line_open; // line_open: the cursor stands behind a line that may be rewritten
    double shown_at;          // time of the last line; 0: none yet
    double last_ms;           // train_ms of the last event; NAN: none yet
    double mean_ms;           // smoothed time of a step; NAN: no step measured yet
};

// ---- files -------------------------------------------------------------------------------------------------------------

static void give_up(LogFile *f)
{
    note("cannot write %s: %s; the run goes on without it", f->path, strerror(errno));
    if (f->fd < 0) return;
    if (ftruncate(f->fd, f->good) != 0) note("%s ends in the middle of a line", f->path);
    close(f->fd);
    f->fd = -1;
}

// Straight to the kernel, one record at a time: what was written stays when the process is killed.
static void append(LogFile *f, const char *text, size_t bytes)
{
    for (size_t done = 0; f->fd >= 0 && done < bytes;) {
        ssize_t n = write(f->fd, text + done, bytes - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            give_up(f);
        else
            done += (size_t)n;
    }
    f->good += (off_t)bytes;
}

static void append_line(LogFile *f, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append_line(LogFile *f, const char *format, ...)
{
    char line[4096];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (n < 0) return;
    size_t length = strlen(line);
    line[length] = '\n';
    append(f, line, length + 1);
}

static void create_file(LogFile *f, const char *folder, const char *uuid, const char *ending)
{
    f->path = format_string("%s/%s.%s", folder, uuid, ending);
    f->fd = open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (f->fd < 0) give_up(f);
}

// ---- head of the log ---------------------------------------------------------------------------------------------------

static void append_separator(LogFile *f)
{
    char line[101];
    memset(line, '=', 100);
    line[100] = '\n';
    append(f, line, sizeof line);
}

static const char shell_plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./=:,+@%-";

// As a shell would need it typed; control characters become "?", so that it stays one line.
static void append_command(LogFile *f, int argc, char **argv)
{
    append(f, "command line:", 13);
    for (int i = 0; i < argc; i++) {
        bool plain = argv[i][0] && argv[i][strspn(argv[i], shell_plain)] == 0;
        size_t n = 0;
        char *text = xcalloc(4 * strlen(argv[i]) + 4, 1); // a quote takes four
        text[n++] = ' ';
        if (!plain) text[n++] = '\'';
        for (const char *p = argv[i]; *p; p++) {
            if (*p == '\'')
                n += (size_t)sprintf(text + n, "'\\''");
            else
                text[n++] = iscntrl((unsigned char)*p) ? '?' : *p;
        }
        if (!plain) text[n++] = '\'';
        append(f, text, n);
        free(text);
    }
    append(f, "\n", 1);
}

// A driver in trouble can keep nvidia-smi waiting for ever, and the other ranks with it.
static void append_nvidia_smi(LogFile *f, double seconds)
{
    bool late;
    char *const argv[] = {"nvidia-smi", NULL}, *text = command_output(argv, seconds, &late);
    if (text) {
        append(f, text, strlen(text));
        if (text[strlen(text) - 1] != '\n') append(f, "\n", 1);
    } else if (late) {
        append_line(f, "nvidia-smi: no answer within %.3g s", seconds);
    } else {
        append_line(f, "nvidia-smi: no NVIDIA GPU or driver on this machine");
    }
    free(text);
}

static void append_head(LogFile *f, const LogHead *head)
{
    append(f, program_source, program_source_size);
    append_separator(f);
    const char *line;
    for (int i = 0; (line = head->version_line(i)); i++) append_line(f, "%s", line);
    append_line(f, "git commit: %s", program_commit);
    append_command(f, head->argc, head->argv);
    if (head->resumed) append_line(f, "resumed: %s", head->resumed);
    append_nvidia_smi(f, head->patience);
    append_separator(f);
}

// ---- JSON lines --------------------------------------------------------------------------------------------------------

static json_t *text_value(const char *text)
{
    size_t bytes, replaced;
    char *valid = utf8_repair(text, strlen(text), &bytes, &replaced); // paths may be in any encoding
    json_t *value = json_stringn(valid, bytes);
    free(valid);
    return value;
}

// The shortest decimal that reads back as the same number, of an fp32 as the same fp32, but DIGITS digits at most: append_json
// prints as many, without zeros at their end.
static json_t *number_value(double x)
{
    char text[40];
    bool fp32 = (float)x == x;
    if (!isfinite(x)) return json_null();
    for (int digits = 1; digits <= DIGITS; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x || (fp32 && strtof(text, NULL) == (float)x)) break;
    }
    return json_real(strtod(text, NULL));
}

static void append_json(LogFile *f, json_t *record)
{
    char *line = json_dumps(record, JSON_COMPACT | JSON_REAL_PRECISION(DIGITS));
    if (!line) fatal(EXIT_BAD_INPUT, "out of host memory for a line of the log");
    size_t n = strlen(line);
    line[n] = '\n'; // with its end in one write
    append(f, line, n + 1);
    free(line);
    json_decref(record);
}

static json_t *event(const char *kind)
{
    json_t *record = json_object();
    json_object_set_new(record, "event", json_string(kind));
    return record;
}

// Every event comes through here, so that the options are in front of the first one.
static void append_event(Logger *l, json_t *record)
{
    if (l->options) {
        json_t *first = event("options");
        json_object_set_new(first, "run", json_string(l->uuid));
        if (l->resumed) json_object_set_new(first, "resumed", text_value(l->resumed));
        json_object_set_new(first, "options", l->options);
        l->options = NULL;
        append_json(&l->json, first);
    }
    append_json(&l->json, record);
}

// ---- console -----------------------------------------------------------------------------------------------------------

// A line of its own, below the one that is being rewritten.
static void show(Logger *l, const char *text)
{
    char shown[4096];
    escape_text(shown, sizeof shown, text);
    printf("%s%s\n", l->line_open ? "\n" : "", shown);
    fflush(stdout);
    l->line_open = false;
}

static void format_rate(char *text, size_t size, double tokens_per_second)
{
    static const char *const units[] = {"", "k", "M", "G"};
    int u = 0;
    while (tokens_per_second >= 999.5 && u < 3) tokens_per_second /= 1000, u++;
    snprintf(text, size, "%.3g%s tokens/s", tokens_per_second, units[u]);
}

static void format_eta(char *text, size_t size, double seconds)
{
    long long s = seconds < 1e9 ? (long long)(seconds + 0.5) : 1000000000;
    if (s >= 3600)
        snprintf(text, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, size, "%lld:%02lld", s / 60, s % 60);
}

static bool time_to_show(const Logger *l, bool last, double now)
{
    return last || !l->shown_at || now - l->shown_at >= (l->terminal ? 0.1 : 5);
}

static void show_progress(Logger *l, int step, int total, double loss)
{
    double now = seconds_now();
    if (!time_to_show(l, step == total, now)) return;
    char rate[48] = "", eta[32] = "", timing[128] = "";
    if (l->mean_ms > 0) { // false for NAN: the first step after a resume has no start
        if (l->tokens_per_step) format_rate(rate, sizeof rate, 1e3 * l->tokens_per_step / l->mean_ms);
        format_eta(eta, sizeof eta, 1e-3 * l->mean_ms * (total - step));
        snprintf(timing, sizeof timing, "  %.*f ms%s%s  eta %s", l->mean_ms < 1000 ? 1 : 0, l->mean_ms, *rate ? "  " : "", rate,
                 eta);
    }
    printf("%sstep %d/%d  loss %.4f%s%s", l->terminal ? "\r\033[K" : "", step, total, loss, timing, l->terminal ? "" : "\n");
    fflush(stdout);
    l->line_open = l->terminal;
    l->shown_at = now;
}

// ---- the interface -----------------------------------------------------------------------------------------------------

Logger *logger_open(const char *folder, const char *uuid, int rank, const LogHead *head)
{
    if (rank != 0) return NULL;
    Logger *l = xcalloc(1, sizeof *l);
    l->options = json_object();
    l->terminal = isatty(STDOUT_FILENO);
    l->last_ms = l->mean_ms = NAN;
    l->uuid = xstrdup(uuid);
    l->resumed = head->resumed ? xstrdup(head->resumed) : NULL;
    create_file(&l->log, folder, l->uuid, "txt");
    if (l->log.fd >= 0) append_head(&l->log, head);
    create_file(&l->json, folder, l->uuid, "jsonl");
    char *message = format_string("log %s", l->log.path);
    if (logger_path(l)) show(l, message);
    free(message);
    return l;
}

void logger_close(Logger *l)
{
    if (!l) return;
    append_event(l, event("end"));
    if (l->line_open) printf("\n");
    if (l->log.fd >= 0) close(l->log.fd);
    if (l->json.fd >= 0) close(l->json.fd);
    free(l->log.path);
    free(l->json.path);
    free(l->uuid);
    free(l->resumed);
    free(l);
}

const char *logger_path(const Logger *l) { return l && l->log.fd >= 0 ? l->log.path : NULL; }

void logger_option(Logger *l, const char *name, const char *value)
{
    if (!l) return;
    assert(l->options && "options come first");
    json_object_set_new(l->options, name, text_value(value));
}

void logger_tokens_per_step(Logger *l, double tokens)
{
    if (l) l->tokens_per_step = tokens;
}

static void say(Logger *l, const char *text)
{
    show(l, text);
    json_t *record = event("message");
    json_object_set_new(record, "text", text_value(text));
    append_event(l, record);
}

void logger_message(Logger *l, const char *format, ...)
{
    if (!l) return;
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say(l, text);
}

void logger_profile(Logger *l, const char *format, ...)
{
    if (!l) return;
    char text[2048] = "profile: ";
    size_t n = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, sizeof text - n, format, args);
    va_end(args);
    append_line(&l->log, "%s", text);
    say(l, text);
}

void logger_validation(Logger *l, int step, int total, double loss, double train_ms)
{
    if (!l) return;
    char line[200];
    snprintf(line, sizeof line, "step:%d/%d val_loss:%.4f train_time:%.0fms step_avg:%.2fms", step, total, loss, train_ms,
             train_ms / (step > 1 ? step : 1));
    append_line(&l->log, "%s", line);
    show(l, line);
    l->last_ms = train_ms;
    json_t *record = event("validation");
    json_object_set_new(record, "step", json_integer(step));
    json_object_set_new(record, "val_loss", number_value(loss));
    json_object_set_new(record, "train_ms", number_value(train_ms));
    append_event(l, record);
}

void logger_step(Logger *l, int step, int total, double train_ms, double loss, double lr)
{
    if (!l) return;
    double ms = train_ms - l->last_ms;
    l->last_ms = train_ms;
    if (isfinite(ms)) l->mean_ms = isnan(l->mean_ms) ? ms : 0.9 * l->mean_ms + 0.1 * ms;
    append_line(&l->log, "step:%d/%d train_time:%.0fms step_avg:%.2fms", step, total, train_ms, train_ms / (step > 1 ? step : 1));
    json_t *record = event("step");
    json_object_set_new(record, "step", json_integer(step));
    json_object_set_new(record, "loss", number_value(loss));
    json_object_set_new(record, "lr", number_value(lr));
    json_object_set_new(record, "ms", number_value(ms));
    json_object_set_new(record, "train_ms", number_value(train_ms));
    append_event(l, record);
    show_progress(l, step, total, loss);
}

void logger_validation_data(Logger *l, const char *sha256, int vocab_size, int64_t tokens)
{
    if (!l) return;
    char line[200];
    snprintf(line, sizeof line, "validation data: %s%s, vocabulary of %d ids, %lld tokens predicted",
             sha256 ? "sha256 " : "SHA-256 not known", sha256 ? sha256 : "", vocab_size, (long long)tokens);
    append_line(&l->log, "%s", line);
    logger_message(l, "%s", line);
}

void logger_failure(Logger *l, const char *text)
{
    if (!l) return;
    json_t *record = event("failure");
    json_object_set_new(record, "text", text_value(text));
    append_event(l, record);
    if (l->line_open) printf("\n");
    l->line_open = false;
}

void logger_memory(Logger *l, double allocated, double reserved)
{
    if (!l) return;
    char line[200];
    snprintf(line, sizeof line, "peak memory allocated: %.0f MiB reserved: %.0f MiB", allocated, reserved);
    append_line(&l->log, "%s", line);
    show(l, line);
    json_t *record = event("memory");
    json_object_set_new(record, "allocated_mib", number_value(allocated));
    json_object_set_new(record, "reserved_mib", number_value(reserved));
    append_event(l, record);
}
