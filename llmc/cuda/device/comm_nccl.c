// Collectives of the CUDA program on several GPUs: NCCL on device memory, the control channel's sockets on
// the host.
//
// NCCL is opened at run time and only by a program of several ranks: the library is a quarter of a gigabyte,
// and one GPU does not need it. Its calls block; what ends a rank whose peer is gone, or whose communicator
// has failed, is the control channel's watching thread and the launching process.
#include "llmc/dist/comm_backend.h"
#include "llmc/ops/costs.h"
#include "llmc/cuda/device/device.h"
#include <ctype.h>
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// clang-format off
#define NCCL_CALLS(X) \
    X(GetUniqueId) X(CommInitRankConfig) X(CommDestroy) X(CommGetAsyncError) X(ReduceScatter) \
    X(AllGather) X(AllReduce) X(Send) X(Recv) X(GroupStart) X(GroupEnd) X(GetErrorString) \
    X(GetLastError) X(GetVersion)
// clang-format on
static struct {
#define MEMBER(name) __typeof__(nccl##name) *name;
    NCCL_CALLS(MEMBER)
#undef MEMBER
    _Atomic(ncclComm_t) comm; // NULL before comm_connect and after comm_disconnect
} nccl;

static pthread_mutex_t asking =
    PTHREAD_MUTEX_INITIALIZER; // the watching thread asks nccl.comm, which must not go meanwhile

// ---- ranks ------------------------------------------------------------------------------------------------

const char *comm_one_rank_only(void) { return NULL; }

// Device files, /dev/nvidia0 and so on: where there is exactly one, the driver need not be asked. Some
// systems have GPUs and no such files.
static int device_files(void)
{
    int count = 0;
    DIR *dir = opendir("/dev");
    for (struct dirent *f; dir && (f = readdir(dir));)
        count += !strncmp(f->d_name, "nvidia", 6) && isdigit(f->d_name[6]);
    if (dir)
        closedir(dir);
    return count;
}

const char *comm_failure(void)
{
    static char text[512];
    ncclResult_t state = ncclSuccess;
    pthread_mutex_lock(&asking);
    ncclComm_t comm = nccl.comm;
    bool good = !comm || nccl.CommGetAsyncError(comm, &state) != ncclSuccess || state == ncclSuccess ||
                state == ncclInProgress;
    if (!good)
        snprintf(text, sizeof text, "NCCL: %s: %s", nccl.GetErrorString(state), nccl.GetLastError(comm));
    pthread_mutex_unlock(&asking);
    return good ? NULL : text;
}

bool comm_choose_devices(const CommOptions *o, LaunchChoice *c, Error *e)
{
    bool all = !strcmp(o->gpus, "all");
    if (o->ranks != 1)
        return error_set(e, "--ranks %d: this is the CUDA program; --gpus N starts several processes",
                         o->ranks);
    if (o->device >= 0 && !all)
        return error_set(e, "--gpus and --device exclude each other");
    if (o->device >= 0) {
        *c = (LaunchChoice){.count = 1, .device = {o->device}};
        return true;
    }
    int visible = device_files() == 1 ? 1 : launch_ask(backend_device_count);
    return launch_choose(c, o->gpus, visible, o->micro_batches, e);
}

// One device: each rank was given its own to see.
int comm_device_of(int local_rank) { return backend_device_count() == 1 ? 0 : local_rank; }

// ---- device memory ----------------------------------------------------------------------------------------

static void check(ncclResult_t status, const char *what)
{
    if (status == ncclSuccess)
        return;
    device_check_failure(what, __FILE__, __LINE__);
    fatal(EXIT_BAD_INPUT, "NCCL: %s: %s: %s", what, nccl.GetErrorString(status),
          nccl.GetLastError(nccl.comm));
}
#define CHECK(call) check(nccl.call, #call)

// An older library than the header does not know all fields of ncclConfig_t; another major version has
// another interface.
static void check_version(void)
{
    int version = 0;
    if (nccl.GetVersion(&version) != ncclSuccess || version / 10000 != NCCL_MAJOR ||
        version / 100 < NCCL_VERSION_CODE / 100)
        fatal(EXIT_BAD_INPUT,
              "the NCCL library is version %d.%d.%d, and this program was built for %d.%d.%d: install that "
              "or a later one of the "
              "same major version (LD_LIBRARY_PATH finds it), or build again",
              version / 10000, version / 100 % 100, version % 100, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
}

static void open_library(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fatal(EXIT_BAD_INPUT,
              "%d GPUs need NCCL: %s; install it, add its folder to LD_LIBRARY_PATH, or use --gpus 1",
              comm_control()->size, dlerror());
#define FIND(name) \
    if (!(nccl.name = (__typeof__(nccl.name))dlsym(library, "nccl" #name))) \
        fatal(EXIT_BAD_INPUT, "the NCCL library lacks nccl" #name ": install version 2.14 or later");
    NCCL_CALLS(FIND)
#undef FIND
    check_version();
}

// NCCL's id, which holds an address and a random number, goes over the control channel and so only to ranks
// that have proved who they are. NCCL's own connections, which it makes with that id, are checked by that
// number alone, and nothing on them is encrypted: they belong on a network of the machines' own
// (NCCL_SOCKET_IFNAME chooses it).
void comm_connect(void)
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    if (comm_control()->size == 1 || nccl.comm)
        return;
    setenv("NCCL_NVLS_ENABLE", "0",
           0); // sums inside the switch have no fixed order; whoever sets the variable decides
    open_library();
    memset(&id, 0, sizeof id);
    if (!comm_control()->rank)
        CHECK(GetUniqueId(&id));
    control_broadcast(comm_control(), &id, sizeof id);
    CHECK(CommInitRankConfig(&comm, comm_control()->size, id, comm_control()->rank, &config));
    nccl.comm = comm;
    control_barrier(comm_control());
}

// What one product's time moves over NVLink, and the multiprocessors that NCCL takes (its channels on a
// Hopper with NVSwitch).
enum { BYTES_PER_PRODUCT = 64 << 20, COLLECTIVE_SMS = 24 };

SharedSms comm_shared_sms(int64_t sent)
{
    return (SharedSms){COLLECTIVE_SMS, (int)ceil_div(sent, BYTES_PER_PRODUCT)};
}

void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count)
{
    OP_SCOPE(comm_reduce_scatter, comm_size(), count);
    if (comm_control()->size > 1)
        CHECK(ReduceScatter(in, out, (size_t)count, ncclFloat, ncclSum, nccl.comm, s));
}

void comm_all_gather(Stream s, void *buf, int64_t bytes)
{
    OP_SCOPE(comm_all_gather, comm_size(), bytes);
    if (comm_control()->size > 1)
        CHECK(AllGather((char *)buf + comm_control()->rank * bytes, buf, (size_t)bytes, ncclChar, nccl.comm,
                        s));
}

void comm_all_to_all(Stream s, void *out, const void *in, int64_t bytes)
{
    OP_SCOPE(comm_all_to_all, comm_size(), bytes);
    int size = comm_control()->size;
    if (size == 1) {
        copy_on_device(s, out, in, (size_t)bytes);
        return;
    }
    CHECK(GroupStart());
    for (int r = 0; r < size; r++) {
        CHECK(Send((const char *)in + r * bytes, (size_t)bytes, ncclChar, r, nccl.comm, s));
        CHECK(Recv((char *)out + r * bytes, (size_t)bytes, ncclChar, r, nccl.comm, s));
    }
    CHECK(GroupEnd());
}

void comm_all_reduce(Stream s, float *buf, int64_t count)
{
    OP_SCOPE(comm_all_reduce, comm_size(), count);
    if (comm_control()->size > 1)
        CHECK(AllReduce(buf, buf, (size_t)count, ncclFloat, ncclSum, nccl.comm, s));
}

const char *comm_description(void)
{
    static char text[256];
    int version = 0;
    if (comm_control()->size == 1)
        return "one GPU";
    if (nccl.comm)
        nccl.GetVersion(&version);
    const char *nvls = getenv("NCCL_NVLS_ENABLE");
    snprintf(text, sizeof text, "NCCL %d.%d.%d, NVLS %s, %s%s", version / 10000, version / 100 % 100,
             version % 100, nvls && strcmp(nvls, "0") ? "on" : "off",
             comm_launcher() ? "started by " : "one process per GPU, started here",
             comm_launcher() ? comm_launcher() : "");
    return text;
}

void comm_disconnect(void)
{
    pthread_mutex_lock(&asking);
    ncclComm_t comm = nccl.comm;
    nccl.comm = NULL;
    pthread_mutex_unlock(&asking);
    if (!comm)
        return;
    CHECK(CommDestroy(comm));
    control_barrier(comm_control());
}
