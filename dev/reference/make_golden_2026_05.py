#!/usr/bin/env python3
"""Writes golden/2026-05-27*.safetensors: record 85, all of its layers at a small width. README.md describes
every tensor.

Of the files with FP8 the codes of the MLP's first product are the only roundings. A code depends on the order
of sums where its value lies next to the border between two codes; the draw is one in which every value of the
first step is further from one than NEAR times float32's error. --search lists such draws (23, 43, 78; with 43 gradients are
ill-conditioned: float32 is 1e-5 off).
"""

import dataclasses
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

import make_golden_2026 as small
from make_golden import sample_indices, save
from make_golden_2026_fp8 import Codes
from r2026 import record
from r2026.trainer import Trainer

SIZES = dict(model_dim=48, mlp_dim=64, vocab_size=61, bigram_rows=960, micro_batches=2)
STAGES = (
    record.Stage(16, 20, 3, 9, 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    record.Stage(48, 40, 9, 21, 1.52, (1.0, 0.5), (1.0, 0.0)),
    record.Stage(64, 40, 15, 33, 1.73, (1.0,), (1.0,)),
)
SCHEDULE = record.Schedule(
    scheduled=5,
    extension=3,
    stages=STAGES,
    last=record.Stage(64, 40, 18, 39, 0.15, (1.0,), (1.0,)),
    final_window=60,
    warmup=3,
    cooldown=2,
)
RECORD = dataclasses.replace(
    record.RECORDS["2026-05-27"], sizes=record.Sizes(**SIZES), schedule=SCHEDULE
)
DRAW, NEAR = 23, 6


def fp8_step(dtype, draw):
    """Codes of the weights, those of the micro-batches' inputs, losses and gradients of the first step."""
    p = {n: t.to(dtype) for n, t in small.initial_parameters(RECORD, draw).items()}
    signs, codes = small.sign_table(RECORD).to(dtype), Codes()
    batches = small.batches_of_step(RECORD, *small.make_batches(RECORD, draw), 0)
    with codes:
        trainer = Trainer(RECORD, p, signs, small.PREFIX, ("mlp-up",), half_fp8=False)
        weights = codes.take()[0::2]  # those of c_proj are not read
        losses, gradients = trainer.gradients(batches)
    return weights, codes.take(), losses, gradients


def near_codes(draw):
    """How many values of the first step are near a border; None where float32 gives other codes."""
    exact, single = fp8_step(torch.float64, draw), fp8_step(torch.float32, draw)
    if any(not torch.equal(a.codes, b.codes) for k in (0, 1) for a, b in zip(exact[k], single[k])):
        return None
    return sum(int(a.near(b, NEAR).sum()) for a, b in zip(exact[1], single[1]))


def write_fp8_gradients(name):
    assert near_codes(DRAW) == 0, "a code depends on the order of sums"
    _, _, losses, gradients = fp8_step(torch.float64, DRAW)
    out = {"loss": torch.stack(losses)}
    for n, g in gradients.items():
        g = g.flatten()
        out |= {f"grad.{n}": g[sample_indices(len(g), small.SAMPLES)], f"norm.{n}": g.norm().reshape(1)}
    save(f"{name}-fp8-gradients", None, out, gradient_samples=small.SAMPLES, **small.metadata(RECORD))


def main():
    if "--search" in sys.argv:
        for draw in range(100):
            if near_codes(draw) == 0:
                print(f"draw {draw}", flush=True)
        return
    for write in (small.write_inputs, small.write_gradients, small.write_steps):
        write("2026-05-27", RECORD, DRAW)
    write_fp8_gradients("2026-05-27")


if __name__ == "__main__":
    main()
