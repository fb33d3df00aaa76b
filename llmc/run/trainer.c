#include "llmc/run/trainer.h"
#include "llmc/run/data_fit.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- data -------------------------------------------------------------------------------------------------

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
    t->position = loader_position(t->loader);
}

// Ranks on several machines may see different files under one name.
static void check_same_data(const char *what, uint64_t fingerprint, const char *pattern)
{
    int64_t mine = (int64_t)(fingerprint >> 2) + 1, first = comm_max(comm_rank() ? 0 : mine);
    if (mine != first)
        fatal(EXIT_BAD_INPUT, "%s of this rank are not those of rank 0 (sizes, tokens): %s", what, pattern);
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
}

// A block holds the batch's arrays, the number of rows, and the attention table.
static int64_t rows_offset(int N) { return (int64_t)batch_offset(N, BATCH_ARRAYS); }
static int64_t table_offset(int N) { return rows_offset(N) + BATCH_ALIGN; }
static int64_t block_size(int N)
{
    return round_up(table_offset(N) + attention_table_ints(N, 0), BATCH_ALIGN);
}

// Fills a host block; returns the document slots it needs.
static int pack_block(int32_t *block, const Batch *b)
{
    memcpy(block, b->block, b->block_ints * sizeof *block);
    block[rows_offset(b->N)] = b->num_rows;
    return attention_table_build(block + table_offset(b->N), b->cu_seqlens, b->num_docs, b->N, 0);
}

// Behind the blocks of a step's input, here or on the device.
static StepParams *input_params(const Trainer *t, int32_t *input)
{
    return (StepParams *)(input + t->accumulation * t->block_ints);
}

static DeviceBatch device_batch(const int32_t *block, int N, int slots)
{
    const int32_t *array[BATCH_ARRAYS];
    for (int i = 0; i < BATCH_ARRAYS; i++)
        array[i] = block + batch_offset(N, i);
    return (DeviceBatch){.N = N,
                         .tokens = array[0],
                         .targets = array[1],
                         .rows = {.order = array[3],
                                  .row_token = array[4],
                                  .row_start = array[5],
                                  .num_rows = block + rows_offset(N)},
                         .table = block + table_offset(N),
                         .slots = slots};
}

// ---- memory -----------------------------------------------------------------------------------------------

static int64_t input_bytes(const Trainer *t, int N) // of a step
{
    return t->accumulation * block_size(N) * (int64_t)sizeof(int32_t) + (int64_t)sizeof(StepParams);
}

static void allocate_batches(Trainer *t)
{
    int A = t->accumulation;
    size_t most = (size_t)input_bytes(t, schedule_most_tokens(t->config));
    t->device_loss = device_alloc((size_t)A * sizeof(float), "batches: losses");
    t->feed = stream_create();
    for (int i = 0; i < STEP_SLOTS; i++) {
        t->device_input[i] = device_alloc(most, "batches");
        t->host_input[i] = host_alloc(most);
        t->host_loss[i] = host_alloc((size_t)A * sizeof(float));
        t->fed[i] = event_create();
        t->done[i] = event_create();
    }
}

static void allocate_parts(Trainer *t)
{
    t->eval_block_ints = block_size(t->part_tokens);
    size_t bytes = (size_t)t->eval_block_ints * sizeof(int32_t);
    batch_alloc(&t->eval_batch, t->part_tokens);
    t->host_eval_block = host_alloc(bytes);
    t->device_eval_block = device_alloc(bytes, "batches: validation");
    t->device_logits =
        device_alloc((size_t)config_vocab_padded(t->config) * sizeof(float), "batches: logits of a sample");
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// Tokens of a validation sequence that are evaluated at a time: the whole sequence, or as much of it as fits
// where a training micro-batch does, but no document is cut. So small micro-batches make the whole program
// small. Scratch of ops is not known yet, and not counted.
static int plan_parts(const Trainer *t)
{
    enum { MULTIPLE = 128 };
    size_t train = acts_bytes(&t->model, schedule_most_tokens(t->config), true);
    if (!t->validation || acts_bytes(&t->model, t->sequence_tokens, false) <= train)
        return t->sequence_tokens;
    int fits = 0, does_not = (int)ceil_div(t->sequence_tokens, MULTIPLE);
    while (does_not - fits > 1) {
        int middle = (fits + does_not) / 2;
        if (acts_bytes(&t->model, middle * MULTIPLE, false) <= train)
            fits = middle;
        else
            does_not = middle;
    }
    int64_t least = round_up(validation_longest(t->validation) + 1, MULTIPLE);
    return (int)min_i64(t->sequence_tokens, max_i64((int64_t)fits * MULTIPLE, least));
}

// One memory for what is never alive together: a training micro-batch, a part of a validation sequence, the
// work of Newton-Schulz.
static void allocate_acts(Trainer *t)
{
    Config *c = t->config;
    size_t train = 0, eval = acts_bytes(&t->model, t->part_tokens, false), updates = 0;
    if (t->loader)
        train = acts_bytes(&t->model, schedule_most_tokens(c), true);
    if (t->loader)
        updates = optimizer_workspace_bytes(&t->optimizer, &t->model);
    t->acts_bytes = larger(larger(train, eval), updates);
    t->acts_memory = device_alloc(t->acts_bytes, "activations");
    acts_place(&t->eval, &t->model, t->part_tokens, false, t->acts_memory);
    t->optimizer.ns_workspace = t->acts_memory;
    snprintf(t->memory_plan, sizeof t->memory_plan,
             "training %.1f MiB, validation %.1f for %d tokens at a time, updates %.1f in one place; "
             "scratch of the head and of attention included",
             (double)train / 1048576, (double)eval / 1048576, t->part_tokens, (double)updates / 1048576);
}

static void allocate_rope(Trainer *t)
{
    Config *c = t->config;
    t->rope_positions = (int)max_i64(t->sequence_tokens, t->loader ? schedule_most_tokens(c) : 0);
    size_t angles = (size_t)t->rope_positions * (size_t)(c->model_dim / c->num_heads / 4);
    t->rope_cos = device_alloc(angles * sizeof(floatX), "batches: rope tables");
    t->rope_sin = device_alloc(angles * sizeof(floatX), "batches: rope tables");
}

static void weights_needed(void *trainer, int stage, Stream s);
static void gradients_done(void *trainer, int stage, const ProductContext *c);

static void rebuild_rope(Trainer *t)
{
    rope_tables(t->stream, t->rope_cos, t->rope_sin, t->rope.frequency, t->rope_positions,
                t->config->model_dim / t->config->num_heads);
}

// Batches, blocks and activations of a stage's size, in memory that is large enough for all stages.
static void take_sizes(Trainer *t, Stage stage)
{
    int N = stage.micro_batch_tokens;
    if (t->batch.N != N) {
        batch_free(&t->batch);
        batch_alloc(&t->batch, N);
        t->slots = 0;
        acts_place(&t->train, &t->model, N, true, t->acts_memory);
    }
    t->block_ints = block_size(N);
    t->input_bytes = input_bytes(t, N);
    t->stage = stage;
    loader_set_sizes(t->loader, N, stage.max_document);
}

void trainer_create(Trainer *t, Config *c, bool need_training, bool need_validation)
{
    memset(t, 0, sizeof *t);
    t->config = c;
    t->accumulation = c->micro_batches / comm_size();
    comm_patience(true); // shards may come over a slow network
    double began = seconds_now();
    if (need_training)
        open_training_data(t);
    t->train_ms = 1e3 * (seconds_now() -
                         began); // finding the shards is training time; what the first step reads follows
    if (need_validation)
        open_validation_data(t);
    if (need_training)
        check_same_data("the training shards", loader_fingerprint(t->loader), c->train_files);
    if (need_validation)
        check_same_data("the validation tokens", validation_fingerprint(t->validation), c->val_files);
    comm_patience(false);
    if (!t->sequence_tokens)
        t->sequence_tokens = (int)min_i64(c->micro_batch_tokens, 4096); // sampling alone
    model_describe(&t->model, c);
    t->part_tokens = plan_parts(t);
    timeline_mark("data");
    // Ranks watch each other; one alone has the watchdog. A wait may cover a whole validation.
    double wait_limit = comm_size() == 1 ? 5.0 * c->timeout : 0;
    backend_reserve(&(OpSizes){.tokens = need_training ? schedule_most_tokens(c) : 0,
                               .wait_limit = wait_limit,
                               .eval_tokens = t->part_tokens,
                               .dim = c->model_dim,
                               .heads = c->num_heads,
                               .mlp_dim = c->mlp_dim,
                               .vocab_padded = config_vocab_padded(c),
                               .fp8_head = c->head == HEAD_FP8,
                               .fp8_mlp = c->mlp == MLP_FP8 && need_training,
                               .deterministic = c->deterministic,
                               .portable = c->portable,
                               .attention = (AttentionKernels)c->attention,
                               .self_check = (SelfCheck)c->self_check});
    timeline_mark("products and plans");
    t->stream = stream_create();
    model_allocate(&t->model, need_training);
    if (need_training)
        optimizer_create(&t->optimizer, &t->model);
    if (need_training && comm_size() > 1)
        t->model.hooks = (StageHooks){t, weights_needed, gradients_done};
    allocate_acts(t);
    allocate_rope(t);
    if (need_training)
        allocate_batches(t);
    allocate_parts(t);
    rope_start(&t->rope, c);
    rebuild_rope(t);
    if (need_training)
        take_sizes(t, schedule_stage(c, 0));
    timeline_mark("memory");
}

// All ranks at once, when none of their steps is under way: a captured collective of one rank reads and
// writes the buffers of the others, and NCCL unmaps them when a graph goes.
static void drop_graphs(Trainer *t)
{
    if (!t->num_graphs)
        return;
    stream_synchronize(t->stream);
    comm_barrier();
    for (int i = 0; i < t->num_graphs; i++)
        graph_destroy(t->graphs[i].graph);
    t->num_graphs = 0;
}

void trainer_free(Trainer *t)
{
    comm_patience(true); // rank 0 may have written a sample, and the others wait for it
    drop_graphs(t);
    stream_synchronize(t->stream);
    comm_disconnect();
    comm_patience(false);
    loader_close(t->loader);
    validation_close(t->validation);
    for (int i = 0; i < 2; i++)
        free(t->fit[i]);
    for (int i = 0; i < STEP_SLOTS && t->loader; i++) {
        host_free(t->host_input[i]);
        device_free(t->device_input[i]);
        host_free(t->host_loss[i]);
        event_destroy(t->fed[i]);
        event_destroy(t->done[i]);
    }
    if (t->loader) {
        batch_free(&t->batch);
        stream_destroy(t->feed);
        device_free(t->device_loss);
        optimizer_free(&t->optimizer);
    }
    batch_free(&t->eval_batch);
    host_free(t->host_eval_block);
    device_free(t->device_eval_block);
    device_free(t->device_logits);
    device_free(t->acts_memory);
    device_free(t->rope_cos);
    device_free(t->rope_sin);
    model_free(&t->model);
    stream_destroy(t->stream);
}

// ---- windows ----------------------------------------------------------------------------------------------

static AttentionSetting attention_setting(const Trainer *t, int window_long)
{
    return (AttentionSetting){.window_short =
                                  window_tokens(t->config, schedule_stage(t->config, t->step).window_short),
                              .window_long = window_tokens(t->config, window_long),
                              .scale = (float)t->rope.scale,
                              .cos = t->rope_cos,
                              .sin = t->rope_sin};
}

static void follow(Trainer *t, int window)
{
    if (!rope_follow_window(&t->rope, t->config, window))
        return;
    drop_graphs(t); // windows and scale are frozen in them
    rebuild_rope(t);
}

void trainer_follow_windows(Trainer *t) { follow(t, schedule_window(t->config, t->step)); }

void trainer_finish_schedule(Trainer *t)
{
    t->step =
        config_total_steps(t->config); // else a validation would move the windows back to those of step 0
    rope_start(&t->rope, t->config);
    for (int i = 0; i < t->step; i++)
        rope_follow_window(&t->rope, t->config, schedule_window(t->config, i));
    follow(t, t->config->window_extension);
    rebuild_rope(t);
}

bool trainer_continue(Trainer *t, Error *e)
{
    rebuild_rope(t);
    return !t->loader || loader_seek(t->loader, t->position, e);
}

// ---- training step ----------------------------------------------------------------------------------------

static void weights_needed(void *trainer, int stage, Stream s)
{
    exchange_stage_needed(&((Trainer *)trainer)->optimizer.exchange, stage, s);
}

static void gradients_done(void *trainer, int stage, const ProductContext *c)
{
    Trainer *t = trainer;
    exchange_stage_done(&t->optimizer.exchange, &t->model.params, stage, t->step, c);
}

void trainer_complete_weights(Trainer *t)
{
    if (t->loader)
        exchange_complete(&t->optimizer.exchange, &t->model.params, t->stream);
}

// The ops of a whole step. Everything that differs between two steps of one graph is in device memory.
static void step_ops(Trainer *t)
{
    AttentionSetting at = attention_setting(t, t->rope.window);
    int last = t->accumulation - 1, slot = t->step % STEP_SLOTS;
    t->optimizer.step = input_params(t, t->device_input[slot]);
    exchange_begin_gather(&t->optimizer.exchange, &t->model.params, t->step, t->stream);
    model_prepare(&t->model, &t->train, t->stream);
    for (int a = 0; a <= last; a++) {
        int N = t->stage.micro_batch_tokens,
            place = (a == 0 ? FIRST_OF_STEP : 0) | (a == last ? LAST_OF_STEP : 0);
        const int32_t *host = t->host_input[slot] + a * t->block_ints;
        DeviceBatch b = device_batch(t->device_input[slot] + a * t->block_ints, N, t->slots);
        b.num_targets = t->stage.targets.count;
        b.target_weight = t->optimizer.step->target_weight;
        comm_step(t->step); // on a CPU a step may take minutes
        profile_batch(host + batch_offset(N, 2), N, host[rows_offset(N)]);
        model_train_batch(&t->model, &t->train, &b, &at, t->device_loss + a, place, t->stream);
    }
    model_finish_gradients(&t->model, &t->train, t->stream);
    optimizer_step(&t->optimizer, &t->model, t->step, t->stream);
}

static void run_step_ops(Trainer *t)
{
    if (t->op_by_op || !t->config->graphs) {
        step_ops(t);
        return;
    }
    int input = t->step % STEP_SLOTS, phase = t->step % update_cycle(&t->model.params);
    for (int i = 0; i < t->num_graphs; i++) {
        StepGraph *g = &t->graphs[i];
        if (g->stage == t->stage.index && g->slots == t->slots && g->phase == phase && g->input == input) {
            graph_launch(g->graph, t->stream);
            return;
        }
    }
    if (t->num_graphs == MAX_GRAPHS)
        drop_graphs(t);
    bool captured = graph_begin(t->stream);
    step_ops(t);
    if (!captured)
        return;
    t->graphs[t->num_graphs++] = (StepGraph){t->stage.index, t->slots, phase, input, graph_end(t->stream)};
    graph_launch(t->graphs[t->num_graphs - 1].graph, t->stream);
}

// Brings the line of the first rank whose data failed to rank 0; of the other ranks' lines nobody needs to
// know.
static void collect_failure(bool failed, Error *e)
{
    Error mine = {""};
    if (failed)
        mine = *e;
    error_set(e, "the training data of another rank failed");
    for (int r = comm_size() - 1; r >= 0; r--) {
        Error line = mine;
        size_t bytes = comm_collect(line.text, failed ? sizeof line.text : 0, sizeof line.text, r);
        if (!bytes || comm_rank())
            continue;
        line.text[sizeof line.text - 1] = 0;
        if (r)
            error_set(e, "rank %d: %s", r, line.text);
        else
            *e = line;
    }
}

// All ranks come here at the same step.
static void follow_stage(Trainer *t)
{
    Stage stage = schedule_stage(t->config, t->step);
    if (stage.index == t->stage.index)
        return;
    drop_graphs(t); // sizes are frozen in them
    take_sizes(t, stage);
}

// When the data of one rank fails, all fail, with the step before as the last: so its state can still be
// saved.
static bool read_batches(Trainer *t, int32_t *blocks, Error *e)
{
    const int64_t failed = INT64_MAX;
    bool good = true;
    for (int a = 0; a < t->accumulation && good; a++) {
        good = loader_next(t->loader, &t->batch, e);
        if (good)
            t->slots = (int)max_i64(t->slots, pack_block(blocks + a * t->block_ints, &t->batch));
    }
    int64_t slots = comm_max(good ? t->slots : failed); // all ranks capture anew at the same step
    if (slots == failed) {
        collect_failure(!good, e);
        return false;
    }
    t->slots = (int)slots;
    t->position = loader_position(t->loader);
    return true;
}

// While the step before computes. The one that read this slot last is over on the device, before anything is
// written there.
static void feed_step(Trainer *t, int slot)
{
    stream_wait(t->feed, t->done[slot]);
    copy_to_device(t->feed, t->device_input[slot], t->host_input[slot], (size_t)t->input_bytes);
    event_record(t->fed[slot], t->feed);
    stream_wait(t->stream, t->fed[slot]);
}

bool trainer_queue_step(Trainer *t, Error *e)
{
    int slot = t->step % STEP_SLOTS;
    comm_step(t->step);
    follow_stage(t);
    if (!read_batches(t, t->host_input[slot], e))
        return false;
    trainer_follow_windows(t);
    *input_params(t, t->host_input[slot]) = schedule_step_params(t->config, t->step);
    feed_step(t, slot);
    run_step_ops(t);
    copy_to_host(t->stream, t->host_loss[slot], t->device_loss, (size_t)t->accumulation * sizeof(float));
    event_record(t->done[slot], t->stream);
    exchange_step_queued(&t->optimizer.exchange, t->step);
    t->step++;
    return true;
}

double trainer_step_tokens(const Trainer *t, int step)
{
    return (double)t->config->micro_batches * schedule_stage(t->config, step).micro_batch_tokens;
}

double trainer_finish_step(Trainer *t, int step)
{
    int slot = step % STEP_SLOTS;
    double sum = 0;
    event_synchronize(t->done[slot]);
    for (int a = 0; a < t->accumulation; a++)
        sum += t->host_loss[slot][a];
    return comm_sum(sum) / trainer_step_tokens(t, step);
}

Ceilings trainer_ceilings(Trainer *t) { return profile_ceilings(t->stream, t->acts_memory, t->acts_bytes); }

void trainer_warm_up(Trainer *t)
{
    Batch *b = &t->batch;
    for (int i = 0; i < b->N; i++)
        b->tokens[i] = b->targets[i] = i % t->config->vocab_size;
    b->num_docs = 1;
    b->cu_seqlens[0] = 0;
    b->cu_seqlens[1] = b->N;
    batch_sort_rows(b);
    int slots = pack_block(t->host_input[0], b);
    *input_params(t, t->host_input[0]) = schedule_step_params(t->config, 0);
    copy_to_device(t->stream, t->device_input[0], t->host_input[0], (size_t)t->input_bytes);
    DeviceBatch device = device_batch(t->device_input[0], b->N, slots);
    device.num_targets = t->stage.targets.count;
    device.target_weight = input_params(t, t->device_input[0])->target_weight;
    AttentionSetting at = attention_setting(t, t->rope.window);
    model_prepare(&t->model, &t->train, t->stream);
    model_train_batch(&t->model, &t->train, &device, &at, t->device_loss, FIRST_OF_STEP, t->stream);
    params_zero_gradients(&t->model.params, t->stream);
    optimizer_warm_up(&t->optimizer, &t->model, t->stream);
    stream_synchronize(t->stream);
}

// ---- validation and sampling ------------------------------------------------------------------------------

static DeviceBatch upload_part(Trainer *t)
{
    Batch *b = &t->eval_batch;
    int slots = pack_block(t->host_eval_block, b);
    copy_to_device(t->stream, t->device_eval_block, t->host_eval_block,
                   (size_t)t->eval_block_ints * sizeof(int32_t));
    return device_batch(t->device_eval_block, b->N, slots);
}

// Summed over the part's tokens, whose batch is on the host. Positions are those in the whole sequence.
static double part_loss(Trainer *t, AttentionSetting at, const ValidationPart *part)
{
    float sum, *device_sum = t->eval.sum;
    int64_t angles = (int64_t)part->first * (t->config->model_dim / t->config->num_heads / 4);
    DeviceBatch b = upload_part(t);
    at.cos += angles;
    at.sin += angles;
    model_eval_batch(&t->model, &t->eval, &b, &at, part->begin - part->first, part->end - part->begin,
                     device_sum, t->stream);
    copy_to_host(t->stream, &sum, device_sum, sizeof sum);
    stream_synchronize(t->stream);
    return sum;
}

bool trainer_validate(Trainer *t, bool final, double *loss, Error *e)
{
    double sum = 0;
    trainer_follow_windows(t);
    trainer_complete_weights(t);
    AttentionSetting at = attention_setting(t, final ? t->config->window_final : t->rope.window);
    model_prepare(&t->model, &t->eval, t->stream);
    for (int q = comm_rank(); q < validation_num_sequences(t->validation); q += comm_size()) {
        for (int begin = 0; begin < t->sequence_tokens;) {
            comm_step(t->step); // a long validation is no standstill
            ValidationPart part;
            if (!validation_part(t->validation, q, begin, &t->eval_batch, &part, e))
                return false;
            sum += part_loss(t, at, &part);
            begin = part.end;
        }
    }
    *loss = comm_sum(sum) / (double)t->config->val_tokens;
    return true;
}

void trainer_next_logits(Trainer *t, const int32_t *tokens, int N, float *z)
{
    const Config *c = t->config;
    Batch b;
    int Vp = config_vocab_padded(c), padded = (int)round_up(N, 16);
    batch_alloc(&b, padded);
    memcpy(b.tokens, tokens, (size_t)N * sizeof *tokens); // what follows the last token cannot be seen by it
    b.num_docs = 1;
    b.cu_seqlens[1] = padded;
    int slots = pack_block(t->host_eval_block, &b);
    copy_to_device(t->stream, t->device_eval_block, t->host_eval_block,
                   (size_t)block_size(padded) * sizeof(int32_t));
    DeviceBatch device = device_batch(t->device_eval_block, padded, slots);
    comm_step(t->step); // other ranks may wait for the end of a long sample
    trainer_complete_weights(t);
    AttentionSetting at = attention_setting(t, c->window_final);
    Acts acts;
    acts_place(&acts, &t->model, padded, false, t->acts_memory);
    model_prepare(&t->model, &acts, t->stream);
    model_forward(&t->model, &acts, &device, &at, t->stream);
    head_logits(t->stream, &t->model.record->head, t->device_logits,
                acts.xf + (int64_t)(N - 1) * c->model_dim, param_weight(&t->model.params, t->model.head), 1,
                c->model_dim, Vp);
    copy_to_host(t->stream, z, t->device_logits, (size_t)Vp * sizeof(float));
    stream_synchronize(t->stream);
    batch_free(&b);
}
