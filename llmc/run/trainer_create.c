// What a trainer has: data, memory, initial state.
#include "llmc/data/validation.h"
#include "llmc/io/weights.h"
#include "llmc/run/data_fit.h"
#include "llmc/run/trainer_internal.h"
#include "llmc/run/vocabulary.h"
#include "llmc/text/prefix.h"
#include <stdlib.h>
#include <string.h>

// ---- data -------------------------------------------------------------------------------------------------

static Tokenizer *open_vocabulary(const Config *c, const char *what)
{
    Error e;
    Tokenizer *tokenizer = vocabulary_open(c, what, &e);
    if (!tokenizer)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    return tokenizer;
}

// The prefixes of the vocabulary's tokens; returns a line for the log.
static char *open_prefixes(Trainer *t)
{
    const Config *c = t->config;
    int found;
    Tokenizer *tokenizer = open_vocabulary(c, "the prefix term of the loss (--stage-prefix)");
    t->prefix = prefix_table_of(tokenizer, config_vocab_padded(c), &found);
    tokenizer_free(tokenizer);
    if (found)
        return format_string("%d of %d tokens begin with a shorter one: targets of the prefix term", found,
                             c->vocab_size);
    free(t->prefix);
    t->prefix = NULL;
    return xstrdup("the tokens are single bytes: the loss has no prefix term");
}

// Which tokens validations leave out; returns a line for the log.
static char *open_mask(Trainer *t)
{
    const Config *c = t->config;
    Tokenizer *tokenizer = open_vocabulary(c, "the mask of a validation (--val-mask)");
    t->mask = token_mask_start(tokenizer, config_vocab_padded(c));
    if (t->mask)
        return format_string("%s leave%s out tokens that cannot follow the one before",
                             c->val_mask == MASK_ALL ? "validations" : "the last validation",
                             c->val_mask == MASK_ALL ? "" : "s");
    return xstrdup("the tokens are single bytes: validations leave none out");
}

static void open_training_data(Trainer *t)
{
    Config *c = t->config;
    Error e;
    LoaderOptions o = {.files_glob = c->train_files,
                       .micro_batches = c->micro_batches,
                       .group_micro_batches = c->group_micro_batches,
                       .micro_batch_tokens = schedule_most_tokens(c),
                       .rank = comm_rank(),
                       .num_ranks = comm_size(),
                       .max_document = c->max_document,
                       .repeat = c->repeat,
                       .epochs = c->repeat ? 0 : c->epochs,
                       .vocab_size = c->vocab_size};
    t->loader = loader_open(&o, &e);
    if (!t->loader)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    c->vocab_size = loader_vocab_size(t->loader);
    t->fit[0] = fit_steps(c, &o, loader_num_tokens(t->loader));
    if (schedule_needs_prefix(c))
        t->fit[2] = open_prefixes(t);
    t->position = loader_position(t->loader);
}

// Ranks on several machines may see different files under one name.
static void check_same_data(const char *what, uint64_t fingerprint, const char *pattern)
{
    if (!comm_agrees(fingerprint))
        fatal(EXIT_BAD_INPUT, "%s of this rank are not those of rank 0 (sizes, tokens): %s", what, pattern);
}

static uint64_t prefix_fingerprint(const Trainer *t)
{
    size_t bytes = (size_t)config_vocab_padded(t->config) * sizeof *t->prefix;
    return fingerprint_bytes(0, t->prefix, t->prefix ? bytes : 0);
}

static void open_validation_data(Trainer *t)
{
    Config *c = t->config;
    Error e;
    t->fit[1] = fit_validation(c);
    t->sequence_tokens =
        (int)min_i64((int64_t)c->micro_batches * c->micro_batch_tokens, c->val_tokens); // config_check: fits
    if (c->val_tokens % t->sequence_tokens)
        fatal(EXIT_USAGE,
              "--val-tokens %lld is not a multiple of a validation sequence, %d tokens "
              "(--micro-batches times --micro-batch-tokens)",
              (long long)c->val_tokens, t->sequence_tokens);
    t->validation = validation_open(c->val_files, c->val_tokens, t->sequence_tokens, c->vocab_size,
                                    t->loader ? loader_document_token(t->loader) : -1, &e);
    if (!t->validation)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    if (!c->vocab_size)
        c->vocab_size = validation_vocab_size(t->validation);
    if (c->val_mask)
        t->fit[3] = open_mask(t);
}

// ---- memory -----------------------------------------------------------------------------------------------

enum { PART_MULTIPLE = 128 }; // of tokens that are evaluated at a time

static PairHash pair_hash_of(const Trainer *t)
{
    const ParamSpec *bigram = record_row(t->model.record, ROLE_BIGRAM),
                    *signs = record_row(t->model.record, ROLE_SIGNS);
    if (!bigram)
        return (PairHash){0};
    return (PairHash){.rows = (int)record_extent(t->config, bigram->rows),
                      .sign_rows = (int)record_extent(t->config, signs->rows)};
}

// What the record's model reads beside tokens.
static BatchTables tables_of(const Trainer *t)
{
    const Record *r = t->model.record;
    return (BatchTables){.pairs = pair_hash_of(t), .prefix = t->prefix, .paired = record_has_paired(r)};
}

static BatchTables eval_tables(const Trainer *t)
{
    BatchTables tables = t->tables;
    tables.prefix = NULL;
    return tables;
}

static int64_t input_bytes(const Trainer *t, int N) // of a step
{
    int n = schedule_launch_tokens(t->config, N);
    return t->most_launches * block_ints(n, &t->tables) * (int64_t)sizeof(int32_t) +
           (int64_t)sizeof(StepParams);
}

static void allocate_batches(Trainer *t)
{
    size_t losses = (size_t)t->most_launches * sizeof(float);
    const RowExchange *rows = &t->optimizer.exchange.rows;
    size_t most = (size_t)input_bytes(t, schedule_most_tokens(t->config)) +
                  (size_t)row_marks_ints(rows) * sizeof(int32_t);
    row_marks_create(&t->row_marks, rows);
    t->launch_position = xcalloc((size_t)t->most_launches, sizeof *t->launch_position);
    t->device_loss = device_alloc(losses, "batches: losses");
    t->feed = stream_create();
    for (int i = 0; i < STEP_SLOTS; i++) {
        t->device_input[i] = device_alloc(most, "batches");
        t->host_input[i] = host_alloc(most);
        t->host_loss[i] = host_alloc(losses);
        t->fed[i] = event_create();
        t->done[i] = event_create();
    }
}

static void allocate_parts(Trainer *t)
{
    BatchTables tables = eval_tables(t);
    t->eval_block_ints = block_ints(t->part_tokens, &tables);
    size_t bytes = (size_t)t->eval_block_ints * sizeof(int32_t);
    batch_alloc(&t->eval_batch, t->part_tokens, &tables);
    t->host_eval_block = host_alloc(bytes);
    t->device_eval_block = device_alloc(bytes, "batches: validation");
    t->device_logits =
        device_alloc((size_t)config_vocab_padded(t->config) * sizeof(float), "batches: logits of a sample");
    if (*t->config->eval)
        t->device_rows = device_alloc((size_t)t->part_tokens * sizeof(float), "batches: losses of tokens");
}

// A batch of an evaluation holds the longest documents of training.
static int64_t evaluation_tokens(const Config *c)
{
    return *c->eval ? round_up((int64_t)c->max_document + EVAL_LEAD, PART_MULTIPLE) : 0;
}

// Of a sequence where nothing is validated.
static int tokens_to_use(const Config *c)
{
    return (int)(*c->eval ? max_i64(schedule_most_tokens(c), evaluation_tokens(c))
                          : min_i64(c->micro_batch_tokens, 4096));
}

static void allocate_mask(Trainer *t)
{
    size_t V = (size_t)config_vocab_padded(t->config);
    if (t->mask)
        t->impossible = device_alloc(V * (V / 8), "batches: mask of validations");
}

enum { LAUNCH_STEP = 1024, SPARE = 768 << 20 }; // tokens; bytes: batches, scratch, libraries' workspaces
enum { MOST_DIVISOR = 8 };                      // of the tokens of a micro-batch

// On the rank that has least.
static size_t least_bytes_free(void)
{
    size_t here = device_bytes_free(), most = INT64_MAX;
    return (size_t)-comm_max(-(int64_t)(here < most ? here : most));
}

// The options of smaller micro-batches that fit, as many tokens a step, owned by the caller; NULL: none do,
// or the present ones may.
static char *smaller_micro_batches(const Trainer *t, size_t spare)
{
    const Config *c = t->config;
    int most = schedule_most_tokens(c);
    bool whole_validation = t->validation && record_crosses_documents(t->model.record);
    if (acts_bytes(&t->model, most, true) <= spare) // may fit: what SPARE is for can take less
        return NULL;
    if (whole_validation && acts_bytes(&t->model, t->sequence_tokens, false) + SPARE > spare)
        return NULL;
    for (int divisor = 2; divisor <= MOST_DIVISOR; divisor *= 2) {
        char *options = schedule_divided(c, divisor);
        if (options && acts_bytes(&t->model, most / divisor, true) + SPARE <= spare)
            return options;
        free(options);
    }
    return NULL;
}

// Whether the sizes of micro-batches are the preset's own, and no earlier run's.
static bool may_divide(const Config *c)
{
    static const char *const sizes[] = {"micro-batches", "micro-batch-tokens", "stage-tokens",
                                        "group-micro-batches"};
    bool given = *c->resume || *c->config;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        given = given || config_given(c, sizes[i]);
    return !given;
}

// options: "--name value ..."
static void take_options(Config *c, const char *options)
{
    char *text = xstrdup(options), *rest = text, *name;
    while ((name = strtok_r(rest, " ", &rest))) {
        const char *value = strtok_r(rest, " ", &rest);
        Error e;
        if (!config_set(c, name + strlen("--"), value, &e))
            fatal(EXIT_BAD_INPUT, "%s", e.text);
    }
    free(text);
    Error e;
    if (!config_check(c, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
}

// Training whose activations do not fit into the GPU's memory gets launches of as many tokens as do. Where
// the record offers none it gets smaller micro-batches, which cut other documents. The program ends where the
// command line or an earlier run says how large they are, and says what would fit if it can. What is free is
// what model and optimizer have left. Returns a line that says so, owned by the caller; NULL: nothing was
// changed.
static char *fit_memory(Trainer *t)
{
    Config *c = t->config, tried = *c;
    Error e;
    int most = schedule_most_tokens(c), n = most;
    if (c->launch_tokens || config_given(c, "launch-tokens"))
        return NULL;
    size_t spare = least_bytes_free(), all = acts_bytes(&t->model, most, true);
    while (n > LAUNCH_STEP && acts_bytes(&t->model, n, true) + SPARE > spare)
        n = (n - 1) / LAUNCH_STEP * LAUNCH_STEP;
    tried.launch_tokens = n;
    if (n == most)
        return NULL;
    char *why = format_string("activations of %d tokens take %.0f MiB, and %.0f are free", most,
                              (double)all / 1048576, (double)spare / 1048576),
         *line = NULL;
    if (config_check_launches(&tried, &e)) {
        c->launch_tokens = n;
        line = format_string("%s: launches of %d tokens (--launch-tokens), the same batch with the same "
                             "losses to rounding, without CUDA graphs",
                             why, n);
    } else {
        char *options = smaller_micro_batches(t, spare);
        if (options && !may_divide(c))
            fatal(EXIT_BAD_INPUT, "%s: give %s, as many tokens a step, cut into other documents", why,
                  options);
        if (options) {
            take_options(c, options);
            line = format_string("%s: %s, as many tokens a step, cut into other documents than the preset's",
                                 why, options);
        }
        free(options);
    }
    free(why);
    return line;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// Tokens of a validation sequence that are evaluated at a time: the whole sequence, or as much of it as fits
// where a training micro-batch does, but no document is cut, and none is read without those before it that it
// depends on. So small micro-batches make the whole program small. Scratch of ops is not known yet, and not
// counted.
static int plan_parts(const Trainer *t)
{
    size_t train = acts_bytes(&t->model, schedule_most_launch_tokens(t->config), true);
    if (!t->validation || record_crosses_documents(t->model.record) ||
        acts_bytes(&t->model, t->sequence_tokens, false) <= train)
        return t->sequence_tokens;
    int fits = 0, does_not = (int)ceil_div(t->sequence_tokens, PART_MULTIPLE);
    while (does_not - fits > 1) {
        int middle = (fits + does_not) / 2;
        if (acts_bytes(&t->model, middle * PART_MULTIPLE, false) <= train)
            fits = middle;
        else
            does_not = middle;
    }
    int64_t least = round_up(validation_longest(t->validation) + 1, PART_MULTIPLE);
    least = max_i64(least, evaluation_tokens(t->config));
    return (int)min_i64(t->sequence_tokens, max_i64((int64_t)fits * PART_MULTIPLE, least));
}

// One memory for what is never alive together: a training micro-batch, a part of a validation sequence, the
// work of Newton-Schulz.
static void allocate_acts(Trainer *t)
{
    Config *c = t->config;
    size_t train = 0, eval = acts_bytes(&t->model, t->part_tokens, false), updates = 0;
    int most = schedule_most_tokens(c), launch = schedule_most_launch_tokens(c);
    char launches[96] = "";
    if (t->loader)
        train = acts_bytes(&t->model, launch, true);
    if (t->loader && launch < most)
        snprintf(launches, sizeof launches, " for %d of %d tokens at a time (%.1f for all)", launch, most,
                 (double)acts_bytes(&t->model, most, true) / 1048576);
    if (t->loader)
        updates = optimizer_workspace_bytes(&t->optimizer, &t->model);
    t->acts_bytes = larger(larger(train, eval), updates);
    t->acts_memory = device_alloc(t->acts_bytes, "activations");
    acts_place(&t->eval, &t->model, t->part_tokens, false, t->acts_memory);
    t->optimizer.ns_workspace = t->acts_memory;
    snprintf(t->memory_plan, sizeof t->memory_plan,
             "training %.1f MiB%s, validation %.1f for %d tokens at a time, updates %.1f in one place; "
             "scratch of the head and of attention included",
             (double)train / 1048576, launches, (double)eval / 1048576, t->part_tokens,
             (double)updates / 1048576);
}

static void allocate_rope(Trainer *t)
{
    const Config *c = t->config;
    rope_start(&t->rope, c);
    t->rope_positions = (int)max_i64(t->sequence_tokens, t->loader ? schedule_most_tokens(c) : 0);
    if (t->loader && schedule_most_launch_tokens(c) < schedule_most_tokens(c))
        t->rope_positions += schedule_most_launch_tokens(c); // rows behind the last document
    if (t->tables.paired)
        t->rope_positions *= 2;
    size_t angles = (size_t)t->rope_positions * (size_t)t->rope.count;
    t->rope_cos = device_alloc(angles * sizeof(floatX), "batches: rope tables");
    t->rope_sin = device_alloc(angles * sizeof(floatX), "batches: rope tables");
}

// Batches, blocks and activations of a stage's size, in memory that is large enough for all stages.
void trainer_take_sizes(Trainer *t, Stage stage)
{
    int N = stage.micro_batch_tokens, n = schedule_launch_tokens(t->config, N);
    if (t->batch.N != N) {
        batch_free(&t->batch);
        batch_free(&t->launch);
        batch_alloc(&t->batch, N, &t->tables);
        if (n < N)
            batch_alloc(&t->launch, n, &t->tables);
        t->slots = t->row_marks.num_values = t->row_marks.num_gradients = 0;
        assert(acts_bytes(&t->model, n, true) <= t->acts_bytes); // sizes of scratch rise with N
        acts_place(&t->train, &t->model, n, true, t->acts_memory);
    }
    t->block_ints = block_ints(n, &t->tables);
    t->input_bytes = input_bytes(t, N);
    t->stage = stage;
    loader_set_sizes(t->loader, N, stage.max_document);
}

// One set of scales for all micro-batches has an order only where one rank computes all of them.
static void check_scales(const Trainer *t)
{
    const Config *c = t->config;
    if (c->fp8_scales == SCALES_SEQUENTIAL && comm_size() > 1 && record_scales_are_state(c))
        fatal(EXIT_USAGE, "--fp8-scales sequential is for one GPU, and this run has %d ranks; leave it out",
              comm_size());
}

// Shards and what the vocabulary says; the ranks must have found the same.
static void open_data(Trainer *t, bool need_training, bool need_validation)
{
    const Config *c = t->config;
    const char *vocabulary = *c->vocab ? c->vocab : VOCABULARY_FOLDER;
    comm_patience(true); // shards may come over a slow network
    double began = seconds_now();
    if (need_training)
        open_training_data(t);
    // Finding the shards is training time; what the first step reads follows.
    t->train_ms = 1e3 * (seconds_now() - began);
    if (need_validation)
        open_validation_data(t);
    if (need_training)
        check_same_data("the training shards", loader_fingerprint(t->loader), c->train_files);
    if (schedule_needs_prefix(c) && need_training)
        check_same_data("the vocabulary's prefixes", prefix_fingerprint(t), vocabulary);
    if (need_validation && c->val_mask)
        check_same_data("the vocabulary's tokens", t->mask ? token_mask_fingerprint(t->mask) : 0, vocabulary);
    if (need_validation)
        check_same_data("the validation tokens", validation_fingerprint(t->validation), c->val_files);
    comm_patience(false);
}

static void reserve_backend(const Trainer *t, bool need_training)
{
    const Config *c = t->config;
    // Ranks watch each other; one alone has the watchdog. A wait may cover a whole validation.
    double wait_limit = comm_size() == 1 ? 5.0 * c->timeout : 0;
    OpSizes sizes = {.tokens = need_training ? schedule_most_launch_tokens(c) : 0,
                     .wait_limit = wait_limit,
                     .eval_tokens = t->part_tokens,
                     .dim = c->model_dim,
                     .heads = c->num_heads,
                     .key_dim = c->num_heads * record_key_width(c),
                     .reach = schedule_longest_reach(c),
                     .mlp_dim = c->mlp_dim,
                     .vocab_padded = config_vocab_padded(c),
                     .fp8_head = c->head == HEAD_FP8,
                     .fp8_mlp = c->mlp != MLP_BF16 && need_training,
                     .fp8_qkv = c->qkv == QKV_FP8 && need_training,
                     .fp8_weight_grads = (c->mlp == MLP_FP8_BACKWARD || c->qkv == QKV_FP8) && need_training,
                     .sdpa_alone = !record_has_attention(config_record(c), ATTENTION_PLAIN),
                     .deterministic = c->deterministic,
                     .portable = c->portable,
                     .attention = (AttentionKernels)c->attention,
                     .self_check = (SelfCheck)c->self_check};
    if (need_training)
        schedule_smaller_launches(c, sizes.smaller, SMALLER_SIZES);
    backend_reserve(&sizes);
}

static void allocate_state(Trainer *t, bool need_training)
{
    model_allocate(&t->model, need_training);
    if (!need_training)
        return;
    optimizer_create(&t->optimizer, &t->model);
    if (comm_size() > 1)
        t->model.hooks = (StageHooks){t, trainer_weights_needed, trainer_gradients_done};
}

static void allocate_rest(Trainer *t, bool need_training)
{
    allocate_acts(t);
    allocate_rope(t);
    if (need_training)
        allocate_batches(t);
    allocate_parts(t);
    allocate_mask(t);
}

static void close_data(Trainer *t)
{
    loader_close(t->loader);
    free(t->prefix);
    token_mask_free(t->mask);
    validation_close(t->validation);
    for (int i = 0; i < TRAINER_NOTES; i++)
        free(t->fit[i]);
}

// Data, model and optimizer.
static void create_state(Trainer *t, Config *c, bool need_training, bool need_validation)
{
    Error e;
    memset(t, 0, sizeof *t);
    t->config = c;
    t->accumulation = c->micro_batches / comm_size();
    open_data(t, need_training, need_validation);
    if (!t->sequence_tokens) // nothing is validated
        t->sequence_tokens = tokens_to_use(c);
    model_describe(&t->model, c);
    if (!weights_check(&t->model.params, c, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    t->tables = tables_of(t);
    if (need_training)
        check_scales(t);
    timeline_mark("data");
    allocate_state(t, need_training);
}

void trainer_create(Trainer *t, Config *c, bool need_training, bool need_validation)
{
    create_state(t, c, need_training, need_validation);
    int micro_batches = c->micro_batches;
    char *fit = need_training ? fit_memory(t) : NULL;
    if (c->micro_batches != micro_batches) { // the loader and FP8 scales depend on their number
        optimizer_free(&t->optimizer);
        model_free(&t->model);
        close_data(t);
        create_state(t, c, need_training, need_validation);
    }
    t->fit_memory = fit;
    t->most_launches =
        t->accumulation * batch_most_launches(schedule_most_tokens(c), schedule_most_launch_tokens(c));
    t->part_tokens = plan_parts(t);
    reserve_backend(t, need_training);
    timeline_mark("products and plans");
    t->stream = stream_create();
    allocate_rest(t, need_training);
    trainer_rebuild_rope(t);
    if (need_training)
        trainer_take_sizes(t, schedule_stage(c, 0));
    timeline_mark("memory");
}

void trainer_free(Trainer *t)
{
    comm_patience(true); // rank 0 may have written a sample, and the others wait for it
    trainer_drop_graphs(t);
    stream_synchronize(t->stream);
    comm_disconnect();
    comm_patience(false);
    close_data(t); // first the loader, whose thread may be at work
    device_free(t->impossible);
    free(t->fit_memory);
    for (int i = 0; i < STEP_SLOTS && t->loader; i++) {
        host_free(t->host_input[i]);
        device_free(t->device_input[i]);
        host_free(t->host_loss[i]);
        event_destroy(t->fed[i]);
        event_destroy(t->done[i]);
    }
    if (t->loader) {
        batch_free(&t->batch);
        batch_free(&t->launch);
        free(t->launch_position);
        row_marks_free(&t->row_marks);
        stream_destroy(t->feed);
        device_free(t->device_loss);
        optimizer_free(&t->optimizer);
    }
    batch_free(&t->eval_batch);
    host_free(t->host_eval_block);
    device_free(t->device_eval_block);
    device_free(t->device_logits);
    device_free(t->device_rows);
    device_free(t->acts_memory);
    device_free(t->rope_cos);
    device_free(t->rope_sin);
    model_free(&t->model);
    stream_destroy(t->stream);
}
