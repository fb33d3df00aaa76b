"""Token shards, document-aligned training batches, validation sequences."""
import glob
import os

import numpy as np
import torch

from . import schedule
from .config import BadInput

MAGIC, VERSION, HEADER_WORDS = 20240520, 1, 256
GPT2_VOCAB, GPT2_DOCUMENT = 50257, 50256


class Shard:
    """tokens: uint16 array (memory-mapped); vocab_size; document: id that begins every document."""

    def __init__(self, path):
        self.path = path
        try:
            size = os.path.getsize(path)
            header = np.fromfile(path, dtype="<i4", count=HEADER_WORDS)
        except OSError as e:
            raise BadInput(f"{path}: {e.strerror}")
        if len(header) < HEADER_WORDS or header[0] != MAGIC or header[1] != VERSION:
            raise BadInput(f"{path}: not a token shard (magic {MAGIC}, version {VERSION} expected)")
        count = int(header[2])
        if count <= 0 or size != 4 * HEADER_WORDS + 2 * count:
            raise BadInput(f"{path}: {size} bytes, but the header's {count} tokens need {4 * HEADER_WORDS + 2 * count}")
        self.vocab_size = int(header[3]) or GPT2_VOCAB
        self.document = int(header[4]) - 1 if header[4] else GPT2_DOCUMENT
        self.tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_WORDS, shape=(count,))
        if int(self.tokens.max()) >= self.vocab_size:
            raise BadInput(f"{path}: token {int(self.tokens.max())} is outside the vocabulary of {self.vocab_size}")
        self.starts = np.flatnonzero(self.tokens == self.document)
        if not len(self.starts):
            raise BadInput(f"{path}: no document start (token {self.document})")


def write_shard(path, tokens, vocab_size=0, document=None):
    """Used by the checks; vocab_size 0 and document None mean GPT-2."""
    header = np.zeros(HEADER_WORDS, "<i4")
    header[:5] = MAGIC, VERSION, len(tokens), vocab_size, 0 if document is None else document + 1
    with open(path, "wb") as f:
        f.write(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


def find_shards(pattern):
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise BadInput(f"no file matches '{pattern}'")
    return paths


def pack(shard, document, n, cap):
    """One micro-batch from the shard's document number `document` on: (tokens [n+1], cu_seqlens, next document), or None."""
    ends = np.append(shard.starts[1:], len(shard.tokens))
    pieces, boundaries, got = [], [], 0
    while got < n + 1:
        if document == len(shard.starts):
            return None
        begin = int(shard.starts[document])
        length = min(int(ends[document]) - begin, cap, n + 1 - got)
        if got < n:                                            # a document whose only token is a target opens no segment
            boundaries.append(got)
        pieces.append(shard.tokens[begin:begin + length])
        got, document = got + length, document + 1
    tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    return tokens, torch.tensor(boundaries + [n]), document


def training_steps(cfg):
    """Yields, for every step, the list of its micro-batches (tokens, cu_seqlens); whole groups only, shard after shard. A new
    stage's first batch begins where the stage before ended.
    """
    paths, t = find_shards(cfg.train_files), 0
    while True:
        for path in paths:
            shard, document, groups = Shard(path), 0, 0
            while True:
                group, stage = [], schedule.stage(cfg, t)
                while len(group) < cfg.micro_batches:
                    packed = pack(shard, document, stage.tokens, stage.max_document)
                    if packed is None:
                        break
                    group.append(packed[:2])
                    document = packed[2]
                if len(group) < cfg.micro_batches:
                    break
                groups, t = groups + 1, t + 1
                yield group
            if not groups:
                raise BadInput(f"{path}: holds no complete group of {cfg.micro_batches} x {stage.tokens} tokens")
        if not cfg.repeat:
            raise BadInput(f"the training shards '{cfg.train_files}' are used up; more shards or --repeat are needed")


def validation_sequences(cfg):
    """The first val_tokens tokens in order, cut into equal sequences; documents begin at every document token."""
    shard = Shard(find_shards(cfg.val_files)[0])
    length = min(8 * cfg.micro_batch_tokens, cfg.val_tokens)
    if length < 1 or cfg.val_tokens % length:
        raise BadInput(f"--val-tokens {cfg.val_tokens} is not a positive multiple of {length} (8 micro-batches)")
    if len(shard.tokens) < cfg.val_tokens + 1:
        raise BadInput(f"{shard.path}: {len(shard.tokens)} tokens, validation needs {cfg.val_tokens + 1}; use --val-tokens")
    for begin in range(0, cfg.val_tokens, length):
        tokens = torch.from_numpy(shard.tokens[begin:begin + length + 1].astype(np.int64))
        starts = torch.nonzero(tokens[1:-1] == shard.document).flatten() + 1
        yield tokens, torch.cat([torch.tensor([0]), starts, torch.tensor([length])])
