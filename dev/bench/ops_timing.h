// Timing of benches of ops: graphs of an op's calls, in bursts, in turn with other ops, or alone for energy.
// Before this file: write_shape(), what a row says of its shape.
#pragma once
#include "dev/bench/figures.h"
#include "dev/bench/ops_arrays.h"
#include "llmc/ops/energy.h"
#include <cuda_runtime_api.h>
#include <math.h>
#include <string.h>

enum {
    REPEATS = 6, // calls in a graph
    ROUNDS = 4,  // launches of the graph
};
static char **filters; // up to a NULL
static double sustained;
static double energy_seconds; // 0: no energy is measured
static double idle_watts;
static double copy_rate, product_rate; // bytes and operations a second

// Takes --sustained SECONDS or --energy SECONDS from the front of `filters`; false when it is neither.
static bool timing_option(void)
{
    double *seconds = !strcmp(*filters, "--sustained") ? &sustained
                      : !strcmp(*filters, "--energy")  ? &energy_seconds
                                                       : NULL;
    if (!seconds || !filters[1] || (*seconds = atof(filters[1])) <= 0)
        return false;
    filters++;
    return true;
}

static Graph *graph_of(void (*op)(void)) // REPEATS calls
{
    now = 0;
    op();
    stream_synchronize(stream);
    graph_begin(stream);
    for (int i = 0; i < REPEATS; i++) {
        now = i % SETS;
        op();
    }
    return graph_end(stream);
}

static double milliseconds(cudaEvent_t begin, cudaEvent_t end)
{
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    return ms;
}

static double seconds_of(void (*op)(void)) // of one call
{
    cudaEvent_t begin, end;
    double best = INFINITY;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    Graph *g = graph_of(op);
    for (int i = 0; i < ROUNDS; i++) {
        cudaEventRecord(begin, stream);
        graph_launch(g, stream);
        cudaEventRecord(end, stream);
        cudaEventSynchronize(end);
        if (i)
            best = fmin(best, milliseconds(begin, end)); // the first launch uploads the graph
    }
    graph_destroy(g);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return best / REPEATS * 1e-3;
}

static void print_row(const char *name, double t, double bytes, double operations)
{
    char shape[96];
    write_shape(shape, sizeof shape, sustained ? ", sustained" : "");
    figure(name, shape, t * 1e6, "us");
    printf("%-34s %9.1f us", name, t * 1e6);
    if (bytes > 0)
        printf("  %7.0f GB/s    %5.1f%% of copy", bytes / t * 1e-9, 100 * bytes / t / copy_rate);
    if (operations > 0)
        printf("  %7.0f TFLOP/s %5.1f%% of product", operations / t * 1e-12,
               100 * operations / t / product_rate);
    printf("\n");
    fflush(stdout);
}

static void launch_graph(Stream s, void *graph) { graph_launch(graph, s); }

// Runs the op alone for energy_seconds.
static void report_energy(const char *name, void (*op)(void), double once)
{
    char shape[96];
    Graph *g = graph_of(op);
    EnergyOfWork e = energy_of_work(stream, launch_graph, g, once * REPEATS, energy_seconds);
    double seconds = e.seconds / REPEATS, mJ = (e.watts - idle_watts) * seconds * 1e3;
    write_shape(shape, sizeof shape, ", alone at the power limit");
    figure(name, shape, seconds * 1e6, "us");
    figure(name, shape, e.watts, "W");
    figure(name, shape, mJ, "mJ");
    printf("%-34s %9.1f us %6.0f W %9.2f mJ\n", name, seconds * 1e6, e.watts, mJ);
    fflush(stdout);
    graph_destroy(g);
}

// Before the first report().
static void timing_begin(void)
{
    if (!energy_seconds)
        return;
    idle_watts = energy_idle_watts(energy_seconds);
    figure("idle", "clocks up", idle_watts, "W");
    printf("idle %.0f W, taken off from every op's mJ\n", idle_watts);
}

static struct {
    const char *name;
    double bytes, operations, ms;
    Graph *graph;
    cudaEvent_t begin, end;
} turn[48]; // what takes turns when sustained
static int turns;

// bytes or operations 0: not the measure for this op
static void report(const char *name, void (*op)(void), double bytes, double operations)
{
    bool wanted = !*filters;
    for (char **f = filters; *f; f++)
        wanted |= strstr(name, *f) != NULL;
    if (!wanted)
        return;
    if (energy_seconds) {
        report_energy(name, op, seconds_of(op));
        return;
    }
    if (!sustained) {
        print_row(name, seconds_of(op), bytes, operations);
        return;
    }
    assert(turns < (int)(sizeof turn / sizeof *turn));
    turn[turns].name = name;
    turn[turns].bytes = bytes;
    turn[turns].operations = operations;
    turn[turns].graph = graph_of(op);
    cudaEventCreate(&turn[turns].begin);
    cudaEventCreate(&turn[turns].end);
    turns++;
}

// After the last: what --sustained has collected.
static void take_turns(void)
{
    int counted = 0;
    for (double start = seconds_now(), at = start; at < start + sustained; at = seconds_now()) {
        for (int i = 0; i < turns; i++) {
            cudaEventRecord(turn[i].begin, stream);
            graph_launch(turn[i].graph, stream);
            cudaEventRecord(turn[i].end, stream);
        }
        stream_synchronize(stream);
        if (at < start + sustained / 3)
            continue;
        for (int i = 0; i < turns; i++)
            turn[i].ms += milliseconds(turn[i].begin, turn[i].end);
        counted++;
    }
    for (int i = 0; i < turns; i++)
        print_row(turn[i].name, turn[i].ms / counted / REPEATS * 1e-3, turn[i].bytes, turn[i].operations);
}
