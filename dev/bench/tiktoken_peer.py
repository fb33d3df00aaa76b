"""tiktoken on the same text: its single-thread rate, and whether a shard holds the same tokens.

tiktoken_peer.py rate RANKS TEXT.jsonl            MB/s of encode_ordinary on one thread, best of three passes
tiktoken_peer.py compare RANKS TEXT.jsonl SHARD   every document led by the document token, token by token
"""
import json
import sys
import time

import numpy as np
import tiktoken
from tiktoken.load import load_tiktoken_bpe

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def load(ranks_path, text_path):
    ranks = load_tiktoken_bpe(ranks_path)
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": len(ranks)})
    with open(text_path, encoding="utf-8", errors="replace", newline="\n") as f:
        return encoding, [json.loads(line)["text"] for line in f if line.strip()]


def rate(encoding, documents):
    size = sum(len(d.encode("utf-8", errors="replace")) for d in documents)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for d in documents:
            encoding.encode_ordinary(d)
        best = min(best, time.perf_counter() - start)
    print(f"{1e-6 * size / best:.2f}")


def compare(encoding, documents, shard_path):
    raw = np.fromfile(shard_path, dtype=np.uint8)
    shard = raw[1024:].view("<u2")
    at = 0
    for number, d in enumerate(documents):
        expected = np.array([encoding.n_vocab - 1] + encoding.encode_ordinary(d), dtype=np.uint16)
        if not np.array_equal(shard[at:at + len(expected)], expected):
            sys.exit(f"document {number} differs, at token {at} of {shard_path}")
        at += len(expected)
    if at != len(shard):
        sys.exit(f"{shard_path} has {len(shard) - at} tokens too many")
    print(f"identical: {len(documents)} documents, {at} tokens")


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in ("rate", "compare"):
        sys.exit(__doc__)
    made = load(sys.argv[2], sys.argv[3])
    rate(*made) if sys.argv[1] == "rate" else compare(*made, sys.argv[4])
