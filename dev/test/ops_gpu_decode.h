// Cases of test_ops_gpu.c: attention over cached keys and values. Pieces of a few rows continue some texts,
// whose earlier positions are what the cache holds; rows beyond them belong to no text.
#pragma once

enum { PIECE = 5, MOST_TEXTS = 64 };

static int decode_texts(const Case *c) { return (int)min_i64(MOST_TEXTS, ceil_div(c->z.N, PIECE)); }

// Variants: 0 a window; 1 a longer one, narrower q and k, key offset; 2 pairs of heads, where their number is
// even, with a key offset; 3 a gate.
static bool decode_is_paired(const Case *c) { return c->variant == 2 && c->z.H % 2 == 0; }
static int decode_offset(const Case *c) { return c->variant == 1 || c->variant == 2; }
static int decode_window(const Case *c)
{
    static const int windows[] = {17, 150, 41, 64};
    return windows[c->variant];
}
static int decode_rows(const Case *c) { return decode_window(c) + PIECE + decode_offset(c); }
static int decode_width(const Case *c) { return c->variant == 1 ? (int)round_up(3 * c->z.e / 4, 4) : c->z.e; }

static void add_rows(Case *c, int pairs)
{
    add(c, "text", INT32, IN, (int64_t)c->z.N * pairs, 1);
    add(c, "position", INT32, IN, (int64_t)c->z.N * pairs, 1);
}

static void fill_rows(Case *c, int pairs)
{
    float *text = NULL, *position = NULL;
    for (int i = 0; i < c->count; i++) {
        text = strcmp(c->buffer[i].name, "text") ? text : c->master[i];
        position = strcmp(c->buffer[i].name, "position") ? position : c->master[i];
    }
    for (int i = 0; i < c->z.N * pairs; i++) {
        int n = i / pairs, number = n / PIECE;
        bool none = number >= decode_texts(c) || n % 11 == 10;
        text[i] = (float)(none ? -1 : number);
        position[i] = (float)(none ? 0 : pairs * (number * 37 % 400 + n % PIECE) + i % pairs);
    }
}

static void fix_decode(Case *c) { fill_rows(c, decode_is_paired(c) ? 2 : 1); }
static void fix_dc_decode(Case *c) { fill_rows(c, 1); }

// Rows of no text keep their y.
DESCRIBE(decode)
{
    SIZES;
    int64_t n = (int64_t)N * d, wide = (int64_t)H * decode_width(c),
            rows = (int64_t)decode_texts(c) * decode_rows(c);
    add(c, "y", FLOATX, INOUT, n, 1);
    add(c, "cache_k", FLOATX, INOUT, rows * wide, 1.7);
    add(c, "cache_v", FLOATX, INOUT, rows * d, 1);
    add(c, "q", FLOATX, IN, N * wide, 1.7);
    add(c, "k", FLOATX, IN, N * wide, 1.7);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "h", FLOATX, IN, n, 1.7);
    add(c, "gate_w", FLOATX, IN, (int64_t)H * gate_inputs(c), 1);
    add_rows(c, decode_is_paired(c) ? 2 : 1);
}
RUN(decode)
{
    SIZES;
    int pairs = decode_is_paired(c) ? 2 : 1;
    TextCache cache = {.k = p[1],
                       .v = p[2],
                       .rows = pairs * decode_rows(c),
                       .text = p[8],
                       .position = p[9],
                       .offset = pairs * decode_offset(c)};
    SdpaForward f = {.y = p[0],
                     .q = p[3],
                     .k = p[4],
                     .v = p[5],
                     .qk = decode_width(c),
                     .window = decode_window(c),
                     .scale = 0.1f};
    AttentionForward gated = {.yg = p[0],
                              .q = p[3],
                              .k = p[4],
                              .v = p[5],
                              .h = p[6],
                              .gate_w = p[7],
                              .window = decode_window(c),
                              .scale = 0.1f,
                              .gate_inputs = gate_inputs(c)};
    if (c->variant == 3)
        o->attention_decode(stream, &gated, &cache, N, H, e);
    else
        o->sdpa_decode(stream, &f, &cache, N * pairs, H / pairs, e);
}

// Variants: 0 of record 89; 1 fewer keys, narrower q and k.
static int dc_decode_keys(const Case *c) { return c->variant ? 40 : 112; }
DESCRIBE(dc_decode)
{
    SIZES;
    int64_t wide = (int64_t)H * decode_width(c),
            rows = (int64_t)decode_texts(c) * (dc_decode_keys(c) + PIECE);
    add(c, "y", FLOATX, INOUT, (int64_t)N * d, 0.1);
    add(c, "cache_k", FLOATX, IN, rows * wide, 1.7);
    add(c, "cache_v", FLOATX, IN, rows * d, 1);
    add(c, "q", FLOATX, IN, N * wide, 1.7);
    add(c, "columns", FP32, IN, (int64_t)N * (2 * H + DC_COLUMNS), 1.5);
    add(c, "lse", FP32, INOUT, (int64_t)N * H, 1);
    add_rows(c, 1);
}
RUN(dc_decode)
{
    SIZES;
    float *columns = p[4];
    TextCache cache = {.k = p[1],
                       .v = p[2],
                       .rows = dc_decode_keys(c) + PIECE,
                       .text = p[6],
                       .position = p[7]};
    DcForward f = {.y = p[0],
                   .lse = p[5],
                   .qk = decode_width(c),
                   .q = p[3],
                   .w1 = columns + 1,
                   .w2 = columns + H + 3,
                   .stride = 2 * H + DC_COLUMNS,
                   .scale = 0.1f,
                   .keys = dc_decode_keys(c)};
    o->dc_decode(stream, &f, &cache, N, H, e);
}
