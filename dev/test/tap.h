// Minimal TAP producer: every test program prints one "ok"/"not ok" line per check and the plan last; run
// them under prove.
#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static int tap_count, tap_failed;

static bool ok(bool passed, const char *format, ...) __attribute__((format(printf, 2, 3), unused));
static bool ok(bool passed, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    printf("%s %d - ", passed ? "ok" : "not ok", ++tap_count);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
    tap_failed += !passed;
    return passed;
}

// value <= limit, with both in the line; NaN fails.
static bool ok_at_most(double value, double limit, const char *what) __attribute__((unused));
static bool ok_at_most(double value, double limit, const char *what)
{
    return ok(value <= limit, "%s: %.4g <= %.4g", what, value, limit);
}

// The larger of two errors; NaN is larger than any number. (fmax would leave it out.)
static double larger_error(double worst, double error) __attribute__((unused));
static double larger_error(double worst, double error)
{
    return isnan(error) ? INFINITY : fmax(worst, error);
}

static void skip(const char *why) __attribute__((unused));
static void skip(const char *why) { printf("ok %d # SKIP %s\n", ++tap_count, why); }

static int tap_done(void) __attribute__((unused));
static int tap_done(void)
{
    printf("1..%d\n", tap_count);
    return tap_failed != 0;
}
