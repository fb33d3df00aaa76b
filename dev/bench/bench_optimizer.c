// NorMuon's step alone, on the matrices of a preset with random weights and gradients, replayed as a graph
// like the trainer does.
//   bench_optimizer [option of train_gpt ...]
// Prints the median time of REPEATS steps for the --ns given, for all variants when there is none.
#include "dev/bench/figures.h"
#include "llmc/dist/comm.h"
#include "llmc/optim/optimizer.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { REPEATS = 40, WARM_UP = 5, PERIOD = 1999993 };

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// (PERIOD) fp32 on the device, nearly normal. Made once: 8 million random numbers take longer than a step.
static float *make_gradients(Stream s)
{
    float *host = host_alloc(PERIOD * sizeof *host),
          *device = device_alloc(PERIOD * sizeof *device, "gradients to copy");
    uint64_t state = 88172645463325252u;
    for (int i = 0; i < PERIOD; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            sum += (float)(state >> 40) * 0x1p-24f - 0.5f;
        }
        host[i] = sum;
    }
    copy_to_device(s, device, host, PERIOD * sizeof *host);
    stream_synchronize(s);
    host_free(host);
    return device;
}

// values (PERIOD), repeated, to every gradient of a matrix. The period is prime: no two rows are the same.
static void fill_gradients(const Params *p, const float *values, Stream s)
{
    for (int i = 0; i < p->num_pools; i++) {
        const ParamPool *q = &p->pools[i];
        for (int64_t at = 0; q->sharding == SHARD_TENSORS && at < q->size; at += PERIOD)
            copy_on_device(s, q->grad + at, values, (size_t)min_i64(PERIOD, q->size - at) * sizeof *values);
    }
}

static double step_ms(Optimizer *o, Model *m, const float *gradients, Stream s)
{
    static float ms[REPEATS];
    cudaEvent_t from, to;
    if (!graph_begin(s))
        fatal(EXIT_BAD_INPUT, "this backend records no graphs");
    optimizer_step(o, m, 0, s);
    Graph *g = graph_end(s);
    cudaEventCreate(&from);
    cudaEventCreate(&to);
    for (int i = 0; i < REPEATS + WARM_UP; i++) {
        fill_gradients(&m->params, gradients, s); // the step clears them
        cudaEventRecord(from, s);
        graph_launch(g, s);
        cudaEventRecord(to, s);
        stream_synchronize(s);
        if (i >= WARM_UP)
            cudaEventElapsedTime(&ms[i - WARM_UP], from, to);
    }
    graph_destroy(g);
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    qsort(ms, REPEATS, sizeof *ms, by_value);
    return ms[REPEATS / 2];
}

static void bench(const Config *c, const float *gradients, Stream s)
{
    Model m;
    Optimizer o;
    StepParams step = {.grad_scale = 1, .muon_momentum = 0.9f};
    for (int i = 0; i < MAX_UPDATE_RULES; i++)
        step.rule[i] = (RuleStep){0.03f, 0.01f};
    memset(&m, 0, sizeof m);
    model_describe(&m, c);
    model_allocate(&m, true);
    optimizer_create(&o, &m);
    o.ns_workspace = device_alloc(optimizer_workspace_bytes(&o, &m), "workspace");
    StepParams *device_step = device_alloc(sizeof step, "scratch: step");
    copy_to_device(s, device_step, &step, sizeof step);
    o.step = device_step;
    fill_gradients(&m.params, gradients, s);
    for (int i = 0; i < m.params.num_pools; i++) {
        const ParamPool *q = &m.params.pools[i];
        if (q->sharding == SHARD_TENSORS)
            copy_on_device(s, q->values, q->grad, (size_t)q->size * sizeof(float));
    }
    optimizer_warm_up(&o, &m, s);
    char *ns = ns_describe(&o.ns);
    float ms = step_ms(&o, &m, gradients, s);
    char shape[96];
    snprintf(shape, sizeof shape, "preset %s, --ns %s", c->preset, ns_variant_name((NsVariant)c->ns));
    figure("NorMuon step", shape, ms, "ms");
    printf("%-10s  %6.3f ms: %s\n", ns_variant_name((NsVariant)c->ns), ms, ns);
    free(ns);
    device_free(device_step);
    device_free(o.ns_workspace);
    optimizer_free(&o);
    model_free(&m);
}

int main(int argc, char **argv)
{
    set_program_name("bench_optimizer", -1);
    figures_open(&argc, argv);
    comm_open(); // one rank, whose number and count the optimizer asks for
    Config c;
    Error e;
    bool chosen = false;
    if (!config_parse(&c, argc, argv, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    for (int i = 1; i < argc; i++)
        chosen |= !strcmp(argv[i], "--ns");
    if (!c.vocab_size)
        c.vocab_size = 50257;
    backend_open(c.device < 0 ? 0 : c.device);
    backend_reserve(&(OpSizes){.tokens = 1024,
                               .eval_tokens = 1024,
                               .dim = c.model_dim,
                               .heads = c.num_heads,
                               .mlp_dim = c.mlp_dim,
                               .vocab_padded = config_vocab_padded(&c)});
    Stream s = stream_create();
    float *gradients = make_gradients(s);
    for (int v = 0; v < NS_VARIANTS; v++) {
        if (chosen && v != c.ns)
            continue;
        Config one = c;
        one.ns = v;
        bench(&one, gradients, s);
    }
    device_free(gradients);
    stream_destroy(s);
    backend_close();
    return 0;
}
