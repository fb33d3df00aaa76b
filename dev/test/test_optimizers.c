// The optimizers in the build that trains (bf16 storage): see test_ops.c. Copies of weights bit by bit.
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"
#include "dev/test/golden_file.h"

static void check(const char *what, const floatX *got, const double *exact, int n)
{
    char text[128];
    snprintf(text, sizeof text, "%s, in roundings", what);
    ok_at_most(worst_rounding(of_x(got, n), exact, n), 1, text);
}

static void test_adam(void)
{
    pool_reset();
    enum { COUNT = 5000 };
    Tensor p = random_tensor(COUNT, 1), m = random_tensor(COUNT, 0.1), v = random_tensor(COUNT, 0.1);
    Tensor32 g = random_tensor32(COUNT, 1);
    StepParams step = {.grad_scale = 0.125f, .rule = {[1] = {.rate = 0.075f}}};
    for (int i = 0; i < COUNT; i++) {
        v.d[i] = fabs(v.d[i]);
        v.x[i] = float_to_x((float)v.d[i]);
        double scaled = g.d[i] * 0.125;
        m.d[i] = 0.65 * m.d[i] + 0.35 * scaled;
        v.d[i] = 0.95 * v.d[i] + 0.05 * scaled * scaled;
        p.d[i] -= (double)step.rule[1].rate * m.d[i] / (sqrt(v.d[i]) + 1e-8); // of the unrounded moments
    }
    adam_update(NULL, p.x, m.x, v.x, g.x, &step, (AdamRule){1, 0.65f, 0.95f, 1e-8f, 0.35f, 0.05f}, COUNT);
    check("Adam: p", p.x, p.d, COUNT);
    check("   m", m.x, m.d, COUNT);
    check("   v", v.x, v.d, COUNT);
}

static void test_cast(void)
{
    pool_reset();
    enum { COUNT = 40000 };
    Tensor32 w = random_tensor32(COUNT, 1);
    floatX *wx = halves(COUNT);
    for (int truncate = 0; truncate < 2; truncate++) {
        int wrong = 0;
        cast_weights(NULL, wx, w.x, COUNT, truncate);
        for (int i = 0; i < COUNT; i++) {
            double unit = ldexp(1, ilogb(w.d[i]) - 7), x = w.d[i] / unit; // unit: of bf16's last place
            wrong += x_to_float(wx[i]) != (truncate ? trunc(x) : nearbyint(x)) * unit;
        }
        ok(wrong == 0, "cast to bf16 goes %s (%d of %d wrong)", truncate ? "toward zero" : "to nearest even",
           wrong, COUNT);
    }
}

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

// The reference's halves of given numbers: the copy is the upper one, and both make the number again.
static void test_split(void)
{
    int64_t n;
    SafeTensors *st = open_golden("2026-normuon");
    float *w = read_golden(st, "split", &n), *upper = read_golden(st, "split.upper", NULL);
    int32_t *lower = read_golden(st, "split.lower", NULL);
    int other = 0, whole = 0, cut = 0;
    pool_reset();
    floatX *wx = halves((int)n);
    cast_weights(NULL, wx, w, n, true);
    for (int64_t i = 0; i < n; i++) {
        other += wx[i].bits != bits_of(upper[i]) >> 16;
        whole += ((uint32_t)wx[i].bits << 16 | (uint32_t)lower[i]) == bits_of(w[i]);
        cut += wx[i].bits != float_to_x(w[i]).bits;
    }
    ok(n == 64 && other == 0 && whole == n,
       "halves of %d numbers are the reference's: %d are not, %d are whole", (int)n, other, whole);
    ok(cut > 0, "   %d of them would be rounded up", cut);
    free(w);
    free(upper);
    free(lower);
    safetensors_close(st);
}

// NorMuon with a truncated copy makes the same weights; the copy is their upper half.
static void test_truncated_update(bool per_column)
{
    enum { ROWS = 24, COLS = 40, BATCH = 2, SIZE = ROWS * COLS, COUNT = BATCH * SIZE };
    pool_reset();
    Tensor32 w = random_tensor32(COUNT, 1), second = random_tensor32(BATCH * COLS, 1);
    float *kept = floats(COUNT), *moments = floats(BATCH * COLS);
    floatX *rounded = halves(COUNT), *truncated = halves(COUNT);
    ns_real *o = take(COUNT, sizeof *o);
    StepParams step = {.rule = {[1] = {0.06f, 0.3f}, [2] = {0.09f, 0.3f}}};
    int32_t rules[BATCH] = {2, 1};
    for (int i = 0; i < COUNT; i++)
        o[i] = (float)uniform(-1, 1);
    for (int i = 0; i < BATCH * COLS; i++)
        moments[i] = second.x[i] = fabsf(second.x[i]);
    memcpy(kept, w.x, COUNT * sizeof *kept);
    NormuonUpdate u = {.w = w.x,
                       .wx = rounded,
                       .second = second.x,
                       .o = o,
                       .o_dtype = NS_FP32,
                       .rows = ROWS,
                       .cols = COLS,
                       .batch = BATCH,
                       .per_column = per_column,
                       .beta2 = 0.9f,
                       .rule = rules,
                       .stride = SIZE};
    normuon_update(NULL, &u, &step);
    u.w = kept;
    u.wx = truncated;
    u.second = moments;
    u.truncate = true;
    normuon_update(NULL, &u, &step);
    int wrong = 0, differ = 0;
    for (int i = 0; i < COUNT; i++) {
        wrong += truncated[i].bits != bits_of(kept[i]) >> 16;
        differ += truncated[i].bits != rounded[i].bits;
    }
    ok(!memcmp(kept, w.x, COUNT * sizeof *kept), "NorMuon per %s: the same weights with either copy",
       per_column ? "column" : "row");
    ok(wrong == 0 && differ > COUNT / 4 && differ < 3 * COUNT / 4,
       "   the truncated one is their upper half (%d are not); %d of %d differ from the rounded", wrong,
       differ, COUNT);
}

int main(void)
{
    OpSizes sizes =
        {.tokens = 64, .eval_tokens = 64, .dim = 64, .heads = 2, .mlp_dim = 64, .vocab_padded = 128};
    backend_open(0);
    backend_reserve(&sizes);
    PART(test_adam());
    PART(test_cast());
    PART(test_split());
    PART(test_truncated_update(true));
    PART(test_truncated_update(false));
    backend_close();
    return tap_done();
}
