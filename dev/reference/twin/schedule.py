"""Learning rate, momentum, window sizes and YaRN as functions of the step t (from 0)."""
import math

import torch

WINDOWS = (3, 7, 11)      # blocks, evenly over the scheduled steps
EXTENSION_WINDOW = 13
FINAL_WINDOW = 20         # the last validation only
COOLDOWN = 0.5
WARMUP_STEPS = 300        # of the momentum; neither of the two scales with the length of the run
COOLDOWN_STEPS = 50


def lr_factor(t, scheduled):
    u = min(0.9999, t / scheduled)
    if u < 1 - COOLDOWN:
        return 1.0
    w = (1 - u) / COOLDOWN
    return w + 0.1 * (1 - w)


def momentum(t, total):
    if t < WARMUP_STEPS:
        return 0.85 + 0.1 * t / WARMUP_STEPS
    if t > total - COOLDOWN_STEPS:
        return 0.95 - 0.1 * (t - (total - COOLDOWN_STEPS)) / COOLDOWN_STEPS
    return 0.95


def long_window(t, scheduled, windows=WINDOWS):
    """Blocks seen by the long-window layers; the short ones see half, rounded down."""
    return EXTENSION_WINDOW if t >= scheduled else windows[len(windows) * t // scheduled]


class Yarn:
    """Rope frequencies (head width e: e/2 of them, the upper half zero) and attention scale, following the window."""

    def __init__(self, head_dim, block_size, dtype, device="cpu", window=WINDOWS[0]):
        n = head_dim // 4
        f = torch.tensor([(1 / 1024) ** (j / (n - 1)) for j in range(n)] + [0.0] * n, dtype=torch.float64)
        self.frequencies = f.to(device=device, dtype=dtype)
        self.block_size, self.window, self.scale = block_size, window, 0.1

    def set_window(self, window):
        a, b = self.window, window
        if a == b:
            return
        r = self.block_size * a * self.frequencies / (2 * math.pi)
        g = ((r - 1) / 31).clamp(0, 1)
        self.frequencies = self.frequencies * (a / b + g * (1 - a / b))
        self.scale *= 1 + 0.2 * math.log(b / a)
        self.window = window

    def tables(self, length, out_dtype):
        """cos, sin [length, head_dim/2]; the angle is formed in the frequencies' precision."""
        t = torch.arange(length, dtype=self.frequencies.dtype, device=self.frequencies.device)
        angle = torch.outer(t, self.frequencies)
        return angle.cos().to(out_dtype), angle.sin().to(out_dtype)
