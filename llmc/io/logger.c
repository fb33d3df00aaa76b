#include "llmc/io/logger.h"
#include "llmc/base/command.h"
#include "llmc/io/append_file.h"
#include "llmc/io/event_file.h"
#include "llmc/io/json_record.h"
#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct Logger {
    AppendFile log, json;
    EventFile *events;      // NULL without --tensorboard
    JsonRecord *options;    // the first event, open; NULL once written
    double tokens_per_step; // of the last step

    // console
    bool verbose, terminal, line_open; // line_open: the cursor stands behind a line that may be rewritten
    double shown_at;                   // time of the last line; 0: none yet
    double last_ms;                    // train_ms of the last event; NAN: none yet
    double mean_ms;                    // smoothed time of a step; NAN: no step measured yet
};

// ---- files ------------------------------------------------------------------------------------------------

static void append_line(AppendFile *f, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append_line(AppendFile *f, const char *format, ...)
{
    char line[4096];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (n < 0)
        return;
    size_t length = strlen(line);
    line[length] = '\n';
    append_file_write(f, line, length + 1);
}

// ---- head of the log --------------------------------------------------------------------------------------

static void append_separator(AppendFile *f)
{
    char line[101];
    memset(line, '=', 100);
    line[100] = '\n';
    append_file_write(f, line, sizeof line);
}

static const char shell_plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./=:,+@%-";

// As a shell would need it typed; control characters become "?", so that it stays one line.
static void append_command(AppendFile *f, int argc, char **argv)
{
    append_file_write(f, "command line:", 13);
    for (int i = 0; i < argc; i++) {
        bool plain = argv[i][0] && argv[i][strspn(argv[i], shell_plain)] == 0;
        size_t n = 0;
        char *text = xcalloc(4 * strlen(argv[i]) + 4, 1); // a quote takes four
        text[n++] = ' ';
        if (!plain)
            text[n++] = '\'';
        for (const char *p = argv[i]; *p; p++) {
            if (*p == '\'')
                n += (size_t)sprintf(text + n, "'\\''");
            else
                text[n++] = iscntrl((unsigned char)*p) ? '?' : *p;
        }
        if (!plain)
            text[n++] = '\'';
        append_file_write(f, text, n);
        free(text);
    }
    append_file_write(f, "\n", 1);
}

// A driver in trouble can keep nvidia-smi waiting for ever, and the other ranks with it.
static void append_nvidia_smi(AppendFile *f, double seconds)
{
    bool late;
    char *const argv[] = {"nvidia-smi", NULL}, *text = command_output(argv, seconds, &late);
    if (text) {
        append_file_write(f, text, strlen(text));
        if (text[strlen(text) - 1] != '\n')
            append_file_write(f, "\n", 1);
    } else if (late) {
        append_line(f, "nvidia-smi: no answer within %.3g s", seconds);
    } else {
        append_line(f, "nvidia-smi: no NVIDIA GPU or driver on this machine");
    }
    free(text);
}

static void append_head(AppendFile *f, const LogHead *head)
{
    append_file_write(f, head->source, head->source_size);
    append_separator(f);
    const char *line;
    for (int i = 0; (line = head->version_line(i)); i++)
        append_line(f, "%s", line);
    append_line(f, "git commit: %s", head->commit);
    append_command(f, head->argc, head->argv);
    if (head->resumed)
        append_line(f, "resumed: %s", head->resumed);
    append_nvidia_smi(f, head->patience);
    append_separator(f);
}

// ---- JSON lines -------------------------------------------------------------------------------------------

static void append_json(AppendFile *f, JsonRecord *record)
{
    size_t bytes;
    char *line = json_line(record, &bytes); // with its end in one write
    append_file_write(f, line, bytes);
    free(line);
}

// Every event comes through here, so that the options are in front of the first one.
static void append_event(Logger *l, JsonRecord *record)
{
    if (l->options) {
        json_end(l->options);
        append_json(&l->json, l->options);
        l->options = NULL;
    }
    append_json(&l->json, record);
}

// ---- console ----------------------------------------------------------------------------------------------

// A line of its own, below the one that is being rewritten.
static void show(Logger *l, const char *text)
{
    char shown[4096];
    escape_text(shown, sizeof shown, text);
    printf("%s%s\n", l->line_open ? "\n" : "", shown);
    flush_output(stdout);
    l->line_open = false;
}

static void format_rate(char *text, size_t size, double tokens_per_second)
{
    static const char *const units[] = {"", "k", "M", "G"};
    int u = 0;
    while (tokens_per_second >= 999.5 && u < 3) {
        tokens_per_second /= 1000;
        u++;
    }
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

// Share of what the GPUs could compute in `ms`; 0 when that is not known.
static double mfu(const StepReport *r, double ms)
{
    return r->peak_flops && ms > 0 ? 1e3 * r->flops / ms / r->peak_flops : 0;
}

static void show_progress(Logger *l, const StepReport *r)
{
    double now = seconds_now(), share = mfu(r, l->mean_ms);
    if (!time_to_show(l, r->step == r->total, now))
        return;
    char rate[48] = "", used[32] = "", eta[32] = "", timing[160] = "";
    if (l->mean_ms > 0) { // false for NAN: the first step after a resume has no start
        format_rate(rate, sizeof rate, 1e3 * r->tokens / l->mean_ms);
        if (share)
            snprintf(used, sizeof used, "  MFU %.1f%%", 100 * share);
        format_eta(eta, sizeof eta, 1e-3 * l->mean_ms * r->tokens_left / r->tokens);
        snprintf(timing, sizeof timing, "  %.*f ms  %s%s  eta %s", l->mean_ms < 1000 ? 1 : 0, l->mean_ms,
                 rate, used, eta);
    }
    printf("%sstep %d/%d  loss %.4f  lr %.3g%s%s", l->terminal ? "\r\033[K" : "", r->step, r->total, r->loss,
           r->rate, timing, l->terminal ? "" : "\n");
    flush_output(stdout);
    l->line_open = l->terminal;
    l->shown_at = now;
}

// ---- the interface ----------------------------------------------------------------------------------------

Logger *logger_open(const char *folder, const char *uuid, int rank, const LogHead *head)
{
    if (rank != 0)
        return NULL;
    Logger *l = xcalloc(1, sizeof *l);
    l->options = json_record("options");
    json_text(l->options, "run", uuid);
    if (head->resumed)
        json_text(l->options, "resumed", head->resumed);
    json_begin(l->options, "options");
    l->terminal = isatty(STDOUT_FILENO);
    l->verbose = head->verbose;
    l->last_ms = l->mean_ms = NAN;
    append_file_create(&l->log, format_string("%s/%s.txt", folder, uuid));
    if (l->log.fd >= 0)
        append_head(&l->log, head);
    append_file_create(&l->json, format_string("%s/%s.jsonl", folder, uuid));
    if (head->tensorboard)
        l->events = event_file_create(folder, uuid, head->steps_done ? head->steps_done + 1 : 0);
    char *message = format_string("log %s", l->log.path);
    if (logger_path(l))
        show(l, message);
    free(message);
    return l;
}

void logger_close(Logger *l)
{
    if (!l)
        return;
    append_event(l, json_record("end"));
    if (l->line_open)
        printf("\n");
    append_file_close(&l->log);
    append_file_close(&l->json);
    if (l->events)
        event_file_close(l->events);
    free(l);
}

const char *logger_path(const Logger *l) { return l && l->log.fd >= 0 ? l->log.path : NULL; }

void logger_option(Logger *l, const char *name, const char *value, OptionKind kind)
{
    if (!l)
        return;
    assert(l->options && "options come first");
    if (kind == KIND_NUMBER)
        json_number(l->options, name, strtod(value, NULL));
    else if (kind == KIND_FLAG)
        json_flag(l->options, name, *value == '1');
    else
        json_text(l->options, name, value);
}

// prefix: in front of the text; log: a line of the log as well.
static void say(Logger *l, const char *prefix, bool log, bool console, const char *format, va_list args)
{
    char text[2048];
    size_t n = strlen(prefix);
    memcpy(text, prefix, n);
    vsnprintf(text + n, sizeof text - n, format, args);
    if (log)
        append_line(&l->log, "%s", text);
    if (console)
        show(l, text);
    JsonRecord *record = json_record("message");
    json_text(record, "text", text);
    append_event(l, record);
}

void logger_message(Logger *l, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (l)
        say(l, "", false, true, format, args);
    va_end(args);
}

void logger_detail(Logger *l, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (l)
        say(l, "", false, l->verbose, format, args);
    va_end(args);
}

void logger_profile(Logger *l, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (l)
        say(l, "profile: ", true, true, format, args);
    va_end(args);
}

void logger_validation(Logger *l, int step, int total, double loss, double train_ms)
{
    if (!l)
        return;
    char line[200];
    snprintf(line, sizeof line, "step:%d/%d val_loss:%.4f train_time:%.0fms step_avg:%.2fms", step, total,
             loss, train_ms, train_ms / (step > 1 ? step : 1));
    append_line(&l->log, "%s", line);
    show(l, line);
    l->last_ms = train_ms;
    JsonRecord *record = json_record("validation");
    json_number(record, "step", step);
    json_number(record, "val_loss", loss);
    json_number(record, "train_ms", train_ms);
    append_event(l, record);
    if (l->events)
        event_file_write(l->events, step, &(EventScalar){"loss/validation", loss}, 1);
}

void logger_evaluation(Logger *l, int step, int total, const Evaluated *r)
{
    if (!l)
        return;
    char *text = evaluated_text(r), *line = format_string("evaluation: step:%d/%d %s", step, total, text);
    append_line(&l->log, "%s", line);
    show(l, line);
    free(text);
    free(line);
    JsonRecord *record = json_record("evaluation");
    json_number(record, "step", step);
    evaluated_json(r, record);
    append_event(l, record);
    for (int i = 0; l->events && i < r->count; i++) {
        char *tag = format_string("%s/%s", r->task, r->measure[i].name);
        event_file_write(l->events, step, &(EventScalar){tag, r->measure[i].value}, 1);
        free(tag);
    }
}

static void json_step(Logger *l, const StepReport *r, double ms)
{
    JsonRecord *record = json_record("step");
    json_number(record, "step", r->step);
    json_number(record, "loss", r->loss);
    json_number(record, "lr", r->rate);
    json_number(record, "momentum", r->momentum);
    json_number(record, "ms", ms);
    if (mfu(r, ms))
        json_number(record, "mfu", mfu(r, ms));
    json_number(record, "tokens", r->tokens);
    json_number(record, "tokens_left", r->tokens_left);
    json_number(record, "train_ms", r->train_ms);
    append_event(l, record);
}

static void tensorboard_step(const Logger *l, const StepReport *r, double ms)
{
    EventScalar scalars[6] = {{"loss/train", r->loss},
                              {"schedule/learning_rate", r->rate},
                              {"schedule/momentum", r->momentum}};
    int n = 3;
    if (!l->events)
        return;
    if (isfinite(ms))
        scalars[n++] = (EventScalar){"speed/step_ms", ms};
    if (ms > 0)
        scalars[n++] = (EventScalar){"speed/tokens_per_second", 1e3 * r->tokens / ms};
    if (mfu(r, ms))
        scalars[n++] = (EventScalar){"speed/mfu", mfu(r, ms)};
    event_file_write(l->events, r->step, scalars, n);
}

void logger_step(Logger *l, const StepReport *r)
{
    if (!l)
        return;
    double ms = r->train_ms - l->last_ms;
    l->last_ms = r->train_ms;
    if (r->tokens != l->tokens_per_step)
        l->mean_ms = NAN; // the mean is of steps of one size
    l->tokens_per_step = r->tokens;
    if (isfinite(ms))
        l->mean_ms = isnan(l->mean_ms) ? ms : 0.9 * l->mean_ms + 0.1 * ms;
    append_line(&l->log, "step:%d/%d train_time:%.0fms step_avg:%.2fms", r->step, r->total, r->train_ms,
                r->train_ms / (r->step > 1 ? r->step : 1));
    json_step(l, r, ms);
    tensorboard_step(l, r, ms);
    show_progress(l, r);
}

void logger_validation_data(Logger *l, const char *sha256, int vocab_size, int64_t tokens)
{
    if (!l)
        return;
    char line[200];
    snprintf(line, sizeof line, "validation data: %s%s, vocabulary of %d ids, %lld tokens predicted",
             sha256 ? "sha256 " : "SHA-256 not known", sha256 ? sha256 : "", vocab_size, (long long)tokens);
    append_line(&l->log, "%s", line);
    logger_message(l, "%s", line);
}

void logger_failure(Logger *l, const char *text)
{
    if (!l)
        return;
    JsonRecord *record = json_record("failure");
    json_text(record, "text", text);
    append_event(l, record);
    if (l->line_open)
        printf("\n");
    l->line_open = false;
}

void logger_memory(Logger *l, double allocated, double reserved)
{
    if (!l)
        return;
    char line[200];
    snprintf(line, sizeof line, "peak memory allocated: %.0f MiB reserved: %.0f MiB", allocated, reserved);
    append_line(&l->log, "%s", line);
    show(l, line);
    JsonRecord *record = json_record("memory");
    json_number(record, "allocated_mib", allocated);
    json_number(record, "reserved_mib", reserved);
    append_event(l, record);
}
