#include "llmc/ops/energy.h"
#include "llmc/base/common.h"
#include <math.h>
#include <unistd.h>

enum { FEWEST_MOVES = 3 };
static const double QUEUED = 0.03; // seconds of work that are queued at a time

// Two readings of the counter: only moments at which it has moved are taken.
typedef struct {
    double first_s, last_s;
    double first, last, seen; // J
    int edges;
} EnergySpan;

static void read_counter(EnergySpan *span)
{
    double joules = backend_energy(), now = seconds_now();
    if (isnan(joules))
        fatal(EXIT_DEVICE, "NVML gives no energy of this GPU: those before Volta have no counter");
    if (!span->edges || joules == span->seen) {
        span->edges += !span->edges;
        span->seen = joules;
        return;
    }
    span->seen = joules;
    if (span->edges++ == 1) {
        span->first_s = now;
        span->first = joules;
    }
    span->last_s = now;
    span->last = joules;
}

static double watts(const EnergySpan *span)
{
    if (span->edges <= FEWEST_MOVES)
        fatal(EXIT_USAGE, "the counter of the GPU's energy moved %d times only: ask for more seconds",
              span->edges - 1);
    return (span->last - span->first) / (span->last_s - span->first_s);
}

double energy_idle_watts(double seconds)
{
    EnergySpan span = {0};
    for (double end = seconds_now() + seconds; seconds_now() < end; read_counter(&span))
        usleep(10000);
    return watts(&span);
}

// The next pieces are queued while those before run: the device never waits.
EnergyOfWork energy_of_work(Stream s, void (*queue)(Stream s, void *work), void *work, double once,
                            double seconds)
{
    EnergySpan span = {0};
    Event *done[2] = {event_create(), event_create()};
    int pieces = 1 + (int)(QUEUED / once);
    double warm = seconds_now() + seconds / 4, end = warm + seconds, count = 0, from = 0, now = 0;
    for (int i = 0; now < end; i++) {
        event_synchronize(done[i % 2]);
        now = seconds_now();
        if (now > warm) {
            read_counter(&span);
            from = from ? from : now;
            count += now > from ? pieces : 0;
        }
        for (int k = 0; k < pieces; k++)
            queue(s, work);
        event_record(done[i % 2], s);
    }
    stream_synchronize(s);
    event_destroy(done[0]);
    event_destroy(done[1]);
    return (EnergyOfWork){(now - from) / count, watts(&span)};
}
