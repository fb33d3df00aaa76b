// Validation and sampling.
#include "llmc/data/validation.h"
#include "llmc/run/trainer_internal.h"
#include <stdlib.h>
#include <string.h>

static DeviceBatch upload_part(Trainer *t)
{
    Batch *b = &t->eval_batch;
    int slots = block_pack(t->host_eval_block, b);
    copy_to_device(t->stream, t->device_eval_block, t->host_eval_block,
                   (size_t)t->eval_block_ints * sizeof(int32_t));
    return block_batch(t->device_eval_block, b, slots);
}

// Summed over the part's tokens, whose batch is on the host. Positions are those in the whole sequence.
static double part_loss(Trainer *t, AttentionSetting at, const ValidationPart *part, bool masked)
{
    float sum, *device_sum = t->eval.sum;
    DeviceBatch b = upload_part(t);
    at = trainer_attention_from(t, &at, part->first);
    EvalLoss loss = {part->begin - part->first, part->end - part->begin, device_sum, NULL,
                     masked ? t->impossible : NULL};
    model_eval_batch(&t->model, &t->eval, &b, &at, &loss, t->stream);
    copy_to_host(t->stream, &sum, device_sum, sizeof sum);
    stream_synchronize(t->stream);
    return sum;
}

AttentionSetting trainer_begin_evaluation(Trainer *t, bool final)
{
    trainer_follow_windows(t);
    trainer_complete_weights(t);
    model_prepare(&t->model, &t->eval, t->stream);
    return trainer_attention(t, final ? t->config->window_final : t->rope.window);
}

void trainer_token_losses(Trainer *t, const AttentionSetting *at, float *losses)
{
    int N = t->eval_batch.N;
    DeviceBatch b = upload_part(t);
    EvalLoss loss = {.count = N, .sum = t->eval.sum, .rows = t->device_rows};
    model_eval_batch(&t->model, &t->eval, &b, at, &loss, t->stream);
    copy_to_host(t->stream, losses, t->device_rows, (size_t)N * sizeof *losses);
    stream_synchronize(t->stream);
}

void trainer_token_logits(Trainer *t, const Acts *acts, int row, float *z)
{
    const Config *c = t->config;
    int Vp = config_vocab_padded(c);
    head_logits(t->stream, &t->model.record->head, t->device_logits, acts->xf + (int64_t)row * c->model_dim,
                param_weight(&t->model.params, t->model.head), 1, c->model_dim, Vp);
    copy_to_host(t->stream, z, t->device_logits, (size_t)Vp * sizeof(float));
    stream_synchronize(t->stream);
}

// Before the first validation, so that a vocabulary that cannot be used shows early.
static bool upload_mask(Trainer *t, Error *e)
{
    size_t V = (size_t)config_vocab_padded(t->config);
    if (!t->mask)
        return true;
    const uint32_t *bits = token_mask_finish(t->mask, e);
    if (!bits)
        return false;
    copy_to_device(t->stream, t->impossible, bits, V * (V / 8));
    stream_synchronize(t->stream);
    token_mask_free(t->mask);
    t->mask = NULL;
    return true;
}

bool trainer_validate(Trainer *t, bool final, double *loss, Error *e)
{
    double sum = 0;
    bool masked = t->config->val_mask == MASK_ALL || (t->config->val_mask == MASK_LAST && final);
    if (!upload_mask(t, e))
        return false;
    AttentionSetting at = trainer_begin_evaluation(t, final);
    for (int q = comm_rank(); q < validation_num_sequences(t->validation); q += comm_size()) {
        for (int begin = 0; begin < t->sequence_tokens;) {
            comm_step(t->step); // a long validation is no standstill
            ValidationPart part;
            if (!validation_part(t->validation, q, begin, &t->eval_batch, &part, e))
                return false;
            sum += part_loss(t, at, &part, masked);
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
    int padded = (int)round_up(N, 16);
    batch_alloc(&b, padded, &t->eval_batch.tables);
    memcpy(b.tokens, tokens, (size_t)N * sizeof *tokens); // what follows the last token cannot be seen by it
    b.num_docs = 1;
    b.cu_seqlens[1] = padded;
    batch_hash_pairs(&b, 0, 0);
    int slots = block_pack(t->host_eval_block, &b);
    copy_to_device(t->stream, t->device_eval_block, t->host_eval_block,
                   (size_t)block_ints(padded, &b.tables) * sizeof(int32_t));
    DeviceBatch device = block_batch(t->device_eval_block, &b, slots);
    comm_step(t->step); // other ranks may wait for the end of a long sample
    trainer_complete_weights(t);
    AttentionSetting at = trainer_attention(t, c->window_final);
    Acts acts;
    acts_place(&acts, &t->model, padded, false, t->acts_memory);
    model_prepare(&t->model, &acts, t->stream);
    model_forward(&t->model, &acts, &device, &at, t->stream);
    trainer_token_logits(t, &acts, N - 1, z);
    batch_free(&b);
}
