#include "llmc/ops/profile.h"
#include "llmc/ops/energy.h"
#include "llmc/ops/ops.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *name;
    int64_t calls;
    double flops, bytes;
    Graph **graph; // (graphs) one a call, from profile_record to profile_energy
    int graphs;
    double seconds, watts; // of all of them; mean power meanwhile
} Op;

enum { OUTSIDE = TRACE_TAGS - 1, NOT_TRACED = -1 };
static struct {
    bool on;
    int depth;   // of ops within ops
    Op *entered; // the outermost of them
    Op op[TRACE_TAGS];
    int count;
    double ms[TRACE_TAGS], busy_ms, exposed_ms, span_ms;
    int order[TRACE_TAGS]; // ops by falling time or energy
    bool recording;
    Stream recorded;
    double idle_watts;

    // the current micro-batch
    const int32_t *cu_seqlens;
    int N, token_rows, pair_rows;
} profile;

// ---- around every op --------------------------------------------------------------------------------------

static int find_op(const char *name)
{
    int i = 0;
    while (i < profile.count && profile.op[i].name != name)
        i++;
    assert(i < OUTSIDE);
    if (i == profile.count)
        profile.op[profile.count++] = (Op){.name = name};
    return i;
}

int profile_enter(const char *name, OpCost cost)
{
    if (profile.depth++)
        return NOT_TRACED;
    int op = profile.on || profile.recording ? find_op(name) : NOT_TRACED, tag = profile.on ? op : NOT_TRACED;
    trace_enter(tag, name);
    if (op != NOT_TRACED)
        profile.entered = &profile.op[op];
    if (profile.on) {
        profile.entered->calls++;
        profile_count(cost);
    }
    if (profile.recording)
        graph_begin(profile.recorded);
    return tag;
}

void profile_count(OpCost cost)
{
    if (!profile.on || !profile.depth)
        return;
    profile.entered->flops += cost.flops;
    profile.entered->bytes += cost.bytes;
}

void profile_leave(int *scope)
{
    if (--profile.depth)
        return;
    trace_leave(*scope);
    if (profile.recording) {
        Op *op = profile.entered;
        op->graph = xrealloc(op->graph, (size_t)(op->graphs + 1), sizeof *op->graph);
        op->graph[op->graphs++] = graph_end(profile.recorded);
    }
}

void profile_batch(const int32_t *cu_seqlens, int N, int token_rows, int pair_rows)
{
    profile.cu_seqlens = cu_seqlens;
    profile.N = N;
    profile.token_rows = token_rows;
    profile.pair_rows = pair_rows;
}

double profile_pairs(int rows, int window)
{
    double pairs = 0, reach = (double)window + 1;
    if (!profile.on || !profile.cu_seqlens)
        return 0;
    for (const int32_t *p = profile.cu_seqlens; *p < profile.N; p++) {
        double length = (double)(p[1] - p[0]) * rows / profile.N;
        pairs +=
            length <= reach ? length * (length + 1) / 2 : reach * (reach + 1) / 2 + (length - reach) * reach;
    }
    return pairs;
}

double profile_token_rows(void) { return profile.token_rows; }
double profile_pair_rows(void) { return profile.pair_rows; }

// ---- one stretch of ops -----------------------------------------------------------------------------------

bool profile_open(Error *e) { return trace_open(e); }

void profile_start(void)
{
    profile.count = 0;
    trace_start();
    profile.on = true;
}

static int by_falling_time(const void *a, const void *b)
{
    double x = profile.ms[*(const int *)a], y = profile.ms[*(const int *)b];
    return x < y ? 1 : x > y ? -1 : *(const int *)a - *(const int *)b;
}

void profile_stop(Stream s)
{
    profile.on = false;
    profile.cu_seqlens = NULL;
    profile.busy_ms = trace_stop(s, profile.ms, &profile.exposed_ms, &profile.span_ms);
    for (int i = 0; i < profile.count; i++)
        profile.order[i] = i;
    qsort(profile.order, (size_t)profile.count, sizeof *profile.order, by_falling_time);
}

double profile_device_ms(void)
{
    double sum = 0;
    for (int i = 0; i < TRACE_TAGS; i++)
        sum += profile.ms[i];
    return sum;
}

double profile_busy_ms(void) { return profile.busy_ms; }
double profile_span_ms(void) { return profile.span_ms; }
double profile_exposed_ms(void) { return profile.exposed_ms; }

// ---- energy -----------------------------------------------------------------------------------------------

void profile_record(Stream s)
{
    profile.count = 0;
    profile.recorded = s;
    profile.recording = true;
}

void profile_record_stop(void) { profile.recording = false; }

static void launch_all(Stream s, void *work)
{
    const Op *op = work;
    for (int i = 0; i < op->graphs; i++)
        graph_launch(op->graph[i], s);
}

static double joules(const Op *op) { return (op->watts - profile.idle_watts) * op->seconds; }

static int by_falling_energy(const void *a, const void *b)
{
    double x = joules(&profile.op[*(const int *)a]), y = joules(&profile.op[*(const int *)b]);
    return x < y ? 1 : x > y ? -1 : *(const int *)a - *(const int *)b;
}

void profile_energy(Stream s, double seconds)
{
    for (int i = 0; i < profile.count; i++) {
        Op *op = &profile.op[i];
        launch_all(s, op); // uploads the graphs
        stream_synchronize(s);
        double begin = seconds_now();
        launch_all(s, op);
        stream_synchronize(s);
        EnergyOfWork e = energy_of_work(s, launch_all, op, seconds_now() - begin, seconds);
        op->seconds = e.seconds;
        op->watts = e.watts;
        for (int k = 0; k < op->graphs; k++)
            graph_destroy(op->graph[k]);
        free(op->graph);
        op->graph = NULL;
        profile.order[i] = i;
    }
    profile.idle_watts = energy_idle_watts(seconds); // last: the clocks are still up
    qsort(profile.order, (size_t)profile.count, sizeof *profile.order, by_falling_energy);
}

char *profile_energy_line(int index)
{
    double all = 0, seconds = 0;
    for (int i = 0; i < profile.count; i++) {
        all += joules(&profile.op[i]);
        seconds += profile.op[i].seconds;
    }
    if (index == 0)
        return format_string("%-22s %6s %10s %6s %10s %10s %6s less %.0f W idle", "op", "calls", "us a call",
                             "W", "mJ a call", "J a step", "share", profile.idle_watts);
    if (index == profile.count + 1)
        return format_string(
            "%-22s %6s %10s %6s %10s %10.3f        %.3f with the idle power in these %.3f ms", "all", "", "",
            "", "", all, all + profile.idle_watts * seconds, 1e3 * seconds);
    if (index > profile.count)
        return NULL;
    const Op *op = &profile.op[profile.order[index - 1]];
    return format_string("%-22s %6d %10.2f %6.0f %10.4g %10.3f %5.1f%%", op->name, op->graphs,
                         1e6 * op->seconds / op->graphs, op->watts, 1e3 * joules(op) / op->graphs, joules(op),
                         100 * joules(op) / all);
}

// ---- what the machine can do ------------------------------------------------------------------------------

static double rate(Stream s, void (*work)(Stream, char *, size_t), char *memory, size_t n, double units)
{
    double best = 0;
    work(s, memory, n); // loads what it needs
    stream_synchronize(s);
    for (int round = 0; round < 5; round++) {
        double begin = seconds_now();
        work(s, memory, n);
        stream_synchronize(s);
        double now = units / (seconds_now() - begin);
        if (now > best)
            best = now;
    }
    return best;
}

enum { REPEATS = 10 }; // so that starting and waiting cost nothing beside the work

static void copy_work(Stream s, char *memory, size_t n)
{
    for (int i = 0; i < REPEATS; i++)
        copy_on_device(s, memory, memory + n, n);
}

static void product_work(Stream s, char *memory, size_t n)
{
    size_t bytes = n * n * sizeof(floatX);
    for (int i = 0; i < REPEATS; i++)
        matmul_forward(&(ProductContext){s, NULL},
                       &(Product){(floatX *)memory, (floatX *)(memory + bytes),
                                  (floatX *)(memory + 2 * bytes), NULL, NULL, (int)n, (int)n, (int)n, 1});
}

Ceilings profile_ceilings(Stream s, void *memory, size_t bytes)
{
    size_t half = bytes / 2 / 256 * 256, most = (size_t)1 << 30, n = backend_is_asynchronous() ? 8192 : 512;
    if (half > most)
        half = most;
    while (n > 16 && 3 * n * n * sizeof(floatX) > bytes)
        n /= 2;
    return (Ceilings){.copy = rate(s, copy_work, memory, half, 2.0 * REPEATS * (double)half),
                      .product = rate(s, product_work, memory, n,
                                      2.0 * REPEATS * (double)n * (double)n * (double)n)};
}

// ---- the table --------------------------------------------------------------------------------------------

// The op's rate in the unit that bounds it, and the share of the ceiling: the least time for its work over
// the time it took.
static void format_rate(char *text, size_t size, const Op *op, double ms, const Ceilings *c)
{
    double by_product = op->flops / c->product, by_copy = op->bytes / c->copy, seconds = 1e-3 * ms;
    *text = 0;
    if (!(ms > 0) || (!by_product && !by_copy))
        return;
    bool tera = c->product >= 1e12;
    if (by_product > by_copy)
        snprintf(text, size, "%8.1f %cFLOP/s %5.0f%%", (tera ? 1e-12 : 1e-9) * op->flops / seconds,
                 tera ? 'T' : 'G', 100 * by_product / seconds);
    else
        snprintf(text, size, "%8.1f GB/s    %5.0f%%", 1e-9 * op->bytes / seconds, 100 * by_copy / seconds);
}

char *profile_line(int index, int steps, const Ceilings *c)
{
    double all = profile_device_ms(), outside = profile.ms[OUTSIDE];
    char text[64];
    if (index == 0)
        return format_string("%-22s %6s %10s %6s %16s %6s of copy %.0f GB/s, product %.1f TFLOP/s", "op",
                             "calls", "ms a step", "share", "rate", "", 1e-9 * c->copy, 1e-12 * c->product);
    if (index == profile.count + 1)
        return format_string("%-22s %6s %10.3f %5.1f%%", "outside of ops", "", outside / steps,
                             100 * outside / all);
    if (index == profile.count + 2)
        return format_string("%-22s %6s %10.3f", "all", "", all / steps);
    if (index > profile.count)
        return NULL;
    int i = profile.order[index - 1];
    const Op *op = &profile.op[i];
    format_rate(text, sizeof text, op, profile.ms[i], c);
    return format_string("%-22s %6.4g %10.3f %5.1f%% %s", op->name, (double)op->calls / steps,
                         profile.ms[i] / steps, 100 * profile.ms[i] / all, text);
}
