// Gradients of the embedding tables between GPUs: whole tables, as the trainer sends them, or only the rows
// that tokens touch.
//
//   bench_embedding_exchange --gpus N --train-files FILES [option of train_gpt ...]       N 2, 4 or 8
//
// Four tables (Vp, d) fp32 hold random gradients in the rows that the loader's batches of two steps touch,
// zeros elsewhere. Ways:
//   whole        reduce-scatter of tables, the others' shares cleared (llmc/dist/exchange.c)
//   padded       the rows that any rank touches, packed by owner; reduce-scatter with as much room for each
//                as the fullest needs
//   each owner   the same rows without gaps; a group of reductions, one to each owner
//   own rows     every rank sends each owner the rows that it touches itself; the owner adds them up in the
//                order of the ranks
// Every way must give sums within (ranks - 1) 2^-24 of the sum of magnitudes, all rows of others cleared,
// before it is timed. Which rows other ranks touch is known from an all-gather of bits ("union"); collectives
// need counts on the host ("counts":
// copy, wait, go on). Times: medians, means of the ranks, ms for all four tables; "known": as if counts were
// there for nothing. Beside products: the products of a layer's backward, a few after the start of each
// table; by how much they all end later.
#include "dev/bench/embedding_rows.cuh"
#include "dev/bench/figures.h"
extern "C" {
#include "llmc/dist/comm.h"
#include "llmc/run/config.h"
#include "llmc/data/dataloader.h"
}
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

enum { TABLES = 4, PAIRS = 8, WARM_UP = 5, REPEATS = 50, BESIDE_REPEATS = 25, PRODUCTS = 5 };
typedef enum { WHOLE, PADDED, EACH_OWNER, OWN_ROWS, WAYS } Way;
static const char *const way_name[WAYS] = {"whole", "padded", "each owner", "own rows"};
typedef enum { UNION, COUNTS, PACK, SEND, PLACE, PARTS } Part;

static Config config;
static int rank, size, d;
static int64_t table_size;
static Stream stream, side; // of the exchange; of the products
static Sets sets;
static float *tables, *packed, *arrived,
    *reference;                        // (TABLES, Vp, d), (Vp, d), (size, share, d), (TABLES, share, d)
static float *small;                   // (64) for the collective that ranks meet in
static floatX *wide, *narrow, *weight; // of the products
static unsigned long long
    *faults;           // (2) device: elements over the limit, elements with other bits than whole's
static int32_t *first; // (size + 1, size + 1) host, copy of sets.first

// ---- NCCL's calls that the trainer does not make ----------------------------------------------------------

// clang-format off
#define NCCL_CALLS(X) \
    X(GetUniqueId) X(CommInitRankConfig) X(CommDestroy) X(GroupStart) X(GroupEnd) X(Reduce) X(Send) \
    X(Recv) X(GetErrorString)
// clang-format on
static struct {
#define MEMBER(name) decltype(&nccl##name) name;
    NCCL_CALLS(MEMBER)
#undef MEMBER
    ncclComm_t comm;
} nccl;
#define NCCL_CHECK(call) \
    do { \
        ncclResult_t status_ = nccl.call; \
        if (status_ != ncclSuccess) \
            fatal(EXIT_BAD_INPUT, "NCCL: %s: %s", #call, nccl.GetErrorString(status_)); \
    } while (0)

static void connect(void) // after comm_connect, which loads the library
{
    ncclConfig_t options = NCCL_CONFIG_INITIALIZER;
    union {
        ncclUniqueId id;
        int64_t words[sizeof(ncclUniqueId) / sizeof(int64_t)];
    } name;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
#define FIND(name) \
    if (!library || !(nccl.name = (decltype(nccl.name))dlsym(library, "nccl" #name))) \
        fatal(EXIT_BAD_INPUT, "the NCCL library lacks nccl" #name);
    NCCL_CALLS(FIND)
#undef FIND
    if (!rank)
        NCCL_CHECK(GetUniqueId(&name.id));
    for (int64_t &word : name.words)
        word = comm_max(rank ? INT64_MIN : word);
    NCCL_CHECK(CommInitRankConfig(&nccl.comm, size, name.id, rank, &options));
}

// ---- the ways ---------------------------------------------------------------------------------------------

static struct {
    cudaEvent_t mark[3 + 3 * TABLES];
    Part part[3 + 3 * TABLES]; // that ends at the mark
    int count;
} ticks;

static void tick(Part part)
{
    ticks.part[ticks.count] = part;
    CUDA_CHECK(cudaEventRecord(ticks.mark[ticks.count++], stream));
}

static unsigned row_blocks(int rows) { return (unsigned)ceil_div(rows, ROW_WARPS); }

static int room_for_each(void)
{
    const int32_t *all = first + size * (size + 1);
    int most = 0;
    for (int r = 0; r < size; r++)
        most = max(most, all[r + 1] - all[r]);
    return most;
}

static int64_t rows_sent(Way way) // by this rank, or the mean of all where a ring is
{
    const int32_t *mine = first + rank * (size + 1), *all = first + size * (size + 1);
    if (way == PADDED)
        return (int64_t)(size - 1) * room_for_each();
    if (way == EACH_OWNER)
        return (int64_t)(size - 1) * all[size] / size;
    if (way == OWN_ROWS)
        return mine[size] - (mine[rank + 1] - mine[rank]);
    return (int64_t)(size - 1) * sets.share;
}

static void send_group(Way way)
{
    const int32_t *mine = first + rank * (size + 1), *all = first + size * (size + 1);
    NCCL_CHECK(GroupStart());
    for (int r = 0; r < size && way == EACH_OWNER; r++) {
        float *rows = packed + (int64_t)all[r] * d;
        NCCL_CHECK(
            Reduce(rows, rows, (size_t)(all[r + 1] - all[r]) * d, ncclFloat, ncclSum, r, nccl.comm, stream));
    }
    for (int r = 0; r < size && way == OWN_ROWS; r++) {
        const int32_t *theirs = first + r * (size + 1);
        if (r == rank)
            continue;
        NCCL_CHECK(Send(packed + (int64_t)mine[r] * d, (size_t)(mine[r + 1] - mine[r]) * d, ncclFloat, r,
                        nccl.comm, stream));
        NCCL_CHECK(Recv(arrived + (int64_t)r * sets.share * d, (size_t)(theirs[rank + 1] - theirs[rank]) * d,
                        ncclFloat, r, nccl.comm, stream));
    }
    NCCL_CHECK(GroupEnd());
}

static void exchange_whole(float *table)
{
    int64_t own = sets.share * (int64_t)d, before = rank * own, after = table_size - before - own;
    comm_reduce_scatter(stream, table + before, table, own);
    tick(SEND);
    if (before)
        device_zero(stream, table, (size_t)before * sizeof(float));
    if (after)
        device_zero(stream, table + before + own, (size_t)after * sizeof(float));
    tick(PLACE);
}

static SharedSms shared; // left by the products that run beside

static void exchange_table(Way way, float *table)
{
    shared = comm_shared_sms(rows_sent(way) * d * (int64_t)sizeof(float));
    if (way == WHOLE)
        return exchange_whole(table);
    int room = way == PADDED ? room_for_each() : 0, set = way == OWN_ROWS ? rank : size;
    pack_rows<<<row_blocks(sets.share * size), ROW_THREADS, 0, stream>>>(packed, table, sets, set, rank, room,
                                                                         d);
    CHECK_LAUNCH();
    tick(PACK);
    if (way == PADDED)
        comm_reduce_scatter(stream, packed + (int64_t)rank * room * d, packed, (int64_t)room * d);
    else
        send_group(way);
    tick(SEND);
    if (way == OWN_ROWS)
        add_rows<<<row_blocks(sets.share), ROW_THREADS, 0, stream>>>(table, arrived, sets, rank, d);
    else
        place_rows<<<row_blocks(sets.share), ROW_THREADS, 0, stream>>>(table, packed, sets, rank, room, d);
    CHECK_LAUNCH();
    tick(PLACE);
}

static void join(void)
{
    comm_all_gather(stream, sets.bits, sets.words * (int64_t)sizeof *sets.bits);
    join_sets<<<size + 1, JOIN_THREADS, 0, stream>>>(sets);
    CHECK_LAUNCH();
}

static void fetch_counts(void)
{
    copy_to_host(stream, first, sets.first, (size_t)((size + 1) * (size + 1)) * sizeof *first);
    stream_synchronize(stream);
}

// New gradients, and all ranks at the same place.
static void prepare(void)
{
    fill_tables<<<2048, 256, 0, stream>>>(tables, sets, rank, TABLES * table_size, d);
    CHECK_LAUNCH();
    comm_all_reduce(stream, small, 64);
    shared.products = 0;
    ticks.count = 0;
    tick(PARTS);
}

static void exchange(Way way, bool known)
{
    if (way != WHOLE && !known) {
        join();
        tick(UNION);
        fetch_counts();
        tick(COUNTS);
    }
    for (int i = 0; i < TABLES; i++)
        exchange_table(way, tables + i * table_size);
}

static void check(Way way)
{
    unsigned long long found[2];
    device_zero(stream, faults, sizeof found);
    prepare();
    exchange(way, false);
    check_tables<<<2048, 256, 0, stream>>>(tables, reference, way == WHOLE, sets, rank, TABLES * table_size,
                                           d, faults);
    CHECK_LAUNCH();
    copy_to_host(stream, found, faults, sizeof found);
    stream_synchronize(stream);
    double wrong = comm_sum((double)found[0]), apart = comm_sum((double)found[1]);
    if (wrong > 0)
        fatal(EXIT_BAD_INPUT, "%s: %.0f elements are not the sum, or not cleared", way_name[way], wrong);
    if (rank || way == WHOLE)
        return;
    printf("%-10s  is right; %.0f of %.0f elements have other bits than whole tables give\n", way_name[way],
           apart, (double)TABLES * (double)table_size);
}

// ---- times ------------------------------------------------------------------------------------------------

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median(float *ms, int count) // and the mean of the ranks'
{
    qsort(ms, (size_t)count, sizeof *ms, by_value);
    return comm_sum(ms[count / 2]) / size;
}

// ms (PARTS + 1): of the parts, and of all
static void time_way(Way way, bool known, double *ms)
{
    static float all[PARTS + 1][REPEATS];
    memset(all, 0, sizeof all);
    for (int i = -WARM_UP; i < REPEATS; i++) {
        prepare();
        exchange(way, known);
        stream_synchronize(stream);
        for (int k = 1; k < ticks.count && i >= 0; k++) {
            float part;
            CUDA_CHECK(cudaEventElapsedTime(&part, ticks.mark[k - 1], ticks.mark[k]));
            all[ticks.part[k]][i] += part;
            all[PARTS][i] += part;
        }
    }
    for (int part = 0; part <= PARTS; part++)
        ms[part] = median(all[part], REPEATS);
}

// Products on a stream of their own, an exchange that begins with every PRODUCTS of them; way WAYS: products
// alone.
static double time_beside(Way way)
{
    static float ms[BESIDE_REPEATS];
    Event *reached = event_create();
    int N = config.micro_batch_tokens;
    ProductContext products = {side, &shared};
    InputGrad g = {narrow, wide, weight, N, d, config.mlp_dim, NULL};
    for (int i = -WARM_UP; i < BESIDE_REPEATS; i++) {
        prepare();
        event_record(reached, stream);
        stream_wait(side, reached);
        for (int t = 0; t < TABLES; t++) {
            event_record(reached, side);
            stream_wait(stream, reached);
            if (way != WAYS)
                exchange_table(way, tables + t * table_size);
            for (int k = 0; k < PRODUCTS; k++)
                matmul_backward_input(&products, &g);
        }
        event_record(reached, side);
        stream_wait(stream, reached);
        tick(PARTS);
        stream_synchronize(stream);
        if (i >= 0)
            CUDA_CHECK(cudaEventElapsedTime(&ms[i], ticks.mark[0], ticks.mark[ticks.count - 1]));
    }
    event_destroy(reached);
    return median(ms, BESIDE_REPEATS);
}

static void bench(void)
{
    double alone = time_beside(WAYS);
    if (!rank)
        printf("%-10s  %8s %7s %7s %7s %7s %7s   %7s %7s   beside %.3f ms of products\n", "", "MB sent",
               "union", "counts", "pack", "send", "place", "known", "fetched", alone);
    for (int way = 0; way < WAYS; way++) {
        double known[PARTS + 1], fetched[PARTS + 1],
            sent = comm_sum((double)rows_sent((Way)way)) / size * d * sizeof(float);
        time_way((Way)way, true, known);
        time_way((Way)way, false, fetched);
        double delay = time_beside((Way)way) - alone;
        if (rank)
            continue;
        char op[96];
        snprintf(op, sizeof op, "embedding gradients, %d tables: %s", TABLES, way_name[way]);
        figure(op, "two steps, alone", fetched[PARTS], "ms");
        figure(op, "two steps, beside products", delay, "ms");
        printf("%-10s  %8.1f %7.3f %7.3f %7.3f %7.3f %7.3f   %7.3f %7.3f   %+.3f\n", way_name[way],
               TABLES * sent * 1e-6, fetched[UNION], fetched[COUNTS], known[PACK], known[SEND], known[PLACE],
               known[PARTS], fetched[PARTS], delay);
    }
}

// ---- tokens -----------------------------------------------------------------------------------------------

// The rows of this rank's tokens in the next two steps, to the device; then everybody's, and first on the
// host.
static void read_pair(Loader *loader, Batch *b)
{
    Error e;
    uint32_t *bits = (uint32_t *)xcalloc((size_t)sets.words, sizeof *bits);
    for (int i = 0; i < 2 * config.micro_batches / size; i++) {
        if (!loader_next(loader, b, &e))
            fatal(EXIT_BAD_INPUT, "%s", e.text);
        for (int k = 0; k < b->rows.count; k++)
            bits[b->rows.row[k] / 32] |= 1u << b->rows.row[k] % 32;
    }
    copy_to_device(stream, sets.bits + rank * sets.words, bits, (size_t)sets.words * sizeof *bits);
    stream_synchronize(stream);
    free(bits);
    join();
    fetch_counts();
}

static void read_pairs(Loader *loader)
{
    const int32_t *all = first + size * (size + 1);
    double Vp = sets.share * size, one[2] = {1, 0}, any[2] = {1, 0};
    Batch b;
    batch_alloc(&b, config.micro_batch_tokens, NULL);
    for (int i = 0; i < PAIRS; i++) {
        read_pair(loader, &b);
        for (int r = 0; r < size; r++) {
            double share = first[r * (size + 1) + size] / Vp;
            one[0] = fmin(one[0], share);
            one[1] = fmax(one[1], share);
        }
        any[0] = fmin(any[0], all[size] / Vp);
        any[1] = fmax(any[1], all[size] / Vp);
    }
    batch_free(&b);
    if (rank)
        return;
    printf("%d tables of %.0f rows, %d columns fp32, on %d GPUs: %s\n", TABLES, Vp, d, size,
           comm_description());
    printf("rows touched in two steps of %d tokens, %d pairs of steps: by one rank %.1f to %.1f%%, by any "
           "%.1f to %.1f%%\n",
           config.micro_batches * config.micro_batch_tokens, PAIRS, 100 * one[0], 100 * one[1], 100 * any[0],
           100 * any[1]);
    printf("in the pair that is timed: %d by rank 0, %d by any; of each owner's %d", first[size], all[size],
           sets.share);
    for (int r = 0; r < size; r++)
        printf(" %d", all[r + 1] - all[r]);
    printf("\n");
}

// ---- the program ------------------------------------------------------------------------------------------

template <class T> static T *allocate(int64_t count)
{
    return (T *)device_alloc((size_t)count * sizeof(T), "bench");
}

static void allocate_all(void)
{
    int64_t Vp = config_vocab_padded(&config), N = config.micro_batch_tokens, F = config.mlp_dim;
    d = config.model_dim;
    table_size = Vp * d;
    sets = {.words = (int)(Vp / 32), .size = size, .share = (int)(Vp / size)};
    sets.bits = allocate<uint32_t>((size + 1) * sets.words);
    sets.below = allocate<int32_t>((size + 1) * sets.words);
    sets.first = allocate<int32_t>((size + 1) * (size + 1));
    first = (int32_t *)host_alloc((size_t)((size + 1) * (size + 1)) * sizeof *first);
    tables = allocate<float>(TABLES * table_size);
    packed = allocate<float>(table_size);
    arrived = allocate<float>(table_size);
    reference = allocate<float>(TABLES * sets.share * (int64_t)d);
    small = allocate<float>(64);
    wide = allocate<floatX>(N * F);
    narrow = allocate<floatX>(N * d);
    weight = allocate<floatX>(F * d);
    faults = allocate<unsigned long long>(2);
    stream = stream_create_urgent();
    side = stream_create();
    fill_operand<<<2048, 256, 0, stream>>>(wide, N * F);
    fill_operand<<<2048, 256, 0, stream>>>(weight, F * d);
    CHECK_LAUNCH();
    for (cudaEvent_t &mark : ticks.mark)
        CUDA_CHECK(cudaEventCreate(&mark));
}

static Loader *open_data(void)
{
    Error e;
    LoaderOptions o = {};
    o.files_glob = config.train_files;
    o.micro_batches = config.micro_batches;
    o.group_micro_batches = config.group_micro_batches;
    o.micro_batch_tokens = config.micro_batch_tokens;
    o.max_document = config.max_document;
    o.rank = rank;
    o.num_ranks = size;
    o.repeat = true;
    Loader *loader = loader_open(&o, &e);
    if (!loader)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    config.vocab_size = loader_vocab_size(loader);
    return loader;
}

int main(int argc, char **argv)
{
    Error e;
    const char *usage =
        "bench_embedding_exchange --gpus N --train-files FILES [option of train_gpt ...], N 2, 4 or 8";
    set_program_name("bench_embedding_exchange", -1);
    figures_open(&argc, argv);
    comm_open();
    if (!config_parse(&config, argc, argv, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    uint64_t options = config_fingerprint(&config);
    CommOptions o = {config.gpus, 1, config.device, config.micro_batches, (double)config.timeout,
                     true,        0, options};
    int device = comm_join(&o);
    rank = comm_rank();
    size = comm_size();
    figures.devices = size;
    if (size == 1)
        fatal(EXIT_USAGE, "one GPU exchanges nothing; usage: %s", usage);
    Loader *loader = open_data();
    if (config.model_dim % 8 || config.model_dim > 4 * WARP * VECTORS)
        fatal(EXIT_USAGE, "--model-dim %d: a multiple of 8 up to %d here", config.model_dim,
              4 * WARP * VECTORS);
    backend_open(device);
    OpSizes sizes = {};
    sizes.tokens = sizes.eval_tokens = 1024;
    sizes.dim = config.model_dim;
    sizes.heads = config.num_heads;
    sizes.mlp_dim = config.mlp_dim;
    sizes.vocab_padded = config_vocab_padded(&config);
    backend_reserve(&sizes);
    comm_connect();
    connect();
    allocate_all();
    read_pairs(loader);
    for (int way = 0; way < WAYS; way++)
        check((Way)way);
    bench();
    comm_barrier();
    NCCL_CHECK(CommDestroy(nccl.comm));
    loader_close(loader);
    comm_close();
    backend_close();
    return 0;
}
