// What a cluster computes next and how its operands get there: the scout of a block, and its fetching thread.
#pragma once
#include "llmc/cuda/muon/sm90_ns_aol.cuh"

enum {
    CLUSTER = 2,
    DRAW_BEFORE = 3,              // stages of a square that are fetched after the next one is drawn
    WARPS = GROUPS * GROUP / WARP // that multiply, in a block
};

#if HOPPER

// ---- squares and tasks -----------------------------------------------------------------------------------------------------

// Where the last square that was found belongs, for the next ones come after it: a task of matrices from `first` on, which go
// together, and the squares before all of these. The tasks lie so far apart that looking through them takes long.
struct Found {
    int first, task, before;
};

// Square `index` of the chain, as the part in its first row of boxes.
static __device__ __forceinline__ Part find_square(const Chain &c, Found &f, int index)
{
    for (int squares; index - f.before >= (squares = c.task[f.task].squares * min(c.together, c.batch - f.first));) {
        f.before += squares;
        if (++f.task == c.tasks) f.task = 0, f.first += c.together;
    }
    const Task &w = c.task[f.task];
    int matrix = (index - f.before) / w.squares, square = index - f.before - matrix * w.squares, i, j;
    Part t = {};
    t.task = f.task;
    t.matrix = f.first + matrix;
    if (is_symmetric(w))
        for (i = 0, j = square; j >= squares_in_row(w.rows, w.width, i); i++) j -= squares_in_row(w.rows, w.width, i);
    else
        j = square / w.row_squares, i = square - j * w.row_squares; // neighbours share the tall operand's columns
    t.row = SQUARE_PARTS * i;
    t.width = j < w.wide ? SQUARE_PARTS : w.width;
    t.col = w.width * j + (SQUARE_PARTS - w.width) * min(j, w.wide);
    t.on_diagonal = is_symmetric(w) && t.row - t.col < t.width;
    return t;
}

// The row of the part that a group of a block has. On the diagonal a part of a wide square has one to four boxes that are wanted:
// each block gets five.
static __device__ __forceinline__ int part_row(const Part &square, int rank, int group)
{
    if (square.on_diagonal) return square.row + (group ? SQUARE_PARTS - 1 - rank : rank);
    return square.row + GROUPS * rank + group;
}

// On the diagonal of a product of a tensor with itself, a part's rows of a may be among those of b, and are not fetched.
static __device__ __forceinline__ bool a_is_in_b(const Task &w, const Part &square, int row)
{
    return w.square && row - square.col < square.width;
}
// Nor are those of parts above the diagonal: narrow squares multiply so fast that what they fetch limits them.
static __device__ __forceinline__ bool a_wanted(const Task &w, const Part &square, int row)
{
    return !is_symmetric(w) || (row >= square.col && !a_is_in_b(w, square, row));
}
// Boxes of b that the parts of a square need.
static __device__ __forceinline__ int b_boxes(const Task &w, const Part &square)
{
    return is_symmetric(w) ? min(square.width, square.row + SQUARE_PARTS - square.col) : square.width;
}

// Of operands, or of raw sums, a box of each part at a time.
static __device__ __forceinline__ int stages_of(const Task &w)
{
    return w.kind == TASK_AOL ? SQUARE / BOX_SIDE : (w.depth + DEPTH - 1) / DEPTH;
}

// One thread: waits until the tasks that this one depends on are done for the part's matrix. What the copy unit wrote then is for
// the copy unit to read, too.
static __device__ __forceinline__ void wait_for_tasks(const Chain &c, const Part &t)
{
    for (uint32_t waits = c.task[t.task].waits; waits; waits &= waits - 1) {
        int task = __ffs((int)waits) - 1;
        const unsigned *done = c.done + task * c.batch + t.matrix;
        while (load_acquire(done) < (unsigned)(SQUARE_PARTS * c.task[task].squares)) __nanosleep(20);
    }
    copy_unit_fence_all();
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

// ---- tickets ---------------------------------------------------------------------------------------------------------------

// The scout of the cluster's first block draws and tells both which square comes next; the last one told of is beyond the last.
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

// What they tell the groups of their block, their clerks and the fetching thread: the square, task -1 after the last.
static __device__ __forceinline__ void tell_part(const SharedMemory &m, Ring<TICKETS> &ring, const Part &t)
{
    barrier_wait(m.heard(ring.stage), ring.parity ^ 1);
    *m.part(ring.stage) = t;
    barrier_arrive(m.told(ring.stage));
    ring.advance();
}
// Every lane of a group says for itself that it has read it, and a clerk is alone.
static __device__ __forceinline__ Part hear_part(const SharedMemory &m, Ring<TICKETS> &ring, int rank, int group)
{
    barrier_wait(m.told(ring.stage), ring.parity);
    Part t = *m.part(ring.stage);
    t.row = part_row(t, rank, group);
    barrier_arrive(m.heard(ring.stage));
    ring.advance();
    return t;
}
// The fetching thread, when what it is to fetch is there.
static __device__ __forceinline__ Part hear_ready(const SharedMemory &m, Ring<TICKETS> &ring)
{
    barrier_wait(m.ready(ring.stage), ring.parity);
    Part t = *m.part(ring.stage);
    copy_unit_fence_all();
    barrier_arrive(m.heard(ring.stage));
    ring.advance();
    return t;
}

// The scout, one thread of each block: finds out what comes next and whether it may begin, while the fetching thread still has
// this square's last operands and its addends to fetch. The next square is drawn when the last few stages of this one are about
// to be fetched: early enough for it to be known in time, and late enough for clusters that are behind to draw less.
static __device__ __forceinline__ void find_squares(const SharedMemory &m, const Chain &c, int rank)
{
    Ring<TICKETS> handed, taken, told;
    Found found = {};
    Ring<1> draw;
    for (bool more = true; more; draw.advance()) {
        if (rank == 0) hand_out(m, handed, atomicAdd(c.ticket, 1));
        int index = take_ticket(m, taken), place = told.stage;
        more = index < c.total;
        Part t = {};
        if (more)
            t = find_square(c, found, index);
        else
            t.task = -1;
        tell_part(m, told, t);
        if (more) wait_for_tasks(c, t);
        barrier_arrive(m.ready(place));
        if (more && rank == 0) barrier_wait(m.draw(), draw.parity);
    }
}

// ---- fetching ------------------------------------------------------------------------------------------------------------

// What a block fetches of a square's operands at each depth: its rows of a, and its half of b's boxes for both blocks. What does
// not depend on the depth is found once: a ring of four stages leaves little time between the release of a place and its use.
struct Operands {
    const Task &w;
    int a_row[GROUPS]; // of a, where the boxes of this block begin: elements, negative: not wanted
    int b_at;          // the same of b, for the first of its boxes
    int b_first, b_count;
    int matrix;
    uint32_t bytes; // that arrive at this block, from both
};
static __device__ __forceinline__ Operands operands_of(const Task &w, const Part &t, int rank)
{
    int boxes = b_boxes(w, t), first = rank ? (boxes + 1) / 2 : 0;
    Operands o = {w, {}, (t.col + first) * BOX_SIDE, first, rank ? boxes - first : (boxes + 1) / 2, t.matrix};
    o.bytes = (uint32_t)(boxes * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        int row = part_row(t, rank, i);
        bool wanted = a_wanted(w, t, row);
        o.a_row[i] = wanted ? row * BOX_SIDE : -1;
        o.bytes += wanted ? BOX_BYTES : 0;
    }
    return o;
}

// Depth k to k + 63.
static __device__ __forceinline__ void fetch_operands(const SharedMemory &m, const Operands &o, int stage, int k)
{
    uint64_t *full = m.full(stage);
    uint8_t *b = m.b(stage) + o.b_first * BOX_BYTES;
    const uint16_t both = 3;
    bool along = o.w.kind == TASK_FULL;
    int x = along ? o.b_at : k, y = along ? k : o.b_at;
    barrier_arrive_expect(full, o.bytes);
    if (o.b_count > 0) tile_load(b, &o.w.b, full, x, y, o.matrix, both);
    if (o.b_count > 1) tile_load(b + BOX_BYTES, &o.w.b, full, along ? x + BOX_SIDE : x, along ? y : y + BOX_SIDE, o.matrix, both);
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        if (o.a_row[i] >= 0) tile_load_own(m.a(stage) + i * BOX_BYTES, &o.w.a, full, k, o.a_row[i], o.matrix);
}

// Of a symmetric result nothing above the diagonal is.
static __device__ __forceinline__ bool addend_wanted(const Task &w, const Part &t, int half, int rank, int i)
{
    int box = 2 * half + i % 2;
    return box < t.width && (!is_symmetric(w) || t.col + box <= part_row(t, rank, i / 2));
}

// One half of d's part of the square, for this block's groups: two boxes side by side for the first, then for the second. Without
// d only the place for them.
static __device__ __forceinline__ void fetch_addend(const SharedMemory &m, const Task &w, const Part &t, int stage, int half,
                                                    int rank)
{
    uint64_t *full = m.full(stage);
    int boxes = 0;
    for (int i = 0; w.has_d && i < 2 * GROUPS; i++) boxes += addend_wanted(w, t, half, rank, i);
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
            bulk_load(m.a(stage) + i * RAW_BYTES, raw_place(w, t.matrix, part_row(t, rank, i), t.col + box), full, RAW_BYTES);
}

static __device__ __forceinline__ int items_after(const Task &w) { return w.kind == TASK_RAW || w.kind == TASK_AOL ? 0 : 2; }

// The stages of a square, of products or of raw sums.
template <bool RAW>
static __device__ __forceinline__ void fetch_stages(const SharedMemory &m, Ring<STAGES> &ring, const Task &w, const Part &t,
                                                    int rank)
{
    int stages = stages_of(w), draw_at = rank == 0 ? max(0, stages - DRAW_BEFORE) : -1;
    Operands o = operands_of(w, t, rank);
#pragma unroll 1
    for (int i = 0; i < stages; i++, ring.advance()) {
        if (i == draw_at) barrier_arrive(m.draw());
        barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
        if (RAW)
            fetch_raw(m, w, t, ring.stage, i, rank);
        else
            fetch_operands(m, o, ring.stage, i * DEPTH);
    }
}

static __device__ __forceinline__ void fetch_square(const SharedMemory &m, const Chain &c, Ring<STAGES> &ring, const Part &t,
                                                    int rank)
{
    const Task &w = c.task[t.task];
    if (w.kind == TASK_AOL)
        fetch_stages<true>(m, ring, w, t, rank);
    else
        fetch_stages<false>(m, ring, w, t, rank);
    for (int half = 0; half < items_after(w); half++, ring.advance()) {
        barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
        fetch_addend(m, w, t, ring.stage, half, rank);
    }
}

// One thread of each block runs this.
static __device__ __forceinline__ void fetch_squares(const SharedMemory &m, const Chain &c, int rank)
{
    Ring<STAGES> ring;
    Ring<TICKETS> heard;
    for (Part t; (t = hear_ready(m, heard)).task >= 0;) fetch_square(m, c, ring, t, rank);
}

#endif
