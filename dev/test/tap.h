// Minimal TAP producer: every test program prints one "ok"/"not ok" line per check and the plan last; run
// them under prove. A main whose calls stand in PART(...) can run some of them: those with TEST_FILTER in
// their text, TEST_FILTER=qkv build/cpu/test_ops.
#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PART(call) (tap_wanted(#call) ? (void)(call) : (void)0)

static int tap_count, tap_failed, tap_parts;

// Whether a part of that name is to be run.
static bool tap_wanted(const char *name) __attribute__((unused));
static bool tap_wanted(const char *name)
{
    const char *filter = getenv("TEST_FILTER");
    bool wanted = !filter || strstr(name, filter);
    tap_parts += wanted;
    return wanted;
}

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
    const char *filter = getenv("TEST_FILTER");
    if (filter && *filter && !tap_parts) {
        fprintf(stderr, "no part of this test has \"%s\" in its name\n", filter);
        return 2;
    }
    printf("1..%d\n", tap_count);
    return tap_failed != 0;
}
