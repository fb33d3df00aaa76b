// The embedding: rows gathered by token, smeared with the token before, and normalised.
#include "llmc/model/blocks/blocks.h"

void embed_forward_block(const Pass *p)
{
    const Model *m = p->m;
    Acts *a = p->a;
    if (pass_runs(a, USES(a->x0, a->rstd0)))
        embed_forward(p->s,
                      &(EmbedForward){.x0 = a->x0,
                                      .rstd = a->rstd0,
                                      .tokens = p->b->tokens,
                                      .embed = param_weight(&m->params, m->embed),
                                      .gate = param_weight(&m->params, m->smear_gate),
                                      .lambda = model_scalar(m, m->record->smear_lambda),
                                      .gate_inputs = (int)m->smear_gate->cols,
                                      .before = p->b->texts.before},
                      p->b->N, m->config->model_dim);
}

void embed_backward_block(const Pass *p, const floatX *dx, const floatX *dx0)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N, d = m->config->model_dim, smear = m->record->smear_lambda;
    if (pass_runs(a, USES(a->dh, dx, dx0, a->x0, a->rstd0)))
        embed_backward(p->s,
                       &(EmbedBackward){.de = a->dh,
                                        .dx = dx,
                                        .dx0 = dx0,
                                        .x0 = a->x0,
                                        .rstd = a->rstd0,
                                        .tokens = p->b->tokens,
                                        .embed = param_weight(&m->params, m->embed),
                                        .gate = param_weight(&m->params, m->smear_gate),
                                        .lambda = model_scalar(m, smear),
                                        .dgate = param_grad(&m->params, m->smear_gate),
                                        .dlambda = model_scalar_grad(m, smear),
                                        .gate_inputs = (int)m->smear_gate->cols},
                       N, d);
    if (pass_runs(a, USES(a->dh)))
        embedding_grad(p->s, param_grad(&m->params, m->embed), a->dh, NULL, &p->b->rows, N, d);
}
