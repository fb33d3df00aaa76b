// Generators: a product, gelu, a second product of few columns.
#include "llmc/cpu/cpu.h"
#include <math.h>

// Of gelu: its value, and its derivative.
static float gelu(float u, float *slope)
{
    const float half_root = 0.70710678f, density = 0.39894228f; // 1 / sqrt 2, 1 / sqrt(2 pi)
    float share = 0.5f * (1 + erff(u * half_root));
    *slope = share + u * density * expf(-0.5f * u * u);
    return u * share;
}

void generator_forward(Stream s, float *out, floatX *pre, const Generator *g, const floatX *x, int N, int d)
{
    OP_SCOPE(generator_forward, g, N, d);
    int width = g->width, K = g->K;
    assert(width <= GENERATOR_MOST && K <= GENERATOR_MOST);
    matmul_forward(&(ProductContext){s, NULL}, &(Product){pre, x, g->w1, NULL, NULL, N, d, width, 1});
#pragma omp parallel for schedule(static) if ((int64_t)N * width > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        float hidden[GENERATOR_MOST], row[GENERATOR_MOST], slope;
        for (int j = 0; j < width; j++)
            hidden[j] = gelu(x_to_float(pre[(int64_t)t * width + j]), &slope);
        for (int k = 0; k < K; k++) {
            load_row(row, g->w2 + k * width, width);
            out[(int64_t)t * K + k] = *g->scale * (dot(hidden, row, width) + x_to_float(g->b2[k]));
        }
    }
}

// Hidden unit j of all tokens: its column of dpre and of dw2. Returns its share of dscale.
static double unit_backward(const GeneratorBackward *a, int j, int N)
{
    const Generator *g = a->generator;
    int width = g->width, K = g->K;
    double sums[GENERATOR_MOST] = {0}, share = 0; // of dout gelu(pre)
    float w[GENERATOR_MOST];
    for (int k = 0; k < K; k++)
        w[k] = x_to_float(g->w2[k * width + j]);
    for (int t = 0; t < N; t++) {
        int64_t at = (int64_t)t * width + j;
        const float *dout = a->dout + (int64_t)t * K;
        float slope, hidden = gelu(x_to_float(a->pre[at]), &slope);
        for (int k = 0; k < K; k++)
            sums[k] += dout[k] * hidden;
        a->dpre[at] = float_to_x(*g->scale * dot(dout, w, K) * slope);
    }
    for (int k = 0; k < K; k++) {
        a->dw2[k * width + j] += (float)(*g->scale * sums[k]);
        share += w[k] * sums[k];
    }
    return share;
}

void generator_backward(Stream s, const GeneratorBackward *a, int N, int d)
{
    OP_SCOPE(generator_backward, a, N, d);
    const Generator *g = a->generator;
    int width = g->width, K = g->K;
    double share[GENERATOR_MOST], bias[GENERATOR_MOST] = {0}, dscale = 0;
    assert(width <= GENERATOR_MOST && K <= GENERATOR_MOST);
#pragma omp parallel for schedule(static) if ((int64_t)N * width > SERIAL_ELEMENTS)
    for (int j = 0; j < width; j++)
        share[j] = unit_backward(a, j, N);
    for (int64_t i = 0; i < (int64_t)N * K; i++)
        bias[i % K] += a->dout[i];
    for (int k = 0; k < K; k++) {
        a->db2[k] += (float)(*g->scale * bias[k]);
        dscale += x_to_float(g->b2[k]) * bias[k];
    }
    for (int j = 0; j < width; j++)
        dscale += share[j];
    if (a->dscale)
        *a->dscale += (float)dscale;
    matmul_backward_input(&(ProductContext){s, NULL},
                          &(InputGrad){a->dx, a->dpre, g->w1, N, d, width, a->residual});
}
