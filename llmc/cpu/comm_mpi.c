// Collectives of the CPU program: MPI over host memory, or one rank when it was built without MPI.
#include "llmc/comm.h"
#include "llmc/rendezvous.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_MPI
#include <mpi.h>
#endif

// Ranks that do not know of each other would all train the same and write into one folder.
static void refuse_strangers(const char *cure)
{
    Rendezvous r;
    Error e;
    if (rendezvous_find(&r, &e) || *e.text)
        fatal(EXIT_USAGE, "started as one of %d ranks (%s), but ranks of the CPU program meet by MPI: %s", r.size, r.source, cure);
}

#ifdef HAVE_MPI
static int rank, size = 1;

static void check(int status, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int length;
    if (status == MPI_SUCCESS) return;
    MPI_Error_string(status, text, &length);
    fatal(EXIT_BAD_INPUT, "%s: %s", what, text);
}
#define CHECK(call) check(call, #call)

// MPI counts in int.
static int mpi_count(int64_t count)
{
    if (count > INT_MAX)
        fatal(EXIT_BAD_INPUT, "a collective of %lld elements is more than MPI counts; use a smaller model", (long long)count);
    return (int)count;
}

// A rank that fails alone ends the others; one that fails in company (a wrong option) need not.
static void abort_all(int status)
{
    if (size > 1) MPI_Abort(MPI_COMM_WORLD, status);
}

// MPI_Init costs a second and needs its environment: a program that was not started by mpirun or srun stays one rank.
static bool started_by_mpi(void)
{
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK");
}

void comm_open(int *argc, char ***argv)
{
    if (!started_by_mpi()) {
        refuse_strangers("start them by mpirun, or by srun with its PMIx");
        return;
    }
    CHECK(MPI_Init(argc, argv));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    CHECK(MPI_Comm_size(MPI_COMM_WORLD, &size));
    if (size == 1) refuse_strangers("the MPI that started them is not the one that this program was built with");
    set_abort_hook(abort_all);
}

void comm_close(void)
{
    if (started_by_mpi()) MPI_Finalize();
}

void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count)
{
    (void)s;
    if (size == 1) return;
    if (out != in + rank * count) {
        CHECK(MPI_Reduce_scatter_block(in, out, mpi_count(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD));
        return;
    }
    // In place, MPI leaves the result in chunk 0; it belongs into chunk `rank`.
    CHECK(MPI_Reduce_scatter_block(MPI_IN_PLACE, in, mpi_count(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD));
    if (rank) memmove(out, in, (size_t)count * sizeof *in);
}

void comm_all_gather(Stream s, void *buf, int64_t bytes)
{
    (void)s;
    if (size > 1) CHECK(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, buf, mpi_count(bytes), MPI_BYTE, MPI_COMM_WORLD));
}

// Reduce and broadcast: every rank gets the bits that rank 0 summed.
void comm_all_reduce(Stream s, float *buf, int64_t count)
{
    (void)s;
    if (size == 1) return;
    CHECK(MPI_Reduce(rank ? buf : MPI_IN_PLACE, buf, mpi_count(count), MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD));
    CHECK(MPI_Bcast(buf, mpi_count(count), MPI_FLOAT, 0, MPI_COMM_WORLD));
}

size_t comm_collect(void *buf, size_t bytes, int owner)
{
    enum { PART = 1 << 30 }; // MPI counts are int
    uint64_t total = bytes;
    if (owner == 0) return rank ? 0 : bytes;
    if (rank == owner) CHECK(MPI_Send(&total, 1, MPI_UINT64_T, 0, 0, MPI_COMM_WORLD));
    if (rank == 0) CHECK(MPI_Recv(&total, 1, MPI_UINT64_T, owner, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    if (rank && rank != owner) return 0;
    for (uint64_t at = 0; at < total; at += PART) {
        int part = (int)(total - at < PART ? total - at : PART);
        if (rank) CHECK(MPI_Send((char *)buf + at, part, MPI_BYTE, 0, 1, MPI_COMM_WORLD));
        else CHECK(MPI_Recv((char *)buf + at, part, MPI_BYTE, owner, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    return total;
}

double comm_sum(double x)
{
    double sum = x;
    if (size > 1) {
        CHECK(MPI_Reduce(&x, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD));
        CHECK(MPI_Bcast(&sum, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD));
    }
    return sum;
}

int64_t comm_max(int64_t x)
{
    int64_t max = x;
    if (size > 1) CHECK(MPI_Allreduce(&x, &max, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD));
    return max;
}

void comm_barrier(void)
{
    if (size > 1) CHECK(MPI_Barrier(MPI_COMM_WORLD));
}

int comm_rank(void) { return rank; }
int comm_size(void) { return size; }
const char *comm_description(void) { return size > 1 ? "MPI" : "one rank"; }

#else // without MPI there is one rank, and every collective is the identity

void comm_open(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    refuse_strangers("this one was built without it; install it and build again");
}
void comm_close(void) {}
void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count) { (void)s, (void)out, (void)in, (void)count; }
void comm_all_gather(Stream s, void *buf, int64_t bytes) { (void)s, (void)buf, (void)bytes; }
void comm_all_reduce(Stream s, float *buf, int64_t count) { (void)s, (void)buf, (void)count; }
size_t comm_collect(void *buf, size_t bytes, int owner)
{
    (void)buf, (void)owner;
    return bytes;
}
double comm_sum(double x) { return x; }
int64_t comm_max(int64_t x) { return x; }
void comm_barrier(void) {}
int comm_rank(void) { return 0; }
int comm_size(void) { return 1; }
const char *comm_description(void) { return "one rank (built without MPI)"; }
#endif

bool comm_any(bool mine) { return comm_max(mine) != 0; }

int comm_join(const CommOptions *o) // mpirun has started and connected the ranks
{
    if (strcmp(o->gpus, "all") && strcmp(o->gpus, "1"))
        fatal(EXIT_USAGE, "--gpus %s: this is the CPU program, whose ranks are started by mpirun -np N", o->gpus);
    return (int)max_i64(o->device, 0);
}

void comm_connect(void) {}
void comm_disconnect(void) {}
void comm_step(int step) { (void)step; }
void comm_patience(bool on) { (void)on; }
bool comm_interrupted(void) { return false; }
