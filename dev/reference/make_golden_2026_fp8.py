#!/usr/bin/env python3
"""Writes golden/2026-fp8*.safetensors: six steps of a small network of record 89 with the FP8 head and MLP,
every code and scale. README.md describes every tensor.

FP8's are the only roundings here, so a code depends on the order of sums where a value lies next to the
border between two codes, and nowhere else. The draw is one in which float64 and float32 give the same codes
over all steps and with either rule of the scales; --search lists such draws (11, 20, 64, ...; with 64 the C
program has them too, with OpenBLAS and without). Values within NEAR times float32's error of a border are
listed in the file: there another order of sums may decide otherwise.
"""

import dataclasses
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

from make_golden import STEPS, sample_indices, save
from make_golden_2026 import (
    PREFIX,
    SMALL,
    batches_of_step,
    initial_parameters,
    make_batches,
    metadata,
    sign_table,
    write_inputs,
)
from r2026 import fp8, record
from r2026.trainer import Trainer

# Rates are a tenth: Newton-Schulz makes much of the errors of gradients that have small singular values, and
# the weights must be known to float32. Few hidden channels make a small file.
PEAKS = 0.1, 0.152, 0.173
STAGES = tuple(dataclasses.replace(s, peak=p) for s, p in zip(SMALL.schedule.stages, PEAKS))
RECORD = dataclasses.replace(
    SMALL,
    sizes=dataclasses.replace(SMALL.sizes, mlp_dim=16),
    schedule=dataclasses.replace(SMALL.schedule, stages=STAGES),
)
TABLE = record.parameters(RECORD)
LAYERS, DRAW, SAMPLES, NEAR = len(RECORD.layers), 64, 160, 8


class Quantised:
    """x that became y. codes: bytes; a zero has no sign."""

    def __init__(self, x, y, dtype, limit):
        self.x, self.dtype, self.limit = x, dtype, limit
        self.codes = self.bytes(y)

    def bytes(self, y):
        return (y + 0.0).to(self.dtype).view(torch.uint8)

    def near(self, single, times=NEAR):
        """Where a border is near; single: the same of a float32 run, whose error counts so many times."""
        error = times * (self.x - single.x).square().mean().sqrt()
        others = [self.bytes(fp8.quantize(self.x + e, self.dtype, self.limit)) for e in (error, -error)]
        return (others[0] != self.codes) | (others[1] != self.codes)


class Codes:
    """While it is open, notes what is quantised."""

    def __init__(self):
        self.plain, self.now = fp8.quantize, []

    def __enter__(self):
        fp8.quantize = self.quantize

    def __exit__(self, *_):
        fp8.quantize = self.plain

    def quantize(self, x, dtype, limit):
        y = self.plain(x, dtype, limit)
        self.now.append(Quantised(x.detach().double(), y.detach(), dtype, limit))
        return y

    def take(self):
        """Those since the last call."""
        codes, self.now = self.now, []
        return codes


def make_trainer(dtype, draw, sequential):
    p = {n: t.to(dtype) for n, t in initial_parameters(RECORD, draw).items()}
    return Trainer(
        RECORD,
        p,
        sign_table(RECORD).to(dtype),
        PREFIX,
        RECORD.fp8,
        sequential=sequential,
        half_fp8=False,
    )


def run(dtype, draw, sequential):
    """Step by step: codes of the weights, codes of its micro-batches, scales, losses, gradients."""
    inputs, codes, scales = make_batches(RECORD, draw), Codes(), {}
    with codes:
        trainer = make_trainer(dtype, draw, sequential)
    state, plain = trainer.model.mlp_state, trainer.model.loss

    def note(key, x):
        scales.setdefault(key, []).append(torch.as_tensor(x, dtype=torch.float64))

    def watched(*args):
        note("activation_scale", state.activation)
        loss = plain(*args)
        note("largest", state.largest)
        return loss

    trainer.model.loss = watched
    for t in range(STEPS):
        weights, batches = codes.take(), batches_of_step(RECORD, *inputs, t)
        scales.clear()
        note("up_scale", [state.up[i][1] for i in range(LAYERS)])
        note("down_scale", [state.down_scale[i] for i in range(LAYERS)])
        with codes:
            losses, gradients = trainer.gradients(batches)
        micro = codes.take()
        yield weights, micro, {k: torch.stack(v) for k, v in scales.items()}, torch.stack(losses), gradients
        with codes:
            trainer.update(gradients)


def draw_is_good(draw, sequential):
    pairs = zip(run(torch.float64, draw, sequential), run(torch.float32, draw, sequential))
    return all(torch.equal(x.codes, y.codes) for a, b in pairs for x, y in zip(a[0] + a[1], b[0] + b[1]))


def write_run(name, sequential):
    assert draw_is_good(DRAW, sequential), f"{name}: a code depends on the order of sums"
    out, pending = {}, {}

    def append(key, x):
        out.setdefault(key, []).append(x)

    runs = zip(run(torch.float64, DRAW, sequential), run(torch.float32, DRAW, sequential))
    for t, ((weights, micro, scales, losses, gradients), (_, single, *_)) in enumerate(runs):
        append("codes.up", torch.stack([x.codes for x in weights[0::2]]))
        append("codes.down", torch.stack([x.codes for x in weights[1::2]]).mT)
        append("codes.head", micro[2 * LAYERS + 1].codes.mT)
        # Of a micro-batch: (input, activation) of every layer, the head's input and weights; then gradients.
        for first in range(0, len(micro), 2 * LAYERS + 3):
            for i in range(first, first + 2 * LAYERS + 1):
                key = "final" if i == first + 2 * LAYERS else ("input", "activation")[(i - first) % 2]
                append(f"codes.{key}", micro[i].codes.flatten())
                append(f"near.{key}", micro[i].near(single[i]).flatten())
        append("loss", losses)
        for key, x in scales.items():
            append(key, x.squeeze(0))
        if t <= RECORD.schedule.last_tied():
            both = gradients["lm_head.weight"] + gradients["embed.weight"].t()
            gradients = gradients | {"lm_head.weight": both}
        for key, x in gradients.items():
            if t % 2 and TABLE[key].optimizer == "adam":
                x = x + pending[key]
            append(f"grad.{key}", x.flatten()[sample_indices(x.numel(), SAMPLES)])
            append(f"norm.{key}", x.norm())
        pending = gradients
    for key in ("input", "activation", "final"):
        out[f"codes.{key}"] = [torch.cat(out[f"codes.{key}"])]
        out[f"near.{key}"] = [torch.cat(out[f"near.{key}"]).nonzero().flatten()]
        print(f"   {key}: {len(out[f'near.{key}'][0])} of {len(out[f'codes.{key}'][0])} codes near a border")
    whole = {k: v[0] if len(v) == 1 else torch.stack(v) for k, v in out.items()}
    save(name, None, whole, draw=DRAW, gradient_samples=SAMPLES, **metadata(RECORD))


def main():
    if "--search" in sys.argv:
        for draw in range(100):
            if draw_is_good(draw, False) and draw_is_good(draw, True):
                print(f"draw {draw}", flush=True)
        return
    write_inputs("2026-fp8", RECORD, DRAW)
    for sequential in (False, True):
        write_run(f"2026-fp8-steps{'-sequential' if sequential else ''}", sequential)


if __name__ == "__main__":
    main()
