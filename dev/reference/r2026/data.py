"""What a batch of this record needs beside its tokens: rows of the bigram and sign tables, and the table of
prefixes.
"""

import torch

from .model import Batch

HASH_CURRENT, HASH_PREVIOUS = 36313, 27191


def wrapped(x):
    """int64 arithmetic as 32-bit signed integers would do it."""
    return (x + 2**31) % 2**32 - 2**31


def bigram_rows(tokens, rows):
    """Rows of the bigram table for a packed sequence [N]: the last row at position 0, whose token counts as
    `rows` - 1 for position 1.
    """
    previous = torch.cat([tokens[:1], tokens[:-1]]).clone()
    if len(previous) > 1:
        previous[1] = rows - 1
    mixed = wrapped(HASH_CURRENT * tokens) ^ wrapped(HASH_PREVIOUS * previous)
    out = mixed % (rows - 1)
    out[0] = rows - 1
    return out


def sign_rows(tokens, rows):
    previous = torch.cat([tokens[:1], tokens[:-1]])
    return (previous ^ tokens) % rows  # 0 at position 0


def make_batch(tokens, cu_seqlens, sizes):
    """tokens [N+1], cu_seqlens from 0 to N."""
    inputs = tokens[:-1]
    return Batch(
        tokens, cu_seqlens, bigram_rows(inputs, sizes.bigram_rows), sign_rows(inputs, sizes.sign_rows)
    )


def prefix_table(token_bytes, padded_vocab):
    """[padded_vocab]: for each token the longest proper prefix of its bytes that is a token itself, else -1.
    token_bytes: {id: bytes}.
    """
    ids = {b: i for i, b in token_bytes.items()}
    table = torch.full((padded_vocab,), -1, dtype=torch.int64)
    for i, b in token_bytes.items():
        for n in range(len(b) - 1, 0, -1):
            if b[:n] in ids:
                table[i] = ids[b[:n]]
                break
    return table
