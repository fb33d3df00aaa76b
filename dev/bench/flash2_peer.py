#!/usr/bin/env python3
"""Time of FlashAttention-2, as PyTorch ships it, on the documents, windows and sizes of bench_attention, for the
table beside the kernels for any GPU. Backward is attention's alone; bench_attention's goes down to q, k and v
before norm and rope, with gates.

  flash2_peer.py [--csv FILE]
"""
import csv
import ctypes
import datetime
import math
import sys

import torch

HEADS, WIDTH, SCALE, REPEATS, ROUNDS = 6, 128, 0.1, 10, 5
# tokens, documents (0: as many as there are), longest document, windows: those of bench_attention
SIZES = [(32768, 47, 2048, (384, 896, 1408)), (262144, 0, 12000, (768, 2560))]
LARGEST = 2147483647  # RAND_MAX of glibc, with whose numbers bench_attention draws the lengths


def documents(tokens, count, longest):
    libc = ctypes.CDLL("libc.so.6")
    libc.srand(1)
    ends = [0]
    while ends[-1] < tokens:
        u = (libc.rand() + 1.0) / (LARGEST + 1.0)
        v = libc.rand() / LARGEST
        n = int(min(longest, 1 + 500 * math.exp(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v))))
        left, rest = tokens - ends[-1], count - len(ends)
        if count:
            n = left if rest == 0 else min(n, left - rest)
        ends.append(ends[-1] + min(n, left))
    return ends


def milliseconds(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    best = math.inf
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best / REPEATS


def main():
    path = sys.argv[2] if sys.argv[1:2] == ["--csv"] else None
    rows = []
    for tokens, count, longest, windows in SIZES:
        ends = documents(tokens, count, longest)
        most = max(b - a for a, b in zip(ends, ends[1:]))
        cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
        q, k, v, dy = (torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        for window in windows:
            # the window's own token counts: i sees j where i - j <= window
            sides = dict(scale=SCALE, window_size_left=window, window_size_right=0)
            forward = lambda: torch.ops.aten._flash_attention_forward(
                q, k, v, cu, cu, most, most, 0.0, True, False, **sides)
            y, lse, state, unused, _ = forward()
            backward = lambda: torch.ops.aten._flash_attention_backward(
                dy, q, k, v, y, lse, cu, cu, most, most, 0.0, True, state, unused, **sides)
            for name, call in (("forward", forward), ("backward", backward)):
                ms = milliseconds(call)
                print(f"attention {name}, FlashAttention-2, N {tokens}, window {window}: {ms:.3f} ms")
                rows.append([datetime.date.today(), f"PyTorch {torch.__version__}",
                             f"1 x {torch.cuda.get_device_name()}", f"attention {name}, FlashAttention-2",
                             f"N {tokens}, window {window}", f"{ms:.3f}", "ms", "dev/bench/flash2_peer.py"])
    if path:
        with open(path, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


main()
