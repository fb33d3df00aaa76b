"""Parameters and forward pass.

Parameters are wide leaves (float64 in that mode, float32 otherwise). In bf16 the half-stored ones hold bf16 values; casting
them in the forward pass is then exact, and their gradients come out wide. `Arithmetic` says what activations are stored in (`act`) and
what is computed with inside an operation (`wide`); each operation rounds its result once.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import attention, head, record
from .config import BadInput

EPS = 2.0 ** -23
GATE_WIDTH = 12           # leading channels that a gate looks at


@dataclass(frozen=True)
class Arithmetic:
    act: torch.dtype
    wide: torch.dtype

    @property
    def half(self):
        return self.act == torch.bfloat16


ARITHMETIC = {"float64": Arithmetic(torch.float64, torch.float64), "float32": Arithmetic(torch.float32, torch.float32),
              "bf16": Arithmetic(torch.bfloat16, torch.float32)}


def init_parameters(cfg, generator):
    """Fresh parameters, float32 values (bf16-representable where stored so)."""
    p = {}
    for name, tensor in record.tensors(cfg).items():
        t, spec = torch.zeros(tensor.shape), tensor.spec
        if spec.init == "normal":
            t.normal_(generator=generator)
        elif isinstance(spec.init, record.Uniform):
            bound = spec.init.scale * cfg.model_dim ** -0.5
            t.view(spec.matrices, -1)[:spec.init.matrices].uniform_(-bound, bound, generator=generator)
        elif spec.init:
            t.copy_(torch.tensor(spec.init))
        p[name] = t.bfloat16().float() if spec.storage == "bf16" else t
    return p


def load_parameters(cfg, path):
    """Parameters from a safetensors file under the checkpoint names; a vector may end early where its row allows it."""
    from safetensors.torch import load_file
    try:
        stored = load_file(path)
    except Exception as e:
        raise BadInput(f"{path}: not readable as safetensors ({e})")
    p = {}
    for name, tensor in record.tensors(cfg).items():
        shape, shortest = tensor.shape, tensor.spec.shortest
        if name not in stored:
            raise BadInput(f"{path}: tensor {name} is missing")
        t = stored[name].float()
        if shortest and t.dim() == 1 and shortest <= t.numel() < shape[0]:
            t = torch.cat([t, torch.tensor(tensor.spec.init[t.numel():])])
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
    """By the tables of the run's record: a block asks for a parameter by what it is to the block and by the layer."""

    def __init__(self, cfg, parameters, device="cpu"):
        self.cfg, self.ar = cfg, ARITHMETIC[cfg.dtype]
        self.p = {n: t.to(device=device, dtype=self.ar.wide, copy=True).requires_grad_() for n, t in parameters.items()}
        self.names = {(t.spec.block, t.layer if t.number is None else t.number): n for n, t in record.tensors(cfg).items()}
        self.flex = attention.Flex() if cfg.attention == "flex" else None

    def parameter(self, block, number=None):
        return self.p[self.names[block, number]]

    def weight(self, w):
        """A record's Weight, wide."""
        s, value = self.parameter("scalars"), w.constant
        if w.scalar is not None:
            value = s[w.scalar] if value == 1 else value * s[w.scalar]
        return value if w.gate is None else value * torch.sigmoid(s[w.gate])

    def mix(self, terms, streams):
        """The sum of weight * stream over the terms, rounded once."""
        values = [self.weight(w) * streams[stream].to(self.ar.wide) for stream, w in terms]
        return sum(values[1:], values[0]).to(self.ar.act)

    def attend(self, q, k, v, batch, window, scale):
        if self.cfg.attention == "flash":
            return attention.flash(q, k, v, batch.cu_seqlens, batch.longest, window, scale)
        if self.flex:
            return self.flex(q, k, v, batch.documents, window, scale)
        return attention.dense(q, k, v, batch.documents, window, scale, self.ar.wide).to(self.ar.act)

    def attention_layer(self, i, layer, x, batch, tables, window, scale):
        cfg, ar, s = self.cfg, self.ar, self.parameter("scalars")
        d = cfg.model_dim
        h = rms(x, ar)
        w = self.parameter("qkvo", i).view(4, d, d)
        q, k, v = (t.reshape(-1, cfg.num_heads, cfg.head_dim) for t in head.Linear.apply(h, w[:3].reshape(3 * d, d)).split(d, -1))
        if cfg.record.v_lambda_on_qk:
            q, k = (s[layer.v_lambdas] * t for t in (q, k))
        q, k = (rms_rope(t, *tables, ar) for t in (q, k))
        v = s[layer.v_lambdas] * v.to(ar.wide)
        if layer.value_table is not None:
            ve = F.embedding(batch.inputs, self.parameter("value_table", layer.value_table))
            v = v + s[layer.v_lambdas + 1] * ve.view_as(v)
        y = self.attend(q, k, v.to(ar.act), batch, window, scale)
        y = (y.to(ar.wide) * gate(h, self.parameter("attention_gate", i))[:, :, None]).to(ar.act)
        return x + head.Linear.apply(y.reshape(-1, d), w[3])

    def mlp(self, i, x):
        h = head.Linear.apply(rms(x, self.ar), self.parameter("mlp_up", i).t())
        a = torch.relu(h.to(self.ar.wide)).square().to(self.ar.act)
        return x + head.Linear.apply(a, self.parameter("mlp_down", i))

    def embed(self, tokens):
        ar = self.ar
        x = F.embedding(tokens, self.parameter("embed"))
        smear = self.parameter("scalars")[self.cfg.record.smear] * gate(x[1:], self.parameter("smear_gate"))
        return rms(torch.cat([x[:1], x[1:] + smear * x[:-1]]).to(ar.act), ar)

    def hidden(self, batch, tables, scale, ws_short, ws_long):
        """The normed output of the last block, [N, d]; window sizes in blocks."""
        cfg, r = self.cfg, self.cfg.record
        x = self.embed(batch.inputs)
        streams = {record.EMBEDDED: x}
        for i, layer in enumerate(r.layers):
            for terms in layer.mix:
                x = self.mix(terms, streams | {record.RUNNING: x})
            if layer.attention:
                window = cfg.block_size * (ws_long if layer.long_window else ws_short)
                x = self.attention_layer(i, layer, x, batch, tables, window, scale)
            if layer.mlp:
                x = self.mlp(i, x)
            streams[i] = x
        return rms(self.mix(r.output, streams | {record.RUNNING: x}), self.ar)

    def loss(self, batch, tables, scale, ws_short, ws_long, fp8):
        """Loss summed over the tokens of the batch."""
        x = self.hidden(batch, tables, scale, ws_short, ws_long)
        return head.loss_sum(x, self.parameter("head"), batch.targets, self.ar.wide, self.cfg.record.head, fp8)
