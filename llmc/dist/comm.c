// Ranks and their host values, the same for all backends: the ranks are started here or found in the
// environment, and the control channel carries what they tell each other.
#include "llmc/dist/comm_backend.h"
#include "llmc/dist/meeting.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static Control control = {.size = 1}; // a program that does not ask for ranks is the only one
static bool joined;
static Rendezvous started; // size 0: not by something else

Control *comm_control(void) { return &control; }
bool comm_is_met(void) { return started.size > 0; }
const char *comm_launcher(void) { return started.size ? started.source : NULL; }

void comm_open(void)
{
    Error e;
    if (!rendezvous_find(&started, &e)) {
        if (*e.text)
            fatal(EXIT_USAGE, "%s", e.text);
        started.size = 0;
    }
    control_init(&control, started.rank, started.size ? started.size : 1);
}

// Ranks of one machine share its cores, unless the user says how many threads each has. With all cores for
// each, four ranks drew the initial weights in 2.1 s, one alone in 0.65 s.
static void share_cores(int ranks)
{
#ifdef _OPENMP
    if (!getenv("OMP_NUM_THREADS"))
        omp_set_num_threads((int)max_i64(1, omp_get_num_procs() / ranks));
#else
    (void)ranks;
#endif
}

// Whoever started the ranks may have given each cores of its own.
static bool has_all_cores(void)
{
    cpu_set_t mine;
    return !sched_getaffinity(0, sizeof mine, &mine) && CPU_COUNT(&mine) == sysconf(_SC_NPROCESSORS_ONLN);
}

static int launch(const CommOptions *o)
{
    LaunchChoice c;
    Error e;
    if (!comm_choose_devices(o, &c, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    if (*c.why)
        note("%s", c.why);
    if (c.count == 1)
        return c.device[0];
    launch_ranks(&control, c.count, o->timeout);
    set_program_name("train_gpt", control.rank);
    share_cores(c.count);
    control_watch(&control, 0, comm_failure);
    return c.device[control.rank];
}

static int meet(const CommOptions *o)
{
    const char *only = comm_one_rank_only();
    if (only)
        fatal(EXIT_USAGE, "started as one of %d ranks (%s), %s", started.size, started.source, only);
    if (strcmp(o->gpus, "all") || o->ranks != 1)
        fatal(EXIT_USAGE, "--gpus and --ranks start ranks, but this is one of %d that were started (%s)",
              started.size, started.source);
    if (!launch_ranks_fit(started.size, o->micro_batches))
        fatal(EXIT_USAGE, "%d ranks (%s): must be 1, 2, 4 or 8 and divide --micro-batches %d", started.size,
              started.source, o->micro_batches);
    meet_ranks(&started, o->program, o->options, o->timeout, &control);
    if (started.local_size && has_all_cores())
        share_cores(started.local_size);
    control_watch(&control, o->timeout, comm_failure);
    return o->device >= 0 ? o->device : comm_device_of(started.local_rank);
}

int comm_join(const CommOptions *o)
{
    int device = started.size ? meet(o) : launch(o);
    joined = true;
    return device;
}

size_t comm_collect(void *buf, size_t bytes, size_t capacity, int owner)
{
    return control_collect(&control, buf, bytes, capacity, owner);
}

double comm_sum(double x) { return control_sum(&control, x); }
int64_t comm_max(int64_t x) { return control_max(&control, x); }

bool comm_agrees(uint64_t fingerprint)
{
    int64_t mine = (int64_t)(fingerprint >> 2) + 1;
    return mine == comm_max(control.rank ? 0 : mine);
}

bool comm_any(bool mine) { return control_max(&control, mine) != 0; }

void comm_barrier(void)
{
    if (joined)
        control_barrier(&control);
}

void comm_broadcast(void *buf, size_t bytes)
{
    if (joined)
        control_broadcast(&control, buf, bytes);
}

void comm_step(int step) { control_step(&control, step); }
void comm_patience(bool on) { control_patience(&control, on); }
bool comm_interrupted(void) { return launch_interrupted(); }
void comm_saved(void) { launch_saved(); }

void comm_begins(void)
{
    comm_barrier();
    launch_begins();
}

void comm_answer(void)
{
    if (control.rank == 0)
        launch_answer();
}

int comm_rank(void) { return control.rank; }
int comm_size(void) { return control.size; }

void comm_close(void)
{
    if (!joined || control.size == 1)
        return;
    comm_disconnect();
    control_close(&control);
}
