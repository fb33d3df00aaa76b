// Comparison of a result in fp32 with its double reference, relative in norm. Why the limit: exact_ops.c.
#pragma once
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"

#define LIMIT 1e-5

static inline void check_x(const char *what, const floatX *got, const double *exact, int n)
{
    ok_at_most(relative_error(of_x(got, n), exact, n), LIMIT, what);
}

static inline void check(const char *what, const float *got, const double *exact, int n)
{
    ok_at_most(relative_error(of_float(got, n), exact, n), LIMIT, what);
}
