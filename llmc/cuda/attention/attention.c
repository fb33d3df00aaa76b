// Attention of the CUDA backend: the table of documents, the choice of kernels, cuDNN's plans by number of
// document slots.
//
// The table of a sequence of N tokens, C = capacity(N) slots, each part of round_up(C + 1, 4) int32 (so that
// parts start on 16 bytes, if the table does). Slots take the documents longest first: the long ones are the
// last to finish, so they start first.
//   part 0  length of the slot's document, 0 for an empty slot
//   part 1  where it starts in (N, d) buffers, in elements; N d for an empty slot
//   part 2  where it starts in (N, H) buffers; N H for an empty slot
//   part 3  cu_seqlens, followed by N to the end
//   then    ceil(N / ATTENTION_KEY_TILE) numbers of tiles of keys, documents longest first, each from its end
//           to its begin
//   then    for each tile of keys 1 if it comes later there than the tile in front of it, which is so only
//           where another document ends it, else 0
//   then    ceil(N / ATTENTION_QUERY_TILE) numbers of tiles of queries, documents longest first
//   then    twice ceil(N / ATTENTION_REACH_TILE) numbers of tiles, of keys and of queries, the furthest reach
//           first
// The last five start on 16 bytes, too.
// Any number of slots from the documents' to C is right for the same table. A slot costs cuDNN 0.2 us forward
// and 0.4 us backward on an H200 also when it is empty, hence plans for several numbers.
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/attention/tile_order.h"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/device/scratch.h"
#include <cudnn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS = 4, MIN_SLOTS = 64, RESERVED_SLOTS = 512, MAX_PLANS = 64, TOKENS_PER_EVAL_SLOT = 512 };

static struct {
    bool open;
    AttentionBy forward, backward;
    OpSizes sizes;
    int head_dim;
    AttentionPlan *plan[MAX_PLANS];
    int num_plans;
    char description[512];
} at;

// ---- document slots --------------------------------------------------------------------------------------

// The number of slots for so many documents: 64, 96, 128, 192, 256, 512 and further powers of two.
static int64_t rounded_slots(int64_t documents)
{
    static const int64_t steps[] = {MIN_SLOTS, 96, 128, 192, 256};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (documents <= steps[i])
            return steps[i];
    int64_t slots = 512;
    while (slots < documents)
        slots *= 2;
    return slots;
}

// Slots that a table has room for: at least those of the plans made in advance.
static int64_t capacity(int N, int max_documents)
{
    int64_t documents = max_documents ? min_i64(max_documents, N) : N;
    return max_i64(RESERVED_SLOTS, rounded_slots(documents));
}

int64_t attention_table_part(int N, int max_documents) { return round_up(capacity(N, max_documents) + 1, 4); }

static int64_t late_tiles_at(int N, int max_documents)
{
    return PARTS * attention_table_part(N, max_documents) + round_up(ceil_div(N, ATTENTION_KEY_TILE), 4);
}

static int64_t query_tiles_at(int N, int max_documents)
{
    return late_tiles_at(N, max_documents) + round_up(ceil_div(N, ATTENTION_KEY_TILE), 4);
}

static int64_t reaching_keys_at(int N, int max_documents)
{
    return query_tiles_at(N, max_documents) + round_up(ceil_div(N, ATTENTION_QUERY_TILE), 4);
}

static int64_t reaching_queries_at(int N, int max_documents)
{
    return reaching_keys_at(N, max_documents) + round_up(ceil_div(N, ATTENTION_REACH_TILE), 4);
}

int64_t attention_table_ints(int N, int max_documents)
{
    return reaching_queries_at(N, max_documents) + round_up(ceil_div(N, ATTENTION_REACH_TILE), 4);
}

// order[i]: length complemented, then start; owned by the caller.
static uint64_t *sorted_documents(const int32_t *cu, int count)
{
    uint64_t *order = xcalloc((size_t)count, sizeof *order);
    for (int i = 0; i < count; i++)
        order[i] = (uint64_t) ~(uint32_t)(cu[i + 1] - cu[i]) << 32 | (uint32_t)cu[i];
    qsort(order, (size_t)count, sizeof *order, tile_order_rising);
    return order;
}

static void make_plans_for(int64_t slots, int N);

int attention_table_build(int32_t *table, const int32_t *cu_seqlens, int num_documents, int N,
                          int max_documents)
{
    assert(at.open && max_documents == at.sizes.max_documents);
    assert(num_documents >= 1 && cu_seqlens[0] == 0 && cu_seqlens[num_documents] == N);
    assert(num_documents <= capacity(N, max_documents));
    int64_t part = attention_table_part(N, max_documents);
    int32_t *length = table, *start = table + part, *lse_start = table + 2 * part, *cu = table + 3 * part;
    int32_t d = at.sizes.dim, H = at.sizes.heads;
    uint64_t *order = sorted_documents(cu_seqlens, num_documents);
    for (int i = 0; i < num_documents; i++) {
        int32_t first = (int32_t)(uint32_t)order[i];
        length[i] = (int32_t) ~(uint32_t)(order[i] >> 32);
        start[i] = (int32_t)((int64_t)first * d); // of use to cuDNN alone, which takes no paired heads
        lse_start[i] = first * H;
        cu[i] = cu_seqlens[i];
    }
    free(order);
    for (int64_t i = num_documents; i < part; i++) {
        length[i] = 0;
        start[i] = (int32_t)((int64_t)N * d);
        lse_start[i] = (int32_t)((int64_t)N * H);
        cu[i] = N;
    }
    tile_order_sort(table + PARTS * part, ATTENTION_KEY_TILE, true, cu_seqlens, num_documents, N);
    tile_order_mark_late(table + late_tiles_at(N, max_documents), table + PARTS * part,
                         (int)ceil_div(N, ATTENTION_KEY_TILE));
    tile_order_sort(table + query_tiles_at(N, max_documents), ATTENTION_QUERY_TILE, false, cu_seqlens,
                    num_documents, N);
    tile_order_by_reach(table + reaching_keys_at(N, max_documents), ATTENTION_REACH_TILE, true, cu_seqlens,
                        num_documents, N);
    tile_order_by_reach(table + reaching_queries_at(N, max_documents), ATTENTION_REACH_TILE, false,
                        cu_seqlens, num_documents, N);
    int64_t slots = rounded_slots(num_documents);
    make_plans_for(slots, N); // here and not in the op, which may be under capture
    return (int)slots;
}

// ---- plans -----------------------------------------------------------------------------------------------

static AttentionPlan *make_plan(int64_t slots, int longest, bool backward, Error *e)
{
    AttentionShape shape = {(int)slots, longest, at.sizes.heads, at.head_dim, backward};
    if (at.num_plans == MAX_PLANS) {
        error_set(e, "more than %d attention plans", MAX_PLANS);
        return NULL;
    }
    AttentionPlan *p = attention_plan_create(&shape, e);
    if (p)
        at.plan[at.num_plans++] = p;
    return p;
}

// The smallest plan that serves; NULL when there is none.
static AttentionPlan *find_plan(int64_t slots, int N, bool backward)
{
    AttentionPlan *best = NULL;
    for (int i = 0; i < at.num_plans; i++) {
        const AttentionShape *s = attention_plan_shape(at.plan[i]),
                             *b = best ? attention_plan_shape(best) : NULL;
        if (s->backward != backward || s->slots < slots || s->longest < N ||
            s->slots > capacity(N, at.sizes.max_documents))
            continue;
        if (!b || s->slots < b->slots || (s->slots == b->slots && s->longest < b->longest))
            best = at.plan[i];
    }
    return best;
}

static AttentionPlan *need_plan(int64_t slots, int N, bool backward)
{
    AttentionPlan *p = find_plan(slots, N, backward);
    if (p)
        return p;
    Error e;
    int longest = N <= at.sizes.tokens ? at.sizes.tokens : at.sizes.eval_tokens;
    slots = rounded_slots(slots);
    note("a cuDNN attention plan for %d documents of up to %d tokens, %s, is made now: a batch needs more "
         "than those "
         "made at the start",
         (int)slots, longest, backward ? "backward" : "forward");
    p = make_plan(slots, longest, backward, &e);
    if (!p)
        fatal(EXIT_BAD_INPUT, "%s (%d documents in a sequence of %d tokens)", e.text, (int)slots, N);
    return p;
}

void attention_check_tokens(int N, int H, bool backward)
{
    int64_t most = backward ? at.sizes.tokens : max_i64(at.sizes.tokens, at.sizes.eval_tokens),
            tokens = ceil_div((int64_t)N * H, at.sizes.heads);
    if (tokens > most)
        fatal(EXIT_BAD_INPUT, "attention%s was asked for %lld tokens, backend_reserve set aside %lld",
              backward ? " backward" : "", (long long)tokens, (long long)most);
}

size_t attention_ds_bytes(int N, int H)
{
    return at.open ? attention_sm80_ds_bytes(N, H, at.sizes.reach ? at.sizes.reach : N) : 0;
}

// Paired heads have twice as many rows as there are tokens; cuDNN does not take them.
static void make_plans_for(int64_t slots, int N)
{
    if (N > max_i64(at.sizes.tokens, at.sizes.eval_tokens))
        return;
    if (at.forward == BY_CUDNN)
        need_plan(slots, N, false);
    if (at.backward == BY_CUDNN && N <= at.sizes.tokens)
        need_plan(slots, N, true);
}

AttentionPlan *attention_plan_for_op(Stream s, int slots, int N, bool backward)
{
    if (stream_is_capturing(s) && !find_plan(slots, N, backward))
        fatal(EXIT_BAD_INPUT,
              "no attention plan for %d documents in %d tokens, and none can be made while a graph is "
              "captured: build a "
              "table of so many documents first",
              slots, N);
    return need_plan(slots, N, backward);
}

AttentionCall attention_call(const int32_t *table, int slots, float scale, int window, int N, int H, int e)
{
    assert(at.open && e == at.head_dim && (uintptr_t)table % 16 == 0);
    assert(slots >= 1 && slots <= capacity(N, at.sizes.max_documents) && window >= 0);
    int64_t part = attention_table_part(N, at.sizes.max_documents);
    return (AttentionCall){.length = table,
                           .start = table + part,
                           .lse_start = table + 2 * part,
                           .cu = table + 3 * part,
                           .key_tiles = table + PARTS * part,
                           .late_tiles = table + late_tiles_at(N, at.sizes.max_documents),
                           .query_tiles = table + query_tiles_at(N, at.sizes.max_documents),
                           .reaching_keys = table + reaching_keys_at(N, at.sizes.max_documents),
                           .reaching_queries = table + reaching_queries_at(N, at.sizes.max_documents),
                           .scale = scale,
                           .window = window,
                           .reach = at.sizes.reach ? (int)min_i64(window, at.sizes.reach) : window,
                           .slots = slots,
                           .N = N,
                           .H = H,
                           .e = e,
                           .qk = e,
                           .fixed_order = at.sizes.deterministic};
}

bool attention_is_open(void) { return at.open; }
AttentionBy attention_by(bool backward) { return backward ? at.backward : at.forward; }
bool attention_is_sm90(bool backward) { return attention_by(backward) == BY_SM90; }

void attention_take_counters(AttentionCall *c, Stream s, bool backward)
{
    size_t each = attention_sm90_counters();
    if (!attention_is_sm90(backward))
        return;
    c->counters = scratch_of(s, SCRATCH_ATTENTION, 2 * each * sizeof(unsigned));
    if (!backward)
        return;
    c->counters += each;
    c->dq_state = scratch_of(s, SCRATCH_DQ_STATE, attention_sm90_states(c->N, c->H) * sizeof(unsigned));
}

// ---- what is reserved ------------------------------------------------------------------------------------

// Where cuDNN's kernels may be taken; whether they are right is found out at every start. Nobody has timed
// them before Hopper.
static bool cudnn_is_a_candidate(Error *why)
{
    int e = at.head_dim;
    if (at.sizes.attention == ATTENTION_OWN)
        return error_set(why, "asked for");
    if (at.sizes.sdpa_alone)
        return error_set(why, "not used for this network's heads");
    if (at.sizes.attention == ATTENTION_CUDNN)
        return true;
    if (device_is_portable())
        return error_set(why, "--portable");
    if (e % 16)
        return error_set(why, "cuDNN's dq is wrong for heads of width %d, which is no multiple of 16", e);
    return true;
}

static bool make_first_plans(Error *e)
{
    const OpSizes *z = &at.sizes;
    for (int slots = MIN_SLOTS; z->tokens && slots <= 128; slots += 32) {
        if (!make_plan(slots, z->tokens, false, e))
            return false;
        if (at.backward == BY_CUDNN && !make_plan(slots, z->tokens, true, e))
            return false;
    }
    if (z->eval_tokens <= z->tokens)
        return true;
    int64_t slots = min_i64(capacity(z->eval_tokens, z->max_documents),
                            rounded_slots(ceil_div(z->eval_tokens, TOKENS_PER_EVAL_SLOT)));
    return make_plan(slots, z->eval_tokens, false, e) != NULL;
}

// Documents that begin and end inside of tiles, and a window that cuts the longest.
enum { CHECKED_TOKENS = 700, CHECKED_ON_HOST = 300, CHECKED_DOCUMENTS = 3 };

int attention_checked_tokens(void)
{
    return (int)min_i64(CHECKED_TOKENS, at.sizes.tokens ? at.sizes.tokens : at.sizes.eval_tokens);
}

static bool peer_is_right(AttentionBy by, const AttentionCall *c, bool backward, Error *why)
{
    AttentionPeer peer = {.name = by == BY_CUDNN ? "cuDNN" : "the kernels for Hopper",
                          .with_backward = backward};
    if (!attention_sm80_prepare(c->e, c->e, why) ||
        (backward && !attention_sm80_prepare_backward(c->e, c->e, why)))
        return false;
    if (by == BY_SM90)
        return attention_sm90_agrees(&peer, c, why);
    peer.forward = find_plan(c->slots, c->N, false);
    peer.backward = backward ? find_plan(c->slots, c->N, true) : NULL;
    return attention_agree(&peer, c, why);
}

static bool sm80_is_right(const AttentionCall *base, const int32_t *cu, int documents, bool backward,
                          Error *why)
{
    AttentionCall c = *base;
    int narrow = at.sizes.key_dim / at.sizes.heads;
    if (!attention_sm80_is_right(&c, cu, documents, backward, why))
        return false;
    c.qk = narrow;
    return !narrow || narrow == c.e || attention_sm80_is_right(&c, cu, documents, backward, why);
}

static bool is_right(AttentionBy by, Error *why)
{
    int e = at.head_dim, H = at.sizes.heads, most = at.sizes.max_documents;
    int N = (int)min_i64(attention_checked_tokens(), by == BY_SM80 ? CHECKED_ON_HOST : CHECKED_TOKENS),
        documents = N < 8 ? 1 : CHECKED_DOCUMENTS;
    int32_t cu[CHECKED_DOCUMENTS + 1] = {0, N < 8 ? N : 1, N / 3, N};
    size_t bytes = (size_t)attention_table_ints(N, most) * sizeof(int32_t);
    int32_t *host = host_alloc(bytes), *table = device_alloc(bytes, "attention: check");
    Stream s = stream_create();
    int slots = attention_table_build(host, cu, documents, N, most);
    copy_to_device(s, table, host, bytes);
    stream_synchronize(s);
    stream_destroy(s);
    int window = at.sizes.reach ? (int)min_i64(N / 4 + 1, at.sizes.reach) : N / 4 + 1;
    AttentionCall c = attention_call(table, slots, 1 / sqrtf((float)e), window, N, H, e);
    bool backward = at.backward == by && at.sizes.tokens,
         right = by == BY_SM80 ? sm80_is_right(&c, cu, documents, backward, why)
                               : peer_is_right(by, &c, backward, why);
    host_free(host);
    device_free(table);
    return right;
}

bool attention_own_is_right(Error *why)
{
    bool portable = at.forward == BY_SM80 || at.backward == BY_SM80;
    return (at.forward != BY_SM90 || is_right(BY_SM90, why)) && (!portable || is_right(BY_SM80, why));
}

// On true with plans made.
static bool cudnn_is_usable(Error *why)
{
    if (!cudnn_is_a_candidate(why) || !make_first_plans(why))
        return false;
    return at.sizes.attention == ATTENTION_CUDNN || is_right(BY_CUDNN, why);
}

static void free_plans(void)
{
    while (at.num_plans)
        attention_plan_free(at.plan[--at.num_plans]);
}

static void prepare_own(void)
{
    Error e;
    int width = at.head_dim;
    bool good = at.forward != BY_SM80 || attention_sm80_prepare(width, width, &e);
    if (good && at.backward == BY_SM80 && at.sizes.tokens)
        good = attention_sm80_prepare_backward(width, width, &e);
    if (!good)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
}

// Beside the scratch that callers give.
static void plan_scratch(void)
{
    const OpSizes *z = &at.sizes;
    scratch_plan(SCRATCH_GATES, attention_gate_sums(z->heads) * sizeof(float));
    if (at.forward == BY_SM90)
        scratch_plan(SCRATCH_ATTENTION, 2 * attention_sm90_counters() * sizeof(unsigned));
    if (at.backward == BY_SM90 && z->tokens)
        scratch_plan(SCRATCH_DQ_STATE, attention_sm90_states(z->tokens, z->heads) * sizeof(unsigned));
}

const char *attention_library(void)
{
    static char text[64];
    size_t version = cudnnGetVersion();
    snprintf(text, sizeof text, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return text;
}

static const char *kernels_name(AttentionBy k)
{
    if (k == BY_CUDNN)
        return attention_library();
    return k == BY_SM90 ? "the program's own kernels for Hopper" : "the program's own kernels for any GPU";
}

// A reason is empty where there was nothing to refuse.
static void describe_choice(const char *not_tensor, const char *not_cudnn)
{
    char *text = at.description;
    size_t size = sizeof at.description;
    int used = snprintf(text, size, "attention forward by %s", kernels_name(at.forward));
    if (not_cudnn[0])
        used += snprintf(text + used, size - (size_t)used, " (not cuDNN: %.160s)", not_cudnn);
    used += snprintf(text + used, size - (size_t)used, ", backward by %s", kernels_name(at.backward));
    if (at.sizes.deterministic)
        used += snprintf(text + used, size - (size_t)used, " (a fixed order of sums)");
    if (not_tensor[0])
        snprintf(text + used, size - (size_t)used, " (not Hopper's: %.160s)", not_tensor);
    if (at.forward == BY_SM80 || at.backward == BY_SM80)
        note("%s: the kernels for any GPU take 1.6 to 2.5 times as long as Hopper's on an H200", text);
}

// The own kernels for Hopper are the fastest, cuDNN's come next. cuDNN's backward has no fixed order of sums.
static void choose_kernels(void)
{
    Error not_tensor = {""}, not_cudnn = {""};
    bool tensor = at.sizes.attention != ATTENTION_CUDNN && attention_sm90_prepare(at.head_dim, &not_tensor);
    at.forward = tensor ? BY_SM90 : BY_CUDNN;
    at.backward = at.forward == BY_CUDNN && at.sizes.deterministic ? BY_SM80 : at.forward;
    plan_scratch();
    if (at.forward == BY_CUDNN && !cudnn_is_usable(&not_cudnn)) {
        if (at.sizes.attention == ATTENTION_CUDNN)
            fatal(EXIT_BAD_INPUT, "%s", not_cudnn.text);
        free_plans();
        at.forward = at.backward = BY_SM80;
    }
    prepare_own();
    describe_choice(not_tensor.text, not_cudnn.text);
}

void attention_reserve(const OpSizes *sizes)
{
    attention_close();
    at.sizes = *sizes;
    at.head_dim = sizes->dim / sizes->heads;
    int64_t most = max_i64(sizes->tokens, sizes->eval_tokens);
    if (at.head_dim % 8 || at.head_dim > ATTENTION_OWN_MAX_WIDTH)
        fatal(EXIT_BAD_INPUT, "heads of width %d: attention takes multiples of 8 up to %d", at.head_dim,
              ATTENTION_OWN_MAX_WIDTH);
    if (most * sizes->dim > INT32_MAX)
        fatal(EXIT_BAD_INPUT,
              "a sequence of %lld tokens of width %d is too large for attention: at most %d tokens",
              (long long)most, sizes->dim, INT32_MAX / sizes->dim);
    if (most > ATTENTION_MOST_TOKENS)
        fatal(EXIT_BAD_INPUT, "a sequence of %lld tokens is too long for attention: at most %d",
              (long long)most, ATTENTION_MOST_TOKENS);
    at.open = true;
    choose_kernels();
}

void attention_close(void)
{
    if (!at.open)
        return;
    free_plans();
    attention_cudnn_close();
    memset(&at, 0, sizeof at);
}

const char *attention_description(void) { return at.open ? at.description : "attention not yet reserved"; }
