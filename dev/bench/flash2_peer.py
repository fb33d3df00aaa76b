#!/usr/bin/env python3
"""Time of FlashAttention-2, as PyTorch ships it, on the documents, windows and sizes of bench_attention.

Backward is attention's alone; bench_attention's goes down to the gradients of q, k and v before norm and rope, with gates.
"""
import argparse
import csv
import ctypes
import datetime
import math

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


def milliseconds(torch, call):
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


def passes(torch, ends, window):
    """Both passes over these documents, as calls without arguments."""
    ops, most = torch.ops.aten, max(b - a for a, b in zip(ends, ends[1:]))
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    q, k, v, dy = (torch.randn(ends[-1], HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    sides = dict(scale=SCALE, window_size_left=window, window_size_right=0)

    def forward():
        return ops._flash_attention_forward(q, k, v, cu, cu, most, most, 0.0, True, False, **sides)

    y, lse, state, unused, _ = forward()

    def backward():
        return ops._flash_attention_backward(dy, q, k, v, y, lse, cu, cu, most, most, 0.0, True, state, unused, **sides)

    return {"forward": forward, "backward": backward}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="FILE", help="append the figures to it")
    parser.add_argument("--deterministic", action="store_true", help="gradients in a fixed order of sums")
    options = parser.parse_args()
    import torch
    torch.use_deterministic_algorithms(options.deterministic)
    order = ", deterministic" if options.deterministic else ""
    rows = []
    for tokens, count, longest, windows in SIZES:
        ends = documents(tokens, count, longest)
        for window in windows:
            for name, call in passes(torch, ends, window).items():
                op, shape, ms = f"attention {name}, FlashAttention-2{order}", f"N {tokens}, window {window}", milliseconds(torch, call)
                print(f"{op}, {shape}: {ms:.3f} ms", flush=True)
                rows.append([datetime.date.today(), "-", f"1 x {torch.cuda.get_device_name()}", op, shape, f"{ms:.3f}", "ms",
                             "dev/bench/flash2_peer.py" + (" --deterministic" if order else "")])
    if options.csv:
        with open(options.csv, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


main()
