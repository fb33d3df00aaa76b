// The head and its loss, fp32 build: forward against the double references, backward against central
// differences of them or analytic gradients. Limit: as in exact_ops.c.
#include "dev/test/tap.h"
#include "dev/test/exact_check.h"

// A prefix term: none, or a further target of most rows. Or no prefix and rows without targets.
typedef enum { NO_PREFIX, PREFIX, NO_TARGETS } Prefix;

static struct {
    int N, d, Vp;
    const HeadSpec *spec;
    int num_targets;
    int32_t *targets, *prefix; // (N); prefix NULL: no term
    Tensor x, w;
} hd;

static const float head_weight[MAX_TARGETS] = {1, 0.5f, 0.25f}, prefix_weight = 0.75f;

static double head_row(const double *x, const double *w, int t, double *logits, double *dlogits)
{
    for (int j = 0; j < hd.Vp; j++)
        logits[j] = inner(x + t * hd.d, w + j * hd.d, hd.d);
    int count = 0;
    int32_t target[MAX_TARGETS + 1];
    float weight[MAX_TARGETS + 1];
    for (int k = 0; k < hd.num_targets && t + k < hd.N; k++) {
        if (hd.targets[t + k] < 0)
            continue;
        target[count] = hd.targets[t + k];
        weight[count++] = head_weight[k];
    }
    if (hd.prefix && hd.prefix[t] >= 0) {
        target[count] = hd.prefix[t];
        weight[count++] = prefix_weight;
    }
    return ref_softcap_loss(hd.spec, logits, target, weight, count, hd.Vp, dlogits);
}

static double head_loss(void)
{
    double sum = 0, logits[2048];
    for (int t = 0; t < hd.N; t++)
        sum += head_row(hd.x.d, hd.w.d, t, logits, NULL);
    return sum;
}

static double *head_row_losses(void)
{
    double *rows = doubles(hd.N), *logits = doubles(hd.Vp);
    for (int t = 0; t < hd.N; t++)
        rows[t] = head_row(hd.x.d, hd.w.d, t, logits, NULL);
    return rows;
}

// Analytic; fp8: with the operands quantised by the search over all codes.
static double head_reference(double *dx, double *dw, bool fp8)
{
    int N = hd.N, d = hd.d, Vp = hd.Vp;
    double *g = doubles(N * Vp), *logits = doubles(Vp), sum = 0, *x8 = doubles(N * d), *w8 = doubles(Vp * d);
    HeadScales scale = head_scales(hd.spec, d);
    for (int i = 0; i < N * d; i++)
        x8[i] = fp8 ? (double)scale.x * ref_e4m3((double)((float)hd.x.d[i] / scale.x)) : hd.x.d[i];
    for (int i = 0; i < Vp * d; i++)
        w8[i] = fp8 ? (double)scale.w * ref_e4m3((double)((float)hd.w.d[i] / scale.w)) : hd.w.d[i];
    for (int t = 0; t < N; t++)
        sum += head_row(x8, w8, t, logits, g + t * Vp);
    for (int i = 0; i < N * Vp && fp8; i++)
        g[i] = (double)scale.g * ref_e5m2(g[i] / (double)scale.g);
    ref_product(dx, g, w8, false, false, N, d, Vp);
    ref_product(dw, g, x8, true, false, Vp, d, N);
    return sum;
}

static void head_inputs(const HeadSpec *spec, int num_targets, Prefix prefix, int N, int d, int Vp,
                        double size)
{
    pool_reset();
    hd.spec = spec;
    hd.num_targets = num_targets;
    hd.N = N;
    hd.d = d;
    hd.Vp = Vp;
    hd.targets = random_tokens(N, Vp);
    if (N > 3)
        hd.targets[2] = hd.targets[1]; // two targets of a row are one token
    for (int t = 0; prefix == NO_TARGETS && t < N; t++)
        hd.targets[t] = t % 4 == 1 || t > N - 3 ? -1 : hd.targets[t];
    hd.prefix = prefix == PREFIX ? random_tokens(N, Vp) : NULL;
    for (int t = 0; hd.prefix && t < N; t++)
        hd.prefix[t] = t % 3 == 1 ? -1 : t % 5 == 3 ? hd.targets[t] : hd.prefix[t];
    hd.x = random_tensor(N * d, 1.7);
    hd.w = random_tensor(Vp * d, size);
}

static HeadLoss head_call(HeadMode mode, float *loss, floatX *dx, float *dw)
{
    size_t train = head_train_scratch_bytes(mode, hd.N, hd.d, hd.Vp),
           eval = head_eval_scratch_bytes(hd.N, hd.d, hd.Vp);
    return (HeadLoss){.spec = hd.spec,
                      .mode = mode,
                      .loss = loss,
                      .dx = dx,
                      .dw = dw,
                      .x = hd.x.x,
                      .w = hd.w.x,
                      .targets = hd.targets,
                      .num_targets = hd.num_targets,
                      .target_weight = head_weight,
                      .prefix = hd.prefix,
                      .prefix_weight = hd.prefix ? &prefix_weight : NULL,
                      .scratch = take(train > eval ? train : eval, 1),
                      .N = hd.N,
                      .d = hd.d,
                      .Vp = hd.Vp};
}

// Every third column or so of a row is masked, by the row's token; targets among them.
static void masked_case(HeadLoss *h, int N, int Vp)
{
    uint32_t *bits = take((size_t)Vp * (size_t)(Vp / 32), sizeof *bits);
    double *logits = doubles(Vp), sum = 0;
    int32_t *tokens = random_tokens(N, Vp);
    int hit = 0;
    for (int t = 0; t < N; t++)
        for (int j = 0; j < Vp; j++)
            bits[tokens[t] * (Vp / 32) + j / 32] |= (uint32_t)((j + tokens[t]) % 3 == 0) << j % 32;
    for (int t = 0; t < N; t++) {
        double most = 0, total = 0;
        ref_product(logits, hd.x.d + t * hd.d, hd.w.d, false, true, 1, Vp, hd.d);
        for (int j = 0; j < Vp; j++) {
            bool masked = (j + tokens[t]) % 3 == 0;
            logits[j] = masked ? -60 : ref_softcap(hd.spec, logits[j]);
            hit += masked && j == hd.targets[t];
            most = fmax(most, logits[j]);
        }
        for (int j = 0; j < Vp; j++)
            total += exp(logits[j] - most);
        sum += most + log(total) - logits[hd.targets[t]];
    }
    h->impossible = bits;
    h->tokens = tokens;
    head_loss_eval(NULL, h);
    ok_at_most(fabs(*h->loss - sum) / sum, 1e-6, "   loss with masked columns");
    printf("# %d targets of %d are masked\n", hit, N);
    h->impossible = NULL;
}

static void head_case(const HeadSpec *spec, int num_targets, Prefix prefix, int N, int d, int Vp, double size,
                      bool differences)
{
    head_inputs(spec, num_targets, prefix, N, d, Vp, size);
    floatX *dx = halves(N * d);
    float loss = 0, *dw = floats(Vp * d), *z = floats(N * Vp);
    double *ex = doubles(N * d), *ew = doubles(Vp * d), *ez = doubles(N * Vp);
    HeadLoss h = head_call(HEAD_BF16, &loss, dx, dw);
    head_loss_train(NULL, &h);
    double exact = head_reference(ex, ew, false);
    printf("# head: N %d, d %d, Vp %d, cap %g, shift %g, %d targets%s\n", N, d, Vp, (double)spec->cap,
           (double)spec->shift, num_targets,
           prefix == NO_PREFIX ? ""
           : prefix == PREFIX  ? " and prefixes"
                               : ", not in all rows");
    ok_at_most(fabs(loss - exact) / exact, 1e-6, "   loss");
    if (differences) {
        ex = central_differences(hd.x.d, N * d, head_loss);
        ew = central_differences(hd.w.d, Vp * d, head_loss);
    }
    check_x("   dx", dx, ex, N * d);
    check("   dw", dw, ew, Vp * d);
    head_loss_train(NULL, &h);
    for (int i = 0; i < Vp * d; i++)
        ew[i] *= 2;
    check("   dw is added to", dw, ew, Vp * d);
    hd.num_targets = 1;
    hd.prefix = NULL;
    for (int t = 0; t < N; t++) // an evaluation has all targets
        hd.targets[t] = hd.targets[t] < 0 ? 0 : hd.targets[t];
    exact = head_reference(ex, ew, false);
    h.rows = floats(N);
    head_loss_eval(NULL, &h);
    ok_at_most(fabs(loss - exact) / exact, 1e-6, "   loss in evaluation, of the next token alone");
    check("   loss of each token", h.rows, head_row_losses(), N);
    masked_case(&h, N, Vp);
    head_logits(NULL, spec, z, hd.x.x, hd.w.x, N, d, Vp);
    ref_product(ez, hd.x.d, hd.w.d, false, true, N, Vp, d);
    for (int i = 0; i < N * Vp; i++)
        ez[i] = ref_softcap(spec, ez[i]);
    check("   z", z, ez, N * Vp);
}

// An fp32 value next to a tie may fall on the other side than its double: 8 bits make that a whole step of
// the coarse grid, so the gradient's limit counts one element in ten thousand off by one step (2^-2 of it) :
// 0.25 * sqrt(1e-4) = 2.5e-3.
static void fp8_head_case(const HeadSpec *spec, int num_targets, Prefix prefix, int N, int d, int Vp)
{
    head_inputs(spec, num_targets, prefix, N, d, Vp, 0.4);
    floatX *dx = halves(N * d);
    float loss = 0, *dw = floats(Vp * d);
    double *ex = doubles(N * d), *ew = doubles(Vp * d);
    void *w8 = take(head_weight_bytes(HEAD_FP8, Vp, d), 1);
    head_quantize(NULL, spec, w8, hd.w.x, Vp, d);
    HeadLoss h = head_call(HEAD_FP8, &loss, dx, dw);
    h.w8 = w8;
    head_loss_train(NULL, &h);
    double exact = head_reference(ex, ew, true);
    ok_at_most(fabs(loss - exact) / exact, 1e-6, "FP8 head: loss");
    ok_at_most(relative_error(of_x(dx, N * d), ex, N * d), 2.5e-3, "   dx");
    ok_at_most(relative_error(of_float(dw, Vp * d), ew, Vp * d), 2.5e-3, "   dw");
    ok(head_weight_bytes(HEAD_BF16, Vp, d) == 0, "   no copy of the weight without FP8");
}

// The head is zero at the start: every column alike, loss ln Vp.
static void zero_head_case(void)
{
    head_inputs(&head_plain, 1, NO_PREFIX, 5, 16, 384, 0);
    float loss;
    HeadLoss h = head_call(HEAD_BF16, &loss, NULL, NULL);
    head_loss_eval(NULL, &h);
    ok_at_most(fabs(loss - 5 * log(384)), 1e-5, "zero head: loss is N ln Vp, padding included");
}

int main(void)
{
    OpSizes sizes =
        {.tokens = 64, .eval_tokens = 64, .dim = 64, .heads = 4, .mlp_dim = 64, .vocab_padded = 17024};
    backend_open(0);
    backend_reserve(&sizes);
    PART(head_case(&head_plain, 1, NO_PREFIX, 7, 12, 64, 1, true));
    PART(head_case(&head_shifted, 3, NO_PREFIX, 7, 12, 64, 1, true));
    PART(head_case(&head_plain, 1, NO_PREFIX, 1, 12, 128, 1, true));
    PART(head_case(&head_shifted, 2, NO_PREFIX, 1, 12, 128, 1, true)); // has a row of its own alone
    PART(head_case(&head_plain, 1, NO_PREFIX, 150, 20, 1792, 0.5, false));
    PART(head_case(&head_plain, 3, NO_PREFIX, 1100, 12, 128, 1, false)); // more rows than a chunk
    // Two chunks, groups of more than one tile.
    PART(head_case(&head_shifted, 1, NO_PREFIX, 70, 12, 17024, 0.5, false));
    PART(head_case(&head_shifted, 1, PREFIX, 7, 12, 64, 1, true));
    PART(head_case(&head_plain, 3, PREFIX, 7, 12, 64, 1, true));
    PART(head_case(&head_shifted, 3, PREFIX, 1100, 12, 128, 1, false));
    PART(head_case(&head_shifted, 2, PREFIX, 70, 12, 17024, 0.5, false));
    PART(head_case(&head_plain, 1, NO_TARGETS, 7, 12, 64, 1, true));
    PART(head_case(&head_plain, 3, NO_TARGETS, 7, 12, 64, 1, true));
    PART(head_case(&head_shifted, 1, NO_TARGETS, 150, 20, 1792, 0.5, false));
    PART(fp8_head_case(&head_plain, 1, NO_TARGETS, 70, 16, 512));
    PART(fp8_head_case(&head_plain, 1, NO_PREFIX, 70, 16, 512));
    PART(fp8_head_case(&head_shifted, 3, NO_PREFIX, 70, 16, 512));
    PART(fp8_head_case(&head_shifted, 3, PREFIX, 70, 16, 512));
    PART(zero_head_case());
    backend_close();
    return tap_done();
}
