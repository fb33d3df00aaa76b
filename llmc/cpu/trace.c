// Tracing on the CPU: ops are done when they return, so the clock around them is their time.
#include "llmc/ops/profile.h"
#include <string.h>

static double ms[TRACE_TAGS], begin, started;

bool trace_open(Error *e)
{
    (void)e;
    return true;
}

void trace_start(void)
{
    memset(ms, 0, sizeof ms);
    started = seconds_now();
}

void trace_enter(int tag, const char *name)
{
    (void)name;
    if (tag >= 0)
        begin = seconds_now();
}

void trace_leave(int tag)
{
    if (tag >= 0)
        ms[tag] += 1e3 * (seconds_now() - begin);
}

double trace_stop(Stream s, double result[TRACE_TAGS], double *exposed, double *span)
{
    double busy = 0;
    (void)s;
    memcpy(result, ms, sizeof ms);
    *span = 1e3 * (seconds_now() - started);
    *exposed = 0; // nothing runs beside anything: collectives are in the table
    for (int i = 0; i < TRACE_TAGS; i++)
        busy += ms[i];
    return busy;
}
