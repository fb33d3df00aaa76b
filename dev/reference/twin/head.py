"""Language-model head and loss, evaluated in chunks of rows so that the logits of a long sequence never exist at once."""
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 4096
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


class Linear(torch.autograd.Function):
    """y = x w^T, x [N, a] in the activation dtype, w [b, a] wide. w is rounded to the dtype of x; its gradient stays wide."""

    @staticmethod
    def forward(ctx, x, w):
        rounded = w.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        ctx.wide = w.dtype
        return x @ rounded.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if x.dtype == ctx.wide:
            dw = g.t() @ x
        elif x.is_cuda:
            dw = torch.mm(g.t(), x, out_dtype=ctx.wide)
        else:
            dw = g.t().to(ctx.wide) @ x.to(ctx.wide)
        return g @ w, dw


def quantize(x, scale, dtype, limit):
    """x / scale as 8-bit floats, saturating, given back as float32 (where every such value is exact)."""
    return (x.float() / scale).clamp(-limit, limit).to(dtype).float()


def product(a, b, sums):
    """a b summed in `sums`. 8-bit floats are exact in bf16, so a GPU may multiply there and still sum in float32."""
    if a.is_cuda and sums == torch.float32:
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=sums)
    return a.to(sums) @ b.to(sums)


class Fp8Linear(torch.autograd.Function):
    """The FP8 head: e4m3 operands forward, e5m2 gradient backward, one scale for each tensor (`constants`: a record's Head); bf16 in and out.

    Sums run in `sums` (float32; the golden vectors take float64). Quantisation is straight-through.
    """

    @staticmethod
    def forward(ctx, x, w, constants, sums):
        sx, sw = x.shape[-1] ** 0.5 / E4M3_MAX, constants.w_scale
        x8, w8 = (quantize(t, s, torch.float8_e4m3fn, E4M3_MAX) for t, s in ((x, sx), (w, sw)))
        ctx.save_for_backward(x8, w8)
        ctx.scales, ctx.wide, ctx.sums = (sx, sw, constants.g_scale), w.dtype, sums
        return (sx * sw * product(x8, w8.t(), sums)).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        sx, sw, sg = ctx.scales
        g8 = quantize(g, sg, torch.float8_e5m2, E5M2_MAX)
        dx = (sg * sw * product(g8, w8, ctx.sums)).to(torch.bfloat16)
        return dx, (sx * sg * product(g8.t(), x8, ctx.sums)).to(ctx.wide), None, None


def cross_entropy_sum(logits, targets, wide, constants):
    """Sum over rows of the cross entropy of cap * sigmoid(logits / slope), over all columns, padding included."""
    return F.cross_entropy(constants.cap * torch.sigmoid(logits.to(wide) / constants.slope), targets, reduction="sum")


def logits_of(x, w, constants, fp8):
    return Fp8Linear.apply(x, w, constants, torch.float32) if fp8 else Linear.apply(x, w)


def loss_sum(x, w, targets, wide, constants, fp8):
    """x [N, d], w [Vp, d], targets [N], constants a record's Head: summed loss. Chunks are recomputed in the backward pass."""
    def chunk(x, w, targets):
        return cross_entropy_sum(logits_of(x, w, constants, fp8), targets, wide, constants)
    if x.shape[0] <= CHUNK:
        return chunk(x, w, targets)
    total = 0.0
    for xs, ts in zip(x.split(CHUNK), targets.split(CHUNK)):
        total = total + (checkpoint(chunk, xs, w, ts, use_reentrant=False) if torch.is_grad_enabled() else chunk(xs, w, ts))
    return total
