// Adam, the momentum and NorMuon, fp32 build, against double references. Limit: that of exact_ops.c.
#include "dev/test/tap.h"
#include "dev/test/exact_check.h"

static void adam_case(int n, bool plain)
{
    pool_reset();
    Tensor p = random_tensor(n, 1), m = random_tensor(n, 1), v = random_tensor(n, 1);
    Tensor32 g = random_tensor32(n, 3);
    StepParams step = {.grad_scale = 0.125f, .rule = {[3] = {.rate = 0.75f}}};
    AdamRule rule = {3, 0.65f, 0.95f, 1e-8f, 0.35f, 0.05f};
    double *ep = doubles(n), *em_ = doubles(n), *ev = doubles(n);
    for (int i = 0; i < n; i++) {
        v.d[i] = fabs(v.d[i]);
        v.x[i] = float_to_x((float)v.d[i]);
        double scaled = g.d[i] * 0.125;
        em_[i] = 0.65 * m.d[i] + 0.35 * scaled;
        ev[i] = 0.95 * v.d[i] + 0.05 * scaled * scaled;
        ep[i] = p.d[i] - 0.75 * em_[i] / (sqrt(ev[i]) + 1e-8);
    }
    float *p32 = floats(n), *m32 = floats(n), *v32 = floats(n);
    for (int i = 0; i < n; i++) {
        p32[i] = x_to_float(p.x[i]);
        m32[i] = x_to_float(m.x[i]);
        v32[i] = x_to_float(v.x[i]);
    }
    if (plain)
        adam_update_fp32(NULL, p32, m32, v32, g.x, &step, rule, n);
    else
        adam_update(NULL, p.x, m.x, v.x, g.x, &step, rule, n);
    double left = 0;
    for (int i = 0; i < n; i++) {
        left += fabs(g.x[i]);
        if (!plain) {
            p32[i] = x_to_float(p.x[i]);
            m32[i] = x_to_float(m.x[i]);
            v32[i] = x_to_float(v.x[i]);
        }
    }
    check(plain ? "Adam fp32: p" : "Adam: p", p32, ep, n);
    check("   m", m32, em_, n);
    check("   v", v32, ev, n);
    ok(left == 0, "   gradient cleared");
}

static void momentum_case(int n)
{
    pool_reset();
    Tensor32 m = random_tensor32(n, 1), u = random_tensor32(n, 1);
    StepParams step = {.grad_scale = 0.125f, .muon_momentum = 0.9f};
    double mu = step.muon_momentum, *em_ = doubles(n), *eu = doubles(n);
    for (int i = 0; i < n; i++) {
        double g = 0.125 * u.d[i];
        em_[i] = m.d[i] + (1 - mu) * (g - m.d[i]);
        eu[i] = g + mu * (em_[i] - g);
    }
    normuon_momentum(NULL, u.x, m.x, &step, n);
    check("NorMuon momentum: M", m.x, em_, n);
    check("   U", u.x, eu, n);
}

static void normuon_reference(double *w, double *second, const double *o, int rows, int cols, bool per_column,
                              double rate, double decay)
{
    int sides = per_column ? cols : rows, others = per_column ? rows : cols;
    double *scaled = doubles(rows * cols), before = 0, after = 0;
    for (int k = 0; k < sides; k++) {
        double mean = 0;
        for (int j = 0; j < others; j++)
            mean += pow(o[per_column ? j * cols + k : k * cols + j], 2) / others;
        second[k] += (1 - (double)0.95f) * (mean - second[k]);
        for (int j = 0; j < others; j++) {
            int i = per_column ? j * cols + k : k * cols + j;
            scaled[i] = o[i] / sqrt(fmax(second[k], 1e-10));
            before += o[i] * o[i];
            after += scaled[i] * scaled[i];
        }
    }
    for (int i = 0; i < rows * cols; i++) {
        double change = scaled[i] * sqrt(before) / fmax(sqrt(after), 1e-10);
        if (change * w[i] >= 0)
            change += decay * w[i];
        w[i] -= rate * change;
    }
}

static void normuon_case(int rows, int cols, int batch, bool per_column, bool own_weight, bool zero)
{
    pool_reset();
    int n = rows * cols, side = rows > cols ? rows : cols;
    Tensor32 w = random_tensor32(batch * n, 1), grad = random_tensor32(batch * n, 1),
             s = random_tensor32(batch * side, 0.5);
    floatX *wx = halves(batch * n);
    ns_real *o = take((size_t)(batch * n), sizeof *o);
    double *od = doubles(batch * n), left = 0;
    StepParams step = {.rule = {[1] = {0.06f, 0.3f}, [2] = {0.09f, 0.3f}}};
    int32_t rules[3] = {1, 2, 1};
    for (int i = 0; i < batch * n; i++) {
        od[i] = o[i] = zero ? 0 : (float)uniform(-1, 1);
        wx[i] = float_to_x(w.x[i]);
    }
    for (int i = 0; i < batch * side; i++)
        s.d[i] = s.x[i] = zero ? 0 : fabsf(s.x[i]);
    normuon_update(NULL,
                   &(NormuonUpdate){own_weight ? w.x : NULL, wx, grad.x, s.x, o, NS_FP32, rows, cols, batch,
                                    per_column, 0.95f, rules, n, false},
                   &step);
    for (int b = 0; b < batch; b++)
        normuon_reference(w.d + b * n, s.d + b * side, od + b * n, rows, cols, per_column,
                          (double)step.rule[rules[b]].rate, step.rule[rules[b]].decay);
    for (int i = 0; i < batch * n; i++)
        left += fabs(grad.x[i]);
    ok(left == 0, "NorMuon %d x %dx%d%s%s%s, gradient cleared", batch, rows, cols,
       per_column ? ", columns" : ", rows", own_weight ? "" : ", floatX weight only",
       zero ? ", zero update decays" : "");
    if (own_weight)
        check("   W", w.x, w.d, batch * n);
    check_x("   W in floatX", wx, w.d, batch * n);
    if (!zero)
        check("   S", s.x, s.d, batch * side);
}
int main(void)
{
    backend_open(0);
    PART(adam_case(9001, false));
    PART(adam_case(64, true));
    PART(momentum_case(9001));
    PART(normuon_case(20, 70, 3, true, true, false));
    PART(normuon_case(16, 16, 2, true, true, false));
    PART(normuon_case(70, 20, 2, false, true, false));
    PART(normuon_case(1, 12, 1, true, false, false));
    PART(normuon_case(6, 12, 2, true, false, true));
    backend_close();
    return tap_done();
}
