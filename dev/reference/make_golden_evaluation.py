#!/usr/bin/env python3
"""Writes golden/evaluation-*.safetensors: losses of the made-up evaluation files of dev/test/EvalMaterial.pm, text by
text, on made-up weights, with two networks: 2025-11-18 and that of the golden files 2026-*. README.md describes the
tensors.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import torch

import make_golden_2026
from make_golden import save
from r2026 import data as data_2026
from r2026 import record as record_2026
from r2026.record import Record, Schedule, Sizes
from r2026.trainer import Trainer as Trainer2026
from twin import config, record
from twin.model import Batch
from twin.trainer import Trainer

DOCUMENT, VOCABULARY = 256, 257  # of bytes
SCHEDULED, EXTENSION, PIECE = 6, 2, 48


def made_up(name, shape):
    """As EvalMaterial.pm makes it."""
    state = 7
    for byte in name.encode():
        state = (state * 31 + byte) % 2**31
    if "sign" in name:
        scale = 0
    else:
        scale = 2**-7 if re.search("embed|head|scalars|lambdas|scale|b2", name) else 2**-9
    values = []
    for _ in range(math.prod(shape)):
        state = (state * 1103515245 + 12345) % 2**31
        bits = state >> 16
        values.append((bits % 255 - 127) * scale if scale else 2 * (bits & 1) - 1)
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


# ---- texts ------------------------------------------------------------------------------------------------


def read_texts(folder):
    """{task: [(tokens, how many of them are scored), ...]}; a token is a byte."""

    def lines(name):
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    def text(context, end):
        context, end = list(context.encode()), list(end.encode())
        return context + end, len(end)

    hellaswag = lines("hellaswag.jsonl")
    out = {"hellaswag": [text(i["ctx"], " " + end) for i in hellaswag for end in i["endings"]]}
    out["lambada"] = [
        text(*(i["text"][:at], i["text"][at:]))
        for i in lines("lambada.jsonl")
        for at in [i["text"].rindex(" ")]
    ]
    with open(os.path.join(folder, "text.txt"), "rb") as f:
        whole = list(f.read())
    pieces = -(-len(whole) // PIECE)
    cuts = [len(whole) * i // pieces for i in range(pieces + 1)]
    out["text"] = [([DOCUMENT] + whole[a:b], b - a) for a, b in zip(cuts, cuts[1:])]
    return out, [i["label"] for i in hellaswag]


def sequence(tokens):
    """A text alone, behind document tokens of other documents: (tokens, boundaries)."""
    lead = [DOCUMENT] * 3
    packed = torch.tensor(lead + tokens)
    return packed, torch.tensor([0, 2, 3, len(packed) - 1])


# ---- networks: each gives the logits, capped, of a sequence -------------------------------------------------


def network_2025():
    cfg = config.preset(
        "2025-11-18",
        model_dim=32,
        num_heads=2,
        mlp_dim=64,
        block_size=4,
        vocab_size=VOCABULARY,
        num_scheduled=SCHEDULED,
        num_extension=EXTENSION,
        dtype="float64",
    )
    parameters = {n: made_up(n, t.shape) for n, t in record.tensors(cfg).items()}
    trainer = Trainer(cfg, parameters)
    for t in range(cfg.total_steps + 1):
        trainer.set_window(t)

    def logits(tokens, boundaries):
        short = trainer.yarn.window // 2
        batch, rope = Batch(tokens, boundaries), trainer._rope(len(tokens) - 1)
        x = trainer.model.hidden(batch, rope, trainer.yarn.scale, short, cfg.record.final_window)
        head = cfg.record.head
        return head.cap * torch.sigmoid(x @ trainer.model.parameter("head").t() / head.slope)

    return logits


def network_2026():
    sizes = Sizes(**(make_golden_2026.SIZES | dict(vocab_size=VOCABULARY)))
    schedule = make_golden_2026.SCHEDULE | dict(scheduled=SCHEDULED, extension=EXTENSION)
    stages = dict(stages=make_golden_2026.STAGES, last=make_golden_2026.EXTENSION)
    r = Record(
        sizes, make_golden_2026.LAYERS, early=1, late=3, dc_window=7, schedule=Schedule(**stages, **schedule)
    )
    parameters = {n: made_up(n, p.shape) for n, p in record_2026.parameters(r).items()}
    signs = made_up("bigram_sign_table", (sizes.sign_rows, sizes.model_dim))
    trainer = Trainer2026(r, parameters, signs, make_golden_2026.PREFIX)
    for trainer.t in range(r.schedule.total + 1):
        short, _ = trainer.follow()

    def logits(tokens, boundaries):
        batch = data_2026.make_batch(tokens, boundaries, sizes)
        x = trainer.model.hidden(batch, (short, r.schedule.final_window), trainer.rope, False)
        return 23.0 * torch.sigmoid((x @ trainer.model.p["lm_head.weight"] + 5.0) / 7.5)

    return logits


# ---- golden files -----------------------------------------------------------------------------------------


@torch.no_grad()
def losses(logits, texts):
    """Summed over the scored tokens of each text."""
    out = []
    for tokens, scored in texts:
        packed, boundaries = sequence(tokens)
        log_p = logits(packed, boundaries)[-scored:].log_softmax(-1)
        out.append(-log_p.gather(1, packed[-scored:, None]).sum())
    return torch.stack(out)


def accuracies(losses, texts, labels):
    """(by the sum of the loss, by its mean a token), as numbers of right items."""
    tokens = torch.tensor([scored for _, scored in texts])
    labels = torch.tensor(labels)
    return torch.tensor([int((x.view(-1, 4).argmin(1) == labels).sum()) for x in (losses, losses / tokens)])


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["perl", os.path.join(here, "../test/EvalMaterial.pm"), folder], check=True)
        texts, labels = read_texts(folder)
    for name, network in ("2025-11-18", network_2025), ("toy-2026", network_2026):
        logits = network()
        out = {task: losses(logits, texts[task]) for task in texts}
        out["right"] = accuracies(out["hellaswag"], texts["hellaswag"], labels).to(torch.int32)
        nats = float(out["text"].sum()) / sum(scored for _, scored in texts["text"])
        save(f"evaluation-{name}", None, out, bits_per_byte=f"{nats / math.log(2):.6f}")
        print(name, out["right"].tolist(), nats / math.log(2))


main()
