#!/usr/bin/env python3
"""Trains with the PyTorch twin, under the option names of the C program."""
import os
import sys
import time

from twin import config

if "--help" in sys.argv:  # before the imports below, which not every machine has
    config.parse(["--help"], __doc__)

import torch

from twin import data, model, record, schedule
from twin.trainer import Trainer


def initial_parameters(cfg):
    if cfg.init_from:
        return model.load_parameters(cfg, cfg.init_from)
    return model.init_parameters(cfg, torch.Generator().manual_seed(cfg.seed))


def save_parameters(cfg, parameters, path):
    from safetensors.torch import save_file
    table = record.tensors(cfg)
    save_file({n: t.bfloat16() if table[n].spec.storage == "bf16" else t for n, t in parameters.items()}, path)


def train(cfg, log):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and cfg.attention != "dense":
        raise config.BadInput(f"--attention {cfg.attention} needs a GPU; use dense")
    if cfg.compile and cfg.attention == "flex":
        raise config.BadInput("--attention flex compiles itself and does not go with --compile; use flash")
    shard = data.Shard(data.find_shards(cfg.train_files)[0])
    cfg.vocab_size = shard.vocab_size
    parameters = initial_parameters(cfg)
    if cfg.save_init:
        save_parameters(cfg, parameters, cfg.save_init)
    print(f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads, {cfg.dtype}, head {cfg.head}, "
          f"attention {cfg.attention}{', compiled' if cfg.compile else ''}; "
          f"{sum(t.numel() for t in parameters.values()):,} parameters", flush=True)
    trainer = Trainer(cfg, parameters, device)
    steps = data.training_steps(cfg)
    last = min(cfg.steps or cfg.total_steps, cfg.total_steps)
    spent, recent, seen = 0.0, [], 0
    for t in range(last + 1):
        final = t == cfg.total_steps
        val = None
        if cfg.val_files and cfg.val_every and (t % cfg.val_every == 0 or t == last):
            val = trainer.validate(final)
            print(f"step:{t}/{cfg.total_steps} val_loss:{val:.4f}", flush=True)
        if t == last:
            log(t, None, val)
            break
        begin = time.perf_counter()
        batches = [model.Batch(*b, device) for b in next(steps)]
        tokens = cfg.micro_batches * schedule.stage(cfg, t).tokens
        loss, seen = float(sum(trainer.step(batches))) / tokens, seen + tokens
        recent.append(time.perf_counter() - begin)
        spent += recent[-1]
        log(t, loss, val)
        print(f"step:{t + 1}/{cfg.total_steps} loss:{loss:.4f} {1e3 * recent[-1]:.1f}ms", flush=True)
    if cfg.save_end:
        save_parameters(cfg, {n: t.detach().float().cpu() for n, t in trainer.model.p.items()}, cfg.save_end)
    if recent:
        middle = sorted(recent)[len(recent) // 2]
        print(f"{len(recent)} steps in {spent:.1f} s; median {1e3 * middle:.1f} ms a step, {seen / len(recent) / middle:.0f} tokens/s")
    if device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() >> 20} MiB")


def main(argv):
    cfg, _ = config.parse(argv, __doc__)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    out = open(cfg.log, "w") if cfg.log else None

    def log(t, loss, val):
        if out:
            show = lambda x: "-" if x is None else f"{x:.6f}"
            print(t, show(loss), show(val), file=out, flush=True)
    try:
        train(cfg, log)
    except config.BadInput as e:
        print(f"{os.path.basename(sys.argv[0])}: error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
