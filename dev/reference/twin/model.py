"""Parameters and forward pass.

Parameters are wide leaves (float64 in that mode, float32 otherwise). In bf16 the half-stored ones hold bf16 values; casting
them in the forward pass is then exact, and their gradients come out wide. `Arithmetic` says what activations are stored in (`act`) and
what is computed with inside an operation (`wide`); each operation rounds its result once.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import attention, head
from .config import BadInput

EPS = 2.0 ** -23
GATE_WIDTH = 12           # leading channels that a gate looks at
NUM_SCALARS = 64
NO_ATTENTION = (0, 7)
LONG_LAYERS = (4, 11)
VALUE_TABLE = {1: 1, 2: 2, 9: 0, 10: 1, 11: 2}
BACKOUT_LAYER = 8
SKIPS = {"five": {6: (0, 5), 7: (1, 4), 8: (2, 3), 9: (3, 2), 10: (4, 1)}, "one": {7: (1, 4)}}  # layer: (skip weight, from block)


@dataclass(frozen=True)
class Arithmetic:
    act: torch.dtype
    wide: torch.dtype

    @property
    def half(self):
        return self.act == torch.bfloat16


ARITHMETIC = {"float64": Arithmetic(torch.float64, torch.float64), "float32": Arithmetic(torch.float32, torch.float32),
              "bf16": Arithmetic(torch.bfloat16, torch.float32)}


def parameter_shapes(cfg):
    """{name: (shape, stored in bf16?)} in checkpoint order."""
    d, vp = cfg.model_dim, cfg.padded_vocab_size
    shapes = {"embed.weight": ((vp, d), True)}
    shapes |= {f"value_embeds.{i}.weight": ((vp, d), True) for i in range(3)}
    shapes |= {"lm_head.weight": ((vp, d), True), "smear_gate.weight": ((1, GATE_WIDTH), True)}
    for i in range(1, cfg.num_layers):
        if i not in NO_ATTENTION:
            shapes[f"blocks.{i}.attn.qkvo_w"] = ((d, 4 * d), False)
            shapes[f"blocks.{i}.attn.attn_gate.weight"] = ((cfg.num_heads, GATE_WIDTH), True)
        shapes[f"blocks.{i}.mlp.c_fc"] = ((d, cfg.mlp_dim), False)
        shapes[f"blocks.{i}.mlp.c_proj"] = ((d, cfg.mlp_dim), False)
    return shapes | {"scalars": ((NUM_SCALARS,), False)}


def scalar_slots(cfg):
    """Offsets in `scalars`: skip weights, block lambdas, attention lambdas, smear lambda, backout lambda."""
    n = cfg.num_layers
    return dict(skip=0, block=n, attn=3 * n, smear=5 * n, backout=5 * n + 1)


def initial_scalars(cfg):
    n = cfg.num_layers
    s = [-1.5] * n + [cfg.block_lambda, 0.0] * n + [0.5, 0.5] * n + [0.0, 0.5]
    return torch.tensor(s + [1.0] * (NUM_SCALARS - len(s)))


def init_parameters(cfg, generator):
    """Fresh parameters, float32 values (bf16-representable where stored so). Zero: head, gates, output projections."""
    bound = 0.5 * math.sqrt(3.0) * cfg.model_dim ** -0.5
    p = {}
    for name, (shape, half) in parameter_shapes(cfg).items():
        t = torch.zeros(shape)
        if name.startswith(("embed", "value_embeds")):
            t.normal_(generator=generator)
        elif name.endswith("qkvo_w"):
            t.view(4, cfg.model_dim, cfg.model_dim)[:3].uniform_(-bound, bound, generator=generator)
        elif name.endswith("c_fc"):
            t.uniform_(-bound, bound, generator=generator)
        elif name == "scalars":
            t.copy_(initial_scalars(cfg))
        p[name] = t.bfloat16().float() if half else t
    return p


def load_parameters(cfg, path):
    """Parameters from a safetensors file under the checkpoint names; scalars may hold 62 to 64 values."""
    from safetensors.torch import load_file
    try:
        stored = load_file(path)
    except Exception as e:
        raise BadInput(f"{path}: not readable as safetensors ({e})")
    p = {}
    for name, (shape, _) in parameter_shapes(cfg).items():
        if name not in stored:
            raise BadInput(f"{path}: tensor {name} is missing")
        t = stored[name].float()
        if name == "scalars" and 5 * cfg.num_layers + 2 <= t.numel() <= NUM_SCALARS:
            t = torch.cat([t, torch.ones(NUM_SCALARS - t.numel())])
        if tuple(t.shape) != shape:
            raise BadInput(f"{path}: {name} has shape {list(t.shape)}, the model needs {list(shape)}")
        p[name] = t
    return p


def rms(x, ar):
    y = x.to(ar.wide)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).to(ar.act)


def rms_rope(x, cos, sin, ar):
    """rms per head, then the rotation; x [N, H, e], tables [N, e/2]."""
    y = x.to(ar.wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    c, s = cos[:, None].to(ar.wide), sin[:, None].to(ar.wide)
    y1, y2 = y.chunk(2, -1)
    return torch.cat([y1 * c + y2 * s, y2 * c - y1 * s], -1).to(ar.act)


def gate(x, w):
    """sigmoid(w . leading channels), wide: [N, rows of w]."""
    return torch.sigmoid(x[:, :GATE_WIDTH].to(w.dtype) @ w.t())


class Batch:
    """One packed sequence on the device. tokens [N+1] int64; cu_seqlens rises from 0 to N."""

    def __init__(self, tokens, cu_seqlens, device="cpu"):
        self.inputs, self.targets = tokens[:-1].to(device), tokens[1:].to(device)
        lengths = torch.diff(cu_seqlens)
        self.documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(torch.int32).to(device)
        self.cu_seqlens, self.longest = cu_seqlens.to(torch.int32).to(device), int(lengths.max())


class Model:
    def __init__(self, cfg, parameters, device="cpu"):
        self.cfg, self.ar = cfg, ARITHMETIC[cfg.dtype]
        self.p = {n: t.to(device=device, dtype=self.ar.wide, copy=True).requires_grad_() for n, t in parameters.items()}
        self.flex = attention.Flex() if cfg.attention == "flex" else None

    def attend(self, q, k, v, batch, window, scale):
        if self.cfg.attention == "flash":
            return attention.flash(q, k, v, batch.cu_seqlens, batch.longest, window, scale)
        if self.flex:
            return self.flex(q, k, v, batch.documents, window, scale)
        return attention.dense(q, k, v, batch.documents, window, scale, self.ar.wide).to(self.ar.act)

    def attention_layer(self, i, x, batch, tables, window, scale):
        cfg, ar, p = self.cfg, self.ar, self.p
        d, slot = cfg.model_dim, scalar_slots(cfg)["attn"] + 2 * i
        h = rms(x, ar)
        w = p[f"blocks.{i}.attn.qkvo_w"].view(4, d, d)
        q, k, v = (t.reshape(-1, cfg.num_heads, cfg.head_dim) for t in head.Linear.apply(h, w[:3].reshape(3 * d, d)).split(d, -1))
        q, k = (rms_rope(t, *tables, ar) for t in (q, k))
        v = p["scalars"][slot] * v.to(ar.wide)
        if i in VALUE_TABLE:
            ve = F.embedding(batch.inputs, p[f"value_embeds.{VALUE_TABLE[i]}.weight"])
            v = v + p["scalars"][slot + 1] * ve.view_as(v)
        y = self.attend(q, k, v.to(ar.act), batch, window, scale)
        y = (y.to(ar.wide) * gate(h, p[f"blocks.{i}.attn.attn_gate.weight"])[:, :, None]).to(ar.act)
        return x + head.Linear.apply(y.reshape(-1, d), w[3])

    def mlp(self, i, x):
        h = head.Linear.apply(rms(x, self.ar), self.p[f"blocks.{i}.mlp.c_fc"].t())
        a = torch.relu(h.to(self.ar.wide)).square().to(self.ar.act)
        return x + head.Linear.apply(a, self.p[f"blocks.{i}.mlp.c_proj"])

    def embed(self, tokens):
        ar, p = self.ar, self.p
        x = F.embedding(tokens, p["embed.weight"])
        smear = p["scalars"][scalar_slots(self.cfg)["smear"]] * gate(x[1:], p["smear_gate.weight"])
        return rms(torch.cat([x[:1], x[1:] + smear * x[:-1]]).to(ar.act), ar)

    def hidden(self, batch, tables, scale, ws_short, ws_long):
        """The normed output of the last block, [N, d]; window sizes in blocks."""
        cfg, ar, s = self.cfg, self.ar, self.p["scalars"]
        slots, skips = scalar_slots(cfg), SKIPS[cfg.skips]
        x = x0 = self.embed(batch.inputs)
        outputs = {}
        for i in range(1, cfg.num_layers):
            if i in skips:
                weight, source = skips[i]
                x = (x.to(ar.wide) + torch.sigmoid(s[slots["skip"] + weight]) * outputs[source].to(ar.wide)).to(ar.act)
            l0, l1 = s[slots["block"] + 2 * i], s[slots["block"] + 2 * i + 1]
            x = (l0 * x.to(ar.wide) + l1 * x0.to(ar.wide)).to(ar.act)
            if i not in NO_ATTENTION:
                window = cfg.block_size * (ws_long if i in LONG_LAYERS else ws_short)
                x = self.attention_layer(i, x, batch, tables, window, scale)
            x = outputs[i] = self.mlp(i, x)
        x = (x.to(ar.wide) - s[slots["backout"]] * outputs[BACKOUT_LAYER].to(ar.wide)).to(ar.act)
        return rms(x, ar)

    def loss(self, batch, tables, scale, ws_short, ws_long, fp8):
        """Loss summed over the tokens of the batch."""
        x = self.hidden(batch, tables, scale, ws_short, ws_long)
        return head.loss_sum(x, self.p["lm_head.weight"], batch.targets, self.ar.wide, fp8)
