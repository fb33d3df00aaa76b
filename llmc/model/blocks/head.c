// The head: logits of the normalised output, and the loss.
#include "llmc/model/blocks/blocks.h"

void head_plan(Acts *a, const Model *m, PlanArena *b)
{
    const Config *c = m->config;
    int N = a->tokens, d = c->model_dim, Vp = config_vocab_padded(c);
    size_t bytes = a->backward ? head_train_scratch_bytes((HeadMode)c->head, N, d, Vp)
                               : head_eval_scratch_bytes(N, d, Vp);
    a->head_scratch = plan_take(b, bytes, 1);
}

void head_train_block(const Pass *p, float *loss)
{
    const Model *m = p->m;
    Acts *a = p->a;
    const Config *c = m->config;
    const HeadSpec *spec = &m->record->head;
    const floatX *w = param_weight(&m->params, m->head);
    int d = c->model_dim, Vp = config_vocab_padded(c);
    if (pass_runs(a, NULL, 0) && m->head_w8 && p->place & FIRST_OF_STEP)
        head_quantize(p->s, spec, m->head_w8, w, Vp, d);
    if (pass_runs(a, USES(a->dh, a->xf, a->head_scratch)))
        head_loss_train(p->s, &(HeadLoss){.spec = spec,
                                          .mode = (HeadMode)c->head,
                                          .loss = loss,
                                          .dx = a->dh,
                                          .dw = param_grad(&m->params, m->head),
                                          .x = a->xf,
                                          .w = w,
                                          .w8 = m->head_w8,
                                          .targets = p->b->targets,
                                          .num_targets = p->b->num_targets,
                                          .target_weight = p->b->target_weight,
                                          .prefix = p->b->prefix,
                                          .prefix_weight = p->b->prefix_weight,
                                          .scratch = a->head_scratch,
                                          .N = p->b->N,
                                          .d = d,
                                          .Vp = Vp});
}

void head_eval_block(const Pass *p, const EvalLoss *loss)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int d = m->config->model_dim;
    if (pass_runs(a, USES(a->xf, a->head_scratch)))
        head_loss_eval(p->s, &(HeadLoss){.spec = &m->record->head,
                                         .loss = loss->sum,
                                         .rows = loss->rows,
                                         .impossible = loss->impossible,
                                         .tokens = p->b->tokens + loss->first,
                                         .x = a->xf + (int64_t)loss->first * d,
                                         .w = param_weight(&m->params, m->head),
                                         .targets = p->b->targets + loss->first,
                                         .scratch = a->head_scratch,
                                         .N = loss->count,
                                         .d = d,
                                         .Vp = config_vocab_padded(m->config)});
}
