#!/usr/bin/env python3
"""Writes golden/2026-*.safetensors: gradients and steps of small networks of records 89 to 91. README.md
describes every tensor.
"""

import dataclasses
import math
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

from make_golden import STEPS, relative_error, sample_indices, samples_of, save
from r2026 import data, model, record
from r2026.trainer import Trainer

GRADIENT_SAMPLES, DRAWS, SAMPLES = 4096, 8, 1024
SIGN_ROWS = 64  # in files: tokens are below 61, and so are the rows of their pairs below 64

# Every feature at least once, at sizes where windows, documents and the second softmax cut something off.
LAYERS = (
    record.Layer("paired", value_table=0),
    record.Layer(long_window=True, value_table=1, xsa=True, output_gate=True),
    record.Layer(None, gates="b"),
    record.Layer(gates="b", xsa=True),
    record.Layer("paired", gates="b", value_table=2, from_late=True),
    record.Layer(
        gates="b", long_window=True, value_table=4, output_gate=True, dc=True, from_late=True, dynamic=True
    ),
)
SIZES = dict(
    model_dim=48,
    num_heads=6,
    mlp_dim=64,
    vocab_size=61,
    hidden=8,
    bigram_rows=97,
    sign_rows=32,
    micro_batches=2,
)
# Stages begin at 0, 2 and 3, the extension at 5; embedding and head part after step 3 and first differ after
# step 5.
SCHEDULE = dict(scheduled=5, extension=3, final_window=20, exact_scales=2, warmup=3, cooldown=2)
STAGES = (
    record.Stage(32, 20, 3, 9, 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0), 0.25, 0.25),
    record.Stage(48, 40, 5, 13, 1.52, (1.0, 0.5), (1.0, 0.0), 0.25, 0.0),
    record.Stage(64, 40, 6, 15, 1.73, (1.0,), (1.0,)),
)
EXTENSION = record.Stage(64, 40, 7, 17, 0.15, (1.0,), (1.0,))
SMALL = record.Record(
    record.Sizes(**SIZES),
    LAYERS,
    early=1,
    late=3,
    dc_window=7,
    schedule=record.Schedule(stages=STAGES, last=EXTENSION, **SCHEDULE),
)
# Token: its bytes. The tokens from 44 on have none: no prefix, and nobody's prefix.
BYTES = {i: bytes([i]) for i in range(40)} | {
    40: b"\x01\x02",
    41: b"\x01\x02\x03",
    42: b"\x01\x02\x03\x04\x05",
    43: b"\x07\x08\x09",
}
PREFIX = data.prefix_table(BYTES, 128)


# Records 90 and 91: q and k narrower than v, Wo by input channels, FP8 both ways, the mask. Fewer and wider
# heads.
NARROW = dataclasses.replace(
    SMALL,
    sizes=record.Sizes(**(SIZES | dict(model_dim=32, num_heads=2, mlp_dim=48, qk_dim=12))),
    wo_by_input=True,
    fp8=("head", "mlp-full", "qkv"),
    masked=True,
)
FILES = {"2026": SMALL, "2026-08": NARROW}


def metadata(r):
    z, s = r.sizes, r.schedule
    return dict(
        num_layers=len(r.layers),
        model_dim=z.model_dim,
        num_heads=z.num_heads,
        head_dim=z.head_dim,
        qk_dim=z.qk_width,
        mlp_dim=z.mlp_dim,
        vocab_size=z.vocab_size,
        padded_vocab_size=z.padded_vocab,
        hidden=z.hidden,
        bigram_rows=z.bigram_rows,
        sign_rows=z.sign_rows,
        micro_batches=z.micro_batches,
        dc_window=r.dc_window,
        num_scheduled=s.scheduled,
        num_extension=s.extension,
        final_window=s.final_window,
        exact_scales=s.exact_scales,
        momentum_warmup=s.warmup,
        momentum_cooldown=s.cooldown,
        early=r.early,
        late=r.late,
    )


# ---- inputs of the runs -----------------------------------------------------------------------------------


def initial_parameters(r, draw=0):
    """Random around their start, so that no gradient vanishes; bf16 values, banks included (their lower
    halves are zero).
    """
    g = torch.Generator().manual_seed(1414 + draw)
    p, table = model.initial_parameters(r, g), record.parameters(r)
    bound = 0.5 * math.sqrt(3.0) * r.sizes.model_dim**-0.5
    for name, t in p.items():
        if name.endswith("bank") and table[name].storage == "split":
            t.uniform_(-bound, bound, generator=g)
        else:
            t += (0.02 if name == "_mudd_gate_scale" else 0.2) * torch.randn(t.shape, generator=g)
        p[name] = t if table[name].storage == "fp32" else t.bfloat16().float()
    p["embed.weight"] = p["lm_head.weight"].t().clone()
    return p


def sign_table(r):
    g = torch.Generator().manual_seed(2236)
    return 1.0 - 2.0 * torch.randint(0, 2, (r.sizes.sign_rows, r.sizes.model_dim), generator=g)


def mask_table(r):
    """[Vp, Vp] bool: a fifth of the pairs, none with the token that begins documents."""
    z, g = r.sizes, torch.Generator().manual_seed(2645)
    table = torch.zeros(z.padded_vocab, z.padded_vocab, dtype=torch.bool)
    table[:60, :60] = torch.rand(60, 60, generator=g) < 0.2
    return table if r.masked else None


def make_batches(r, draw=0):
    """tokens, cu_seqlens [STEPS, 2, most + 1]; see README.md."""
    g = torch.Generator().manual_seed(1732 + draw)
    stages = [r.schedule.stage(t) for t in range(STEPS)]
    shape = STEPS, r.sizes.micro_batches, max(s.tokens for s in stages) + 1
    tokens, cu = torch.randint(0, 60, shape, generator=g), torch.zeros(shape, dtype=torch.int64)
    for t, stage in enumerate(stages):
        n = stage.tokens
        for i in range(shape[1]):
            starts = [0, 1, n // 3 + i, n // 3 + 2 + i, n - 3]
            tokens[t, i, starts] = 60
            tokens[t, i, n + 1 :] = 0
            cu[t, i] = n
            cu[t, i, : len(starts)] = torch.tensor(starts)
    return tokens, cu


def batches_of_step(r, tokens, cu, t):
    n = r.schedule.stage(t).tokens
    return [
        data.make_batch(x[: n + 1], torch.cat([c[c < n], torch.tensor([n])]), r.sizes)
        for x, c in zip(tokens[t], cu[t])
    ]


def make_trainer(r, dtype, draw=0, fp8=(), sequential=False):
    p = {n: t.to(dtype) for n, t in initial_parameters(r, draw).items()}
    return Trainer(r, p, sign_table(r).to(dtype), PREFIX, fp8, sequential=sequential, mask=mask_table(r))


# ---- runs -------------------------------------------------------------------------------------------------


def gradients_at_start(r, dtype, draw):
    """loss, validation, grad.<name> as [1, numel]."""
    trainer, batches = make_trainer(r, dtype, draw), batches_of_step(r, *make_batches(r, draw), 0)
    losses, gradients = trainer.gradients(batches)
    out = {
        "loss": torch.stack(losses),
        "validation": torch.stack([trainer.validate(batches[0], f) for f in (False, True)]),
    }
    return {
        k: v.double().reshape(1, -1)
        for k, v in (out | {f"grad.{n}": g for n, g in gradients.items()}).items()
    }


def trajectory(r, dtype, draw):
    """loss [STEPS, 2] and, for each parameter, value minus initial value after every step."""
    trainer, inputs = make_trainer(r, dtype, draw), make_batches(r, draw)
    start = {n: p.detach().double().clone() for n, p in trainer.model.p.items()}
    losses, updates = [], {n: [] for n in start}
    for t in range(STEPS):
        losses.append(torch.stack(trainer.step(batches_of_step(r, *inputs, t))).double())
        for n, p in trainer.model.p.items():
            updates[n].append((p.detach().double() - start[n]).flatten())
    return {"loss": torch.stack(losses)} | {n: torch.stack(u) for n, u in updates.items()}


def reference_and_errors(r, run, first=0):
    """(float64 run of draw `first`, {name: root mean square over the draws of the float32 run's relative
    error, a row a step}).
    """
    squares, reference = {}, None
    for draw in range(first, first + DRAWS):
        exact, single = run(r, torch.float64, draw), run(r, torch.float32, draw)
        reference = reference or exact
        for name, x in exact.items():
            e = torch.stack([relative_error(a, b) for a, b in zip(single[name], x)])
            squares[name] = squares.get(name, 0) + e.square() / DRAWS
    return reference, {n: s.sqrt() for n, s in squares.items()}


def write_inputs(name, r, draw=0):
    table, p = record.parameters(r), initial_parameters(r, draw)
    save(
        f"{name}-init",
        None,
        {n: t if table[n].storage == "fp32" else t.bfloat16() for n, t in p.items()},
        **metadata(r),
    )
    tokens, cu = make_batches(r, draw)
    rows = torch.zeros(2, *tokens.shape[:2], tokens.shape[2] - 1, dtype=torch.int64)
    for t in range(STEPS):
        for i, b in enumerate(batches_of_step(r, tokens, cu, t)):
            rows[0, t, i, : len(b.inputs)], rows[1, t, i, : len(b.inputs)] = b.bigram_rows, b.sign_rows
    lengths = torch.tensor([len(BYTES.get(i, b"")) for i in range(r.sizes.vocab_size)])
    vocabulary = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
    for i, b in BYTES.items():
        vocabulary[i, : len(b)] = torch.tensor(list(b))
    out = {
        "tokens": tokens,
        "cu_seqlens": cu,
        "bigram_rows": rows[0],
        "sign_rows": rows[1],
        "signs": sign_table(r)[:SIGN_ROWS].bfloat16(),
        "micro_batch_tokens": torch.tensor([r.schedule.stage(t).tokens for t in range(STEPS)]),
        "vocabulary.bytes": vocabulary,
        "vocabulary.lengths": lengths,
        "prefix": PREFIX,
    }
    if r.masked:
        bits = mask_table(r).view(-1, r.sizes.padded_vocab // 8, 8).long()
        out["mask"] = (bits << torch.arange(8)).sum(-1)
    save(f"{name}-batches", None, out, **metadata(r))


def write_gradients(name, r, draw=0):
    exact, errors = reference_and_errors(r, gradients_at_start, draw)
    out = {k: exact.pop(k)[0] for k in ("loss", "validation")}
    for n, g in exact.items():
        out |= {
            n: g[0, sample_indices(g.shape[1], GRADIENT_SAMPLES)],
            f"norm.{n[5:]}": g.norm().reshape(1),
            f"rel_f32.{n[5:]}": errors[n],
        }
    save(f"{name}-gradients", None, out, gradient_samples=GRADIENT_SAMPLES, **metadata(r))


def write_steps(name, r, draw=0):
    exact, errors = reference_and_errors(r, trajectory, draw)
    out = {"loss": exact.pop("loss"), "loss_rel_f32": errors.pop("loss")}
    samples = samples_of(initial_parameters(r, draw), exact, {"f32": errors})
    save(f"{name}-steps", None, out | samples, **metadata(r))


def write_fp8_run(name, r, sequential):
    """Losses and scales of the same run with all of the record's FP8."""
    trainer, inputs = make_trainer(r, torch.float64, 0, r.fp8, sequential), make_batches(r)
    old, new, plain = trainer.model.mlp_state, trainer.model.full_state, trainer.model.loss
    out = {}

    def note(key, x):
        out.setdefault(key, []).append(torch.as_tensor(x, dtype=torch.float64))

    def watched(*args):
        for kind in "xpe" if new else ():
            note(f"scale_{kind}", new.scale[new.set][kind])
        if old:
            note("activation_scale", old.activation)
        loss = plain(*args)
        if old:
            note("largest", old.largest)
        return loss

    trainer.model.loss = watched
    layers = range(len(LAYERS))
    for t in range(STEPS):
        note("up_scale", [new.up[i][1] if new else old.up[i][1] for i in layers])
        note("down_scale", [new.down[i][1] if new else old.down_scale[i] for i in layers])
        if new:
            note("qkv_scale", [new.qkv[i][1] for i in r.attention_layers()])
        note("loss", torch.stack(trainer.step(batches_of_step(r, *inputs, t))))
    tensors = {k: torch.stack(v) for k, v in out.items()}
    for k, v in tensors.items():
        if len(v) > STEPS:
            tensors[k] = v.view(STEPS, r.sizes.micro_batches, -1)
    save(f"{name}-steps-fp8{'-sequential' if sequential else ''}", None, tensors, **metadata(r))


def write_fp8_gradients(name, r):
    """Step 0 with q, k, v and the MLP in FP8 both ways and no other rounding than that to codes."""
    trainer, batches = make_trainer(r, torch.float64, 0, ("mlp-full", "qkv")), batches_of_step(
        r, *make_batches(r), 0
    )
    state = trainer.model.full_state
    state.stored, state.copy = (lambda x: x.float().to(x.dtype)), (lambda x: x.float())
    trainer.model.quantize_weights(True)
    losses, gradients = trainer.gradients(batches)
    state.end_of_step()
    out = {"loss": torch.stack(losses)}
    for kind in "xpe":
        out[f"next_{kind}"] = torch.stack([s[kind] for s in state.scale])
    for n, g in gradients.items():
        g = g.flatten()
        out |= {f"grad.{n}": g[sample_indices(len(g), SAMPLES)], f"norm.{n}": g.norm().reshape(1)}
    save(f"{name}-fp8-gradients", None, out, gradient_samples=SAMPLES, **metadata(r))


def main():
    for name, r in FILES.items():
        for write in (write_inputs, write_gradients, write_steps):
            write(name, r)
        for sequential in (False, True):
            write_fp8_run(name, r, sequential)
        if "qkv" in r.fp8:
            write_fp8_gradients(name, r)


if __name__ == "__main__":
    main()
