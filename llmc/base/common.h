// What every file may use: errors, checked allocation, small arithmetic. Nothing here knows of models or
// data.
//
// Errors. A function that can fail because of what the user gave it (a file, an option) returns false and
// writes one line into an Error: what, where, what to do. Only the program's own top level turns that line
// into an exit, through fatal(). Broken promises of our own code are assert()s.
#pragma once
#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char text[1024];
} Error;

// Writes `text` into out (size bytes) as one line that a terminal shows and does not obey: control characters
// and bytes that are no UTF-8 become \n, \t, \x1b. error_set, fatal, print_error and note do so with their
// whole message; whatever else prints a name from outside calls it.
void escape_text(char *out, size_t size, const char *text);

// Writes the message and returns false, so that a check reads `return error_set(e, "...")`.
bool error_set(Error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

// EXIT_DEVICE: a GPU has failed or no longer answers; the run can be resumed from its last checkpoint.
// EXIT_DIVERGED: a loss is no finite number.
enum { EXIT_BAD_INPUT = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 3, EXIT_DEVICE = 4, EXIT_DIVERGED = 5 };

// Prints "program: error: message" as one line on stderr, ends all ranks (see set_abort_hook) and exits with
// `status`. Ranks above 0 wait 0.3 s before they print, so that a fault that all of them meet is told once,
// by rank 0.
void fatal(int status, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

// The line alone, as fatal() would print it for `rank` (below 0: of the program as a whole).
void print_error(int rank, const char *format, ...) __attribute__((format(printf, 2, 3)));

// A line on stderr that starts with "note: "; for a slower or missing path taken. Of several ranks only rank
// 0 prints it: they take the same paths.
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Called by fatal() before it exits; comm sets it so that one failing rank ends the others.
void set_abort_hook(void (*hook)(int status));
// Gets the message of fatal() in place of stderr: launch sets it in its children, whose parent prints the
// first one only.
void set_error_sink(void (*sink)(int status, const char *message));
void set_program_name(const char *name, int rank); // rank < 0: not shown

// Never return NULL: running out of host memory is fatal, with the size in the message. Zeroed memory.
void *xcalloc(size_t count, size_t size);
void *xrealloc(void *p, size_t count, size_t size);
char *xstrdup(const char *s);

// printf into a fresh string, owned by the caller.
char *format_string(const char *format, ...) __attribute__((format(printf, 1, 2)));

// A finite number in the fewest digits that strtod reads back as the same double, owned by the caller.
char *format_number(double x);

// A regular file for reading (O_CLOEXEC): its descriptor, and its size in *bytes. -1 with "<what> <path>:
// ..." in `e` when it cannot be opened, or is a folder, a device, or a FIFO, which would keep the program
// waiting.
int open_regular(const char *what, const char *path, int64_t *bytes, Error *e);

// First of all in main: a closed standard stream is opened to /dev/null, else the next file or socket gets
// its number, and what is printed goes there.
void open_standard_streams(void);

// fflush. When standard output cannot be written, the first reason is kept.
void flush_output(FILE *f);
// At the end of a program that prints results: 0 when all of them are written. Else fatal(), or for a pipe
// that was closed, whose reader wants no more, EXIT_BAD_INPUT without a message.
int finish_output(void);

double seconds_now(void);     // monotonic clock
double process_seconds(void); // since the process began, libraries loaded before main included
uint64_t fingerprint_bytes(uint64_t seed, const void *bytes,
                           size_t count); // FNV-1a, to tell things apart; seed 0 begins

// Where the time from the start of the process to the first training step goes: each mark names the stretch
// since the one before it (the same name again adds to it). timeline_text: "program 0.11 s, device 0.52, ...,
// in all 3.20", owned by the caller.
void timeline_mark(const char *stretch); // static text
char *timeline_text(void);

// Makes a folder and those above it, unless they are there. 0, or the errno of what is in the way (ENOTDIR: a
// file).
int make_folders(const char *path);

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

#ifdef __cplusplus
}
#endif
