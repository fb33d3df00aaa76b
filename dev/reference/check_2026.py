#!/usr/bin/env python3
"""Checks of r2026 against facts and arithmetic that share none of its code. Prints TAP; exit status 1 on a
failure.

    check_2026.py [RANKS]

RANKS: r50k_base.tiktoken, GPT-2's vocabulary. With it the tables of the whole vocabulary are checked, too (a
minute).
"""

import base64
import math
import sys
import zlib

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

import make_golden_2026
from make_golden_2026 import BYTES, LAYERS, NARROW, SMALL
from r2026 import data, fp8_full, mask, model, record
from r2026.optimizer import ADAM_LR
from r2026.trainer import Trainer

count = failures = 0


def check(ok, what, detail=""):
    global count, failures
    count += 1
    failures += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {what}" + (f" ({detail})" if detail else ""), flush=True)


def small_trainer(fp8=(), r=SMALL, draw=0):
    return make_golden_2026.make_trainer(r, torch.float64, draw, fp8)


def small_batches(t, r=SMALL):
    """Of any step of the small run; beyond the golden steps those of the extension again."""
    batches = make_golden_2026.make_batches(r)
    return make_golden_2026.batches_of_step(r, *batches, min(t, make_golden_2026.STEPS - 1))


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
    rope, scales = model.Rope.start(record.Sizes(), torch.float32), []
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


def check_gradients(r):
    """Central differences in float64 at elements of every tensor."""
    trainer = small_trainer(r=r)
    batch, g = small_batches(0, r)[0], torch.Generator().manual_seed(3)
    windows, (targets, prefix) = trainer.follow(), r.schedule.weights(0)
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


def check_fp8_up():
    """Codes of the first product alone: what they change is less than what both change, and no scale is kept."""
    batches = small_batches(0)
    runs = [small_trainer(fp8) for fp8 in ((), ("mlp-up",), ("mlp",))]
    runs[2].gradients(batches)  # the activations' scales
    losses = [float(r.gradients(batches)[0][0]) for r in runs]
    up, both = (abs(x / losses[0] - 1) for x in losses[1:])
    check(0 < up < 2**-4 and up != both, "loss with c_fc alone in FP8", f"{up:.1e}, with both {both:.1e}")


def check_fp8_narrow():
    """The same of record 90, where the gradients are 8-bit numbers, too."""
    batches = small_batches(0, NARROW)
    exact, fp8 = small_trainer(r=NARROW), small_trainer(NARROW.fp8, NARROW)
    (a, _), ga = exact.gradients(batches)
    fp8.gradients(batches)
    fp8.model.full_state.end_of_step()  # the first scales are those of a large network's gradients
    (b, _), gb = fp8.gradients(batches)
    loss = abs(float(b) / float(a) - 1)
    check(0 < loss < 2**-4, "loss with the FP8 of record 90", f"{loss:.1e}")
    errors = {n: float((gb[n] - ga[n]).norm() / ga[n].norm()) for n in ("qk_bank", "vo_bank", "mlp_bank")}
    check(all(0 < e < 2**-2 for e in errors.values()), "gradients of the banks with it", str(errors))
    state = fp8.model.full_state
    kept = [s["x"].clone() for s in state.scale]
    fp8.step(batches)
    check(
        not torch.equal(state.scale[0]["x"], state.scale[1]["x"])
        and not torch.equal(kept[0], state.scale[0]["x"]),
        "delayed scales: a set for each micro-batch number, new after a step",
    )


# ---- records 90 and 91 ------------------------------------------------------------------------------------


def fixed_numbers(c, start, *shape):
    """bf16(c r(start + i)), r(i) = floor(u / 256) / 2^23 - 1 with u = 2654435761 i mod 2^32."""
    i = torch.arange(start, start + math.prod(shape))
    r = torch.div(2654435761 * i % 2**32, 256, rounding_mode="floor").float() / 2**23 - 1
    return (torch.tensor(c, dtype=torch.float32) * r).bfloat16().double().view(shape)


def near(got, want, share):
    return all(abs(float(g) - w) <= share * abs(w) for g, w in zip(got, want))


def e4m3_sum(x):
    """Sum of the bytes of 8-bit numbers, and their checksum."""
    b = x.to(torch.float8_e4m3fn).view(torch.uint8)
    return int(b.long().sum()), zlib.crc32(b.contiguous().numpy().tobytes())


def check_records():
    sizes = {}
    for name, r in record.RECORDS.items():
        sizes[name] = (
            sum(math.prod(p.shape) for p in record.parameters(r).values()),
            sum(8 * r.schedule.stage(t).tokens for t in range(r.schedule.total)),
            r.schedule.begins(),
            r.schedule.last_tied(),
        )
    want = {
        "2026-05-27": (640_605_607, 340_131_840, [0, 425, 850, 1275], 851),
        "2026-07-17": (640_605_607, 338_821_120, [0, 423, 847, 1270], 847),
        "2026-08-03": (637_656_487, 350_617_600, [0, 423, 847, 1270], 847),
        "2026-08-06": (637_656_487, 343_408_640, [0, 417, 833, 1250], 833),
    }
    check(sizes == want, "records 85, 89, 90 and 91: parameters, tokens, stages", str(sizes))
    s = record.RECORDS["2026-08-06"].schedule
    rates = {
        416: 1,
        417: 1.52,
        500: 1.52,
        600: 1.337333,
        832: 0.913547,
        833: 1.028480,
        1000: 0.676667,
        1200: 0.255333,
        1249: 0.152107,
        1250: 0.15,
    }
    check(all(abs(s.rate(t) - r) < 5e-7 for t, r in rates.items()), "learning-rate factors of record 91")
    rope, scales = model.Rope.start(record.RECORDS["2026-08-03"].sizes, torch.float32), []
    for old, new in ((384, 384), (384, 896), (896, 1408), (1408, 1664)):
        rope.follow(old, new)
        scales.append(rope.scale)
    check(
        near(scales, (0.1154701, 0.1350376, 0.1472446, 0.1521641), 1e-6),
        "attention scales at width 96",
        str(scales),
    )


def qkv_case(layer):
    """Products, rotation and backward of one layer on fixed numbers: what the published kernels gave."""
    h = fixed_numbers(3, 0, 16, 768)
    h[0, 5] = 9.5
    w = torch.cat([fixed_numbers(0.03125, 10**6, 1152, 768), fixed_numbers(0.03125, 2 * 10**6, 768, 768)])
    state, lin = fp8_full.Scales(0), torch.tensor(0.5, dtype=torch.float64)
    state.quantize_weights({0: w}, None)
    leaves = [x.requires_grad_() for x in (h, w, lin)]
    q, k, v = fp8_full.QkvProduct.apply(*leaves, state, 0).split([576, 576, 768], 1)
    rope = model.Rope.start(record.RECORDS["2026-08-03"].sizes, torch.float32)
    q, k = model.prepare_qk(layer, q.reshape(16, 6, 96), k.reshape(16, 6, 96), rope)
    dv = fixed_numbers(0.01, 5 * 10**6, 16, 6, 128)
    dv.view(-1)[0] = 1.5
    loss = (q * fixed_numbers(0.01, 3 * 10**6, 16, 6, 96)).sum() + (
        k * fixed_numbers(0.01, 4 * 10**6, 16, 6, 96)
    ).sum()
    (loss + (v.view(16, 6, 128) * dv).sum()).backward()
    return state, q.detach(), k.detach(), v.detach(), *(x.grad for x in leaves)


def check_qkv():
    plain = qkv_case(record.Layer(long_window=True))
    state, q, k, v, dh, dw, dlin = plain
    w8, scale = state.qkv[0]
    h = fixed_numbers(3, 0, 16, 768)
    h[0, 5] = 9.5
    h8 = fp8_full.q8(h, fp8_full.INPUT_SCALE)
    check(
        e4m3_sum(w8) == (263105893, 0x591CBC09)
        and float(scale) == float.fromhex("0x1.24924ap-14")
        and e4m3_sum(h8) == (2053780, 0xDE6298BF),
        "8-bit copies of QKV weights and input, byte by byte",
    )
    got = [
        q.abs().sum(),
        q[0, 0, 0],
        q[5, 3, 2],
        q[5, 4, 3],
        q[15, 5, 95],
        k.abs().sum(),
        k[0, 0, 0],
        k[1, 0, 50],
        k[5, 4, 3],
        k[15, 5, 95],
    ]
    want = [7902.1, 2.0625, -0.30859, 0.22363, 1.6875, 7888.6, -1.0625, 1.546875, 0.382813, 0.496094]
    check(near(got, want, 0.01), "q and k with key offset", str([round(float(x), 5) for x in got]))
    check(near([v.abs().sum(), v[0, 0], v[15, 767]], [56658.6, 10, 2.90625], 0.005), "v")
    sums = [dh.abs().sum(), dw[:1152].abs().sum(), dw[1152:].abs().sum(), dlin]  # dlin to one step of bf16
    check(
        near(sums[:3], [9.4118, 1482.4, 19326.9], 0.003) and abs(float(dlin) - 19) <= 0.125,
        "gradients",
        str([round(float(x), 4) for x in sums]),
    )
    points = [
        dh[0, 0],
        dh[3, 100],
        dh[15, 767],
        dw[0, 0],
        dw[600, 3],
        dw[1151, 767],
        dw[1152, 0],
        dw[1919, 767],
    ]
    want = [0.013245, 0.00071335, -0.00037193, -0.0032501, -0.00077057, 0.00015545, -1.359375, 0.0546875]
    check(near(points, want, 0.02), "gradients, single values", str([round(float(x), 7) for x in points]))
    _, q, k, _, dh, dw, _ = qkv_case(record.Layer("paired"))
    got = [
        q.abs().sum(),
        q[5, 3, 2],
        q[5, 4, 3],
        k.abs().sum(),
        k[1, 0, 50],
        k[15, 5, 95],
        dh.abs().sum(),
        dw[:1152].abs().sum(),
    ]
    check(
        near(got, [7891.6, 1.265625, 0.326172, 7884.0, -0.574219, -1.101563, 9.4673, 1495.4], 0.01),
        "paired heads of width 96",
        str([round(float(x), 5) for x in got]),
    )


def check_mlp_full():
    fc, proj = fixed_numbers(0.03125, 6 * 10**6, 3072, 768), fixed_numbers(0.02, 9 * 10**6, 3072, 768)
    h, g, state = (
        fixed_numbers(2, 0, 128, 768),
        fixed_numbers(0.001, 12 * 10**6, 128, 768),
        fp8_full.Scales(1),
    )
    bank, results = torch.stack([fc, proj])[None], []
    for _ in range(2):
        state.quantize_weights({}, bank)
        leaves = [x.clone().requires_grad_() for x in (h, fc, proj)]
        f = fp8_full.MlpProduct.apply(*leaves, state, 0)
        f.backward(g)
        results.append(
            [float(state.largest[0][kind][0]) for kind in "xpe"]
            + [x.detach().abs().sum() for x in (f, *(y.grad for y in leaves))]
        )
        state.end_of_step()
    (u8, su), (d8, sd) = state.up[0], state.down[0]
    check(
        e4m3_sum(u8) == (420968846, 0xBE280BBD)
        and e4m3_sum(d8) == (420928459, 0x8AFCD653)
        and [float(x) for x in (su, sd)]
        == [float.fromhex("0x1.24924ap-14"), float.fromhex("0x1.76db6ep-15")],
        "8-bit copies of the MLP's weights, byte by byte",
    )
    want = [
        [2, 260, 0.041015625, 1.06856e7, 22195, 1427375, 536662],
        [2, 256, 0.076660156, 7.62566e7, 38278, 2461067, 3835917],
    ]
    for got, numbers, name in zip(results, want, ("first", "second")):
        check(
            got[:2] == numbers[:2] and near(got[2:], numbers[2:], 0.01),
            f"MLP in FP8, {name} pass",
            str([round(float(x), 6) for x in got]),
        )
    scales = [float(state.scale[0][kind][0]) for kind in "xpe"]
    check(
        near(scales, [1.25 * 2 / 448, 1.25 * 256 / 448, 1.25 * 0.076660156 / 448], 0.01),
        "delayed scales of the MLP",
    )


def check_vocabulary(path):
    with open(path, "rb") as f:
        tokens = {int(line.split()[1]): base64.b64decode(line.split()[0]) for line in f if line.strip()}
    table = data.prefix_table(tokens, 50304)
    check(int((table >= 0).sum()) == 50000 and int(table.sum()) == 548_403_601, "prefixes of GPT-2's tokens")
    bits = mask.impossible(tokens, 50304)
    check(zlib.crc32(bits.tobytes()) == 0x9FEC8B33, "mask of impossible tokens, byte by byte")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check_vocabulary(sys.argv[1])
    for part in (check_facts, check_schedule, check_paired_attention, check_run, check_fp8, check_fp8_up):
        part()
    for part in (check_fp8_narrow, check_records, check_qkv, check_mlp_full):
        part()
    for small in (SMALL, NARROW):
        check_gradients(small)
    print(f"1..{count}")
    raise SystemExit(failures != 0)
