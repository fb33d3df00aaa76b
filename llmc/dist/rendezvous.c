#include "llmc/dist/rendezvous.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *rank, *size, *local, *local_size;
} Names;
static const Names known[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};

// True and the number, when the variable is set and holds one from 0 to `most`.
static bool number(const char *name, int most, int *out)
{
    const char *text = getenv(name);
    char *end;
    if (!text || !*text)
        return false;
    long value = strtol(text, &end, 10);
    if (*end || value < 0 || value > most)
        return false;
    *out = (int)value;
    return true;
}

void rendezvous_first_host(const char *list, char *out, size_t capacity)
{
    size_t plain = strcspn(list, "[,");
    if (list[plain] == '[') {
        size_t first = strcspn(list + plain + 1, "-,]");
        snprintf(out, capacity, "%.*s%.*s", (int)plain, list, (int)first, list + plain + 1);
    } else {
        snprintf(out, capacity, "%.*s", (int)plain, list);
    }
}

// Runs that a batch system or mpirun starts side by side on one machine get ports of their own, from the
// number of their job.
static int usual_port(void)
{
    const char *pmix = getenv("PMIX_NAMESPACE"), *job = getenv("SLURM_JOB_ID"),
               *step = getenv("SLURM_STEP_ID");
    char text[256] = "";
    if (pmix)
        snprintf(text, sizeof text, "%s", pmix);
    else if (job)
        snprintf(text, sizeof text, "%s.%s", job, step ? step : "");
    return *text ? 20000 + (int)(fingerprint_bytes(0, text, strlen(text)) % 10000) : 29500;
}

static bool find_address(Rendezvous *r, Error *e)
{
    const char *given = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
    if (given && *given)
        snprintf(r->address, sizeof r->address, "%s", given);
    else if (!strncmp(r->source, "SLURM", 5) && nodes)
        rendezvous_first_host(nodes, r->address, sizeof r->address);
    else if (r->local_size == r->size)
        snprintf(r->address, sizeof r->address, "127.0.0.1");
    else
        return error_set(e,
                         "started as rank %d of %d (%s), but MASTER_ADDR, the machine of rank 0, is not set",
                         r->rank, r->size, r->source);
    r->port = usual_port();
    if (getenv("MASTER_PORT") && (!number("MASTER_PORT", 65535, &r->port) || r->port < 1))
        return error_set(e, "MASTER_PORT '%s' is no port number", getenv("MASTER_PORT"));
    const char *taken = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (taken && !strcmp(taken, "True"))
        r->port++;
    if (r->port > 65535)
        return error_set(e, "MASTER_PORT 65535 is torchrun's own, and the ranks need the port above it; "
                            "choose a lower one");
    return true;
}

// A rank that is not the first, and nobody says of how many: each process would train a whole run of its own.
static void check_alone(Error *e)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *rank = getenv(known[i].rank), *size = getenv(known[i].size);
        bool first = !rank || !*rank || !strcmp(rank, "0");
        // A shell inside of salloc has variables of the allocation, and is no task of a step.
        bool of_slurm = !strncmp(known[i].rank, "SLURM", 5), in_step = getenv("SLURM_STEP_ID") != NULL;
        bool said = size && *size;
        if (!first && !said && (!of_slurm || in_step))
            error_set(e, "%s is '%s', but %s, the number of ranks, is not set; set it, or unset %s",
                      known[i].rank, rank, known[i].size, known[i].rank);
    }
}

bool rendezvous_find(Rendezvous *r, Error *e)
{
    e->text[0] = 0;
    memset(r, 0, sizeof *r);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const Names *n = &known[i];
        const char *given = getenv(n->size);
        if (!given || !*given)
            continue;
        if (!number(n->size, 1 << 20, &r->size) || r->size < 1)
            return error_set(e, "%s is '%s' and not a number of ranks", n->size, given);
        if (r->size == 1)
            continue;
        r->source = n->size;
        if (r->size > MAX_RANKS)
            return error_set(e, "%s is %d ranks; this program drives at most 8", n->size, r->size);
        if (!number(n->rank, r->size - 1, &r->rank))
            return error_set(e, "%s is %d, but %s is '%s' and not a rank from 0 to %d", n->size, r->size,
                             n->rank, getenv(n->rank) ? getenv(n->rank) : "(not set)", r->size - 1);
        r->local_rank = r->rank;
        r->local_size = 0;
        number(n->local, MAX_RANKS, &r->local_rank);
        number(n->local_size, r->size, &r->local_size);
        return find_address(r, e);
    }
    check_alone(e);
    return false;
}
