// What the tests of FP8 products beside a file of the PyTorch reference share.
#pragma once
#include "dev/test/golden_file.h"
#include "dev/test/ops_reference.h"
#include "dev/test/tap.h"
#include "llmc/cpu/fp8.h"

static SafeTensors *file; // the golden file

// A tensor of the file, of a step of its MLP; step < 0: by its name alone.
static float *get(const char *name, int step)
{
    int64_t count;
    char *key = step < 0 ? format_string("%s", name) : format_string("mlp.%s.%d", name, step);
    float *x = read_golden(file, key, &count), *kept = floats((int)count);
    memcpy(kept, x, sizeof(float) * (size_t)count);
    free(key);
    free(x);
    return kept;
}

static floatX *rounded(const float *x, int n)
{
    floatX *y = halves(n);
    for (int i = 0; i < n; i++)
        y[i] = float_to_x(x[i]);
    return y;
}

// (rows, cols) of the file to the memory's (cols, rows), as a copy of split storage has it.
static floatX *truncated_transpose(const float *x, int rows, int cols)
{
    floatX *y = halves(rows * cols);
    for (int i = 0; i < rows * cols; i++)
        y[i % cols * rows + i / cols] = truncate_to_x(x[i]);
    return y;
}

// transposed: codes (cols, rows) of values (rows, cols)
static int differing(const uint8_t *codes, const float *values, int rows, int cols, bool transposed)
{
    int wrong = 0;
    for (int i = 0; i < rows * cols; i++)
        wrong += e4m3_to_float(codes[transposed ? i % cols * rows + i / cols : i]) != values[i];
    return wrong;
}

static void check(const char *what, int step, const double *got, const float *exact, int n, double limit)
{
    char text[64];
    snprintf(text, sizeof text, "step %d: %s", step, what);
    ok_at_most(relative_error(got, of_float(exact, n), n), limit, text);
}
