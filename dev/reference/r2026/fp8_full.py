"""Emulated FP8 of record 90: q, k, v and the MLP in both directions. All 8-bit operands are e4m3, one fp32
scale for each tensor; products sum in the wide dtype and are rounded to bf16 once.

Gradients are those of the plain summed loss, as on eight ranks. On one rank the published program divides
them by the number of micro-batches before they are quantised: here the scales are so much larger (unit).
"""

import torch

from .fp8 import E4M3, LEAST, bf16, quantize, truncated

HEADROOM, FLOOR, GRADIENT_FLOOR = 1.25, 1e-6, 1e-7


def single(x):
    return torch.as_tensor(x, dtype=torch.float32)


def q8(x, scale):
    """x / scale in fp32, saturated and rounded to e4m3; in the dtype of x."""
    return quantize(x.float() / scale, torch.float8_e4m3fn, E4M3).to(x.dtype)


INPUT_SCALE, GRADIENT_SCALE = single(8.0) / E4M3, single(1.0) / E4M3  # of q, k, v: constants


def scaled(product, *scales):
    """fp32 product of the scales * product."""
    s = single(1.0)
    for x in scales:
        s = s * x
    return s.to(product.dtype) * product


class Scales:
    """Delayed scales of the MLPs, a set for each micro-batch number (sets = 1: they follow the last
    micro-batch of a step). unit: of the scales of gradients. stored, copy: how operands and results of products
    are rounded, and the copies of weights; to bf16, as a bf16 network has them.

    x: input, p: relu squared, e: gradient before it; largest: what the next ones follow.
    """

    def __init__(self, layers, sets=1, unit=1):
        start = {"x": 8 / E4M3, "p": 16 / E4M3, "e": unit / E4M3}
        self.least = {"x": FLOOR, "p": FLOOR, "e": unit * GRADIENT_FLOOR}
        self.gradient = unit * GRADIENT_SCALE
        self.stored, self.copy = bf16, truncated
        self.scale = [
            {k: torch.full((layers,), v, dtype=torch.float32) for k, v in start.items()} for _ in range(sets)
        ]
        self.largest = [{k: torch.zeros(layers) for k in start} for _ in range(sets)]
        self.set, self.layers = 0, layers
        self.qkv, self.up, self.down = {}, {}, {}

    def begin(self, micro_batch):
        self.set = micro_batch % len(self.scale)

    def now(self, kind, i):
        return self.scale[self.set][kind][i]

    def note(self, kind, i, x):
        self.largest[self.set][kind][i] = x.abs().max().float()

    def end_of_step(self):
        for scale, largest in zip(self.scale, self.largest):
            for kind in scale:
                follow = largest[kind].clamp(min=LEAST) * single(HEADROOM / E4M3)
                scale[kind] = follow.clamp(min=self.least[kind])

    def quantize_weights(self, qkv, mlp):
        """qkv: {layer: [rows, d]}, mlp [layers, 2, F, d]; the copies that products read are truncated to
        bf16.
        """
        for i, w in qkv.items():
            w16 = self.copy(w.detach())
            scale = w16.abs().max().clamp(min=LEAST) * single(1 / E4M3)
            self.qkv[i] = q8(w16, scale).to(w.dtype), scale
        for i in range(self.layers):
            for copies, w in zip((self.up, self.down), self.copy(mlp[i].detach())):
                scale = w.abs().max().clamp(min=LEAST) / E4M3
                copies[i] = q8(w, scale).to(mlp.dtype), scale


class QkvProduct(torch.autograd.Function):
    """h [N, d], w [rows, d], lin a scalar: bf16(lin * h w^T), lin as a scale."""

    @staticmethod
    def forward(ctx, h, w, lin, state, i):
        w8, scale = state.qkv[i]
        h8, lin32 = q8(state.stored(h), INPUT_SCALE), lin.float()
        ctx.save_for_backward(h8, w8, w, lin)
        ctx.scale, ctx.gradient, ctx.stored = scale, state.gradient, state.stored
        return state.stored(scaled(h8 @ w8.t(), INPUT_SCALE, scale * lin32))

    @staticmethod
    def backward(ctx, g):
        h8, w8, w, lin = ctx.saved_tensors
        g8, stored = q8(ctx.stored(g), ctx.gradient), ctx.stored
        dw = stored(scaled(g8.t() @ h8, ctx.gradient, INPUT_SCALE))
        dh = stored(scaled(g8 @ w8, ctx.gradient, ctx.scale * lin.float()))
        return dh, stored(lin * dw), stored((dw * w).sum()), None, None


class MlpProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, fc, proj, state, i):
        (u8, su), (d8, sd) = state.up[i], state.down[i]
        sx, sp = state.now("x", i), state.now("p", i)
        stored = state.stored
        h16 = stored(h)
        h8 = q8(h16, sx)
        state.note("x", i, h16)
        p = stored(torch.relu(stored(scaled(h8 @ u8.t(), sx, su))).square())
        p8 = q8(p, sp)
        state.note("p", i, p)
        ctx.save_for_backward(h8, p8, u8, d8)
        ctx.scales, ctx.state, ctx.i = (sx, sp, su, sd), state, i
        return stored(scaled(p8 @ d8, sp, sd))

    @staticmethod
    def backward(ctx, g):
        h8, p8, u8, d8 = ctx.saved_tensors
        (sx, sp, su, sd), state, i = ctx.scales, ctx.state, ctx.i
        stored = state.stored
        g16 = stored(g)
        sg, se = g16.abs().max().float().clamp(min=LEAST) / E4M3, state.now("e", i)
        g8 = q8(g16, sg)
        root = stored(
            (p8.float() * sp).sqrt().to(p8.dtype)
        )  # of the activation as p8 has it: where that is 0 the gradient is, too
        dpre = stored(2 * stored(scaled(g8 @ d8.t(), sg, sd)) * root)
        state.note("e", i, dpre)
        e8 = q8(dpre, se)
        dh, dfc, dproj = scaled(e8 @ u8, se, su), scaled(e8.t() @ h8, se, sx), scaled(p8.t() @ g8, sp, sg)
        return stored(dh), stored(dfc), stored(dproj), None, None
