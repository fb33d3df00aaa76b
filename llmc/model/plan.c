#include "llmc/model/plan.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 };
static const uintptr_t SPAN = (uintptr_t)1 << 40; // between two stand-ins: more than any tensor has

void plan_begin(Plan *p) { memset(p, 0, sizeof *p); }

static void *stand_in(int tensor) { return (void *)(SPAN * (uintptr_t)(tensor + 1)); }

static void *take(PlanArena *a, size_t bytes, bool pinned)
{
    Plan *p = a->plan;
    int i = a->taken++;
    if (!a->base) {
        assert(i == p->count && i < MAX_PLANNED);
        p->count++;
        p->tensor[i].bytes = (size_t)round_up((int64_t)bytes, ALIGN);
        p->tensor[i].first = pinned ? 0 : INT_MAX;
        p->tensor[i].last = pinned ? INT_MAX : -1;
        return stand_in(i);
    }
    assert(i < p->count && bytes <= p->tensor[i].bytes);
    return p->tensor[i].last < 0 ? NULL : a->base + p->tensor[i].offset;
}

void *plan_take(PlanArena *a, size_t elements, size_t size) { return take(a, elements * size, false); }
void *plan_take_pinned(PlanArena *a, size_t elements, size_t size) { return take(a, elements * size, true); }

void plan_op(Plan *p, const void *const *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        int64_t at = (int64_t)((uintptr_t)tensors[i] / SPAN) - 1;
        if (at < 0 || at >= p->count)
            continue;
        if (p->ops < p->tensor[at].first)
            p->tensor[at].first = p->ops;
        if (p->ops > p->tensor[at].last)
            p->tensor[at].last = p->ops;
    }
    p->ops++;
}

void plan_spoil_dead(Plan *p, char *base)
{
    for (int i = 0; i < p->count; i++) {
        if (p->tensor[i].last == p->ops - 1 && p->ops)
            memset(base + p->tensor[i].offset, 0x7f, p->tensor[i].bytes);
    }
    p->ops++;
}

// ---- offsets ----------------------------------------------------------------------------------------------

static bool is_alive(const Plan *p, int i, int op)
{
    return p->tensor[i].first <= op && op <= p->tensor[i].last;
}

size_t plan_most_alive(const Plan *p, int *op)
{
    size_t most = 0;
    *op = 0;
    for (int k = 0; k < p->ops; k++) {
        size_t sum = 0;
        for (int i = 0; i < p->count; i++)
            sum += is_alive(p, i, k) ? p->tensor[i].bytes : 0;
        if (sum > most) {
            most = sum;
            *op = k;
        }
    }
    return most;
}

static bool overlap(const Plan *p, int i, int k)
{
    return p->tensor[i].first <= p->tensor[k].last && p->tensor[k].first <= p->tensor[i].last;
}

// Where tensor i meets none of the placed ones that are alive with it: the lowest offset.
static void put(Plan *p, bool *placed, int i)
{
    size_t at = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (int k = 0; k < p->count; k++) {
            size_t begin = p->tensor[k].offset, end = begin + p->tensor[k].bytes;
            if (!placed[k] || !overlap(p, i, k))
                continue;
            if (at < end && begin < at + p->tensor[i].bytes) {
                at = end;
                moved = true;
            }
        }
    }
    placed[i] = true;
    p->tensor[i].offset = at;
    if (at + p->tensor[i].bytes > p->size)
        p->size = at + p->tensor[i].bytes;
}

void plan_place(Plan *p)
{
    bool placed[MAX_PLANNED] = {false};
    int fullest;
    plan_most_alive(p, &fullest);
    for (int i = 0; i < p->count; i++) {
        if (is_alive(p, i, fullest))
            put(p, placed, i);
    }
    for (;;) { // the others, the largest first
        int next = -1;
        for (int i = 0; i < p->count; i++) {
            bool left = !placed[i] && p->tensor[i].last >= 0;
            if (left && (next < 0 || p->tensor[i].bytes > p->tensor[next].bytes))
                next = i;
        }
        if (next < 0)
            return;
        put(p, placed, next);
    }
}
