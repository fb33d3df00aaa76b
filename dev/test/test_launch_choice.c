// Which devices --gpus names, and which rank a launcher's environment says that this process is.
#include "dev/test/tap.h"
#include "llmc/dist/launch.h"
#include "llmc/dist/rendezvous.h"
#include <stdlib.h>
#include <string.h>

static void chooses(const char *gpus, int visible, int micro_batches, int count, int first, const char *why)
{
    LaunchChoice c;
    Error e = {""};
    bool good = launch_choose(&c, gpus, visible, micro_batches, &e);
    bool right =
        count ? good && c.count == count && c.device[0] == first && (why ? c.left_out > 0 : !c.left_out)
              : !good && strstr(e.text, why);
    ok(right, "--gpus %s of %d, %d micro-batches: %s", gpus, visible, micro_batches, good ? c.why : e.text);
}

static void test_choice(void)
{
    int most[] = {1, 1, 2, 2, 4, 4, 4, 4, 8, 8};
    for (int visible = 0; visible <= 9; visible++) {
        bool odd = visible != most[visible] && visible > 0;
        chooses("all", visible, 8, most[visible], 0, odd ? "left" : NULL);
    }
    chooses("all", 8, 12, 4, 0, "left");
    chooses("all", 8, 3, 1, 0, "left");
    chooses("2", 4, 8, 2, 0, NULL);
    chooses("1,3", 4, 8, 2, 1, NULL);
    chooses("3,", 4, 8, 1, 3, NULL);
    chooses("3", 4, 8, 0, 0, "3 ranks; must be 1, 2, 4 or 8");
    chooses("0", 4, 8, 0, 0, "GPU 0 alone is --gpus 0,");
    chooses("0,", 4, 8, 1, 0, NULL);
    chooses("2", 1, 8, 0, 0, "device 1 does not exist");
    chooses("1,1", 4, 8, 2, 1, NULL); // NCCL refuses that, its stand-in on one GPU does not
    chooses("two", 4, 8, 0, 0, "neither a number");
    chooses("", 4, 8, 0, 0, "needs a number");
    chooses("4", 4, 6, 0, 0, "divide --micro-batches 6");
}

// A rank beside no number of ranks.
static void test_no_size(void)
{
    static const char *const names[][2] = {{"RANK", "WORLD_SIZE"},
                                           {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                           {"PMI_RANK", "PMI_SIZE"},
                                           {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};
    Rendezvous r;
    Error e;
    setenv("SLURM_STEP_ID", "0", 1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *rank = names[i][0], *size = names[i][1];
        unsetenv(size);
        setenv(rank, "1", 1);
        bool named = !rendezvous_find(&r, &e) && strstr(e.text, rank) && strstr(e.text, size);
        ok(named, "a rank of how many: %s", e.text);
        setenv(rank, "0", 1);
        ok(!rendezvous_find(&r, &e) && !*e.text, "%s 0 alone is one rank", rank);
        unsetenv(rank);
    }
    setenv("SLURM_PROCID", "1", 1);
    unsetenv("SLURM_STEP_ID");
    ok(!rendezvous_find(&r, &e) && !*e.text, "a shell inside of salloc is one rank");
    unsetenv("SLURM_PROCID");
}

static void test_last_port(void)
{
    Rendezvous r;
    Error e;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("MASTER_PORT", "65535", 1);
    ok(rendezvous_find(&r, &e) && r.port == 65535, "the last port");
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    ok(!rendezvous_find(&r, &e) && strstr(e.text, "MASTER_PORT 65535"), "and none above it: %s", e.text);
    setenv("MASTER_PORT", "65534", 1);
    ok(rendezvous_find(&r, &e) && r.port == 65535, "torchrun's port is left to it");
    const char *vars[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"};
    for (size_t i = 0; i < sizeof vars / sizeof *vars; i++)
        unsetenv(vars[i]);
}

static void test_environment(void)
{
    char host[64];
    const char *lists[][2] = {{"node7", "node7"},
                              {"a,b", "a"},
                              {"n[03-05,9],x", "n03"},
                              {"gpu[12]", "gpu12"},
                              {"x,n[3-4]", "x"}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        rendezvous_first_host(lists[i][0], host, sizeof host);
        ok(!strcmp(host, lists[i][1]), "the first host of %s is %s", lists[i][0], host);
    }
    const char *vars[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
    for (int i = 0; i < 4; i++)
        unsetenv(vars[i]);
    Rendezvous r;
    Error e;
    ok(!rendezvous_find(&r, &e) && !*e.text, "without variables there is one rank");
    setenv("SLURM_PROCID", "3", 1);
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    setenv("SLURM_LOCALID", "1", 1);
    setenv("SLURM_STEP_NODELIST", "gpu[07-08]", 1);
    bool found = rendezvous_find(&r, &e);
    ok(found && r.rank == 3 && r.size == 4 && r.local_rank == 1 && !strcmp(r.address, "gpu07") &&
           r.port == 29500,
       "srun's variables: rank %d of %d at %s", r.rank, r.size, r.address);
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
    ok(!rendezvous_find(&r, &e) && strstr(e.text, "MASTER_ADDR"), "mpirun on machines unknown: %s", e.text);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    ok(rendezvous_find(&r, &e) && r.rank == 1 && r.size == 2 && !strcmp(r.address, "127.0.0.1"),
       "mpirun on one machine");
    setenv("RANK", "5", 1);
    setenv("WORLD_SIZE", "4", 1);
    ok(!rendezvous_find(&r, &e) && strstr(e.text, "RANK is '5'"), "a rank outside: %s", e.text);
}

int main(void)
{
    PART(test_choice());
    PART(test_no_size());
    PART(test_last_port());
    PART(test_environment());
    return tap_done();
}
