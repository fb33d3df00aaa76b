// Where the coefficients of Polar Express come from.
#pragma once
#include "llmc/optim/newton_schulz.h"
#include <math.h>
#include <string.h>

// Solves the 4x4 system `rows` (coefficients | right side) in place by elimination with pivoting.
static void solve4(double rows[4][5], double x[4])
{
    for (int k = 0; k < 4; k++) {
        int pivot = k;
        for (int i = k + 1; i < 4; i++)
            if (fabs(rows[i][k]) > fabs(rows[pivot][k]))
                pivot = i;
        for (int j = 0; j < 5; j++) {
            double swap = rows[k][j];
            rows[k][j] = rows[pivot][j];
            rows[pivot][j] = swap;
        }
        for (int i = k + 1; i < 4; i++) {
            double factor = rows[i][k] / rows[k][k];
            for (int j = k; j < 5; j++)
                rows[i][j] -= factor * rows[k][j];
        }
    }
    for (int k = 3; k >= 0; k--) {
        x[k] = rows[k][4];
        for (int j = k + 1; j < 4; j++)
            x[k] -= rows[k][j] * x[j];
        x[k] /= rows[k][k];
    }
}

// The odd quintic with the least max |1 - p| on [l, u]: Remez exchange on l < q < r < u, where the error
// alternates in sign.
static NsTuple best_quintic(double l, double u)
{
    double u3 = u * u * u;
    if (l / u >= 1 - 5e-6)
        return (NsTuple){15 / (8 * u), -10 / (8 * u3), 3 / (8 * u3 * u * u)}; // points coincide: the limit
    double points[4] = {l, (3 * l + u) / 4, (l + 3 * u) / 4, u}, error = INFINITY, x[4];
    for (int round = 0; round < 100; round++) { // converges in a handful
        double rows[4][5];
        for (int i = 0; i < 4; i++) {
            double p = points[i], p2 = p * p;
            double row[5] = {p, p * p2, p * p2 * p2, i % 2 ? -1 : 1, 1};
            memcpy(rows[i], row, sizeof row);
        }
        solve4(rows, x);
        double root = sqrt(9 * x[1] * x[1] - 20 * x[0] * x[2]);
        points[1] = sqrt((-3 * x[1] - root) / (10 * x[2]));
        points[2] = sqrt((-3 * x[1] + root) / (10 * x[2]));
        if (fabs(x[3] - error) < 1e-15)
            break;
        error = x[3];
    }
    return (NsTuple){x[0], x[1], x[2]};
}

// Polar Express (Amsel et al., arXiv 2505.16932): greedily composed minimax quintics for singular values in
// [lower, 1]. cushion: no step is fitted below cushion * its upper bound. safety: all but the last map
// x/(1+safety), so that rounding cannot push a value out of the interval. tuples (steps) out, host.
static void polar_express(NsTuple *tuples, int steps, double lower, double safety, double cushion)
{
    double l = lower, u = 1;
    for (int t = 0; t < steps; t++) {
        NsTuple p = best_quintic(fmax(l, cushion * u), u);
        if (cushion * u > l) { // fitted above l: centre the range that [l, u] really maps to around 1
            double centre = 2 / (ns_scalar_map(&p, 1, l) + ns_scalar_map(&p, 1, u));
            p = (NsTuple){p.a * centre, p.b * centre, p.c * centre};
        }
        if (t < steps - 1)
            p = (NsTuple){p.a / (1 + safety), p.b / pow(1 + safety, 3), p.c / pow(1 + safety, 5)};
        tuples[t] = p;
        l = ns_scalar_map(&p, 1, l);
        u = 2 - l;
    }
}
