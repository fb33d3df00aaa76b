// The training step: windows, batches, graphs.
#include "llmc/run/trainer_internal.h"
#include <stdlib.h>
#include <string.h>

// ---- windows ----------------------------------------------------------------------------------------------

void trainer_rebuild_rope(Trainer *t)
{
    rope_tables(t->stream, t->rope_cos, t->rope_sin, t->rope.frequency, NULL, t->rope_positions,
                record_key_width(t->config));
}

AttentionSetting trainer_attention(const Trainer *t, int window_long)
{
    return (AttentionSetting){.window_short =
                                  window_tokens(t->config, schedule_stage(t->config, t->step).window_short),
                              .window_long = window_tokens(t->config, window_long),
                              .scale = (float)t->rope.scale,
                              .cos = t->rope_cos,
                              .sin = t->rope_sin,
                              .cos_paired = t->tables.paired ? t->rope_cos : NULL,
                              .sin_paired = t->tables.paired ? t->rope_sin : NULL};
}

AttentionSetting trainer_attention_from(const Trainer *t, const AttentionSetting *at, int position)
{
    AttentionSetting moved = *at;
    int64_t angles = (int64_t)position * t->rope.count;
    moved.cos += angles;
    moved.sin += angles;
    if (moved.cos_paired) {
        moved.cos_paired += 2 * angles;
        moved.sin_paired += 2 * angles;
    }
    return moved;
}

static void follow(Trainer *t, int window)
{
    if (rope_follow_window(&t->rope, t->config, window))
        trainer_rebuild_rope(t);
}

void trainer_follow_windows(Trainer *t) { follow(t, schedule_window(t->config, t->step)); }

void trainer_finish_schedule(Trainer *t)
{
    t->step =
        config_total_steps(t->config); // else a validation would move the windows back to those of step 0
    rope_follow_steps(&t->rope, t->config, t->step);
    follow(t, t->config->window_extension);
    trainer_rebuild_rope(t);
}

bool trainer_continue(Trainer *t, Error *e)
{
    trainer_rebuild_rope(t);
    return !t->loader || loader_seek(t->loader, t->position, e);
}

// ---- training step ----------------------------------------------------------------------------------------

void trainer_weights_needed(void *trainer, int stage, Stream s)
{
    exchange_stage_needed(&((Trainer *)trainer)->optimizer.exchange, stage, s);
}

void trainer_gradients_done(void *trainer, int stage, const ProductContext *c)
{
    Trainer *t = trainer;
    exchange_stage_done(&t->optimizer.exchange, &t->model.params, stage, t->step, c);
}

void trainer_complete_weights(Trainer *t)
{
    if (t->loader)
        exchange_complete(&t->optimizer.exchange, &t->model.params, t->stream);
}

// What a block of a step's input holds.
const Batch *trainer_launch(const Trainer *t) { return t->launch.N ? &t->launch : &t->batch; }

// Behind the blocks of a step's input, here or on the device.
StepParams *trainer_input_params(const Trainer *t, int32_t *input)
{
    return (StepParams *)(input + t->most_launches * t->block_ints);
}

// Behind those.
static int32_t *input_lists(const Trainer *t, int32_t *input)
{
    return (int32_t *)(trainer_input_params(t, input) + 1);
}

// Of a block on the device, with what the stage's loss has.
static DeviceBatch training_batch(const Trainer *t, const int32_t *block, int micro, const StepParams *step)
{
    DeviceBatch b = block_batch(block, trainer_launch(t), t->slots);
    b.num_targets = t->stage.targets.count;
    b.target_weight = step->target_weight;
    b.prefix_weight = &step->prefix_weight;
    b.number = micro * comm_size() + comm_rank();
    b.exact_scales = &step->exact_scales;
    if (!schedule_has_prefix(&t->stage))
        b.prefix = NULL;
    return b;
}

// The tracer counts what the ops of this batch must do.
static void note_batch(const Trainer *t, const int32_t *block)
{
    const Batch *b = trainer_launch(t);
    DeviceBatch host = block_batch(block, b, 0);
    int pair_rows = host.bigram.num_rows ? *host.bigram.num_rows : 0;
    profile_batch(block + (b->cu_seqlens - b->block), b->N, *host.rows.num_rows, pair_rows);
}

// The ops of a whole step. Everything that differs between two steps of one graph is in device memory.
static void step_ops(Trainer *t)
{
    AttentionSetting at = trainer_attention(t, t->rope.window);
    int slot = t->step % STEP_SLOTS, last = t->launches[slot] - 1;
    t->optimizer.step = trainer_input_params(t, t->device_input[slot]);
    t->optimizer.exchange.rows.now = t->row_lists;
    exchange_begin_gather(&t->optimizer.exchange, &t->model.params, t->step, t->stream);
    model_prepare(&t->model, &t->train, t->stream);
    for (int a = 0; a <= last; a++) {
        int place = (a == 0 ? FIRST_OF_STEP : 0) | (a == last ? LAST_OF_STEP : 0);
        DeviceBatch b = training_batch(t, t->device_input[slot] + a * t->block_ints, a, t->optimizer.step);
        comm_step(t->step); // on a CPU a step may take minutes
        note_batch(t, t->host_input[slot] + a * t->block_ints);
        AttentionSetting moved = trainer_attention_from(t, &at, t->launch_position[a]);
        model_train_batch(&t->model, &t->train, &b, &moved, t->device_loss + a, place, t->stream);
    }
    model_finish_gradients(&t->model, &t->train, t->stream);
    optimizer_step(&t->optimizer, &t->model, t->step, t->stream);
}

// All ranks at once, when none of their steps is under way: a captured collective of one rank reads and
// writes the buffers of the others, and NCCL unmaps them when a graph goes.
void trainer_drop_graphs(Trainer *t)
{
    if (!t->num_graphs)
        return;
    stream_synchronize(t->stream);
    comm_barrier();
    for (int i = 0; i < t->num_graphs; i++)
        graph_destroy(t->graphs[i].graph);
    t->num_graphs = 0;
}

static void run_step_ops(Trainer *t)
{
    if (t->op_by_op || !t->config->graphs || t->launch.N) { // steps differ in their launches
        step_ops(t);
        return;
    }
    int input = t->step % STEP_SLOTS, cycle = update_cycle(&t->model.params);
    int phase = t->step % cycle + (t->model.params.tied ? cycle : 0);
    for (int i = 0; i < t->num_graphs; i++) {
        StepGraph *g = &t->graphs[i];
        const RowLists *rows = &t->row_lists;
        if (g->stage == t->stage.index && g->slots == t->slots && g->phase == phase && g->input == input &&
            g->num_values == rows->num_values && g->num_gradients == rows->num_gradients) {
            graph_launch(g->graph, t->stream);
            return;
        }
    }
    if (t->num_graphs == MAX_GRAPHS)
        trainer_drop_graphs(t);
    bool captured = graph_begin(t->stream);
    step_ops(t);
    if (!captured)
        return;
    t->graphs[t->num_graphs++] = (StepGraph){.stage = t->stage.index,
                                             .slots = t->slots,
                                             .phase = phase,
                                             .input = input,
                                             .num_values = t->row_lists.num_values,
                                             .num_gradients = t->row_lists.num_gradients,
                                             .graph = graph_end(t->stream)};
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

// All ranks come here at the same step. The device still works on the step before, by a graph of its own
// stage.
static void follow_stage(Trainer *t)
{
    Stage stage = schedule_stage(t->config, t->step);
    if (stage.index != t->stage.index)
        trainer_take_sizes(t, stage);
}

// Whether step `step` updates the table of which rows travel.
static bool rows_updated(const Trainer *t, int step)
{
    int table = t->optimizer.exchange.rows.param;
    return table >= 0 && update_is_due(t->model.params.list[table].spec->update.every, step);
}

// The rows that the ranks exchange in the next step, behind its input.
static void list_rows(Trainer *t, int slot)
{
    const RowExchange *x = &t->optimizer.exchange.rows;
    row_marks_agree(&t->row_marks, x, rows_updated(t, t->step), &t->row_lists);
    row_marks_list(&t->row_marks, &t->row_lists, comm_rank(), input_lists(t, t->host_input[slot]));
    t->row_lists.values = input_lists(t, t->device_input[slot]);
    t->row_lists.gradients = t->row_lists.values + x->size * t->row_lists.num_values;
}

static void add_launch(Trainer *t, int32_t *blocks, int *count, const Batch *b, int position)
{
    assert(*count < t->most_launches);
    t->slots = (int)max_i64(t->slots, block_pack(blocks + *count * t->block_ints, b));
    t->launch_position[(*count)++] = position;
}

// Blocks of the micro-batch.
static void add_launches(Trainer *t, int32_t *blocks, int *count)
{
    if (!t->launch.N)
        add_launch(t, blocks, count, &t->batch, 0);
    for (int document = 0; t->launch.N && document < t->batch.num_docs;) {
        int position = batch_take_launch(&t->launch, &t->batch, &document);
        add_launch(t, blocks, count, &t->launch, position);
    }
}

// When the data of one rank fails, all fail, with the step before as the last: so its state can still be
// saved.
static bool read_batches(Trainer *t, int32_t *blocks, Error *e)
{
    const int64_t failed = INT64_MAX;
    bool good = true;
    int *launches = &t->launches[t->step % STEP_SLOTS];
    *launches = 0;
    row_marks_begin(&t->row_marks, rows_updated(t, t->step - 1));
    for (int a = 0; a < t->accumulation && good; a++) {
        good = loader_next(t->loader, &t->batch, e);
        if (!good)
            break;
        add_launches(t, blocks, launches);
        row_marks_add(&t->row_marks, t->batch.bigram.row, t->batch.bigram.count);
    }
    int64_t slots = comm_max(good ? t->slots : failed); // all ranks capture anew at the same step
    if (slots == failed) {
        collect_failure(!good, e);
        return false;
    }
    t->slots = (int)slots;
    list_rows(t, t->step % STEP_SLOTS);
    t->position = loader_position(t->loader);
    return true;
}

// While the step before computes. The one that read this slot last is over on the device, before anything is
// written there.
static void feed_step(Trainer *t, int slot)
{
    const RowLists *rows = &t->row_lists;
    int64_t lists = (int64_t)t->optimizer.exchange.size * (rows->num_values + rows->num_gradients);
    stream_wait(t->feed, t->done[slot]);
    copy_to_device(t->feed, t->device_input[slot], t->host_input[slot],
                   (size_t)(t->input_bytes + lists * (int64_t)sizeof(int32_t)));
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
    *trainer_input_params(t, t->host_input[slot]) = schedule_step_params(t->config, t->step);
    feed_step(t, slot);
    run_step_ops(t);
    copy_to_host(t->stream, t->host_loss[slot], t->device_loss, (size_t)t->launches[slot] * sizeof(float));
    event_record(t->done[slot], t->stream);
    optimizer_part(&t->optimizer, &t->model, t->step, t->stream);
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
    for (int a = 0; a < t->launches[slot]; a++)
        sum += t->host_loss[slot][a];
    return comm_sum(sum) / trainer_step_tokens(t, step);
}

bool trainer_has_untied(const Trainer *t)
{
    return !t->model.params.tied && t->step - 1 == t->model.params.last_tied;
}

void trainer_record_ops(Trainer *t)
{
    assert(!trainer_has_untied(t));
    t->step--;
    profile_record(t->stream);
    step_ops(t);
    profile_record_stop();
    t->step++;
}

Ceilings trainer_ceilings(Trainer *t) { return profile_ceilings(t->stream, t->acts_memory, t->acts_bytes); }

void trainer_warm_up(Trainer *t)
{
    Batch *b = t->launch.N ? &t->launch : &t->batch;
    for (int i = 0; i < b->N; i++)
        b->tokens[i] = b->targets[i] = i % t->config->vocab_size;
    b->num_docs = 1;
    b->cu_seqlens[0] = 0;
    b->cu_seqlens[1] = b->N;
    batch_complete(b);
    t->slots = block_pack(t->host_input[0], b);
    *trainer_input_params(t, t->host_input[0]) = schedule_step_params(t->config, 0);
    copy_to_device(t->stream, t->device_input[0], t->host_input[0], (size_t)t->input_bytes);
    DeviceBatch device =
        training_batch(t, t->device_input[0], 0, trainer_input_params(t, t->device_input[0]));
    AttentionSetting at = trainer_attention(t, t->rope.window);
    model_prepare(&t->model, &t->train, t->stream);
    model_train_batch(&t->model, &t->train, &device, &at, t->device_loss, FIRST_OF_STEP, t->stream);
    params_zero_gradients(&t->model.params, t->stream);
    model_start_scales(&t->model, t->stream);
    optimizer_warm_up(&t->optimizer, &t->model, t->stream);
    stream_synchronize(t->stream);
    t->slots = 0;
}
