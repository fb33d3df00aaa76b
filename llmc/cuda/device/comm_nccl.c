// Collectives of the CUDA program on several GPUs: NCCL on device memory, the control channel's sockets on the host.
//
// NCCL is opened at run time and only by a program of several ranks: the library is a quarter of a gigabyte, and one GPU does not
// need it. Its calls block; what ends a rank whose peer is gone, or whose communicator has failed, is the control channel's watching
// thread and the launching process.
#include "llmc/comm.h"
#include "llmc/cuda/device/device.h"
#include "llmc/launch.h"
#include "llmc/rendezvous.h"
#include <ctype.h>
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <dlfcn.h>
#include <nccl.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define NCCL_CALLS(X)                                                                                                           \
    X(GetUniqueId) X(CommInitRankConfig) X(CommDestroy) X(CommGetAsyncError) X(ReduceScatter) X(AllGather) X(AllReduce)         \
    X(GetErrorString) X(GetLastError) X(GetVersion)
static struct {
#define MEMBER(name) __typeof__(nccl##name) *name;
    NCCL_CALLS(MEMBER)
#undef MEMBER
    _Atomic(ncclComm_t) comm; // NULL before comm_connect and after comm_disconnect
} nccl;

static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER; // the watching thread asks nccl.comm, which must not go meanwhile
static Control control;
static bool joined;
static Rendezvous started; // size 0: not by something else

// ---- ranks -------------------------------------------------------------------------------------------------------------

void comm_open(int *argc, char ***argv)
{
    Error e;
    (void)argc, (void)argv;
    if (!rendezvous_find(&started, &e)) {
        if (*e.text) fatal(EXIT_USAGE, "%s", e.text);
        started.size = 0;
    }
    control_init(&control, started.rank, started.size ? started.size : 1);
}

// Device files, /dev/nvidia0 and so on: where there is exactly one, the driver need not be asked. Some systems have GPUs and no
// such files.
static int device_files(void)
{
    int count = 0;
    DIR *dir = opendir("/dev");
    for (struct dirent *f; dir && (f = readdir(dir));) count += !strncmp(f->d_name, "nvidia", 6) && isdigit(f->d_name[6]);
    if (dir) closedir(dir);
    return count;
}

// What went wrong in the background; NULL: nothing.
static const char *failure(void)
{
    static char text[512];
    ncclResult_t state = ncclSuccess;
    pthread_mutex_lock(&asking);
    ncclComm_t comm = nccl.comm;
    bool good = !comm || nccl.CommGetAsyncError(comm, &state) != ncclSuccess || state == ncclSuccess || state == ncclInProgress;
    if (!good) snprintf(text, sizeof text, "NCCL: %s: %s", nccl.GetErrorString(state), nccl.GetLastError(comm));
    pthread_mutex_unlock(&asking);
    return good ? NULL : text;
}

static int launch(const CommOptions *o)
{
    LaunchChoice c;
    Error e;
    bool all = !strcmp(o->gpus, "all");
    if (o->device >= 0 && !all) fatal(EXIT_USAGE, "--gpus and --device exclude each other");
    if (o->device >= 0) return o->device;
    int visible = device_files() == 1 ? 1 : launch_ask(backend_device_count);
    if (!launch_choose(&c, o->gpus, visible, o->micro_batches, &e)) fatal(EXIT_USAGE, "%s", e.text);
    if (c.left_out) note("%s", c.why);
    if (c.count == 1) return c.device[0];
    launch_ranks(&control, c.count, o->timeout, o->nothing_to_save);
    set_program_name("train_gpt", control.rank);
#ifdef _OPENMP // with all cores for each of them, four ranks drew the initial weights in 2.1 s, one alone in 0.65 s
    if (!getenv("OMP_NUM_THREADS")) omp_set_num_threads((int)max_i64(1, omp_get_num_procs() / c.count));
#endif
    control_watch(&control, 0, failure);
    return c.device[control.rank];
}

static int meet(const CommOptions *o)
{
    if (strcmp(o->gpus, "all"))
        fatal(EXIT_USAGE, "--gpus starts ranks, but this is one of %d that were started (%s)", started.size, started.source);
    if (!launch_ranks_fit(started.size, o->micro_batches))
        fatal(EXIT_USAGE, "%d ranks (%s): must be 1, 2, 4 or 8 and divide --micro-batches %d", started.size, started.source,
              o->micro_batches);
    rendezvous_meet(&started, o->program, o->options, o->timeout, &control);
    control_watch(&control, o->timeout, failure);
    if (o->device >= 0) return o->device;
    return backend_device_count() == 1 ? 0 : started.local_rank; // one: each rank was given its own to see
}

int comm_join(const CommOptions *o)
{
    int device = started.size ? meet(o) : launch(o);
    joined = true;
    return device;
}

// ---- device memory -----------------------------------------------------------------------------------------------------

static void check(ncclResult_t status, const char *what)
{
    if (status == ncclSuccess) return;
    fatal(EXIT_BAD_INPUT, "NCCL: %s: %s: %s", what, nccl.GetErrorString(status), nccl.GetLastError(nccl.comm));
}
#define CHECK(call) check(nccl.call, #call)

static void open_library(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) fatal(EXIT_BAD_INPUT, "%d GPUs need NCCL: %s; install it, add its folder to LD_LIBRARY_PATH, or use --gpus 1",
                        control.size, dlerror());
#define FIND(name)                                                                                                              \
    if (!(nccl.name = (__typeof__(nccl.name))dlsym(library, "nccl" #name)))                                                     \
        fatal(EXIT_BAD_INPUT, "the NCCL library lacks nccl" #name ": install version 2.14 or later");
    NCCL_CALLS(FIND)
#undef FIND
}

void comm_connect(void)
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    if (control.size == 1 || nccl.comm) return;
    setenv("NCCL_NVLS_ENABLE", "0", 0); // sums inside the switch have no fixed order; whoever sets the variable decides
    open_library();
    memset(&id, 0, sizeof id);
    if (!control.rank) CHECK(GetUniqueId(&id));
    control_broadcast(&control, &id, sizeof id);
    CHECK(CommInitRankConfig(&comm, control.size, id, control.rank, &config));
    nccl.comm = comm;
    control_barrier(&control);
}

// What one product's time moves over NVLink, and the multiprocessors that NCCL takes (its channels on a Hopper with NVSwitch).
enum { BYTES_PER_PRODUCT = 64 << 20, COLLECTIVE_SMS = 24 };

void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count)
{
    int64_t sent = (control.size - 1) * count * (int64_t)sizeof(float);
    if (control.size > 1) device_share(COLLECTIVE_SMS, (int)ceil_div(sent, BYTES_PER_PRODUCT));
    if (control.size > 1) CHECK(ReduceScatter(in, out, (size_t)count, ncclFloat, ncclSum, nccl.comm, s));
}

void comm_all_gather(Stream s, void *buf, int64_t bytes)
{
    if (control.size > 1) CHECK(AllGather((char *)buf + control.rank * bytes, buf, (size_t)bytes, ncclChar, nccl.comm, s));
}

void comm_all_reduce(Stream s, float *buf, int64_t count)
{
    device_share(0, 0); // the last reduction of a step: the next step's products begin as those of the first
    if (control.size > 1) CHECK(AllReduce(buf, buf, (size_t)count, ncclFloat, ncclSum, nccl.comm, s));
}

// ---- host memory -------------------------------------------------------------------------------------------------------

size_t comm_collect(void *buf, size_t bytes, int owner) { return control_collect(&control, buf, bytes, owner); }
double comm_sum(double x) { return control_sum(&control, x); }
int64_t comm_max(int64_t x) { return control_max(&control, x); }
bool comm_any(bool mine) { return control_max(&control, mine) != 0; }

void comm_barrier(void)
{
    if (joined) control_barrier(&control);
}

void comm_step(int step) { control_step(&control, step); }
void comm_patience(bool on) { control_patience(&control, on); }
bool comm_interrupted(void) { return launch_interrupted(); }
int comm_rank(void) { return control.rank; }
int comm_size(void) { return control.size; }

const char *comm_description(void)
{
    static char text[256];
    int version = 0;
    if (control.size == 1) return "one GPU";
    if (nccl.comm) nccl.GetVersion(&version);
    const char *nvls = getenv("NCCL_NVLS_ENABLE");
    snprintf(text, sizeof text, "NCCL %d.%d.%d, NVLS %s, %s%s", version / 10000, version / 100 % 100, version % 100,
             nvls && strcmp(nvls, "0") ? "on" : "off", started.size ? "started by " : "one process per GPU, started here",
             started.size ? started.source : "");
    return text;
}

void comm_disconnect(void)
{
    pthread_mutex_lock(&asking);
    ncclComm_t comm = nccl.comm;
    nccl.comm = NULL;
    pthread_mutex_unlock(&asking);
    if (!comm) return;
    CHECK(CommDestroy(comm));
    control_barrier(&control);
}

void comm_close(void)
{
    if (!joined || control.size == 1) return;
    comm_disconnect();
    control_close(&control);
}
