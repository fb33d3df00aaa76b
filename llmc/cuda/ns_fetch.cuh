// What a cluster works on, and how it gets there: units of the chain, the scouts that find the next one, the threads that fetch
// operands.
#pragma once
#include "llmc/cuda/ns_tile.cuh"

enum {
    CLUSTER = 2,    // blocks
    DRAW_BEFORE = 2 // stages of a unit that are fetched after the next one is drawn
};

#if HOPPER

// ---- squares and tasks -----------------------------------------------------------------------------------------------------

// Unit `index` of the chain, a square or half of one, as the part in its first row of boxes.
static __device__ __forceinline__ Part find_unit(const Chain &c, int index)
{
    Part t = {};
    int first = index / (c.together * c.units) * c.together, count = min(c.together, c.batch - first),
        rest = index - first * c.units, i, j;
    while (rest >= c.task[t.task].units * count) rest -= c.task[t.task++].units * count;
    const Task &w = c.task[t.task];
    int matrix = rest / w.units, unit = rest - matrix * w.units;
    t.matrix = first + matrix;
    t.boxes = SQUARE_PARTS;
    t.col = 0;
    if (w.halved) {
        i = (int)sqrtf((float)unit); // rows of squares have 1, 3, 5 ... units
        j = (unit - i * i) / 2;
        if (i != j) t.boxes = SQUARE_PARTS / 2, t.col = (unit - i * i) % 2 * t.boxes;
    } else if (is_symmetric(w)) {
        triangle_position(unit, i, j);
    } else {
        j = unit / w.row_squares, i = unit - j * w.row_squares; // neighbours share the tall operand's columns
    }
    t.on_diagonal = i == j && is_symmetric(w);
    t.square = is_symmetric(w) ? i * (i + 1) / 2 + j : unit;
    t.row = SQUARE_PARTS * i;
    t.col += SQUARE_PARTS * j;
    t.kind = w.kind, t.rows = w.rows, t.alpha = w.alpha, t.beta = w.beta, t.has_d = w.has_d, t.has_elements = w.elements != NULL;
    t.a_in_b = w.square && t.on_diagonal;
    t.stages = w.kind == TASK_AOL ? SQUARE / BOX_SIDE : (w.depth + DEPTH - 1) / DEPTH;
    return t;
}

// The row of the part that a group of a block has. On the diagonal a part has one to four boxes below it: each block gets five.
static __device__ __forceinline__ int part_row(const Part &square, int rank, int group)
{
    if (square.on_diagonal) return square.row + (group ? SQUARE_PARTS - 1 - rank : rank);
    return square.row + GROUPS * rank + group;
}

// One thread: whether the tasks that this one depends on are done for the part's matrix. What the copy unit wrote then is for the
// copy unit to read, too.
static __device__ __forceinline__ bool tasks_done(const Chain &c, const Part &t)
{
    for (uint32_t waits = c.task[t.task].waits; waits; waits &= waits - 1) {
        int task = __ffs((int)waits) - 1;
        if (load_acquire(c.done + task * c.batch + t.matrix) < (unsigned)(SQUARE_PARTS * c.task[task].units)) return false;
    }
    copy_unit_fence_global();
    return true;
}

// A position in a ring of SIZE places.
template <int SIZE> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

// ---- scouts ----------------------------------------------------------------------------------------------------------------

// Which unit is next, and whether it may begin, takes a thread of each block thousands of cycles to find out: the scout, ahead of
// the fetching thread. That of the cluster's first block draws and tells both which unit comes next; the last one told of is
// beyond the last.
static __device__ __forceinline__ void hand_out(const SharedMemory &m, Ring<TICKETS> &ring, unsigned index)
{
    barrier_wait(m.taken(ring.stage), ring.parity ^ 1);
    for (int rank = 0; rank < CLUSTER; rank++) send_word(m.ticket(ring.stage), index, m.drawn(ring.stage), rank);
    ring.advance();
}
static __device__ __forceinline__ int take_ticket(const SharedMemory &m, Ring<TICKETS> &ring)
{
    barrier_wait(m.drawn(ring.stage), ring.parity);
    int index = *(volatile uint32_t *)m.ticket(ring.stage);
    barrier_arrive_at(m.taken(ring.stage), 0);
    ring.advance();
    return index;
}

// What it tells all others of its block: the unit, task -1 after the last.
static __device__ __forceinline__ void tell_part(const SharedMemory &m, const Ring<TICKETS> &ring, const Part &t)
{
    barrier_wait(m.heard(ring.stage), ring.parity ^ 1);
    *m.part(ring.stage) = t;
    barrier_arrive(m.told(ring.stage));
}
static __device__ __forceinline__ Part hear_part(const SharedMemory &m, const Ring<TICKETS> &ring)
{
    barrier_wait(m.told(ring.stage), ring.parity);
    return *m.part(ring.stage);
}

// One thread of each block. The next unit is drawn when the last few stages of this one are about to be fetched: early enough for
// it to be known in time, and late enough for clusters that are behind to draw less.
static __device__ __forceinline__ void scout_units(const SharedMemory &m, const Chain &c, int rank)
{
    Ring<TICKETS> handed, taken, told;
    for (uint32_t parity = 1;; parity ^= 1, told.advance()) {
        if (rank == 0) {
            barrier_wait(m.draw(), parity); // the first time at once
            hand_out(m, handed, atomicAdd(c.ticket, 1));
        }
        int index = take_ticket(m, taken);
        Part t = {};
        t.task = -1;
        if (index < c.total) t = find_unit(c, index);
        tell_part(m, told, t);
        if (t.task < 0) return;
        const Task &w = c.task[t.task];
        if (w.kind != TASK_AOL) prefetch_map(&w.a), prefetch_map(&w.b);
        if (w.has_d) prefetch_map(&w.d);
        if (w.has_out) prefetch_map(&w.out);
        while (!tasks_done(c, t)) __nanosleep(20);
        barrier_arrive(m.ready(told.stage));
    }
}

// ---- fetching ------------------------------------------------------------------------------------------------------------

// Depth k to k + 63 of the operands: this block's rows of a, and its half of b's columns for both blocks.
static __device__ __forceinline__ void fetch_operands(const SharedMemory &m, const Task &w, const Part &t, int stage, int k,
                                                      int rank)
{
    uint64_t *full = m.full(stage);
    const uint16_t both = 3;
    int own = t.a_in_b ? 0 : GROUPS, half = t.boxes / CLUSTER;
    barrier_arrive_expect(full, (uint32_t)((own + t.boxes) * BOX_BYTES)); // what the other block sends counts too
    for (int i = 0; i < own; i++)
        tile_load_own(m.a(stage) + i * BOX_BYTES, &w.a, full, k, part_row(t, rank, i) * BOX_SIDE, t.matrix);
    for (int i = half * rank; i < half * rank + half; i++) {
        int at = (t.col + i) * BOX_SIDE;
        if (t.kind == TASK_FULL)
            tile_load(m.b(stage) + i * BOX_BYTES, &w.b, full, at, k, t.matrix, both);
        else
            tile_load(m.b(stage) + i * BOX_BYTES, &w.b, full, k, at, t.matrix, both);
    }
}

// Of a symmetric result nothing above the diagonal is.
static __device__ __forceinline__ bool addend_wanted(const Task &w, const Part &t, int half, int rank, int i)
{
    return 2 * half < t.boxes && (!is_symmetric(w) || t.col + 2 * half + i % 2 <= part_row(t, rank, i / 2));
}

// One half of d's part of the square, for this block's groups: two boxes side by side for the first, then for the second. Without
// d only the place for them.
static __device__ __forceinline__ void fetch_addend(const SharedMemory &m, const Task &w, const Part &t, int stage, int half,
                                                    int rank)
{
    uint64_t *full = m.full(stage);
    int boxes = 0;
    for (int i = 0; t.has_d && i < 2 * GROUPS; i++) boxes += addend_wanted(w, t, half, rank, i);
    if (boxes == 0) {
        barrier_arrive(full);
        return;
    }
    barrier_arrive_expect(full, (uint32_t)(boxes * BOX_BYTES));
    for (int i = 0; i < 2 * GROUPS; i++)
        if (addend_wanted(w, t, half, rank, i))
            tile_load_own(m.a(stage) + i * BOX_BYTES, &w.d, full, (t.col + 2 * half + i % 2) * BOX_SIDE,
                          part_row(t, rank, i / 2) * BOX_SIDE, t.matrix);
}

// The raw sums of box `box` of the groups' parts. Above the diagonal there may be nothing.
static __device__ __forceinline__ void fetch_raw(const SharedMemory &m, const Task &w, const Part &t, int stage, int box,
                                                 int rank)
{
    uint64_t *full = m.full(stage);
    bool wanted[GROUPS];
    uint32_t bytes = 0;
    for (int i = 0; i < GROUPS; i++) {
        int row = part_row(t, rank, i);
        wanted[i] = t.col + box <= row && row * BOX_SIDE < w.rows;
        bytes += wanted[i] ? RAW_BYTES : 0;
    }
    if (bytes == 0)
        barrier_arrive(full);
    else
        barrier_arrive_expect(full, bytes);
    for (int i = 0; i < GROUPS; i++)
        if (wanted[i])
            bulk_load(m.a(stage) + i * RAW_BYTES, raw_place(w, t, part_row(t, rank, i)) + box * RAW_BYTES / sizeof(float4), full,
                      RAW_BYTES);
}

static __device__ __forceinline__ int items_after(const Part &t) { return t.kind == TASK_RAW ? 0 : 2; }

// One thread of each block.
static __device__ __forceinline__ void fetch_units(const SharedMemory &m, const Chain &c, int rank)
{
    Ring<STAGES> ring;
    Ring<TICKETS> heard;
    for (Part t; (t = hear_part(m, heard)).task >= 0; heard.advance()) {
        const Task &w = c.task[t.task];
        barrier_wait(m.ready(heard.stage), heard.parity);
        barrier_arrive(m.heard(heard.stage));
        for (int i = 0; i < t.stages; i++, ring.advance()) {
            if (rank == 0 && i == max(0, t.stages - DRAW_BEFORE)) barrier_arrive(m.draw());
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            if (t.kind == TASK_AOL)
                fetch_raw(m, w, t, ring.stage, i, rank);
            else
                fetch_operands(m, w, t, ring.stage, i * DEPTH, rank);
        }
        for (int half = 0; half < items_after(t); half++, ring.advance()) {
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            fetch_addend(m, w, t, ring.stage, half, rank);
        }
    }
}

#endif
