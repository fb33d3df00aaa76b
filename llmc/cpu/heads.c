// Heads of the records of 2026: norm, rope, key offset and values before attention; XSA and gate after it.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/rows.h"
#include "llmc/cpu/vmath.h"

// ---- norm and rope ----------------------------------------------------------------------------------------

static int64_t position_of(const HeadsForward *a, int t, int n)
{
    return a->paired ? 2 * (int64_t)t + n % 2 : t;
}

// Pairs (2j, 2j+1) of x by the angles of row `position`; inverse: back, whatever the length of (cos, sin).
static void rotate_pairs(float *x, const HeadsForward *a, int64_t position, int e, bool inverse)
{
    const floatX *cos = a->cos + position * (e / 4), *sin = a->sin + position * (e / 4);
    for (int j = 0; j < e / 4; j++) {
        float c = x_to_float(cos[j]), s = x_to_float(sin[j]), even = x[2 * j], odd = x[2 * j + 1];
        if (inverse) {
            float length = c * c + s * s;
            c /= length;
            s /= -length;
        }
        x[2 * j] = even * c + odd * s;
        x[2 * j + 1] = odd * c - even * s;
    }
}

// The transpose of the rotation.
static void rotate_gradient(float *g, const HeadsForward *a, int64_t position, int e)
{
    const floatX *cos = a->cos + position * (e / 4), *sin = a->sin + position * (e / 4);
    for (int j = 0; j < e / 4; j++) {
        float c = x_to_float(cos[j]), s = x_to_float(sin[j]), even = g[2 * j], odd = g[2 * j + 1];
        g[2 * j] = even * c - odd * s;
        g[2 * j + 1] = odd * c + even * s;
    }
}

static float norm_rotate(float *y, const floatX *raw, const HeadsForward *a, int64_t position, int e)
{
    load_row(y, raw, e);
    float rstd = rms_rstd(y, e);
    for (int i = 0; i < e; i++)
        y[i] *= rstd;
    rotate_pairs(y, a, position, e, false);
    return rstd;
}

// ---- values, forward --------------------------------------------------------------------------------------

static float value_gate(const ValueMix *m, const floatX *u, int t, int n, int H, int e)
{
    if (!m->gate_w)
        return m->factor[(int64_t)t * m->stride + n / (H / m->groups)];
    int inputs = m->gate_inputs;
    const floatX *w = m->gate_w + n * 2 * inputs, *h = m->h + (int64_t)t * H * e;
    float sum = 0;
    for (int c = 0; c < inputs; c++)
        sum += x_to_float(w[c]) * x_to_float(h[c]) + x_to_float(w[inputs + c]) * x_to_float(u[c]);
    return m->gate[(int64_t)t * H + n] = 2 * sigmoid(sum);
}

static void values_row(const HeadsForward *a, int t, int H, int e)
{
    const ValueMix *m = &a->value;
    int d = H * e;
    int64_t at = (int64_t)t * d;
    const floatX *u = m->table ? m->table + (int64_t)m->tokens[t] * d : NULL;
    for (int n = 0; n < H; n++) {
        float gate = u ? value_gate(m, u, t, n, H, e) : 0;
        for (int c = n * e; c < (n + 1) * e; c++) {
            float v = x_to_float(a->raw_v[at + c]);
            if (u)
                v += gate * x_to_float(u[c]);
            if (m->extra)
                v += x_to_float(m->extra[at + c]);
            a->v[at + c] = float_to_x(v);
        }
    }
}

void heads_forward(Stream s, const HeadsForward *a, int N, int H, int e)
{
    OP_SCOPE(heads_forward, a, N, H, e);
    int qk = a->qk, half = qk / 2;
    int64_t width = (int64_t)H * qk;
    assert(qk % 4 == 0 && (!a->paired || H % 2 == 0));
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        float *y = cpu_scratch((size_t)qk);
        for (int n = 0; n < H; n++) {
            int64_t at = t * width + n * qk, position = position_of(a, t, n);
            a->rstd_q[(int64_t)t * H + n] = norm_rotate(y, a->raw_q + at, a, position, qk);
            store_row(a->q + at, y, qk);
            a->rstd_k[(int64_t)t * H + n] = norm_rotate(y, a->raw_k + at, a, position, qk);
            store_row(a->k + at, y, a->offset && t > 0 ? half : qk);
            if (a->offset)
                store_row(a->k + at + width + half, y + half, qk - half);
        }
        values_row(a, t, H, e);
    }
}

void qkv_heads_forward(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e)
{
    OP_SCOPE(qkv_heads_forward, a, N, H, e);
    qkv_heads_apart(c, a, N, H, e);
}

// ---- backward ---------------------------------------------------------------------------------------------

static void load_sum(float *restrict to, const floatX *a, const floatX *b, int n)
{
    load_row(to, a, n);
    for (int i = 0; i < n && b; i++)
        to[i] += x_to_float(b[i]);
}

// From the gradient g of rope(rms(x)) = y, both scratch of one head, to that of x.
static void norm_rotate_backward(floatX *dx, float *g, float *y, float rstd, const HeadsForward *a,
                                 int64_t position, int e)
{
    rotate_pairs(y, a, position, e, true);
    rotate_gradient(g, a, position, e);
    rms_backward(g, g, y, rstd, e);
    store_row(dx, g, e);
}

// One head of k and its gradient, offset undone. k_t's fixed channels are in row t + 1, those of k_0 in row
// 0, too; what attention gave to row N does not exist.
static void load_key(const HeadsBackward *a, int64_t at, int t, int N, int64_t width, float *g, float *y)
{
    const HeadsForward *f = a->forward;
    int qk = f->qk, half = qk / 2;
    load_sum(g, a->dk + at, a->dk_add ? a->dk_add + at : NULL, qk);
    load_row(y, f->k + at, qk);
    if (!f->offset)
        return;
    load_row(y + half, f->k + at + width + half, qk - half);
    for (int c = half; c < qk; c++) {
        int64_t below = at + width + c;
        g[c] = t == 0 ? g[c] : 0;
        if (t + 1 < N)
            g[c] += x_to_float(a->dk[below]) + (a->dk_add ? x_to_float(a->dk_add[below]) : 0);
    }
}

// sums (H, 2 gate_inputs): gradient of gate_w.  g (d): gradient of v
static void gates_backward_row(const HeadsBackward *a, const float *g, int t, int H, int e, float *sums)
{
    const ValueMix *m = &a->forward->value;
    int d = H * e, inputs = m->gate_inputs;
    const floatX *u = m->table + (int64_t)m->tokens[t] * d, *h = m->h + (int64_t)t * d;
    float *dh = a->dh_lead + (int64_t)t * inputs, *du = a->du_lead + (int64_t)t * inputs;
    for (int c = 0; c < inputs; c++)
        dh[c] = du[c] = 0;
    for (int n = 0; n < H; n++) {
        float gate = m->gate[(int64_t)t * H + n], dgate = 0;
        for (int c = n * e; c < (n + 1) * e; c++)
            dgate += g[c] * x_to_float(u[c]);
        dgate *= gate * (1 - gate / 2); // before the sigmoid
        const floatX *w = m->gate_w + n * 2 * inputs;
        float *of_head = sums + n * 2 * inputs;
        for (int c = 0; c < inputs; c++) {
            of_head[c] += dgate * x_to_float(h[c]);
            of_head[inputs + c] += dgate * x_to_float(u[c]);
            dh[c] += dgate * x_to_float(w[c]);
            du[c] += dgate * x_to_float(w[inputs + c]);
        }
    }
}

static void factors_backward_row(const HeadsBackward *a, const float *g, int t, int d)
{
    const ValueMix *m = &a->forward->value;
    const floatX *u = m->table + (int64_t)m->tokens[t] * d;
    int width = d / m->groups;
    for (int i = 0; i < m->groups; i++) {
        float sum = 0;
        for (int c = i * width; c < (i + 1) * width; c++)
            sum += g[c] * x_to_float(u[c]);
        a->dfactor[(int64_t)t * m->stride + i] = sum;
    }
}

static void heads_backward_row(const HeadsBackward *a, int t, int N, int H, int e, float *sums)
{
    const HeadsForward *f = a->forward;
    int d = H * e, qk = f->qk;
    int64_t width = (int64_t)H * qk;
    floatX *to = a->dqkv + t * (2 * width + d);
    float *arena = cpu_scratch(2 * (size_t)round_up(qk, 16) + (size_t)d),
          *g = scratch_take(&arena, (size_t)qk), *y = scratch_take(&arena, (size_t)qk), *dv = arena;
    for (int n = 0; n < H; n++) {
        int64_t at = t * width + n * qk, of_head = (int64_t)t * H + n, position = position_of(f, t, n);
        load_sum(g, a->dq + at, a->dq_add ? a->dq_add + at : NULL, qk);
        load_row(y, f->q + at, qk);
        norm_rotate_backward(to + n * qk, g, y, f->rstd_q[of_head], f, position, qk);
        load_key(a, at, t, N, width, g, y);
        norm_rotate_backward(to + width + n * qk, g, y, f->rstd_k[of_head], f, position, qk);
    }
    int64_t at = (int64_t)t * d;
    load_sum(dv, a->dv + at, a->dv_add ? a->dv_add + at : NULL, d);
    store_row(to + 2 * width, dv, d);
    if (f->value.table && f->value.gate_w)
        gates_backward_row(a, dv, t, H, e, sums);
    else if (f->value.table)
        factors_backward_row(a, dv, t, d);
}

void heads_backward(Stream s, const HeadsBackward *a, int N, int H, int e)
{
    OP_SCOPE(heads_backward, a, N, H, e);
    int gates = H * 2 * a->forward->value.gate_inputs;
    float *sums = cpu_shared((size_t)(PARTS * gates));
    for (int i = 0; i < PARTS * gates; i++)
        sums[i] = 0;
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            heads_backward_row(a, t, N, H, e, sums + part * gates);
    for (int i = 0; i < gates && a->dgate_w; i++) {
        double total = 0;
        for (int part = 0; part < PARTS; part++)
            total += sums[part * gates + i];
        a->dgate_w[i] += (float)total;
    }
}

void sdpa_heads_backward(Stream s, const SdpaHeadsBackward *a, int N, int H, int e)
{
    OP_SCOPE(sdpa_heads_backward, a, N, H, e);
    int pairs = a->heads.forward->paired ? 2 : 1;
    sdpa_backward(s, &a->sdpa, N * pairs, H / pairs, e);
    heads_backward(s, &a->heads, N, H, e);
}

// ---- XSA and gate -----------------------------------------------------------------------------------------

#define XSA_FLOOR 1e-8f

typedef struct {
    float share, inverse; // tanh(alpha), 1 / max(v . v, floor)
    bool floored;
} Xsa;

static Xsa xsa_of(const HeadsOutput *a, const float *v, int t, int n, int e)
{
    float square = dot(v, v, e);
    bool floored = square <= XSA_FLOOR;
    return (Xsa){tanhf(a->alpha[(int64_t)t * a->alpha_stride + n]), 1 / (floored ? XSA_FLOOR : square),
                 floored};
}

// y, less its share along v; v: scratch (e), loaded here.
static void load_output(const HeadsOutput *a, int64_t at, int t, int n, int e, float *y, float *v, Xsa *x)
{
    load_row(y, a->y + at, e);
    if (!a->alpha)
        return;
    load_row(v, a->v + at, e);
    *x = xsa_of(a, v, t, n, e);
    float along = x->share * dot(y, v, e) * x->inverse;
    for (int c = 0; c < e; c++)
        y[c] -= along * v[c];
}

void heads_output_forward(Stream s, const HeadsOutput *a, int N, int H, int e)
{
    OP_SCOPE(heads_output_forward, a, N, H, e);
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int64_t head = 0; head < (int64_t)N * H; head++) {
        int t = (int)(head / H), n = (int)(head % H);
        float *arena = cpu_scratch(2 * (size_t)round_up(e, 16)), *y = scratch_take(&arena, (size_t)e),
              *v = arena;
        Xsa x;
        load_output(a, head * e, t, n, e, y, v, &x);
        float gate = a->gate ? a->gate[(int64_t)t * a->gate_stride + n] : 1;
        for (int c = 0; c < e; c++)
            y[c] *= gate;
        store_row(a->out + head * e, y, e);
    }
}

// g (e): gradient of y less its share along v; becomes that of y.  dv (e) out.  y, v (e).
// Returns that of alpha.
static float xsa_backward(floatX *dv, float *g, const float *y, const float *v, const Xsa *x, int e)
{
    float along = dot(y, v, e) * x->inverse, back = dot(g, v, e) * x->inverse; // of y and of g
    float dalpha = -(1 - x->share * x->share) * dot(y, v, e) * back;
    float shrink = x->floored ? 0 : 2 * along * back; // v . v grows with v
    for (int c = 0; c < e; c++) {
        dv[c] = float_to_x(-x->share * (along * g[c] + back * y[c] - shrink * v[c]));
        g[c] -= x->share * back * v[c];
    }
    return dalpha;
}

void heads_output_backward(Stream s, const HeadsOutputBackward *a, int N, int H, int e)
{
    OP_SCOPE(heads_output_backward, a, N, H, e);
    const HeadsOutput *f = a->forward;
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int64_t head = 0; head < (int64_t)N * H; head++) {
        int t = (int)(head / H), n = (int)(head % H);
        float *arena = cpu_scratch(3 * (size_t)round_up(e, 16)), *y = scratch_take(&arena, (size_t)e),
              *v = scratch_take(&arena, (size_t)e), *g = arena;
        Xsa x;
        load_row(g, a->dout + head * e, e);
        load_output(f, head * e, t, n, e, y, v, &x);
        if (f->gate) {
            int64_t at = (int64_t)t * f->gate_stride + n;
            a->dgate[at] = dot(g, y, e);
            for (int c = 0; c < e; c++)
                g[c] *= f->gate[at];
        }
        if (f->alpha) {
            load_row(y, f->y + head * e, e);
            a->dalpha[(int64_t)t * f->alpha_stride + n] = xsa_backward(a->dv + head * e, g, y, v, &x, e);
        }
        store_row(a->dy + head * e, g, e);
        if (a->delta) {
            load_row(g, a->dy + head * e, e);
            load_row(y, f->y + head * e, e);
            a->delta[head] = dot(g, y, e);
        }
    }
}
