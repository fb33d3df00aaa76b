#!/usr/bin/env python3
"""Checks of the twin itself, against arithmetic that shares none of its code. Prints TAP; exit status 1 on a failure."""
import math
import os
import sys
import tempfile

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import numpy as np
import torch

import make_golden
from twin import config, data, head, model, newton_schulz, record, schedule
from twin.attention import dense
from twin.optimizer import Adam, NorMuon
from twin.trainer import Trainer

count = failures = 0


def check(ok, what, detail=""):
    global count, failures
    count += 1
    failures += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {what}" + (f" ({detail})" if detail else ""), flush=True)


def check_parameter_count():
    n = sum(math.prod(t.shape) for t in record.tensors(config.preset("2025-10-27")).values())
    check(n == 268_665_628, "parameter count of 2025-10-27", f"{n:,}")


def check_gradients(preset):
    """Central differences in float64 at elements of every tensor, all zero-gradient elements left out."""
    cfg = make_golden.make_config(preset, dtype="float64")
    trainer = Trainer(cfg, make_golden.initial_parameters(cfg))
    batch = make_golden.batches_of_step(*make_golden.make_batches(cfg), 0)[0]
    _, gradients = trainer.gradients([batch])
    worst, where, g = 0.0, "", torch.Generator().manual_seed(1)
    for name, p in trainer.model.p.items():
        flat, grad = p.data.view(-1), gradients[name].flatten()
        live = torch.nonzero(grad).flatten()
        for j in live[torch.randperm(len(live), generator=g)[:3]].tolist():
            kept, values = float(flat[j]), []
            h = 1e-5 * max(1.0, abs(kept))
            for x in (kept + h, kept - h):
                flat[j] = x
                with torch.no_grad():
                    values.append(float(trainer.loss(batch)))
            flat[j] = kept
            difference = (values[0] - values[1]) / (2 * h)
            # 1e-13 * loss / h is the rounding of the difference itself
            error = abs(difference - float(grad[j])) / (abs(float(grad[j])) + 1e-13 * values[0] / h / 1e-6)
            if error > worst:
                worst, where = error, name
    check(worst < 1e-6, f"gradient of every tensor against finite differences, {preset}", f"worst {worst:.1e} in {where}")


def check_polar_errors():
    """Mean over 8 Gaussian 128 x 512 matrices against values published for these coefficients, to 4 standard deviations."""
    expected = {"kj": (0.219, 0.001), "you": (0.0177, 0.0003), "polar": (0.091, 0.002), "gram": (0.091, 0.002),
                "turbo": (0.0936, 0.001), "turbo-gram": (0.0936, 0.001)}
    g = torch.randn(8, 128, 512, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    for ns, (mean, sd) in expected.items():
        for half, slack in ((False, 0.0), (True, 0.002 if "gram" in ns else 0.005)):
            q = newton_schulz.orthogonalize(g.float() if half else g, ns, half).double()
            e = float(((q - u @ vt).norm(dim=(1, 2)) / 128 ** 0.5).mean())
            check(abs(e - mean) < 4 * sd + slack, f"polar error of {ns}{' in half precision' if half else ''}",
                  f"{e:.4f}, expected {mean}")
    for a, b in (("polar", "gram"), ("turbo", "turbo-gram")):
        x, y = (newton_schulz.orthogonalize(g, n, False) for n in (a, b))
        e = float((x - y).norm() / x.norm())
        check(e < 1e-11, f"{b} equals {a} in exact arithmetic", f"{e:.1e}")
    for ns in config.NS_NAMES:
        z = newton_schulz.orthogonalize(torch.zeros(1, 6, 12), ns, True)
        check(bool((z == 0).all()), f"{ns} keeps zero matrices zero")


def check_attention():
    """Row by row in plain loops."""
    g = torch.Generator().manual_seed(3)
    n, w = 600, 37
    q, k, v = (torch.randn(n, 2, 8, generator=g, dtype=torch.float64) for _ in range(3))
    documents = (torch.rand(n, generator=g) < 0.02).cumsum(0)
    y, worst = dense(q, k, v, documents, w, 0.3, torch.float64), 0.0
    for i in range(n):
        js = [j for j in range(i + 1) if i - j <= w and documents[i] == documents[j]]
        for h in range(2):
            s = torch.exp(0.3 * (k[js, h] @ q[i, h]))
            worst = max(worst, float((y[i, h] - (s @ v[js, h]) / s.sum()).abs().max()))
    check(worst < 1e-12, "blocked attention against a loop over queries", f"{worst:.1e}")


def check_schedules():
    cfg = config.preset("2025-10-27", num_scheduled=100)
    ends = [schedule.lr_factor(cfg, t) for t in (0, 49, 50, 75, 99, 100, 139)]
    check(np.allclose(ends, [1, 1, 1, 0.55, 0.118, 0.10018, 0.10018]), "learning-rate factor", str(ends))
    cfg = config.preset("2025-10-27")
    m = [schedule.momentum(cfg, t) for t in (0, 150, 299, 300, 2235, 2260, 2284)]
    check(np.allclose(m, [0.85, 0.9, 0.85 + 29.9 / 300, 0.95, 0.95, 0.9, 0.852]), "momentum", str(m))
    short = config.preset("2025-10-27", num_scheduled=279, num_extension=10)
    check(schedule.momentum(short, 288) == 0.85 + 28.8 / 300, "a run of 289 steps never cools its momentum down")
    w = [schedule.stage(cfg, t).window for t in (0, 748, 749, 1496, 1497, 2244, 2245)]
    check(w == [3, 3, 7, 7, 11, 11, 13], "windows", str(w))
    cfg = config.preset("2025-11-29")
    rates = [schedule.lr_factor(cfg, t) for t in (699, 700, 953, 954, 1399, 1400, 2119, 2120, 2159)]
    want = [1, 1.51, 1.51, 1.51, 0.1 + 1.41 * 721 / 1166, 0.1 + 1.83 * 720 / 1166, 0.1 + 1.83 / 1166, 0.1, 0.1]
    sizes = [8 * schedule.stage(cfg, t).tokens for t in (706, 707, 1413, 1414, 2120)]
    check(np.allclose(rates, want, rtol=1e-12) and sizes == [131072, 262144, 262144, 393216, 393216], "rates and sizes of record 46",
          str(rates))
    y = schedule.Yarn(128, 128, torch.float64, 3)
    y.set_window(7)
    # by hand: f = 1 turns 61.1 times in 384 tokens and is kept, f = 1/1024 turns 0.06 times and is stretched by 3/7
    r = 128 * 3 * 1024 ** (-5 / 31) / (2 * math.pi)
    middle = 1024 ** (-5 / 31) * (3 / 7 + (r - 1) / 31 * 4 / 7)
    f = y.frequencies
    check(float(f[0]) == 1 and abs(float(f[31]) * 1024 - 3 / 7) < 1e-12 and abs(float(f[5]) - middle) < 1e-12
          and bool((f[32:] == 0).all()), "YaRN frequencies", f"{float(f[5]):.6f}")
    check(abs(y.scale - 0.1 * (1 + 0.2 * math.log(7 / 3))) < 1e-15, "YaRN attention scale", f"{y.scale:.6f}")


def check_optimizers():
    """Both optimizers on one small matrix, spelled out in numpy."""
    g = torch.Generator().manual_seed(9)
    w, gs = torch.randn(3, 5, generator=g, dtype=torch.float64), torch.randn(3, 3, 5, generator=g, dtype=torch.float64)
    table = record.tensors(config.preset("2025-11-18"))
    adam = Adam({"lm_head.weight": table["lm_head.weight"]}, {"lm_head.weight": w.clone()}, 0.008, False)
    p, m, v = w.numpy().copy(), 0, 0
    for k, x in enumerate(gs.numpy(), 1):
        adam.step(2 * k - 2, {"lm_head.weight": torch.from_numpy(x / 4)}, 0.5)
        adam.step(2 * k - 1, {"lm_head.weight": torch.from_numpy(x * 3 / 4)}, 0.5)
        m, v = 0.65 * m + 0.35 * x, 0.95 * v + 0.05 * x * x
        p -= 0.004 * np.sqrt(1 - 0.95 ** k) / (1 - 0.65 ** k) * m / (np.sqrt(v) + 1e-8)
    check(np.allclose(adam.p["lm_head.weight"].numpy(), p, rtol=1e-13), "Adam, three updates of the sums over two steps")
    muon = NorMuon({"blocks.1.mlp.c_fc": table["blocks.1.mlp.c_fc"]}, {"blocks.1.mlp.c_fc": w.clone()}, "you", 0.03, 1.2, False)
    p, m, s = w.numpy().copy(), 0, 0
    for x in gs.numpy():
        muon.step({"blocks.1.mlp.c_fc": torch.from_numpy(x)}, 0.5, 0.9)
        m = 0.9 * m + 0.1 * x
        u = 0.1 * x + 0.9 * m
        o = newton_schulz.orthogonalize(torch.from_numpy(u)[None], "you", False)[0].numpy()
        s = 0.95 * s + 0.05 * (o ** 2).mean(0)
        o2 = o / np.sqrt(s)
        o2 *= np.sqrt((o ** 2).sum() / (o2 ** 2).sum())
        p -= 0.03 * np.where(o2 * p >= 0, o2 + 0.015 * 1.2 * p, o2)
    check(np.allclose(muon.p["blocks.1.mlp.c_fc"].numpy(), p, rtol=1e-12), "NorMuon with cautious decay, three steps")


def check_fp8():
    """Conversions at the edges; the three products of the FP8 head where every number is exact."""
    x = torch.tensor([500.0, -1e9, 464.0, 17.0, 19.0, 2.0 ** -10, 3 * 2.0 ** -10])
    y = head.quantize(x, 1.0, torch.float8_e4m3fn, head.E4M3_MAX).tolist()
    check(y == [448, -448, 448, 16, 20, 0, 2.0 ** -8], "e4m3 saturates and rounds ties to even", str(y))
    y = head.quantize(torch.tensor([1e6, 9.0, 11.0]), 1.0, torch.float8_e5m2, head.E5M2_MAX).tolist()
    check(y == [57344, 8, 12], "e5m2 saturates and rounds ties to even", str(y))
    # d = 16: sx = 1/112, so that 0.5 is 56 in e4m3 and 0.25 is 28; weights 2^-5 and -2^-4 are 16 and -32 units of 2^-9
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([0.5, 0.25])
    x.requires_grad_()
    w = torch.zeros(1, 16, dtype=torch.float64)
    w[0, :2] = torch.tensor([2.0 ** -5, -(2.0 ** -4)])
    w.requires_grad_()
    y = head.Fp8Linear.apply(x, w, record.Head(), torch.float64)
    y.backward(torch.full_like(y, 0.5))                       # 0.5 * 448 = 224 in e5m2
    check(y.item() == 0 and x.grad[0, :3].tolist() == [2.0 ** -6, -(2.0 ** -5), 0]
          and np.allclose(w.grad[0, :3].tolist(), [0.25, 0.125, 0], rtol=1e-15),
          "FP8 head on exactly representable values",
          f"{x.grad[0, :2].tolist()} {w.grad[0, :2].tolist()}")


def check_loader():
    """Three hand-made documents in a vocabulary of 10 with document token 9."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.bin")
        stream = [1, 9, 2, 3, 9, 4, 4, 4, 4, 4, 9, 5, 9, 6, 6, 6, 6, 9]
        data.write_shard(path, stream, 10, 9)
        cfg = config.preset("tiny", train_files=path, val_files=path, micro_batches=1, micro_batch_tokens=5,
                            max_document=4, val_tokens=10)
        got = [(g[0][0].tolist(), g[0][1].tolist()) for _, g in zip(range(2), data.training_steps(cfg))]
        expected = [([9, 2, 3, 9, 4, 4], [0, 3, 5]), ([9, 5, 9, 6, 6, 6], [0, 2, 5])]
        check(got == expected, "training batches of a hand-made shard", str(got))
        try:
            list(data.training_steps(cfg))
            check(False, "the end of the shards is an error")
        except config.BadInput as e:
            check("used up" in str(e), "the end of the shards is an error")
        cfg.val_tokens = 5
        got = [(t.tolist(), c.tolist()) for t, c in data.validation_sequences(cfg)]
        check(got == [(stream[:6], [0, 1, 4, 5])], "validation sequence", str(got))
        data.write_shard(path, [9, 1, 2, 10], 10, 9)
        try:
            data.Shard(path)
            check(False, "a token outside the vocabulary is refused")
        except config.BadInput:
            check(True, "a token outside the vocabulary is refused")


def check_initial_loss():
    cfg = config.preset("tiny", dtype="float32", micro_batch_tokens=64)
    trainer = Trainer(cfg, model.init_parameters(cfg, torch.Generator().manual_seed(1)))
    tokens = torch.randint(0, 50257, (65,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss = float(trainer.loss(model.Batch(tokens, torch.tensor([0, 20, 64])))) / 64
    check(abs(loss - math.log(50304)) < 1e-4, "a fresh model's loss is ln(50304)", f"{loss:.4f}")


def main():
    torch.set_num_threads(2)
    check_parameter_count()
    for preset in ("2025-10-27", "2025-11-18", "toy"):
        check_gradients(preset)
    for f in (check_polar_errors, check_attention, check_schedules, check_optimizers, check_fp8, check_loader,
              check_initial_loss):
        f()
    print(f"1..{count}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
