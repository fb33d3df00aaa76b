#!/usr/bin/env python3
"""HellaSwag of a checkpoint by the PyTorch twin, beside what `train_gpt --eval` found.

usage: evaluate.py HELLASWAG.jsonl CHECKPOINT.safetensors --vocab DIR [--items FILE] [options of train.py]

--vocab: folder with encoder.json and vocab.bpe, read by tiktoken. --items: what `train_gpt --eval-items` wrote for
the same file: says how far its losses are from these, and how many choices differ. Of train.py's options --preset,
--num-scheduled and --num-extension must be those of the checkpoint's run. Every text is computed alone, in the
dtype of --dtype, float32 by default.
"""

import argparse
import json
import os
import sys

if "--help" in sys.argv:  # before the imports below, which not every machine has
    print(__doc__)
    sys.exit(0)

import tiktoken
import torch
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from twin import config
from twin.config import BadInput
from twin.model import Batch, load_parameters
from twin.trainer import Trainer

DOCUMENT = 50256
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def read_items(path, encode):
    """[(right ending, [(tokens, how many of them are scored), one for each ending]), ...]"""
    with open(path, encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    texts = [[(encode(i["ctx"]), encode(" " + end)) for end in i["endings"]] for i in lines]
    return [(i["label"], [(c + e, len(e)) for c, e in t]) for i, t in zip(lines, texts)]


def network(cfg, path, device):
    """Losses of the last n tokens of a text: a function of (tokens, n)."""
    trainer = Trainer(cfg, load_parameters(cfg, path), device)
    for t in range(cfg.total_steps + 1):
        trainer.set_window(t)

    @torch.no_grad()
    def losses(tokens, scored):
        # The text is a document of its own, behind document tokens of others.
        packed = torch.tensor([DOCUMENT] * 3 + tokens)
        batch = Batch(packed, torch.tensor([0, 2, 3, len(packed) - 1]), device)
        short, last = trainer.yarn.window // 2, cfg.record.final_window
        rope = trainer._rope(len(packed) - 1)
        x = trainer.model.hidden(batch, rope, trainer.yarn.scale, short, last)[-scored:]
        head = cfg.record.head
        logits = x.double() @ trainer.model.parameter("head").double().t()
        log_p = (head.cap * torch.sigmoid(logits / head.slope)).log_softmax(-1)
        return -log_p.gather(1, packed[-scored:, None].to(device)).sum()

    return losses


def compare(path, losses, choices):
    with open(path, encoding="utf-8") as f:
        ours = [i for i in map(json.loads, f) if i["task"] == "hellaswag"]
    if len(ours) != len(losses):
        raise BadInput(f"{path}: {len(ours)} items of hellaswag, the file has {len(losses)}")
    difference = torch.tensor([i["losses"] for i in ours], dtype=torch.float64) / losses - 1
    differ = [sum(i[key] != c[n] for i, c in zip(ours, choices)) for n, key in enumerate(("choice", "choice_normalised"))]
    print(
        f"losses of {losses.numel()} texts: relative difference {difference.mean():+.2e} in the mean, "
        f"{difference.square().mean().sqrt():.2e} root mean square, {difference.abs().max():.2e} at most; "
        f"other choices: {differ[0]}, normalised {differ[1]}"
    )


def main():
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("checkpoint")
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--items")
    mine, rest = parser.parse_known_args()
    cfg, _ = config.parse(["--dtype", "float32"] + rest, __doc__)
    ranks = data_gym_to_mergeable_bpe_ranks(*(os.path.join(mine.vocab, n) for n in ("vocab.bpe", "encoder.json")))
    ranks.pop("<|endoftext|>", None)
    encode = tiktoken.Encoding("gpt2", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={}).encode_ordinary
    items = read_items(mine.file, encode)
    run = network(cfg, mine.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    losses = torch.tensor([[float(run(*text)) for text in texts] for _, texts in items], dtype=torch.float64)
    scored = torch.tensor([[n for _, n in texts] for _, texts in items])
    labels = torch.tensor([label for label, _ in items])
    choices = torch.stack([losses.argmin(1), (losses / scored).argmin(1)], 1)
    right = (choices == labels[:, None]).double().mean(0)
    print(f"accuracy {right[0]:.4f}, accuracy_normalised {right[1]:.4f}; {len(items)} items")
    if mine.items:
        compare(mine.items, losses, choices.tolist())


try:
    main()
except (BadInput, OSError, ValueError) as e:
    sys.exit(print(f"evaluate.py: error: {e}", file=sys.stderr) or 1)
