// Rows of tables: gathered with signs, and the sums that are their gradients.
#include "llmc/cpu/cpu.h"
#include <string.h>

static float sign_of(const RowSigns *signs, int t, int c, int width)
{
    const uint32_t *bits = signs->bits + (int64_t)signs->rows[t] * ceil_div(width, 32);
    return bits[c / 32] >> c % 32 & 1 ? -1.0f : 1.0f;
}

void signed_gather(Stream s, floatX *out, const floatX *table, const int32_t *rows, const RowSigns *signs,
                   int N, int d, int width)
{
    OP_SCOPE(signed_gather, N, d, width);
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        const floatX *from = table + (int64_t)rows[t] * width;
        floatX *to = out + (int64_t)t * d;
        for (int c = 0; c < width; c++)
            to[c] = float_to_x(sign_of(signs, t, c, width) * x_to_float(from[c]));
        for (int c = width; c < d; c++)
            to[c] = float_to_x(0);
    }
}

// sum += what one reader gives to the row of position t.
static void add_reader(float *restrict sum, const RowReader *r, int t, int d, int width)
{
    const floatX *g = r->g + (int64_t)t * (r->pitch ? r->pitch : d);
    const float *factor = r->factor ? r->factor + (int64_t)t * r->stride : NULL;
    int group = r->factor ? d / r->groups : d;
    for (int c = 0; c < width; c++) {
        float x = (factor ? factor[c / group] : 1) * x_to_float(g[c]);
        if (c < r->leads)
            x += r->lead[(int64_t)t * r->leads + c];
        sum[c] += r->signs ? sign_of(r->signs, t, c, width) * x : x;
    }
}

void table_grad(Stream s, float *dtable, const RowReader *readers, int count, const TokenRows *rows, int N,
                int d, int width)
{
    OP_SCOPE(table_grad, readers, count, N, d, width);
    assert(count <= ROW_READERS);
#pragma omp parallel for schedule(dynamic, 16) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int r = 0; r < *rows->num_rows; r++) {
        float *sum = cpu_scratch((size_t)width), *to = dtable + (int64_t)rows->row_token[r] * width;
        for (int c = 0; c < width; c++)
            sum[c] = 0;
        for (int i = rows->row_start[r]; i < rows->row_start[r + 1]; i++)
            for (int k = 0; k < count; k++)
                add_reader(sum, &readers[k], rows->order[i], d, width);
        for (int c = 0; c < width; c++)
            to[c] += sum[c];
    }
}

// ---- rows that travel -------------------------------------------------------------------------------------

void rows_load(Stream s, void *out, const void *table, const int32_t *rows, int count, int bytes)
{
    OP_SCOPE(rows_load, count, bytes);
    for (int64_t k = 0; k < count; k++) {
        if (rows[k] >= 0)
            memcpy((char *)out + k * bytes, (const char *)table + (int64_t)rows[k] * bytes, (size_t)bytes);
    }
}

void rows_store(Stream s, void *table, const void *in, const int32_t *rows, int count, int bytes)
{
    OP_SCOPE(rows_store, count, bytes);
    for (int64_t k = 0; k < count; k++) {
        if (rows[k] >= 0)
            memcpy((char *)table + (int64_t)rows[k] * bytes, (const char *)in + k * bytes, (size_t)bytes);
    }
}

void rows_take(Stream s, float *out, float *table, const int32_t *rows, int count, int width)
{
    OP_SCOPE(rows_take, count, width);
    for (int64_t k = 0; k < count; k++) {
        if (rows[k] < 0)
            continue;
        float *row = table + (int64_t)rows[k] * width;
        memcpy(out + k * width, row, (size_t)width * sizeof *row);
        memset(row, 0, (size_t)width * sizeof *row);
    }
}

void rows_add(Stream s, float *table, const float *in, const int32_t *rows, int count, int width)
{
    OP_SCOPE(rows_add, count, width);
    for (int64_t k = 0; k < count; k++) {
        if (rows[k] < 0)
            continue;
        float *restrict row = table + (int64_t)rows[k] * width;
        const float *restrict from = in + k * width;
        for (int c = 0; c < width; c++)
            row[c] += from[c];
    }
}
