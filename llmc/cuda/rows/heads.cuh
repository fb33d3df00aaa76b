// What both directions of heads.h share.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

static __device__ __forceinline__ int64_t position_of(const HeadsForward &a, int64_t t, int n)
{
    return a.paired ? 2 * t + n % 2 : t;
}

static __device__ __forceinline__ void unpack4(uint2 u, float (&f)[4])
{
    f[0] = __uint_as_float(u.x << 16);
    f[1] = __uint_as_float(u.x & 0xffff0000u);
    f[2] = __uint_as_float(u.y << 16);
    f[3] = __uint_as_float(u.y & 0xffff0000u);
}

static __device__ __forceinline__ float dot8(const float (&a)[8], const float (&b)[8])
{
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum += a[k] * b[k];
    return sum;
}

// ---- vectors ----------------------------------------------------------------------------------------------

// Heads of q and k of multiples of 16, of v of multiples of 8, up to 256. LANES neighbouring lanes, 16 or 32,
// share a head and have a 16-byte vector of it each; those beyond its width have zeros. A rotating pair lies
// in one lane. Vectors are counted in 32 bits: a tensor has less than 34 GB.
enum { MAX_HEAD = 8 * WARP };
const unsigned WHOLE_WARP = 0xffffffffu;

static inline bool heads_in_vectors(int qk, int e)
{
    return qk % 16 == 0 && qk <= MAX_HEAD && e % 8 == 0 && e <= MAX_HEAD;
}

static __device__ __forceinline__ uint4 vector_or_zero(const floatX *p, int v, bool has)
{
    return has ? load_vec(p, v) : make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void add8(float (&sum)[8], uint4 u)
{
    float x[8];
    unpack8(u, x);
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum[k] += x[k];
}

// Sums over the lanes of a head, all at once.
template <int LANES, int COUNT> static __device__ __forceinline__ void lane_sums(float (&x)[COUNT])
{
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] += __shfl_xor_sync(WHOLE_WARP, x[i], step);
}

// Cosines and sines of a vector's four pairs, in bf16.
struct Rotation {
    uint2 c, s;
};

// Of vector j of head n.
static __device__ __forceinline__ Rotation load_rotation(const HeadsForward &a, int64_t t, int n, int j)
{
    if (j >= a.qk / 16)
        return {make_uint2(0x3f803f80, 0x3f803f80), make_uint2(0, 0)}; // ones, zeros
    int64_t at = position_of(a, t, n) * (a.qk / 4) + 4 * j;
    return {*(const uint2 *)(a.cos + at), *(const uint2 *)(a.sin + at)};
}

// ---- forward, in vectors --------------------------------------------------------------------------------

// gate_n of a token, by all of the LANES lanes of a head; lane c has input c.
template <int LANES>
static __device__ __forceinline__ float value_gate(const ValueMix &m, int64_t t, int n, const floatX *u,
                                                   int H, int d, int c)
{
    static_assert(LANES >= MAX_GATE_INPUTS);
    if (!m.gate_w)
        return m.factor[t * m.stride + n / (H / m.groups)];
    int inputs = m.gate_inputs;
    float x[1] = {};
    if (c < 2 * inputs)
        x[0] = to_float(m.gate_w[n * 2 * inputs + c]) * to_float(c < inputs ? m.h[t * d + c] : u[c - inputs]);
    lane_sums<LANES>(x);
    return 2 * sigmoid(x[0]);
}

static __device__ __forceinline__ uint4 norm_rotate(const float (&x)[8], float rstd, const Rotation &turn)
{
    float y[8], c[4], s[4];
    unpack4(turn.c, c);
    unpack4(turn.s, s);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float even = x[2 * k] * rstd, odd = x[2 * k + 1] * rstd;
        y[2 * k] = even * c[k] + odd * s[k];
        y[2 * k + 1] = odd * c[k] - even * s[k];
    }
    return pack8(y);
}

// Lane j of a head, which is unit t * H + n; those of none take part in sums.
struct HeadLane {
    unsigned unit;
    int64_t t;
    int n, j;
    bool has;
};

// A vector of k, whose second half belongs to the row below with an offset; row 0 keeps its own.
static __device__ __forceinline__ void store_key(const HeadsForward &a, const HeadLane &l, uint4 y, int H)
{
    int keys = a.qk / 8, at = (int)l.unit * keys + l.j;
    bool below = a.offset && l.j >= keys / 2;
    if (!below || l.t == 0)
        store_vec(a.k, at, y);
    if (below)
        store_vec(a.k, at + H * keys, y);
}

// What v is made of, for a vector.
struct ValueParts {
    const floatX *u_row; // of the table, or NULL
    uint4 raw, extra, u;
};

// raw: the lane's vector of raw v
static __device__ __forceinline__ ValueParts load_value(const HeadsForward &a, const HeadLane &l, uint4 raw,
                                                        int H, int e)
{
    const ValueMix &m = a.value;
    int values = e / 8, at = (int)l.unit * values + l.j;
    bool has = l.has && l.j < values;
    const floatX *u_row = m.table ? m.table + (int64_t)m.tokens[l.t] * H * e : NULL;
    return {u_row, raw, vector_or_zero(m.extra, at, has && m.extra),
            vector_or_zero(u_row, l.n * values + l.j, has && u_row)};
}

// gate: value_gate's, or 0 without a table
static __device__ __forceinline__ void store_value(const HeadsForward &a, const HeadLane &l,
                                                   const ValueParts &p, float gate, int e)
{
    float v[8], u[8];
    unpack8(p.raw, v);
    unpack8(p.u, u);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] += gate * u[i];
    add8(v, p.extra);
    if (l.has && l.j < e / 8)
        store_vec(a.v, (int)l.unit * (e / 8) + l.j, pack8(v));
    if (l.has && l.j == 0 && p.u_row && a.value.gate_w)
        a.value.gate[l.unit] = gate;
}

// ---- pairs: heads of any width ----------------------------------------------------------------------------

static __device__ __forceinline__ float2 load_two(const floatX *p)
{
    uint32_t u = *(const uint32_t *)p;
    return {__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u)};
}

static __device__ __forceinline__ void store_two(floatX *p, float even, float odd)
{
    *(uint32_t *)p = pack2(even, odd);
}

// Cosine and sine of pair j of a head.
static __device__ __forceinline__ float2 turn_of(const HeadsForward &a, int64_t position, int j)
{
    int64_t at = position * (a.qk / 4) + j;
    return j < a.qk / 4 ? make_float2(to_float(a.cos[at]), to_float(a.sin[at])) : make_float2(1, 0);
}
