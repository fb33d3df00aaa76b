"""Forward pass and loss of one packed sequence, from the tables of a Record. The backward pass is autograd.

Everything is computed in the dtype of the parameters (float64 for golden vectors). `fp8` chooses what is
emulated: nothing, or some of "head", and "mlp", "mlp-up" or
"mlp-full" and "qkv" (see Record); quantisation is straight-through and its scales are constants.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twin.attention import dense

from . import record
from . import fp8_full
from .fp8 import HeadScales, MlpState, head_logits, mlp_fp8

EPS = 2.0**-23
DC_EPS, XSA_FLOOR = 1e-6, 1e-8
CAP, SHIFT, SLOPE, MASKED = 23.0, 5.0, 7.5, -60.0
GENERATOR_SCALE = 0.1  # of mu and nu; that of a and b is a parameter


@dataclass
class Batch:
    """tokens [N+1], cu_seqlens from 0 to N, rows of the bigram table [N], rows of the sign table [N]; all
    int64.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    bigram_rows: torch.Tensor
    sign_rows: torch.Tensor

    @property
    def inputs(self):
        return self.tokens[:-1]

    @property
    def targets(self):
        return self.tokens[1:]

    def documents(self):
        lengths = torch.diff(self.cu_seqlens)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


@dataclass
class Rope:
    """Frequencies [e/4] of the rotated channel pairs (2j, 2j+1), the attention scale; both follow the long
    window.
    """

    frequencies: torch.Tensor
    scale: float = 0.1

    @staticmethod
    def start(sizes, dtype):
        """The scale times the root of q's and k's width is that of width e at 0.1."""
        n = sizes.qk_width // 4
        x = torch.linspace(0, 1, n, dtype=torch.float32 if dtype != torch.float64 else dtype)
        scale = 0.1 * math.sqrt(sizes.head_dim / sizes.qk_width)
        return Rope(torch.tensor(1 / 1024, dtype=x.dtype) ** x, scale)

    def follow(self, old, new):
        """YaRN: the long window goes from `old` to `new` tokens."""
        if old == new:
            return
        turns = old * self.frequencies / (2 * math.pi)
        g = ((turns - 1) / 31).clamp(0, 1)
        self.frequencies = self.frequencies * (old / new + g * (1 - old / new))
        self.scale *= 1 + 0.2 * math.log(new / old)

    def rotate(self, x, positions):
        """x [N, H, e]; positions [N] or [N, H]."""
        angle = positions.to(self.frequencies.dtype)[..., None] * self.frequencies
        if angle.dim() == 2:
            angle = angle[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        half = x.shape[-1] // 2
        even, odd = x[..., 0:half:2], x[..., 1:half:2]
        turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
        return torch.cat([turned, x[..., half:]], -1)


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


# ---- pieces, each a function of its operands --------------------------------------------------------------


def generator(x, w1, w2, b2, scale):
    """Coefficients [N, K] of x [N, d]; w1 [hidden, d], w2 [K, hidden], b2 [K]."""
    return scale * (F.gelu(x @ w1.t()) @ w2.t() + b2)


def smear(e, scalar, weight):
    """e [N, d]: every token adds its predecessor's embedding, weight [1, channels]; position 0 stays."""
    gate = torch.sigmoid(e[1:, : weight.shape[1]] @ weight.t())
    return torch.cat([e[:1], e[1:] + scalar * gate * e[:-1]])


def prepare_qk(layer, q, k, rope):
    """Raw q, k [N, H, e] normalised, rotated and, with a long window, k shifted."""
    n, heads, e = q.shape
    position = torch.arange(n)
    if layer.attention == "paired":
        position = 2 * position[:, None] + (torch.arange(heads) % 2)[None]
    q, k = (rope.rotate(rms(x), position) for x in (q, k))
    if layer.long_window:  # the key offset: the fixed channels come from the position before
        half = e // 2
        k = torch.cat([k[:, :, :half], torch.cat([k[:1, :, half:], k[:-1, :, half:]])], -1)
    return q, k


def value_gate(h, u, weight):
    """[N, H] from the first channels of h and u [N, d]; weight [H, 2 * channels]."""
    c = weight.shape[1] // 2
    return 2 * torch.sigmoid(torch.cat([h[:, :c], u[:, :c]], -1) @ weight.t())


def attend(layer, q, k, v, documents, window, scale):
    """q, k [N, H, e], v [N, H, ev] after everything; the paired form reads them as [2N, H/2, ..]."""
    shape = v.shape
    if layer.attention == "paired":
        q, k, v = (x.reshape(2 * shape[0], shape[1] // 2, x.shape[-1]) for x in (q, k, v))
        documents = documents.repeat_interleave(2)
    return dense(q, k, v, documents, window, scale, q.dtype).reshape(shape)


def dc(q, k, v, w1, w2, documents, scale, window):
    """The second, mixed softmax over the last keys: a mixture of all heads' probabilities for every head.
    w1, w2 [N, H].
    """
    w1 = w1 * torch.rsqrt(w1.square().mean(-1, keepdim=True) + DC_EPS)
    position = torch.arange(len(q))
    distance = position[:, None] - position[None]
    seen = (distance >= 0) & (distance < window) & (documents[:, None] == documents[None])
    scores = scale * torch.einsum("tne,jne->ntj", q, k)
    mixed = torch.einsum("tn,ntj->tj", w1, scores.masked_fill(~seen, float("-inf")).softmax(-1))
    return w2[:, :, None] * torch.einsum("tj,jne->tne", mixed, v)


def xsa(y, v, alpha):
    """y, v [N, H, e], alpha [N, H]: takes tanh(alpha) of y's part along v away."""
    share = torch.tanh(alpha)[:, :, None] * (y * v).sum(-1, keepdim=True)
    return y - share / v.square().sum(-1, keepdim=True).clamp_min(XSA_FLOOR) * v


def weighted_loss(logits, targets, weights, prefix, prefix_weight):
    """Summed cross entropy of the capped logits; weights: of the targets 1, 2, .. ahead; prefix [N], -1:
    none.
    """
    log_p = (CAP * torch.sigmoid((logits + SHIFT) / SLOPE)).log_softmax(-1)
    total = 0.0
    for ahead, weight in enumerate(weights):
        total = total - weight * log_p[: len(logits) - ahead].gather(1, targets[ahead:, None]).sum()
    rows = torch.nonzero(prefix >= 0).flatten()
    return total - prefix_weight * log_p[rows].gather(1, prefix[rows, None]).sum()


def initial_parameters(r, generator, dtype=torch.float32):
    """As the original starts: banks uniform, tables small, generators Kaiming; bf16-stored tensors hold bf16
    values.
    """
    d, table = r.sizes.model_dim, record.parameters(r)
    p = {n: torch.zeros(s.shape) for n, s in table.items()}
    bound = 0.5 * math.sqrt(3.0) * d**-0.5

    def uniform(shape, c):
        return torch.empty(shape).uniform_(-c, c, generator=generator)

    p["lm_head.weight"] = 0.005 * torch.randn(p["lm_head.weight"].shape, generator=generator)
    p["value_embeds"] = 0.01 * torch.randn(p["value_embeds"].shape, generator=generator).bfloat16().float()
    p["qk_bank"], p["vo_bank"] = uniform(p["qk_bank"].shape, bound), uniform(p["vo_bank"].shape, bound)
    p["mlp_bank"][:, 0] = uniform(p["mlp_bank"][:, 0].shape, bound)
    for name in ("mudd_w1", "mudd_gate_w1"):
        p[name] = uniform(p[name].shape, d**-0.5)
    p["scalars"] = torch.tensor([0.5, 1.0] * len(r.layers) + [0.0, -1.5])
    p["resid_lambdas"].fill_(math.sqrt(1.1))
    p["post_lambdas"].fill_(1.0)
    p["_mudd_gate_scale"] = torch.tensor(0.1)
    start = {6: 2.0, 7: 2.0, 8: math.sqrt(1.1), 9: 1.0, 11: 0.05, 12: math.sqrt(1.1), 13: 1.0}
    for column, value in start.items():
        p["mudd_b2"][0, column] = value / GENERATOR_SCALE
    p["mudd_b2"][1, 1] = -0.5 / GENERATOR_SCALE
    for i, row in enumerate("ab"):
        for key, at in r.columns(row)[0].items():
            kind = key[0] if isinstance(key, tuple) else key
            value = {"gate": 0.25, "bigram": 0.05, "skip": 0.5, "dc1": 1.0}.get(kind, 0.0)
            p["mudd_gate_b2"][i, at] = value / 0.1
    for name, spec in table.items():
        if spec.storage != "fp32":
            p[name] = p[name].bfloat16().float()
    p["embed.weight"] = p["lm_head.weight"].t().clone()
    return {n: t.to(dtype) for n, t in p.items()}


class Model:
    """Parameters are leaves in one wide dtype. signs [sign_rows, d] of +-1; prefix [padded vocabulary], -1:
    no prefix. sets: of delayed scales. half: FP8 operands and results are bf16 (fp8.py). mask [padded
    vocabulary, same], bool: tokens that cannot follow a token.
    """

    def __init__(self, r, parameters, signs, prefix, fp8=(), sets=1, mask=None, half=True):
        self.r, self.z, self.signs, self.prefix, self.fp8 = r, r.sizes, signs, prefix, set(fp8)
        self.p = {n: t.contiguous().clone().requires_grad_() for n, t in parameters.items()}
        self.dtype = self.p["embed.weight"].dtype
        self.mlp_state = MlpState(len(r.layers), sets, half) if self.fp8 & {"mlp", "mlp-up"} else None
        full, unit = self.fp8 & {"mlp-full", "qkv"}, r.sizes.micro_batches // sets
        self.full_state = fp8_full.Scales(len(r.layers), sets, unit) if full else None
        self.mask = mask
        self.head_scales = HeadScales(half)

    # ---- pieces -------------------------------------------------------------------------------------------

    def generate(self, x, kind, row):
        """Coefficients [N, K]; kind "mudd" (rows mu, nu) or "mudd_gate" (rows a, b)."""
        p, number = self.p, {"mu": 0, "nu": 1, "a": 0, "b": 1}[row]
        count = (
            self.r.columns(row)[1] if kind == "mudd_gate" else {"mu": record.NUM_MU, "nu": record.NUM_NU}[row]
        )
        scale = p["_mudd_gate_scale"] if kind == "mudd_gate" else GENERATOR_SCALE
        w1, w2, b2 = (p[f"{kind}_{name}"][number] for name in ("w1", "w2", "b2"))
        return generator(x, w1, w2[:count], b2[:count], scale)

    def value_table(self, number, tokens):
        vp = self.z.padded_vocab
        return F.embedding(tokens, self.p["value_embeds"][number * vp : (number + 1) * vp])

    def values(self, layer, h, v, batch, mu, extra):
        """V with its value embedding and, in the dynamic layer, the mixture `extra` of kept streams."""
        n, heads, e = v.shape
        if layer.value_table is None:
            return v
        u = self.value_table(layer.value_table, batch.inputs)
        if layer.dynamic:
            gate = mu[:, 6:8].repeat_interleave(heads // 2, 1)
            v = v + extra.view(n, heads, e)
        else:
            gate = value_gate(h, u, self.p["ve_gate_bank"][layer.value_table])
        return v + gate[:, :, None] * u.view(n, heads, e)

    def qkv_weights(self, i):
        """[q, k, v rows, d] of layer i."""
        z, number = self.z, self.r.attention_layers().index(i)
        qk = self.p["qk_bank"][number * z.num_heads : (number + 1) * z.num_heads].reshape(-1, z.model_dim)
        return torch.cat([qk, self.p["vo_bank"][2 * number]])

    def quantize_weights(self, exact):
        """After an optimizer step, and at the start."""
        if self.mlp_state:
            self.mlp_state.quantize_weights(self.p["mlp_bank"], exact)
        if self.full_state:
            qkv = {i: self.qkv_weights(i) for i in self.r.attention_layers()}
            self.full_state.quantize_weights(qkv, self.p["mlp_bank"])

    def begin_micro_batch(self, number):
        for state in (self.mlp_state, self.full_state):
            if state:
                state.begin(number)

    def attention(
        self, i, layer, h, batch, documents, coefficients, windows, rope, training, mu=None, extra=None
    ):
        """The layer's attention of the normalised input h [N, d], output projection included."""
        z, p = self.z, self.p
        n, heads, e, d = len(h), z.num_heads, z.head_dim, z.model_dim
        number = self.r.attention_layers().index(i)
        lin, lout = p["scalars"][2 * i], p["scalars"][2 * i + 1]
        w, wo = self.qkv_weights(i), p["vo_bank"][2 * number + 1]
        if training and "qkv" in self.fp8:
            qkv = fp8_full.QkvProduct.apply(h, w, lin, self.full_state, i)
        else:
            qkv = lin * (h @ w.t())
        qk = heads * z.qk_width
        q, k, v = (x.reshape(n, heads, -1) for x in qkv.split([qk, qk, d], -1))
        q, k = prepare_qk(layer, q, k, rope)
        v = self.values(layer, h, v, batch, mu, extra)
        y = attend(layer, q, k, v, documents, windows[layer.long_window], rope.scale)
        if layer.dc:
            w1, w2 = coefficients["dc1"], coefficients["dc2"]
            y = y + dc(q, k, v, w1, w2, documents, rope.scale, self.r.dc_window)
        if layer.xsa:
            y = xsa(y, v, coefficients["xsa", i])
        if layer.output_gate:
            y = y * coefficients["gate", i][:, :, None]
        return lout * (y.reshape(n, d) @ (wo if self.r.wo_by_input else wo.t()))

    def mlp(self, i, x, training):
        h, (fc, proj) = rms(x), self.p["mlp_bank"][i]
        if training and self.mlp_state:
            return mlp_fp8(h, fc, proj, self.mlp_state, i, "mlp-up" in self.fp8)
        if training and "mlp-full" in self.fp8:
            return fp8_full.MlpProduct.apply(h, fc, proj, self.full_state, i)
        return torch.relu(h @ fc.t()).square() @ proj

    # ---- the network --------------------------------------------------------------------------------------

    def embed(self, tokens):
        e = F.embedding(tokens, self.p["embed.weight"])
        return rms(smear(e, self.p["scalars"][2 * len(self.r.layers)], self.p["smear_gate.weight"]))

    def hidden(self, batch, windows, rope, training=True):
        """The normalised stream before the head, [N, d]. windows: (short, long) in tokens."""
        p, heads, documents = self.p, self.z.num_heads, batch.documents()
        x0 = self.embed(batch.inputs)
        bigram = F.embedding(batch.bigram_rows, p["bigram_embed.weight"]) * self.signs[batch.sign_rows]
        coefficients = {}

        def unpack(x, row):
            generated = self.generate(x, "mudd_gate", row)
            coefficients.update({key: generated[:, at] for key, at in self.r.columns(row)[0].items()})

        unpack(x0, "a")
        c0 = x = x0 + coefficients["bigram", 0] * bigram
        kept, mu, before_last = {}, None, None
        rows = {
            layer.gates: i for i, layer in reversed(list(enumerate(self.r.layers)))
        }  # first layer of each generator
        for i, layer in enumerate(self.r.layers):
            if i and rows[layer.gates] == i:
                unpack(x, layer.gates)
            resid, post = p["resid_lambdas"][i], p["post_lambdas"][i]
            if not layer.attention:
                x = (
                    x
                    + torch.sigmoid(p["scalars"][2 * len(self.r.layers) + 1])
                    * coefficients["skip"]
                    * kept[self.r.early]
                )
            else:
                h = rms(kept[self.r.late] if layer.from_late else x)
                extra = None
                if layer.dynamic:
                    before_last = x
                    mu = self.generate(x, "mudd", "mu")
                    m = [mu[:, j : j + 1] for j in range(record.NUM_MU)]
                    extra = m[0] * c0 + m[1] * kept[self.r.late] + m[2] * x
                    x = (1 + m[5]) * x + m[3] * c0 + m[4] * kept[self.r.late]
                out = self.attention(
                    i, layer, h, batch, documents, coefficients, windows, rope, training, mu, extra
                )
                if layer.dynamic:
                    x = m[8] * x + m[9] * out + m[10] * c0 + m[11] * bigram
                else:
                    x = resid[0] * x + post[0] * out + coefficients["x0", i] * x0
                    if i:
                        x = x + coefficients["bigram", i] * bigram
            f = self.mlp(i, x, training)
            x = m[12] * x + m[13] * f if layer.dynamic else resid[1] * x + post[1] * f
            if i in (self.r.early, self.r.late):
                kept[i] = x
        if training and self.mlp_state:
            self.mlp_state.end_of_forward()
        nu = self.generate(x, "mudd", "nu")
        sources = (c0, kept[self.r.late], before_last, self.value_table(0, batch.inputs), kept[self.r.early])
        for j, source in enumerate(sources):
            x = x + nu[:, j : j + 1] * source
        return rms(x)

    def loss(self, batch, windows, rope, targets, prefix_weight):
        """Training loss summed over the tokens; targets: weights of the tokens 1, 2, .. ahead."""
        x = self.hidden(batch, windows, rope)
        logits = (
            head_logits(x, self.p["lm_head.weight"], self.head_scales)
            if "head" in self.fp8
            else x @ self.p["lm_head.weight"]
        )
        return weighted_loss(logits, batch.targets, targets, self.prefix[batch.targets], prefix_weight)

    @torch.no_grad()
    def validation_loss(self, batch, windows, rope, masked=False):
        """Summed over the tokens: no FP8, the next token alone; masked: tokens that cannot follow the input
        count
        as logits of -60.
        """
        z = CAP * torch.sigmoid(
            (self.hidden(batch, windows, rope, False) @ self.p["lm_head.weight"] + SHIFT) / SLOPE
        )
        if masked:
            z = z.masked_fill(self.mask[batch.inputs], MASKED)
        return F.cross_entropy(z, batch.targets, reduction="sum")
