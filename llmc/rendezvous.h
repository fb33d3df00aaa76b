// Ranks that something else has started, on one machine or many: who they are, from the environment, and how they meet over TCP.
//
// Looked for, in this order: RANK, WORLD_SIZE, LOCAL_RANK (torchrun's names); OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK (mpirun);
// PMI_RANK, PMI_SIZE, MPI_LOCALRANKID (MPICH's mpiexec); SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID (srun). They meet
// where rank 0 listens: MASTER_ADDR, else the first node of Slurm's step, else this machine when all ranks are on it; port
// MASTER_PORT, else one that follows from the job's number (PMIX_NAMESPACE, SLURM_JOB_ID), else 29500. A port that torchrun
// itself serves (TORCHELASTIC_USE_AGENT_STORE) is left to it: the next is taken.
#pragma once
#include "llmc/control.h"

typedef struct {
    int rank, size, local_rank;
    int local_size; // ranks on this machine; 1 when nobody says
    char address[256];
    int port;
    const char *source; // the variable that said so
} Rendezvous;

// False with an empty line: not started as one of several ranks. False with a line: started so, but something is missing.
bool rendezvous_find(Rendezvous *r, Error *e);

// Connects the control channel of all ranks, or ends with one line: no answer within `timeout` seconds, the port taken, two
// programs on one port, ranks of another program or with other options.
//   program, options  hashes that must be the same on all ranks
void rendezvous_meet(const Rendezvous *r, uint64_t program, uint64_t options, double timeout, Control *c);

// First host of a Slurm node list, "node[03-05,9],x" -> "node03". out (capacity): a string.
void rendezvous_first_host(const char *list, char *out, size_t capacity);
