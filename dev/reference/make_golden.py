#!/usr/bin/env python3
"""Writes golden/*.safetensors: what the C program must reproduce. README.md describes every tensor."""
import dataclasses
import itertools
import json
import math
import os
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch
from safetensors.torch import save_file

from twin import config, head, model, newton_schulz, record, schedule
from twin.optimizer import NorMuon
from twin.trainer import Trainer

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
SIZES = dict(model_dim=16, num_heads=2, mlp_dim=64, block_size=4, vocab_size=61, micro_batch_tokens=64, micro_batches=2,
             num_scheduled=6, num_extension=2, head="bf16")
# All else as the record says; stages begin at steps 0 and 3 and the extension at 5, with 64, 128 and 96 tokens a micro-batch.
TOY_SIZES = dict(vocab_size=61, micro_batches=2, num_scheduled=5, num_extension=1)
# Stages begin at steps 0, 2 and 4 and the extension at 5, with 32, 64, 96 and 96 tokens a micro-batch.
GROWING_SIZES, GROWING_TOKENS = SIZES | dict(num_scheduled=5, num_extension=1), (32, 64, 96, 96)
# Their first tokens: with draw 0 the reference in float32 is 4e-5 off in a value embedding after Adam's first update, of one element
# whose gradient is next to nothing.
GROWING_DRAW = 4
STEPS, SAMPLES = 6, 160
# Fewer columns than rows: NorMuon's shape factor is not 1.
NARROW_MLP = dict(model_dim=32, num_heads=4, mlp_dim=16)
HEADS_13 = dict(model_dim=104, num_heads=13, mlp_dim=16)  # so have the gates, [13, 12]
DRAWS = 8                 # instances (weights and tokens) whose error in half and single precision makes the yardsticks
SAMPLE_RULE = "index i of k = min(160, n) is (i * s) mod n; s = smallest integer >= max(1, floor(0.618 n)) coprime to n"
# documents of every micro-batch, by length, repeated to N + 1 tokens; the last token alone is a document of its own in one of them
DOCUMENTS = ((1, 5, 24, 1, 9, 30), (64, 1), (3, 40, 2, 2, 60), (70,), (12, 12, 1, 1, 1, 80), (33, 31, 9))


def make_config(preset, **changes):
    sizes = {"toy": TOY_SIZES, "2025-11-29": GROWING_SIZES, "2025-12-10": GROWING_SIZES}.get(preset, SIZES)
    cfg = config.preset(preset, **(sizes | changes))
    if sizes is GROWING_SIZES:
        stages = tuple(dataclasses.replace(s, tokens=n) for s, n in zip(cfg.record.stages, GROWING_TOKENS))
        cfg = dataclasses.replace(cfg, record=dataclasses.replace(cfg.record, stages=stages))
    return cfg.check()


SCALARS_2025 = [-1.5] * 12 + [1.05, 0.1] * 12 + [0.5, 0.4] * 12 + [0.3, 0.5] + [1.0] * 2


def initial_parameters(cfg, draw=0):
    """Random everywhere, so that no gradient vanishes and no scalar is at a value that hides an error."""
    g = torch.Generator().manual_seed(2718 + draw)
    bound = 0.5 * math.sqrt(3.0) * cfg.model_dim ** -0.5
    spread = {"head": 0.3, "smear_gate": 0.5, "attention_gate": 0.5}
    p = {}
    for name, tensor in record.tensors(cfg).items():
        shape, half = tensor.shape, tensor.spec.storage == "bf16"
        if tensor.spec.block == "scalars":
            mean = tensor.spec.init if cfg.record is config.PRESETS["toy"]["record"] else SCALARS_2025
            t = torch.tensor(mean) + 0.1 * torch.randn(shape, generator=g)
        elif half:
            t = torch.randn(shape, generator=g) * spread.get(tensor.spec.block, 1.0)
        else:
            t = torch.empty(shape).uniform_(-bound, bound, generator=g)
        p[name] = t.bfloat16().float() if half else t
    return p


def make_batches(cfg, draw=0):
    """tokens and cu_seqlens [STEPS, 2, N+1], N the largest of the stages. A smaller step fills its tokens up with 0; cu_seqlens is
    filled up with the step's N. Token 60 begins every document.
    """
    first = GROWING_DRAW if cfg.record.to_floor else 0
    g, stages = torch.Generator().manual_seed(31415 + first + draw), [schedule.stage(cfg, t) for t in range(STEPS)]
    most = max(s.tokens for s in stages)
    tokens = torch.randint(0, 60, (STEPS, cfg.micro_batches, most + 1), generator=g)
    cu = torch.full_like(tokens, most)
    for i in range(STEPS * cfg.micro_batches):
        row, starts, at = (i // cfg.micro_batches, i % cfg.micro_batches), [], 0
        n, lengths = stages[row[0]].tokens, itertools.cycle(DOCUMENTS[i % len(DOCUMENTS)])
        while at <= n:
            starts.append(at)
            at += min(next(lengths), stages[row[0]].max_document)
        tokens[row][starts] = 60
        tokens[row][n + 1:] = 0
        starts = [s for s in starts if s < n]
        cu[row] = n
        cu[row][:len(starts)] = torch.tensor(starts)
    return tokens, cu


def batches_of_step(tokens, cu, t):
    """Drops the fill of both again; cu_seqlens always has some."""
    return [model.Batch(x[:int(c[-1]) + 1], c[:int((c < c[-1]).sum()) + 1]) for x, c in zip(tokens[t], cu[t])]


def save(name, cfg, tensors, **extra):
    meta = {k: str(getattr(cfg, k)) for k in ("num_layers", "model_dim", "num_heads", "mlp_dim", "block_size", "vocab_size",
                                              "padded_vocab_size", "micro_batch_tokens", "micro_batches", "num_scheduled",
                                              "num_extension", "weight_decay", "ns", "head")} if cfg else {}
    meta |= {"steps": str(STEPS), "sample_rule": SAMPLE_RULE} | {k: str(v) for k, v in extra.items()}
    reals = {torch.float64: torch.float32, torch.int64: torch.int32}
    tensors = {k: t.detach().to(reals.get(t.dtype, t.dtype)).contiguous() for k, t in tensors.items()}
    path = os.path.join(FOLDER, name + ".safetensors")
    save_file(tensors, path, metadata=meta)
    sort_metadata(path)
    print(f"{name}: {len(tensors)} tensors, {os.path.getsize(path)} bytes")


def sort_metadata(path):
    """The library writes metadata in a random order; sorted, a regenerated file is the same byte for byte."""
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header, body = json.loads(f.read(size)), f.read()
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + body)


def relative_error(x, r):
    """|x - r| / |r| in float64; 0 where both are zero."""
    x, r = x.double(), r.double()
    norm, diff = r.norm(), (x - r).norm()
    return torch.zeros(()).double() if norm == 0 and diff == 0 else diff / norm


def sample_indices(n, most=SAMPLES):
    s = max(1, int(0.618 * n))
    while math.gcd(s, n) != 1:
        s += 1
    return torch.arange(min(most, n)) * s % n


def flattened(values):
    """The results of one run by name, each as [rows, numel] in float64: one row for a gradient, a row per step otherwise."""
    return {k: v.detach().double().clone() for k, v in values.items()}


def gradients_at_start(cfg, parameters, tokens, cu):
    """loss [1, 2], logits [1, N * Vp] of micro-batch 0 and grad.<name> [1, numel], the sum over the micro-batches."""
    trainer = Trainer(cfg, parameters)
    batches = batches_of_step(tokens, cu, 0)
    trainer.set_window(0)
    losses, gradients = trainer.gradients(batches)
    w = trainer.yarn.window
    with torch.no_grad():
        x = trainer.model.hidden(batches[0], trainer._rope(len(batches[0].inputs)), trainer.yarn.scale, w // 2, w)
        logits = head.logits_of(x, trainer.model.parameter("head"), cfg.record.head, False)
    return flattened({"loss": torch.stack(losses)[None], "logits": logits.reshape(1, -1)} |
                     {f"grad.{n}": g.reshape(1, -1) for n, g in gradients.items()})


def trajectory(cfg, parameters, tokens, cu):
    """loss [STEPS, 2] and, for each parameter, value minus initial value after every step, <name> [STEPS, numel]."""
    trainer = Trainer(cfg, parameters)
    losses, updates = [], {n: [] for n in parameters}
    for t in range(STEPS):
        losses.append(torch.stack(trainer.step(batches_of_step(tokens, cu, t))))
        for n, p in trainer.model.p.items():
            updates[n].append((p.detach().double() - parameters[n].double()).flatten())
    return flattened({"loss": torch.stack(losses)} | {n: torch.stack(v) for n, v in updates.items()})


def model_inputs(cfg, draw):
    return initial_parameters(cfg, draw), *make_batches(cfg, draw)


def reference_and_errors(cfg, run, make_inputs=model_inputs):
    """(run in float64 on draw 0, {kind: {name: [rows]}}): the errors are root mean squares over the draws."""
    squares, reference = {"bf16": {}, "f32": {}}, None
    for draw in range(DRAWS):
        inputs = make_inputs(cfg, draw)
        exact = run(dataclasses.replace(cfg, dtype="float64"), *inputs)
        reference = reference or exact
        for kind, dtype in (("bf16", "bf16"), ("f32", "float32")):
            other = run(dataclasses.replace(cfg, dtype=dtype), *inputs)
            for name, r in exact.items():
                e = torch.stack([relative_error(x, y) for x, y in zip(other[name], r)])
                squares[kind][name] = squares[kind].get(name, 0) + e.square() / DRAWS
    return reference, {kind: {n: s.sqrt() for n, s in by_name.items()} for kind, by_name in squares.items()}


def write_gradients(preset):
    cfg = make_config(preset)
    exact, errors = reference_and_errors(cfg, gradients_at_start)
    out = {"loss": exact["loss"][0], "logits": exact["logits"].view(-1, cfg.padded_vocab_size)}
    out |= {f"{k}_rel": torch.cat([errors["bf16"][k], errors["f32"][k]]) for k in ("loss", "logits")}
    for n, tensor in record.tensors(cfg).items():
        out[f"grad.{n}"] = exact[f"grad.{n}"].view(tensor.shape)
        out |= {f"rel_{kind}.{n}": e[f"grad.{n}"] for kind, e in errors.items()}
    save(f"gradients-{preset}", cfg, out, preset=preset)


def gate_inputs(cfg, draw=0):
    """Gates and, for each, gradients of STEPS steps [STEPS, rows, cols]: sums over the micro-batches."""
    g = torch.Generator().manual_seed(1618 + draw)
    p = {n: t for n, t in initial_parameters(cfg, draw).items() if n.endswith("gate.weight")}
    return p, {n: torch.randn(STEPS, *t.shape, generator=g) for n, t in p.items()}


def gate_trajectory(cfg, parameters, gradients):
    """NorMuon alone: value minus initial value of each gate after every step, <name> [STEPS, numel]."""
    ar = model.ARITHMETIC[cfg.dtype]
    p = {n: t.to(ar.wide, copy=True) for n, t in parameters.items()}
    table = {n: t for n, t in record.tensors(cfg).items() if n in p}
    optimizer, updates = NorMuon(table, p, cfg.ns, cfg.record.normuon_lr, cfg.weight_decay, ar.half), {n: [] for n in p}
    for t in range(STEPS):
        optimizer.step({n: g[t].to(ar.wide) / cfg.micro_batches for n, g in gradients.items()},
                       schedule.lr_factor(cfg, t), schedule.momentum(cfg, t))
        for n, x in p.items():
            updates[n].append((x.double() - parameters[n].double()).flatten())
    return flattened({n: torch.stack(v) for n, v in updates.items()})


def samples_of(p0, exact, errors):
    """What a steps-* file holds of each parameter."""
    out = {}
    for n, update in exact.items():
        value = p0[n].double().flatten() + update
        out |= {f"sample.{n}": value[:, sample_indices(value.shape[1])], f"norm.{n}": value.norm(dim=1),
                f"update_norm.{n}": update.norm(dim=1)}
        out |= {f"rel_{kind}.{n}": e[n] for kind, e in errors.items()}
    return out


def write_steps(preset, ns, suffix="", **sizes):
    cfg = make_config(preset, ns=ns, **sizes)
    exact, errors = reference_and_errors(cfg, trajectory)
    out = {"loss": exact.pop("loss")} | {f"loss_rel_{kind}": e.pop("loss") for kind, e in errors.items()}
    out |= samples_of(initial_parameters(cfg), exact, errors)
    save(f"steps-{preset}-{ns}{suffix}", cfg, out, preset=preset)
    worst = {kind: max(float(v[2]) for v in e.values()) for kind, e in errors.items()}
    print("   update after 3 steps, worst tensor: " + ", ".join(f"{k} {w:.2e}" for k, w in worst.items()))


def write_gates(preset, ns, suffix, **sizes):
    cfg = make_config(preset, ns=ns, **sizes)
    p, gradients = gate_inputs(cfg)
    weights = {n: t.bfloat16() for n, t in p.items()}
    save(f"init{suffix}", cfg, weights | {f"grad.{n}": g for n, g in gradients.items()})
    exact, errors = reference_and_errors(cfg, gate_trajectory, gate_inputs)
    save(f"steps-{preset}-{ns}{suffix}", cfg, samples_of(p, exact, errors), preset=preset)


def write_init(cfg, suffix=""):
    table, weights = record.tensors(cfg), initial_parameters(cfg)
    save(f"init{suffix}", cfg, {n: t.bfloat16() if table[n].spec.storage == "bf16" else t for n, t in weights.items()})


def log_uniform(n, m, g):
    """Singular values log-uniform in 1e-3..1, random singular vectors."""
    u, _ = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64))
    return u * 10 ** (-3 * torch.rand(n, generator=g, dtype=torch.float64)) @ v.t()


def write_newton_schulz():
    g = torch.Generator().manual_seed(161803)
    cases = {k: torch.randn(s, generator=g) for k, s in dict(wide=(16, 64), square=(16, 16), gate=(2, 12), row=(1, 12)).items()}
    cases |= {"hard": log_uniform(24, 48, g).float(), "zero": torch.zeros(4, 8)}
    out = {f"input.{k}": x for k, x in cases.items()}
    for ns in config.NS_NAMES:
        for k, x in cases.items():
            out[f"{ns}.{k}"] = newton_schulz.orthogonalize(x.double()[None], ns, False)[0]
    save("newton_schulz", None, out)


def write_schedules():
    out = {}
    runs = ("2025-10-27", 2245, 40), ("2025-10-27", 279, 10), ("2025-10-27", 6, 2), ("2025-11-29", 2120, 40)
    for preset, scheduled, extension in runs:
        cfg, total = config.preset(preset, num_scheduled=scheduled, num_extension=extension), scheduled + extension
        long = [schedule.stage(cfg, t).window for t in range(total)]
        out |= {f"lr.{total}": torch.tensor([schedule.lr_factor(cfg, t) for t in range(total)]).double(),
                f"momentum.{total}": torch.tensor([schedule.momentum(cfg, t) for t in range(total)]).double(),
                f"ws_long.{total}": torch.tensor(long), f"ws_short.{total}": torch.tensor([w // 2 for w in long])}
    yarn, frequencies, scales = schedule.Yarn(128, 128, torch.float64, 3), [], []
    for w in (3, 7, 11, 13):
        yarn.set_window(w)
        frequencies.append(yarn.frequencies)
        scales.append(yarn.scale)
    out |= {"ws": torch.tensor([3, 7, 11, 13, cfg.record.final_window]), "frequencies": torch.stack(frequencies + frequencies[-1:]),
            "scale": torch.tensor(scales + scales[-1:]).double()}
    save("schedules", None, out)


def write_fp8_head():
    """One row of x has a single non-zero channel (the largest value that rms can give); some weights saturate e4m3."""
    g = torch.Generator().manual_seed(57721)
    x = torch.randn(32, 64, generator=g)
    x[7] = torch.eye(64)[5]
    x = (x / x.square().mean(-1, keepdim=True).sqrt()).bfloat16()
    w = (0.25 * torch.randn(256, 64, generator=g)).bfloat16()
    targets = torch.randint(0, 250, (32,), generator=g)
    xs, ws = x.clone().requires_grad_(), w.double().requires_grad_()
    logits = head.Fp8Linear.apply(xs, ws, record.Head(), torch.float64)
    loss = head.cross_entropy_sum(logits, targets, torch.float64, record.Head())
    loss.backward()
    save("fp8_head", None, {"x": x, "w": w, "targets": targets, "logits": logits.double(), "loss": loss.reshape(1),
                            "dx": xs.grad.double(), "dw": ws.grad})


def main():
    os.makedirs(FOLDER, exist_ok=True)
    cfg = make_config("2025-11-18")
    tokens, cu = make_batches(cfg)
    write_init(cfg)
    write_init(make_config("2025-11-18", **NARROW_MLP), "-narrow-mlp")
    save("batches", cfg, {"tokens": tokens, "cu_seqlens": cu})
    toy = make_config("toy")
    write_init(toy, "-toy")
    save("batches-toy", toy, dict(zip(("tokens", "cu_seqlens"), make_batches(toy))))
    growing = make_config("2025-11-29")
    save("batches-2025-11-29", growing, dict(zip(("tokens", "cu_seqlens"), make_batches(growing))))
    for preset in ("2025-10-27", "2025-11-18", "2025-12-10", "toy"):
        write_gradients(preset)
    for preset in ("2025-10-27", "2025-11-10", "2025-11-29", "2025-12-10"):
        write_steps(preset, "polar")
    for ns in config.NS_NAMES:
        write_steps("2025-11-18", ns)
    write_steps("2025-11-18", "polar", "-narrow-mlp", **NARROW_MLP)
    write_steps("toy", "polar")
    write_gates("2025-11-18", "polar", "-13-heads", **HEADS_13)
    write_newton_schulz()
    write_schedules()
    write_fp8_head()


if __name__ == "__main__":
    main()
