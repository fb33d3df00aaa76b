// Memory of many tensors that are not all alive at once. A planning pass runs the model's functions without
// its ops and notes which op uses which tensor; offsets follow from the intervals. The scratch of an op is a
// tensor, too: alive while the op runs.
#pragma once
#include "llmc/base/common.h"

enum { MAX_PLANNED = 1024 };

typedef struct {
    int count;
    struct {
        size_t bytes;
        int first, last; // ops that use it, from the first to the last; last below 0: none
        size_t offset;
    } tensor[MAX_PLANNED];
    int ops; // seen so far
    size_t size;
} Plan;

// The tensors are taken twice, in the same order: while planning, from addresses that stand for them and hold
// nothing, then from memory.
typedef struct {
    Plan *plan;
    char *base; // NULL while planning
    int taken;
} PlanArena;

void plan_begin(Plan *p);
void *plan_take(PlanArena *a, size_t elements,
                size_t size); // 256-byte aligned; NULL in the second pass when no op uses it
// Alive from the first op to the last of all passes over the ops.
void *plan_take_pinned(PlanArena *a, size_t elements, size_t size);
// The next op uses these tensors, or parts of them; NULL and memory that is not planned are left out.
void plan_op(Plan *p, const void *const *tensors, int count);
// For tests, where memory is the host's and ops run at once: the next op is about to run, and the tensors
// that the plan has no use for from here on are overwritten in `base`, where all of them lie. ops: of this
// pass, 0 before the first.
void plan_spoil_dead(Plan *p, char *base);
// Offsets and size. What is alive at the op with the most bytes lies side by side; the others lie where they
// fit.
void plan_place(Plan *p);
size_t plan_most_alive(const Plan *p, int *op); // bytes alive at the op with the most; no plan needs less
