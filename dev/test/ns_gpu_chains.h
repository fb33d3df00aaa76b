// Small chains of Newton-Schulz for compute-sanitizer, under which they take many times as long
// (gpu/sanitize.pl): all kinds of tasks, narrow and full squares, rows that end within a box and results
// whose rows start anywhere. Input and workspace are allocations of their own, of exactly the size that is
// asked for, and nobody writes the workspace before: accesses beyond it and reads of what was never written
// are the tool's to see.
#pragma once
#include "dev/test/ns_gpu_arrays.h"
#include "dev/test/tap.h"
#include <cuda_runtime_api.h>

static void *exact_memory(size_t bytes)
{
    void *p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess)
        fatal(EXIT_BAD_INPUT, "no device memory for %zu bytes", bytes);
    return p;
}

typedef struct {
    const char *variant, *dtype;
    int n, m, batch;
} SmallChain;

// The result's elements, u (batch, n, m) fp32.
static double *chain_run(const SmallChain *c, const float *u)
{
    int64_t count = (int64_t)c->n * c->m * c->batch;
    NsOptions o = options(c->variant, NULL, 0, NULL, c->dtype);
    void *device_u = exact_memory((size_t)count * sizeof *u),
         *work = exact_memory(ns_workspace_bytes(&o, c->n, c->m, c->batch));
    copy_to_device(NULL, device_u, u, (size_t)count * sizeof *u);
    NsInput in = {device_u, c->n, c->m, c->batch, (int64_t)c->n * c->m, 0, 0};
    double *out = values_of(o.dtype, newton_schulz(NULL, &o, &in, work), count);
    cudaFree(device_u);
    cudaFree(work);
    return out;
}

static void test_chains(void)
{
    static const SmallChain chains[] = {
        {"turbo", "bf16", 304, 1111, 3},  {"turbo-gram", "fp16", 264, 272, 20},
        {"gram", "fp16", 304, 1111, 3},   {"polar", "fp16", 264, 272, 20},
        {"polar", "bf16", 1032, 1040, 1}, {"turbo-gram", "fp16", 2048, 2056, 1},
    };
    Random r = {7};
    for (size_t i = 0; i < sizeof chains / sizeof *chains; i++) {
        const SmallChain *c = &chains[i];
        int64_t count = (int64_t)c->n * c->m * c->batch;
        float *u = xcalloc((size_t)count, sizeof *u);
        for (int64_t k = 0; k < count; k++)
            u[k] = (float)random_normal(&r);
        double *once = chain_run(c, u), *again = chain_run(c, u);
        bool finite = true;
        for (int64_t k = 0; k < count; k++)
            finite = finite && isfinite(once[k]);
        ok(finite && !memcmp(once, again, (size_t)count * sizeof *once),
           "chain of %s in %s, %d of %dx%d: twice the same bits", c->variant, c->dtype, c->batch, c->n, c->m);
        free(u);
        free(once);
        free(again);
    }
}
