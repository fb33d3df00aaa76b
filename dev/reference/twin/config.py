"""Presets and options. One table of fields; every field can be set on the command line under the C program's name."""
import argparse
import dataclasses
from dataclasses import dataclass, field

from . import record
from .record import Record

NS_NAMES = ("kj", "you", "polar", "gram", "turbo", "turbo-gram")


class BadInput(Exception):
    """The user's mistake: shown as one line, exit status 1."""


def option(default, help, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    # model
    model_dim: int = option(768, "model width d")
    num_heads: int = option(6, "attention heads H; head width is d/H")
    mlp_dim: int = option(3072, "hidden width of the MLP")
    block_size: int = option(128, "tokens in one attention window block")
    # schedule and optimizers
    num_scheduled: int = option(2245, "scheduled steps")
    num_extension: int = option(40, "extension steps")
    window_schedule: str = option("", "long windows in blocks of the stages, evenly over the scheduled steps, like 3,7,11")
    micro_batches: int = option(8, "micro-batches in one step")
    micro_batch_tokens: int = option(32768, "tokens N in one micro-batch, where the record's stages do not say")
    weight_decay: float = option(0.0, "cautious weight decay of NorMuon")
    ns: str = option("polar", "Newton-Schulz variant", NS_NAMES)
    head: str = option("fp8", "training head", ("bf16", "fp8"))
    # data
    train_files: str = option("", "glob of training shards")
    val_files: str = option("", "validation shard")
    val_tokens: int = option(10485760, "validation tokens")
    val_every: int = option(250, "validate every so many steps; 0: never")
    max_document: int = option(2048, "longest piece of a document in training, where the record's stages do not say")
    repeat: bool = option(False, "start again when the last shard ends")
    # run
    seed: int = option(1, "seed of the initial weights")
    init_from: str = option("", "safetensors file with the initial weights")
    save_init: str = option("", "write the initial weights to this safetensors file")
    save_end: str = option("", "write the weights after the last step to this safetensors file")
    steps: int = option(0, "stop after so many steps; 0: all")
    dtype: str = option("bf16", "arithmetic of the twin", ("bf16", "float32", "float64"))
    attention: str = option("dense", "attention kernel (flex and flash need a GPU)", ("dense", "flex", "flash"))
    log: str = option("", "file with one line per step: step, training loss per token, validation loss or -")
    threads: int = option(0, "CPU threads; 0: torch's choice")
    compile: bool = option(False, "torch.compile the forward and backward pass")
    # filled in from the first training shard
    vocab_size: int = 50257
    record: Record = record.FIVE_SKIPS

    @property
    def head_dim(self):
        return self.model_dim // self.num_heads

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // 128) * 128

    @property
    def num_layers(self):
        return len(self.record.layers)

    @property
    def stages(self):
        """Those of the record, with the sizes and windows that the options give; the last one is the extension."""
        stages = self.record.stages
        if self.window_schedule:
            windows = [int(w) for w in self.window_schedule.split(",")]
            if len(windows) != len(stages) - 1 and any(s.tokens for s in stages):
                raise BadInput(f"--window-schedule: '{self.window_schedule}' has {len(windows)} entries; the record's stages have sizes of "
                               f"their own and need {len(stages) - 1}")
            scheduled = stages[:-1] if len(windows) == len(stages) - 1 else (stages[0],) * len(windows)
            stages = tuple(dataclasses.replace(s, window=w) for s, w in zip(scheduled, windows)) + stages[-1:]
        return tuple(dataclasses.replace(s, tokens=s.tokens or self.micro_batch_tokens,
                                         max_document=s.max_document or self.max_document) for s in stages)

    @property
    def total_steps(self):
        return self.num_scheduled + self.num_extension

    def check(self):
        """Raises BadInput when the sizes do not go together."""
        if self.model_dim < 12 or self.num_heads < 1 or self.model_dim % self.num_heads:
            raise BadInput("--model-dim must be at least 12 and a multiple of --num-heads")
        if self.head_dim % 4 or self.head_dim < 8:
            raise BadInput(f"head width {self.head_dim} must be a multiple of 4, at least 8")
        if self.window_schedule and not all(w.isdecimal() and int(w) > 0 for w in self.window_schedule.split(",")):
            raise BadInput(f"--window-schedule: '{self.window_schedule}' is not a list like 3,7,11")
        for name in ("mlp_dim", "block_size", "num_scheduled", "micro_batches", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} must be at least 1")
        self.stages
        return self


PRESETS = {
    "2025-10-27": {},
    "2025-11-10": dict(num_scheduled=2205, weight_decay=1.2),
    "2025-11-18": dict(num_scheduled=2185, weight_decay=1.2, record=record.ONE_SKIP),
    "2025-11-29": dict(num_scheduled=2120, weight_decay=1.2, record=record.GROWING),
    "2025-12-10": dict(num_scheduled=2120, weight_decay=1.2, record=record.FACTOR_ON_QKV),
    "tiny": dict(num_scheduled=300, num_extension=20, weight_decay=1.2, record=record.ONE_SKIP, model_dim=64, num_heads=2, mlp_dim=256,
                 block_size=16, micro_batch_tokens=512, val_tokens=65536, val_every=50, head="bf16"),
    "toy": dict(record=record.toy(), model_dim=24, num_heads=3, mlp_dim=40, block_size=8, micro_batch_tokens=64, num_scheduled=12,
                num_extension=4, val_tokens=512, val_every=5, head="bf16"),
}


def preset(name, **overrides):
    return dataclasses.replace(Config(**PRESETS[name]), **overrides)


def parse(argv, description):
    """(Config, preset name) from the command line; argparse itself ends the program with status 2 on a wrong option."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, default="2025-10-27")
    for f in dataclasses.fields(Config):
        if "help" not in f.metadata:
            continue
        name = "--" + f.name.replace("_", "-")
        if f.type is bool:
            parser.add_argument(name, dest=f.name, action="store_true", default=None, help=f.metadata["help"])
        else:
            parser.add_argument(name, dest=f.name, type=f.type, choices=f.metadata["choices"], default=None,
                                help=f.metadata["help"])
    args = vars(parser.parse_args(argv))
    name = args.pop("preset")
    return preset(name, **{k: v for k, v in args.items() if v is not None}).check(), name
