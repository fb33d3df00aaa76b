"""Emulated FP8 of the head and of the MLP. Quantisation is straight-through; products sum in the wide
dtype.

half: operands and results are rounded to bf16, as a bf16 network stores them; otherwise to fp32, so that
codes and the scales of weights, which are bf16 numbers by definition, are the only roundings of note.
"""

import torch

E4M3, E5M2 = 448.0, 57344.0
ACTIVATION_HEADROOM, WEIGHT_HEADROOM, LEAST = 1.80, 1.12, 1e-12
LEAST_WEIGHT = torch.tensor(LEAST).bfloat16().item()


def quantize(x, dtype, limit):
    """x rounded to 8-bit floats, saturating, given back in the dtype of x."""
    return x.clamp(-limit, limit).float().to(dtype).to(x.dtype)


def bf16(x):
    return x.bfloat16().to(x.dtype)


def single(x):
    return x.float().to(x.dtype)


def truncated(x):
    """The upper half of fp32 values: the copy of a bank that products read."""
    return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


class HeadScales:
    """x / sx and w / sw are e4m3; the gradient of the logits times 448 / 0.75 is e5m2."""

    def __init__(self, half=True):
        self.x, self.w, self.g = (float(torch.tensor(s / E4M3)) for s in (100, 1.6, 0.75))
        self.stored = bf16 if half else single


class HeadProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, scales):
        x8, w8 = quantize(x / scales.x, torch.float8_e4m3fn, E4M3), quantize(
            w / scales.w, torch.float8_e4m3fn, E4M3
        )
        ctx.save_for_backward(x8, w8)
        ctx.scales = scales
        return scales.stored(scales.x * scales.w * (x8 @ w8))

    @staticmethod
    def backward(ctx, g):
        (x8, w8), s = ctx.saved_tensors, ctx.scales
        g8 = quantize(g / s.g, torch.float8_e5m2, E5M2)
        return s.stored(s.g * s.w * (g8 @ w8.t())), s.stored(s.g * s.x * (x8.t() @ g8)), None


def head_logits(x, w, scales):
    return HeadProduct.apply(x, w, scales)


class MlpState:
    """Weights are quantised after every optimizer step, activations with the scale that the forward before
    left in the same of `sets` sets: one for each micro-batch number, or one for all.
    """

    def __init__(self, layers, sets=1, half=True):
        self.stored, self.weights = (bf16, truncated) if half else (single, torch.Tensor.float)
        self.sets = [[1.0] * layers for _ in range(sets)]
        self.largest = [0.0] * layers
        self.set = 0
        self.up, self.down, self.down_scale, self.down_next = {}, {}, {}, {}

    @property
    def activation(self):
        return self.sets[self.set]

    def begin(self, micro_batch):
        self.set = micro_batch % len(self.sets)

    def quantize_weights(self, bank, exact):
        """bank [layers, 2, F, d]. exact: the down-projection's scale comes from the weights at hand, else
        from those before.
        """
        for i in range(len(self.largest)):
            fc, proj = self.weights(bank[i].detach())
            scale = bf16(fc.abs().max().clamp(min=LEAST_WEIGHT) / E4M3)
            self.up[i] = (quantize(bf16(fc / scale), torch.float8_e4m3fn, E4M3).to(bank.dtype), float(scale))
            largest = proj.abs().max().clamp(min=LEAST_WEIGHT)
            if exact:
                self.down_next[i] = bf16(largest / E4M3)
            used = self.down_next[i]
            self.down_scale[i] = float(used)
            self.down[i] = quantize(proj / used, torch.float8_e4m3fn, E4M3).to(bank.dtype)
            self.down_next[i] = largest * torch.tensor(WEIGHT_HEADROOM / E4M3)

    def end_of_forward(self):
        factor = torch.tensor(ACTIVATION_HEADROOM / E4M3)
        self.sets[self.set] = [float(torch.tensor(max(m, LEAST)) * factor) for m in self.largest]


def relu2_of_codes(h, state, i):
    """relu^2 of the product of the codes of h and of c_fc."""
    largest = h.abs().max().clamp(min=LEAST)
    h8 = quantize(h * (E4M3 / largest), torch.float8_e4m3fn, E4M3)
    up, up_scale = state.up[i]
    return state.stored(torch.relu(state.stored((up_scale * largest / E4M3) * (h8 @ up.t()))).square())


class MlpProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, fc, proj, state, i):
        stored, h = state.stored, state.stored(h)
        post = relu2_of_codes(h, state, i)
        scale = state.activation[i]
        post8 = quantize(post * float(1 / torch.tensor(scale)), torch.float8_e4m3fn, E4M3)
        state.largest[i] = float(post.max())
        ctx.save_for_backward(h, fc, proj, post)
        ctx.stored = stored
        return stored(scale * state.down_scale[i] * (post8 @ state.down[i]))

    @staticmethod
    def backward(ctx, g):
        (h, fc, proj, post), stored = ctx.saved_tensors, ctx.stored
        dpost = stored(g @ proj.t())
        dpre = stored(2 * dpost * post.sqrt())
        return stored(dpre @ fc), dpre.t() @ h, post.t() @ g, None, None


class MlpUpProduct(MlpProduct):
    """Codes of the first product alone: the second one reads what backward reads."""

    @staticmethod
    def forward(ctx, h, fc, proj, state, i):
        stored, h = state.stored, state.stored(h)
        post = relu2_of_codes(h, state, i)
        ctx.save_for_backward(h, fc, proj, post)
        ctx.stored = stored
        return stored(post @ proj)


def mlp_fp8(h, fc, proj, state, i, up_alone):
    return (MlpUpProduct if up_alone else MlpProduct).apply(h, fc, proj, state, i)
