"""Adam and NorMuon by the rows of the parameter table, the tied head, and the parity of updates."""

import torch

from twin.newton_schulz import orthogonalize

from . import record

ADAM_LR, ADAM_DECAY, ADAM_EPS = 0.008, 0.005, 1e-10
NORMUON_LR, NORMUON_DECAY, NORMUON_BETA2, FLOOR = 0.023, 1.2, 0.9, 1e-10


class Optimizers:
    """Banks move at every step, all else at odd ones. half: bf16-stored tensors are rounded, Newton-Schulz
    runs in bf16.

    p: {name: leaf}; table: {name: Param}, of other tensors than the record's. While the head is tied,
    embed.weight is lm_head.weight transposed and has no update of its own.
    """

    def __init__(self, r, p, half=False, table=None):
        self.p, self.table, self.schedule, self.half = p, table or record.parameters(r), r.schedule, half
        self.m = {n: torch.zeros_like(t) for n, t in p.items()}
        self.v = {n: torch.zeros_like(t) for n, t in p.items() if self.table[n].optimizer == "adam"}
        self.count = {n: 0 for n in self.v}
        self.second = {}
        self.pending = {n: torch.zeros_like(t) for n, t in p.items() if self.table[n].optimizer == "adam"}
        self.tied = True

    @torch.no_grad()
    def step(self, t, gradients):
        """gradients: {name: tensor} of step t alone. Adam sums those of an even and the following odd
        step.
        """
        factor = self.schedule.rate(t)
        for name, total in self.pending.items():
            total.add_(gradients[name])
        if t % 2:
            self.adam_step(factor)
            for total in self.pending.values():
                total.zero_()
            if self.tied and t == self.schedule.last_tied():
                self.untie()
        for name, spec in self.table.items():
            if spec.optimizer == "normuon":
                self.normuon(name, spec, gradients[name], factor, self.schedule.momentum(t))

    def adam_step(self, factor):
        for name in self.pending:
            if name == "embed.weight" and self.tied:
                continue
            g = self.pending[name]
            if name == "lm_head.weight" and self.tied:
                g = g + self.pending["embed.weight"].t()
            self.adam(name, self.table[name], g, factor)
        if self.tied:
            self.p["embed.weight"].copy_(self.p["lm_head.weight"].t())

    def untie(self):
        """Embedding and head part: the embedding goes on with the head's moments and count."""
        self.tied = False
        for state in (self.m, self.v):
            state["embed.weight"].copy_(state["lm_head.weight"].t())
        self.count["embed.weight"] = self.count["lm_head.weight"]

    def adam(self, name, spec, g, factor):
        p, m, v, (b1, b2) = self.p[name], self.m[name], self.v[name], spec.betas
        self.count[name] += 1
        k, lr = self.count[name], ADAM_LR * factor * spec.lr
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        u = lr * (1 - b2**k) ** 0.5 / (1 - b1**k) * m / (v.sqrt() + ADAM_EPS)
        u = torch.where(u * p > 0, u + lr * lr * ADAM_DECAY * spec.decay * p, u)
        p.sub_(u)
        if self.half and spec.storage == "bf16":
            p.copy_(p.bfloat16())

    def normuon(self, name, spec, g, factor, mu):
        """Matrices are the last two dimensions; the second moment is per column where rows < columns, else
        per row.
        """
        p, m = self.p[name], self.m[name]
        m.lerp_(g, 1 - mu)
        update = g.lerp(m, mu)
        rows, cols = spec.shape[-2:]
        o = orthogonalize(update.reshape(-1, rows, cols), "polar", self.half)
        axis = -2 if rows < cols else -1
        mean = o.square().mean(axis, keepdim=True)
        second = self.second.get(name, torch.zeros_like(mean))
        self.second[name] = second = second + (1 - NORMUON_BETA2) * (mean - second)
        scaled = o * second.clamp_min(FLOOR).rsqrt()
        norm = o.square().sum((-2, -1), keepdim=True).sqrt()
        o = scaled * norm / scaled.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(FLOOR)
        lr = NORMUON_LR * factor
        multipliers = (
            torch.tensor(spec.matrix_lr or (1.0,), dtype=o.dtype) * max(1.0, rows / cols) ** 0.5 * spec.lr
        )
        effective = (lr * multipliers).repeat(len(o) // len(multipliers))[:, None, None]
        w = p.reshape(-1, rows, cols)
        decay = torch.where(o * w >= 0, NORMUON_DECAY * lr * effective * w, torch.zeros_like(w))
        p.copy_((w - decay - effective * o).view(p.shape))
