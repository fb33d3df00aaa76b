#!/usr/bin/env python3
"""Checks of r2026 against facts and arithmetic that share none of its code. Prints TAP; exit status 1 on a
failure.
"""

import math
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

import make_golden_2026
from make_golden_2026 import BYTES, LAYERS, SMALL
from r2026 import data, model, record
from r2026.optimizer import ADAM_LR
from r2026.trainer import Trainer

count = failures = 0


def check(ok, what, detail=""):
    global count, failures
    count += 1
    failures += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {what}" + (f" ({detail})" if detail else ""), flush=True)


def small_trainer(fp8=(), draw=0):
    return make_golden_2026.make_trainer(torch.float64, draw, fp8)


def small_batches(t):
    """Of any step of the small run; beyond the golden steps those of the extension again."""
    batches = make_golden_2026.make_batches()
    return make_golden_2026.batches_of_step(*batches, min(t, make_golden_2026.STEPS - 1))


def check_facts():
    full = record.Record(schedule=record.Schedule())
    n = sum(math.prod(p.shape) for p in record.parameters(full).values())
    check(n == 640_605_607, "parameters of 2026-07-17, the padding layer of the MLP bank included", f"{n:,}")
    tokens = torch.tensor([50256, 464, 262, 50256, 464])
    rows, signs = data.bigram_rows(tokens, full.sizes.bigram_rows), data.sign_rows(
        tokens, full.sizes.sign_rows
    )
    check(
        rows.tolist() == [377279, 86771, 71476, 118394, 143001],
        "rows of the bigram table",
        str(rows.tolist()),
    )
    check(signs.tolist() == [0, 1408, 214, 1366, 1408], "rows of the sign table", str(signs.tolist()))
    prefixes = data.prefix_table(BYTES, 128)
    check(
        prefixes[[40, 41, 42, 43]].tolist() == [1, 40, 41, 7] and int((prefixes >= 0).sum()) == 4,
        "longest proper prefixes",
    )


def check_schedule():
    s = record.Schedule()
    rates = {
        422: 1.0,
        423: 1.52,
        508: 1.52,
        600: 1.354593,
        846: 0.912310,
        847: 1.027087,
        1000: 0.709843,
        1200: 0.295144,
        1269: 0.152073,
        1270: 0.15,
        1284: 0.15,
    }
    check(all(abs(s.rate(t) - r) < 5e-7 for t, r in rates.items()), "learning-rate factors")
    check(s.begins() == [0, 423, 847, 1270] and s.last_tied() == 847, "stages begin, the head parts")
    check(
        sum(8 * s.stage(t).tokens for t in range(s.total)) == 338_821_120, "training tokens of the whole run"
    )
    check(
        s.weights(0) == ([1.0, 0.5, 0.25], 0.25)
        and s.weights(423) == ([1.0, 0.5], 0.25)
        and s.weights(1000) == ([1.0], 0.0),
        "weights of the targets",
    )
    rope, scales = model.Rope.start(128, torch.float32), []
    for old, new in ((384, 896), (896, 1408), (1408, 1664)):
        rope.follow(old, new)
        scales.append(rope.scale)
    check(
        all(abs(a - b) < 5e-8 for a, b in zip(scales, (0.1169460, 0.1275175, 0.1317780))),
        "attention scales of the stages",
    )


def check_paired_attention():
    """Row by row, key by key: row 2t holds the first half of the heads of token t, row 2t + 1 the second
    half.
    """
    trainer, batch = small_trainer(), small_batches(0)[0]
    g, n, h, e = torch.Generator().manual_seed(7), 32, 6, 8
    q, k, v = (torch.randn(n, h, e, generator=g, dtype=torch.float64) for _ in range(3))
    documents = batch.documents()
    out = model.attend(LAYERS[0], q, k, v, documents, 5, 0.1)
    worst = 0.0
    for row in range(2 * n):
        for slot in range(3):
            head = slot + 3 * (row % 2)
            keys = [j for j in range(max(0, row - 5), row + 1) if documents[j // 2] == documents[row // 2]]
            scores = torch.stack(
                [0.1 * q[row // 2, head] @ k[j // 2, slot + 3 * (j % 2)] for j in keys]
            ).softmax(0)
            y = sum(s * v[j // 2, slot + 3 * (j % 2)] for s, j in zip(scores, keys))
            worst = max(worst, float((y - out[row // 2, head]).abs().max()))
    check(worst < 1e-12, "paired heads, row by row", f"{worst:.1e}")


def check_gradients():
    """Central differences in float64 at elements of every tensor."""
    trainer = small_trainer()
    batch, g = small_batches(0)[0], torch.Generator().manual_seed(3)
    windows, (targets, prefix) = trainer.follow(), SMALL.schedule.weights(0)
    _, gradients = trainer.gradients([batch])
    worst, where, silent = 0.0, "", []
    for name, p in trainer.model.p.items():
        flat, grad = p.data.view(-1), gradients[name].flatten()
        live = torch.nonzero(grad).flatten()
        if not len(live):
            silent.append(name)
        for j in live[torch.randperm(len(live), generator=g)[:4]].tolist():
            kept, values, h = float(flat[j]), [], 1e-5
            for x in (kept + h, kept - h):
                flat[j] = x
                with torch.no_grad():
                    values.append(float(trainer.model.loss(batch, windows, trainer.rope, targets, prefix)))
            flat[j] = kept
            difference = (values[0] - values[1]) / (2 * h)
            error = abs(difference - float(grad[j])) / (abs(float(grad[j])) + 1e-13 * values[0] / h / 1e-6)
            if error > worst:
                worst, where = error, name
    check(not silent, "every tensor has a gradient", " ".join(silent))
    check(
        worst < 1e-5, "gradient of every tensor against finite differences", f"worst {worst:.1e} in {where}"
    )


def check_run():
    """Eight steps over three stages and the extension: parity of updates, the tied head, Adam's first
    step.
    """
    trainer = small_trainer()
    p, moved, tied = trainer.model.p, {}, []
    for t in range(SMALL.schedule.total):
        before = {n: x.detach().clone() for n, x in p.items()}
        losses = trainer.step(small_batches(t))
        moved[t] = {n for n in p if not torch.equal(before[n], p[n])}
        tied.append(torch.equal(p["embed.weight"], p["lm_head.weight"].t()))
        if t == 1:
            step = (before["bigram_embed.weight"] - p["bigram_embed.weight"].detach()).abs()
            # the first update of Adam is lr sign(g), with decay where it agrees with the weight
            check(
                abs(float(step[step > 0].median()) / (ADAM_LR * 75) - 1) < 0.6 and bool((step == 0).any()),
                "Adam's first update moves touched rows alone, by about the rate",
                f"{float(step[step > 0].median()):.3f}",
            )
    banks = {"qk_bank", "vo_bank", "mlp_bank"}
    check(
        all(moved[t] == banks for t in range(0, 8, 2)) and all(moved[t] > banks for t in range(1, 8, 2)),
        "banks at every step, Adam at odd ones",
    )
    check(
        tied == [True] * 5 + [False] * 3,
        "embedding and head are one until the first odd step after they part",
        str(tied),
    )
    check(all(math.isfinite(float(x)) for x in losses), "losses are finite")
    check(
        trainer.window_long == 17 and math.isfinite(float(trainer.validate(small_batches(7)[0], final=True))),
        "a last validation",
    )


def check_fp8():
    """8-bit operands are up to 2^-4 wrong each; sums of many are better. Scales come from the micro-batch
    before.
    """
    exact, fp8 = small_trainer(), small_trainer(("head", "mlp"))
    first, second = small_batches(0)
    state, scales = fp8.model.mlp_state, []
    for batch in (first, second, first):
        b, gb = fp8.gradients([batch])
        scales.append(state.activation[0])
    check(
        scales[0] != 1.0 and scales[0] == scales[2] != scales[1],
        "the activations' scales follow the micro-batches",
        str(scales),
    )
    a, ga = exact.gradients([first])
    loss = abs(float(b[0]) / float(a[0]) - 1)
    check(0 < loss < 2**-4, "loss with FP8", f"{loss:.1e}")
    errors = {n: float((gb[n] - ga[n]).norm() / ga[n].norm()) for n in ga}
    banks = max(errors[n] for n in ("qk_bank", "vo_bank", "mlp_bank", "lm_head.weight"))
    check(0 < banks < 2**-3, "gradients of the large matrices with FP8", f"{banks:.3f}")


if __name__ == "__main__":
    for part in (check_facts, check_schedule, check_paired_attention, check_gradients, check_run, check_fp8):
        part()
    print(f"1..{count}")
    raise SystemExit(failures != 0)
