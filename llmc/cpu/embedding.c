// Token embedding with the smear of the previous token, and gradients of table rows.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/rows.h"
#include "llmc/cpu/vmath.h"

void embed_forward(Stream s, const EmbedForward *a, int N, int d)
{
    OP_SCOPE(embed_forward, N, d);
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        float *y = cpu_scratch((size_t)d);
        const floatX *own = a->embed + (int64_t)a->tokens[t] * d;
        int32_t before = a->before ? a->before[t] : t > 0 ? a->tokens[t - 1] : -1;
        load_row(y, own, d);
        if (before >= 0) {
            const floatX *previous = a->embed + (int64_t)before * d;
            float smear = *a->lambda * sigmoid(gate_dot(own, a->gate, a->gate_inputs));
#pragma omp simd
            for (int i = 0; i < d; i++)
                y[i] += smear * x_to_float(previous[i]);
        }
        a->rstd[t] = rms_store(a->x0 + (int64_t)t * d, y, d);
    }
}

// Of one part of the rows: gradients of gate [0:gate_inputs] and lambda, behind them.
typedef double GateSums[MAX_GATE_INPUTS + 1];

// Gradient of y_t: backward through the norm. h: scratch (d)
static void smeared_gradient(const EmbedBackward *a, int t, int d, float *restrict dy, float *restrict h)
{
    int64_t at = (int64_t)t * d;
    load_row(dy, a->dx + at, d);
    if (a->dx0) {
        const floatX *restrict dx0 = a->dx0 + at;
#pragma omp simd
        for (int i = 0; i < d; i++)
            dy[i] += x_to_float(dx0[i]);
    }
    load_row(h, a->x0 + at, d);
    rms_backward(dy, dy, h, a->rstd[t], d);
}

// Writes de_t. next: lambda * sig_{t+1} * dy_{t+1}, what row t gave to row t+1; replaced by the same of row t
// for row t-1.
static void embed_backward_row(const EmbedBackward *a, int t, int d, float *restrict dy, float *restrict row,
                               float *restrict next, double *sums)
{
    const floatX *own = a->embed + (int64_t)a->tokens[t] * d;
    smeared_gradient(a, t, d, dy, row);
#pragma omp simd
    for (int i = 0; i < d; i++)
        next[i] += dy[i];
    float smear = 0;
    if (t > 0) {
        float sig = sigmoid(gate_dot(own, a->gate, a->gate_inputs));
        load_row(row, a->embed + (int64_t)a->tokens[t - 1] * d, d);
        float p = dot(dy, row, d), du = *a->lambda * p * sig * (1 - sig);
        sums[a->gate_inputs] += sig * p;
        for (int c = 0; c < a->gate_inputs; c++) {
            sums[c] += du * x_to_float(own[c]);
            next[c] += du * x_to_float(a->gate[c]);
        }
        smear = *a->lambda * sig;
    }
    store_row(a->de + (int64_t)t * d, next, d);
#pragma omp simd
    for (int i = 0; i < d; i++)
        next[i] = smear * dy[i];
}

// Rows from the last to the first, since row t gets gradient from row t+1; the one behind the part is
// computed twice.
static void embed_backward_part(const EmbedBackward *a, int begin, int end, int N, int d, double *sums)
{
    size_t row_floats = (size_t)round_up(d, 16);
    float *arena = cpu_scratch(3 * row_floats);
    float *dy = scratch_take(&arena, row_floats), *row = scratch_take(&arena, row_floats), *next = arena;
    for (int i = 0; i < d; i++)
        next[i] = 0;
    if (end < N) {
        smeared_gradient(a, end, d, dy, row);
        float smear =
            *a->lambda * sigmoid(gate_dot(a->embed + (int64_t)a->tokens[end] * d, a->gate, a->gate_inputs));
        for (int i = 0; i < d; i++)
            next[i] = smear * dy[i];
    }
    for (int t = end - 1; t >= begin; t--)
        embed_backward_row(a, t, d, dy, row, next, sums);
}

void embed_backward(Stream s, const EmbedBackward *a, int N, int d)
{
    OP_SCOPE(embed_backward, N, d);
    GateSums sums[PARTS] = {{0}};
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++) {
        int begin = part_begin(N, part), end = part_begin(N, part + 1);
        if (begin < end)
            embed_backward_part(a, begin, end, N, d, sums[part]);
    }
    for (int i = 0; i <= a->gate_inputs; i++) {
        double total = 0;
        for (int part = 0; part < PARTS; part++)
            total += sums[part][i];
        *(i < a->gate_inputs ? a->dgate + i : a->dlambda) += (float)total;
    }
}

void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows,
                    int N, int d)
{
    OP_SCOPE(embedding_grad, N, d);
    float factor = scale ? *scale : 1;
#pragma omp parallel for schedule(dynamic, 16) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int r = 0; r < *rows->num_rows; r++) {
        float *sum = cpu_scratch((size_t)d), *to = dtable + (int64_t)rows->row_token[r] * d;
        for (int i = 0; i < d; i++)
            sum[i] = 0;
        for (int k = rows->row_start[r]; k < rows->row_start[r + 1]; k++) {
            const floatX *from = g + (int64_t)rows->order[k] * d;
#pragma omp simd
            for (int i = 0; i < d; i++)
                sum[i] += x_to_float(from[i]);
        }
#pragma omp simd
        for (int i = 0; i < d; i++)
            to[i] += factor * sum[i];
    }
}
