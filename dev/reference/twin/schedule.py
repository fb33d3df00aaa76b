"""Stage, learning rate, momentum and YaRN as functions of the step t (from 0), by the tables of the run's record."""
import math

import torch


def begins(cfg):
    """First step of every stage and of the extension."""
    n, scheduled = len(cfg.stages) - 1, cfg.num_scheduled
    if cfg.record.starts == "up":
        return [-(-k * scheduled // n) for k in range(n + 1)]
    return [(2 * k * scheduled + n) // (2 * n) for k in range(n + 1)]


def stage(cfg, t):
    return cfg.stages[sum(t >= b for b in begins(cfg)[1:])]


def peak_rate(cfg, t):
    """The rate of a stage holds from its first step on, or where t / S is beyond its rate_after."""
    peak = cfg.stages[0].rate
    for s, begin in zip(cfg.stages[1:-1], begins(cfg)[1:]):
        if (t >= begin if s.rate_after is None else t / cfg.num_scheduled > s.rate_after):
            peak = s.rate
    return cfg.stages[-1].rate if t >= cfg.num_scheduled else peak


def lr_factor(cfg, t):
    r, peak, u = cfg.record, peak_rate(cfg, t), min(1.0 if cfg.record.to_floor else 0.9999, t / cfg.num_scheduled)
    if u < 1 - r.cooldown:
        return peak
    w = (1 - u) / r.cooldown
    return peak * w + r.floor * (1 - w)


def momentum(cfg, t):
    r, start = cfg.record, cfg.total_steps - cfg.record.cooldown_steps
    if t < r.warmup_steps:
        return 0.85 + 0.1 * t / r.warmup_steps
    if t > start:
        return 0.95 - 0.1 * (t - start) / r.cooldown_steps
    return 0.95


class Yarn:
    """Rope frequencies (head width e: e/2 of them, the upper half zero) and attention scale, following the long window."""

    def __init__(self, head_dim, block_size, dtype, window, device="cpu"):
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
