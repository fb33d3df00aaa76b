#include "llmc/ops/heads.h"

// Planes of one product where they have one width; in FP8 a product for each.
static void products(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e)
{
    int d = H * e, wide = H * a->heads.qk;
    int64_t plane = (int64_t)N * wide, weight = (int64_t)wide * d;
    for (int k = 0; k < 3 && a->x8; k++)
        matmul_fp8(c, a->raw + k * plane,
                   &(Fp8Product){a->x8, a->w8 + k * weight, a->scale_x, a->scale_w, N, d, k < 2 ? wide : d,
                                 a->alpha},
                   NULL);
    if (a->x8)
        return;
    int planes = wide == d ? 3 : 2;
    matmul_forward(c, &(Product){a->raw, a->x, a->w, NULL, a->alpha, N, d, wide, planes});
    if (planes == 2)
        matmul_forward(c,
                       &(Product){a->raw + 2 * plane, a->x, a->w + 2 * weight, NULL, a->alpha, N, d, d, 1});
}

void qkv_heads_apart(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e)
{
    HeadsForward rest = qkv_heads_planes(a, N, H);
    products(c, a, N, H, e);
    heads_forward(c->stream, &rest, N, H, e);
}
