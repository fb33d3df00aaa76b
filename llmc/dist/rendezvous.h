// Ranks that something else has started, on one machine or many: who they are and where they meet, from the
// environment.
//
// Looked for, in this order: RANK, WORLD_SIZE, LOCAL_RANK (torchrun's names); OMPI_COMM_WORLD_RANK, _SIZE,
// _LOCAL_RANK (mpirun); PMI_RANK, PMI_SIZE, MPI_LOCALRANKID (MPICH's mpiexec); SLURM_PROCID,
// SLURM_STEP_NUM_TASKS, SLURM_LOCALID (srun). They meet where rank 0 listens: MASTER_ADDR, else the first
// node of Slurm's step, else this machine when all ranks are on it; port MASTER_PORT, else one that follows
// from the job's number (PMIX_NAMESPACE, SLURM_JOB_ID), else 29500. A port that torchrun itself serves
// (TORCHELASTIC_USE_AGENT_STORE) is left to it: the next is taken.
#pragma once
#include "llmc/dist/control.h"

typedef struct {
    int rank, size, local_rank;
    int local_size; // ranks on this machine; 0 when nobody says
    char address[256];
    int port;
    const char *source; // the variable that said so
} Rendezvous;

// False with an empty line: not started as one of several ranks. False with a line: started so, but something
// is missing, as is the number of ranks beside a rank that is not 0.
bool rendezvous_find(Rendezvous *r, Error *e);

// First host of a Slurm node list, "node[03-05,9],x" -> "node03". out (capacity): a string.
void rendezvous_first_host(const char *list, char *out, size_t capacity);
