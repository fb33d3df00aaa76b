#!/usr/bin/env python3
"""Writes golden/2026-*.safetensors: operations, updates, schedules and tables of records 89 to 91 by
themselves. README.md describes every tensor.
"""

import collections
import dataclasses
import re
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

from make_golden import STEPS, save
from make_golden_2026 import LAYERS, NARROW, SIZES, SMALL, sign_table
from r2026 import data, fp8, fp8_full, mask, model, record
from r2026.optimizer import Optimizers

# ---- operations by themselves -----------------------------------------------------------------------------


class Cases:
    """<case>.<input>, <case>.out.<output>, the upstream gradient <case>.dout.<output> and the gradients
    <case>.d.<input>.
    """

    def __init__(self, seed):
        self.g, self.out = torch.Generator().manual_seed(seed), {}

    def draw(self, *shape, scale=1.0):
        return (scale * torch.randn(shape, generator=self.g)).bfloat16().double()

    def add(self, case, f, **inputs):
        """f of the inputs, of which real ones have a gradient, gives a tensor or {name: tensor}."""
        x = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
        y = f(**x)
        y = y if isinstance(y, dict) else {"y": y}
        dy = {n: self.draw(*t.shape) for n, t in y.items()}
        sum((t * dy[n]).sum() for n, t in y.items()).backward()
        self.out |= {f"{case}.{n}": t for n, t in inputs.items()} | {
            f"{case}.out.{n}": t for n, t in y.items()
        }
        self.out |= {f"{case}.dout.{n}": t for n, t in dy.items()}
        self.out |= {f"{case}.d.{n}": t.grad for n, t in x.items() if t.is_floating_point()}


N, D, H, E = 20, 48, 6, 8
OP_CU = torch.tensor([0, 1, 9, 11, N])
PLAIN, PAIRED, OFFSET = record.Layer(), record.Layer("paired"), record.Layer(long_window=True)


def op_documents():
    return torch.repeat_interleave(torch.arange(len(OP_CU) - 1), torch.diff(OP_CU))


def write_attention_ops():
    c, documents, scale = Cases(101), op_documents(), 0.13
    rope = model.Rope.start(SMALL.sizes, torch.float64)
    rope.follow(9, 13)
    c.out |= {
        "cu_seqlens": OP_CU,
        "frequencies": rope.frequencies,
        "window": torch.tensor([5]),
        "dc_window": torch.tensor([7]),
        "scale": torch.tensor([scale]),
    }
    q, k, v, y = (c.draw(N, H, E) for _ in range(4))
    for name, layer in (("qk", PLAIN), ("qk-paired", PAIRED), ("qk-offset", OFFSET)):
        c.add(name, lambda q, k: dict(zip("qk", model.prepare_qk(layer, q, k, rope))), q=q, k=k)
    c.add(
        "value",
        lambda h, v, u, w: v + model.value_gate(h, u, w)[:, :, None] * u.view(N, H, E),
        h=c.draw(N, D),
        v=v,
        u=c.draw(N, D),
        w=c.draw(H, 2 * record.VALUE_GATE_CHANNELS, scale=0.4),
    )
    for name, layer in (("attend", PLAIN), ("attend-paired", PAIRED)):
        c.add(name, lambda q, k, v: model.attend(layer, q, k, v, documents, 5, scale), q=q, k=k, v=v)
    c.add(
        "dc",
        lambda q, k, v, w1, w2: model.dc(q, k, v, w1, w2, documents, scale, 7),
        q=q,
        k=k,
        v=v,
        w1=c.draw(N, H),
        w2=c.draw(N, H),
    )
    c.add("xsa", model.xsa, y=y, v=v, alpha=c.draw(N, H))
    save("2026-ops-attention", None, c.out)


def write_stream_ops():
    c, n = Cases(202), 16
    c.add("smear", model.smear, e=c.draw(n, D), scalar=c.draw(1)[0], weight=c.draw(1, record.SMEAR_CHANNELS))
    c.add(
        "generator",
        model.generator,
        x=c.draw(n, D),
        w1=c.draw(8, D, scale=0.2),
        w2=c.draw(14, 8, scale=0.5),
        b2=c.draw(14),
        scale=torch.tensor(0.1).double(),
    )
    rows, signs = torch.tensor([96, 3, 3, 5, 0, 3, 95, 5]), torch.tensor([0, 1, 2, 3, 1, 1, 31, 0])
    plus_minus = sign_table(SMALL).double()
    c.out["bigram.plus_minus"] = plus_minus
    c.add(
        "bigram",
        lambda rows, signs, table: table[rows] * plus_minus[signs],
        rows=rows,
        signs=signs,
        table=c.draw(97, D),
    )
    c.add(
        "mix",
        lambda **x: sum(x[f"c{j}"] * x[f"s{j}"] for j in range(4)),
        **{f"s{j}": c.draw(n, D) for j in range(4)},
        **{f"c{j}": c.draw(n, 1) for j in range(4)},
    )
    c.add(
        "mlp",
        lambda h, fc, proj: torch.relu(h @ fc.t()).square() @ proj,
        h=c.draw(n, D),
        fc=c.draw(64, D, scale=0.15),
        proj=c.draw(64, D, scale=0.15),
    )
    targets, prefix = torch.randint(0, 61, (n,), generator=c.g), torch.randint(-1, 61, (n,), generator=c.g)
    prefix[::3] = -1
    logits = c.draw(n, 128, scale=4.0)
    for name, weights, pw in (
        ("loss", (1.0,), 0.0),
        ("loss-prefix", (1.0,), 0.25),
        ("loss-three", (1.0, 0.5, 0.125), 0.25),
    ):
        x = logits.clone().requires_grad_()
        y = model.weighted_loss(x, targets, weights, prefix, pw)
        y.backward()
        c.out |= {
            f"{name}.weights": torch.tensor(weights),
            f"{name}.prefix_weight": torch.tensor([pw]),
            f"{name}.out": y.reshape(1),
            f"{name}.d.logits": x.grad,
        }
    c.out |= {"loss.logits": logits, "loss.targets": targets, "loss.prefix": prefix}
    save("2026-ops-stream", None, c.out)


def write_fp8_ops():
    c, n, f = Cases(303), 16, 64
    edges = torch.tensor(
        [
            2.0**-10,
            1.5 * 2.0**-10,
            3 * 2.0**-10,
            0.0146484375,
            0.96875,
            1.0625,
            1.1875,
            17,
            19,
            27,
            432,
            465,
            1000,
            -0.3,
            -1e9,
            3.14159,
            9,
            11,
            61440,
            1e6,
        ]
    )
    c.out |= {
        "casts": edges,
        "casts.e4m3": fp8.quantize(edges, torch.float8_e4m3fn, fp8.E4M3),
        "casts.e5m2": fp8.quantize(edges, torch.float8_e5m2, fp8.E5M2),
    }
    # The head. Row 7 of x has the largest value that rms can give, some weights saturate.
    x, w, g = c.draw(n, D), c.draw(D, 128, scale=0.7), c.draw(n, 128, scale=0.2)
    x[7] = 0
    x[7, 5] = D**0.5
    x = x.bfloat16().double()
    xs, ws, scales = x.clone().requires_grad_(), w.clone().requires_grad_(), fp8.HeadScales()
    y = fp8.head_logits(xs, ws, scales)
    y.backward(g)
    c.out |= {
        "head.x": x,
        "head.w": w,
        "head.dlogits": g,
        "head.x8": fp8.quantize(x / scales.x, torch.float8_e4m3fn, fp8.E4M3),
        "head.w8": fp8.quantize(w / scales.w, torch.float8_e4m3fn, fp8.E4M3),
        "head.g8": fp8.quantize(g / scales.g, torch.float8_e5m2, fp8.E5M2),
        "head.out.logits": y,
        "head.d.x": xs.grad,
        "head.d.w": ws.grad,
    }
    # The MLP of one layer: weights that change between steps, three forwards of which the scales of the
    # second and third are delayed.
    state, bank = fp8.MlpState(1), torch.stack([c.draw(1, 2, f, D, scale=s) for s in (0.1, 0.13, 0.05)])
    for step in range(3):
        state.quantize_weights(bank[step], step < 1)
        c.out |= {
            f"mlp.up8.{step}": state.up[0][0],
            f"mlp.up_scale.{step}": torch.tensor([state.up[0][1]]),
            f"mlp.down8.{step}": state.down[0],
            f"mlp.down_scale.{step}": torch.tensor([state.down_scale[0]]),
        }
        c.out[f"mlp.activation_scale.{step}"] = torch.tensor(state.activation)
        h, fc, proj = (t.clone().requires_grad_() for t in (c.draw(n, D), *bank[step, 0]))
        dy = c.draw(n, D)
        y = fp8.mlp_fp8(h, fc, proj, state, 0)
        y.backward(dy)
        state.end_of_forward()
        c.out |= {
            f"mlp.fc.{step}": fc,
            f"mlp.proj.{step}": proj,
            f"mlp.h.{step}": h,
            f"mlp.out.{step}": y,
            f"mlp.dout.{step}": dy,
            f"mlp.largest.{step}": torch.tensor(state.largest),
            f"mlp.d.h.{step}": h.grad,
            f"mlp.d.fc.{step}": fc.grad,
            f"mlp.d.proj.{step}": proj.grad,
        }
    save(
        "2026-ops-fp8", None, {k: t.bfloat16() if "8." in k or k[-1] == "8" else t for k, t in c.out.items()}
    )


def write_narrow_ops():
    """Records 90 and 91: q and k of width 12 beside v of width 16, FP8 of q, k, v and of the MLP both ways."""
    c, n, d, heads, e, f = Cases(707), 16, 32, 2, 12, 48
    documents, rope = torch.tensor([0] + [1] * 9 + [2] * 6), model.Rope.start(NARROW.sizes, torch.float64)
    c.out |= {
        "cu_seqlens": torch.tensor([0, 1, 10, 16]),
        "frequencies": rope.frequencies,
        "window": torch.tensor([5]),
        "dc_window": torch.tensor([7]),
        "scale": torch.tensor([rope.scale]),
    }
    q, k, v = c.draw(n, heads, e), c.draw(n, heads, e), c.draw(n, heads, 16)
    for name, layer in (("qk", PLAIN), ("qk-paired", PAIRED), ("qk-offset", OFFSET)):
        c.add(name, lambda q, k: dict(zip("qk", model.prepare_qk(layer, q, k, rope))), q=q, k=k)
    for name, layer in (("attend", PLAIN), ("attend-paired", PAIRED)):
        c.add(name, lambda q, k, v: model.attend(layer, q, k, v, documents, 5, rope.scale), q=q, k=k, v=v)
    c.add(
        "dc",
        lambda q, k, v, w1, w2: model.dc(q, k, v, w1, w2, documents, rope.scale, 7),
        q=q,
        k=k,
        v=v,
        w1=c.draw(n, heads),
        w2=c.draw(n, heads),
    )
    # h and the gradient each have an element that is cut.
    state, w, lin = (
        fp8_full.Scales(1, 1),
        c.draw(2 * heads * e + d, d, scale=0.15),
        torch.tensor(-0.5).double(),
    )
    h, dy = c.draw(n, d), c.draw(n, len(w), scale=0.1)
    h[0, 5], dy[3, 7] = 9.5, 1.5
    state.quantize_weights({0: w}, c.draw(1, 2, f, d))
    leaves = [x.clone().requires_grad_() for x in (h, w, lin)]
    y = fp8_full.QkvProduct.apply(*leaves, state, 0)
    y.backward(dy)
    c.out |= {
        "qkv.h": h,
        "qkv.w": w,
        "qkv.lin": lin.reshape(1),
        "qkv.dout": dy,
        "qkv.w8": state.qkv[0][0],
        "qkv.scale": state.qkv[0][1].reshape(1),
        "qkv.h8": fp8_full.q8(h, fp8_full.INPUT_SCALE),
        "qkv.g8": fp8_full.q8(dy, fp8_full.GRADIENT_SCALE),
        "qkv.out": y,
    }
    c.out |= {f"qkv.d.{name}": x.grad for name, x in zip(("h", "w", "lin"), leaves)}
    for step, spread in enumerate((0.0, 0.13, 0.05)):  # a fresh c_proj is zero
        bank = torch.stack([c.draw(f, d, scale=0.12), c.draw(f, d, scale=spread)])
        state.quantize_weights({}, bank[None])
        h, dy = c.draw(n, d), c.draw(n, d)
        c.out |= {
            f"mlp.{name}.{step}": t
            for name, t in (("fc", bank[0]), ("proj", bank[1]), ("h", h), ("dout", dy))
        }
        for name, (copy, scale) in (("up", state.up[0]), ("down", state.down[0])):
            c.out |= {f"mlp.{name}8.{step}": copy, f"mlp.{name}_scale.{step}": scale.reshape(1)}
        leaves = [x.clone().requires_grad_() for x in (h, *bank)]
        y = fp8_full.MlpProduct.apply(*leaves, state, 0)
        h8, p8 = y.grad_fn.saved_tensors[:2]
        c.out |= {f"mlp.h8.{step}": h8, f"mlp.p8.{step}": p8, f"mlp.out.{step}": y.detach().clone()}
        y.backward(dy)
        c.out |= {f"mlp.scale_{kind}.{step}": state.now(kind, 0).reshape(1).clone() for kind in "xpe"}
        c.out |= {f"mlp.largest_{kind}.{step}": state.largest[0][kind].clone() for kind in "xpe"}
        c.out |= {f"mlp.d.{name}.{step}": x.grad for name, x in zip(("h", "fc", "proj"), leaves)}
        state.end_of_step()
    save(
        "2026-08-ops",
        None,
        {k: t.bfloat16() if k.split(".")[1][-1] == "8" else t for k, t in c.out.items() if "." in k}
        | {k: t for k, t in c.out.items() if "." not in k},
    )


# ---- updates, schedule, tables ----------------------------------------------------------------------------


def write_adam():
    """Adam's tensors of a record of width 16 on given gradients; the tied pair parts after step 3."""
    c, r = Cases(404), dataclasses.replace(
        SMALL, sizes=record.Sizes(**(SIZES | dict(model_dim=16, num_heads=2)))
    )
    names = (
        "embed.weight",
        "lm_head.weight",
        "ve_gate_bank",
        "smear_gate.weight",
        "scalars",
        "resid_lambdas",
        "mudd_b2",
        "mudd_gate_w2",
        "_mudd_gate_scale",
    )
    table, out = record.parameters(r), {}
    p = {n: c.draw(*table[n].shape, scale=0.5) for n in names}
    p["embed.weight"] = p["lm_head.weight"].t().clone()
    optimizers = Optimizers(r, p, table={n: table[n] for n in names})
    for n in names:
        out |= {f"init.{n}": p[n].clone(), f"grad.{n}": c.draw(STEPS, *table[n].shape, scale=0.2)}
    after = {n: [] for n in names}
    for t in range(STEPS):
        optimizers.step(t, {n: out[f"grad.{n}"][t] for n in names})
        for n in names:
            after[n].append(p[n].clone())
    out |= {f"after.{n}": torch.stack(after[n])[1::2] for n in names}
    for n in names:
        s = table[n]
        out[f"constants.{n}"] = torch.tensor([s.lr, s.decay, *s.betas])
    out["rate"] = torch.tensor([r.schedule.rate(t) for t in range(STEPS)])
    save("2026-adam", None, out)


def write_normuon():
    """Banks on given gradients: wide and square by columns and rows, tall with a multiplier for each of the
    two matrices.
    """
    c, out, steps = Cases(505), {}, 3
    specs = {
        "wide": record.Param((2, 8, 24), "split", "normuon"),
        "square": record.Param((2, 24, 24), "split", "normuon"),
        "tall": record.Param((1, 2, 32, 24), "split", "normuon", matrix_lr=(1.0, 2.0)),
    }
    factors, momentum = (1.0, 1.52, 0.3), (0.85, 0.9, 0.95)
    for name, spec in specs.items():
        p = {name: c.draw(*spec.shape, scale=0.2)}
        optimizers, g, after = Optimizers(SMALL, p, table=specs), c.draw(steps, *spec.shape), []
        out |= {f"init.{name}": p[name].clone(), f"grad.{name}": g}
        for t in range(steps):
            optimizers.normuon(name, spec, g[t], factors[t], momentum[t])
            after.append(p[name].clone())
        out[f"after.{name}"] = torch.stack(after)
    w = c.draw(64) + 2.0**-10 * torch.randn(64, generator=c.g)
    w = w.float()
    out |= {
        "rate": torch.tensor(factors),
        "momentum": torch.tensor(momentum),
        "split": w,
        "split.upper": fp8.truncated(w).bfloat16(),
        "split.lower": w.view(torch.int32).long() & 0xFFFF,
    }
    save("2026-normuon", None, out)


def write_schedules():
    out = {}
    for scheduled, extension in ((1270, 15), (1270, 45), (1250, 40), (150, 2)):
        s = record.Schedule(scheduled=scheduled, extension=extension)
        rope, window, scale = model.Rope.start(record.Sizes(), torch.float32), s.stage(0).window_long, []
        weights, prefix = zip(*(s.weights(t) for t in range(s.total)))
        for t in range(s.total):
            rope.follow(window, s.stage(t).window_long)
            window = s.stage(t).window_long
            scale.append(rope.scale)
            if t in [0] + s.begins()[1:]:
                out[f"frequencies.{s.total}.{s.stage_index(t)}"] = rope.frequencies.clone()
        columns = {
            "rate": [s.rate(t) for t in range(s.total)],
            "momentum": [s.momentum(t) for t in range(s.total)],
            "targets": [list(w) + [0.0] * (3 - len(w)) for w in weights],
            "prefix": prefix,
            "scale": scale,
        }
        out |= {f"{k}.{s.total}": torch.tensor(v, dtype=torch.float64) for k, v in columns.items()}
        rows = [
            [s.stage(t).tokens, s.stage(t).cut, s.stage(t).window_short, s.stage(t).window_long]
            for t in range(s.total)
        ]
        out |= {
            f"stage.{s.total}": torch.tensor(rows),
            f"begins.{s.total}": torch.tensor(s.begins()),
            f"last_tied.{s.total}": torch.tensor([s.last_tied()]),
        }
    save("2026-schedules", None, out)


def write_rows():
    """Rows of the bigram and sign tables at their full sizes."""
    z = record.Sizes()
    tokens = torch.randint(0, z.vocab_size, (64,), generator=torch.Generator().manual_seed(606))
    tokens[:2] = torch.tensor([50256, 464])
    tokens[60:] = torch.tensor([50256, 50256, 0, 0])
    save(
        "2026-rows",
        None,
        {
            "tokens": tokens,
            "bigram_rows": data.bigram_rows(tokens, z.bigram_rows),
            "sign_rows": data.sign_rows(tokens, z.sign_rows),
        },
    )


TEXT = (
    "The trainer reads its shards, and the shards are read again when they end. It's what they'd do; "
    "we're sure that it'll end. 12 + 34 = 46, 2025 and 2026: numbers, too. «Über größere Wörter» – naïve "
    "façades, ελληνικά, 日本語日本語. The end, the end!\n\n"
) * 2


def small_vocabulary(merges):
    """{id: bytes}: the single bytes, then so many merges learned from TEXT, of pieces that a tokenizer would
    not join.
    """
    pieces = [
        [p[i : i + 1] for i in range(len(p))]
        for p in (m.encode() for m in re.findall(r"'\w+| ?[^\W\d]+| ?\d+| ?[^\w\s]+|\s+", TEXT))
    ]
    vocabulary = {i: bytes([i]) for i in range(256)}
    for rank in range(256, 256 + merges):
        counts = collections.Counter(pair for p in pieces for pair in zip(p, p[1:]))
        a, b = max(counts, key=lambda pair: (counts[pair], pair))
        vocabulary[rank] = a + b
        for p in pieces:
            for i in range(len(p) - 1, -1, -1):
                if p[i : i + 2] == [a, b]:
                    p[i : i + 2] = [a + b]
    return vocabulary


def write_vocabulary():
    vocabulary, padded = small_vocabulary(120), 384
    lengths = torch.tensor([len(b) for b in vocabulary.values()])
    table = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    for i, b in vocabulary.items():
        table[i, : len(b)] = torch.tensor(list(b))
    save(
        "2026-vocabulary",
        None,
        {
            "bytes": table,
            "lengths": lengths,
            "prefix": data.prefix_table(vocabulary, padded),
            "mask": torch.from_numpy(mask.impossible(vocabulary, padded)).view(torch.int32),
        },
    )


def main():
    for write in (
        write_attention_ops,
        write_stream_ops,
        write_fp8_ops,
        write_narrow_ops,
        write_adam,
        write_normuon,
        write_schedules,
        write_rows,
        write_vocabulary,
    ):
        write()


if __name__ == "__main__":
    main()
