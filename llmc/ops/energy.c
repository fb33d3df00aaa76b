#include "llmc/ops/energy.h"
#include "llmc/base/common.h"
#include <math.h>
#include <unistd.h>

enum { FEWEST_MOVES = 3, LONGEST = 10 }; // moves that a mean needs; so many times the seconds asked for
static const double QUEUED = 0.03;       // seconds of work that are queued at a time
static const double SHORTEST = 1e-6;     // of a piece, less than a launch takes

// Two readings of the counter: only moments at which it has moved are taken. Time and pieces of work are
// counted between the same moments as joules: a quotient of any two has no end that the other lacks.
typedef struct {
    double first_s, last_s;
    double first, last, seen;       // J
    double first_count, last_count; // pieces done
    int moves;
} EnergySpan;

// count: pieces done by now.
static void read_counter(EnergySpan *span, double count)
{
    double joules = backend_energy(), now = seconds_now();
    if (isnan(joules))
        fatal(EXIT_DEVICE, "the device's counter of energy cannot be read");
    if (!span->first_s) { // not known since when it has stood there
        span->first_s = now;
        span->seen = joules;
        return;
    }
    if (joules == span->seen)
        return;
    span->seen = joules;
    if (span->moves++ == 0) {
        span->first_s = now;
        span->first = joules;
        span->first_count = count;
    }
    span->last_s = now;
    span->last = joules;
    span->last_count = count;
}

// Whether to go on at `now` with what was to take until `end`.
static bool goes_on(const EnergySpan *span, double now, double end, double seconds)
{
    return now < end || (span->moves < FEWEST_MOVES && now < end + LONGEST * seconds);
}

static double watts(const EnergySpan *span)
{
    if (span->moves < FEWEST_MOVES)
        fatal(EXIT_DEVICE, "the device's counter of energy moved %d times only: ask for more seconds",
              span->moves);
    return (span->last - span->first) / (span->last_s - span->first_s);
}

double energy_idle_watts(double seconds)
{
    EnergySpan span = {0};
    double now = seconds_now(), end = now + seconds;
    for (; goes_on(&span, now, end, seconds); now = seconds_now()) {
        read_counter(&span, 0);
        usleep(10000);
    }
    return watts(&span);
}

// The next pieces are queued while those before run: the device never waits.
EnergyOfWork energy_of_work(Stream s, void (*queue)(Stream s, void *work), void *work, double once,
                            double seconds)
{
    EnergySpan span = {0};
    Event *done[2] = {event_create(), event_create()};
    int pieces = 1 + (int)(QUEUED / fmax(once, SHORTEST));
    double warm = seconds_now() + seconds / 4, end = warm + seconds, count = 0, now = 0;
    for (int i = 0; goes_on(&span, now, end, seconds); i++) {
        event_synchronize(done[i % 2]);
        now = seconds_now();
        if (now > warm)
            read_counter(&span, count);
        for (int k = 0; k < pieces; k++)
            queue(s, work);
        event_record(done[i % 2], s);
        count += i > 0 ? pieces : 0; // of the rounds before this one, which the next begins by awaiting
    }
    stream_synchronize(s);
    event_destroy(done[0]);
    event_destroy(done[1]);
    double power = watts(&span); // ends the program where the counter hardly moved
    return (EnergyOfWork){(span.last_s - span.first_s) / (span.last_count - span.first_count), power};
}
