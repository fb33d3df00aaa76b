"""Adam and NorMuon, each over the tensors whose row in the record's table names it."""
import torch

from . import record
from .newton_schulz import frobenius, orthogonalize

FLOOR = 1e-10


class Adam:
    """table: {name: Tensor}. half: tensors stored in bf16 and their moments are rounded after each update."""

    def __init__(self, table, parameters, lr, half):
        self.specs = {n: t.spec for n, t in table.items() if isinstance(t.spec.update, record.Adam)}
        self.p = {n: parameters[n] for n in self.specs}
        self.m = {n: torch.zeros_like(t) for n, t in self.p.items()}
        self.v = {n: torch.zeros_like(t) for n, t in self.p.items()}
        self.pending = {n: torch.zeros_like(t) for n, t in self.p.items()}  # gradient since the last update
        self.lr, self.half = lr, half

    @torch.no_grad()
    def step(self, t, gradients, factor):
        for name, spec in self.specs.items():
            self.pending[name].add_(gradients[name])
            if (t + 1) % spec.update.every == 0:
                self._update(name, spec, (t + 1) // spec.update.every, factor)
                self.pending[name].zero_()

    def _update(self, name, spec, k, factor):
        """The k-th update of the tensor."""
        p, g, m, v, u = self.p[name], self.pending[name], self.m[name], self.v[name], spec.update
        correction = (1 - u.beta2 ** k) ** 0.5 / (1 - u.beta1 ** k)
        m.mul_(u.beta1).add_(g, alpha=1 - u.beta1)
        v.mul_(u.beta2).addcmul_(g, g, value=1 - u.beta2)
        p.sub_(self.lr * factor * u.lr * correction * m / (v.sqrt() + u.eps))
        if self.half and spec.storage == "bf16":
            for t in (p, m, v):
                t.copy_(t.bfloat16())


class NorMuon:
    """half: Newton-Schulz in half precision, tensors stored in bf16 are rounded after each step."""

    def __init__(self, table, parameters, ns, lr, weight_decay, half):
        self.specs = {n: t.spec for n, t in table.items() if isinstance(t.spec.update, record.NorMuon)}
        self.p = {n: parameters[n] for n in self.specs}
        self.ns, self.lr, self.weight_decay, self.half = ns, lr, weight_decay, half
        by_kind = {}
        for n, spec in self.specs.items():
            kind = tuple(self.p[n].shape), spec.matrices, spec.update.beta2, spec.update.wide
            by_kind.setdefault(kind, []).append(n)
        self.groups = list(by_kind.items())
        self.m = [torch.zeros(len(names), *shape, dtype=self.p[names[0]].dtype, device=self.p[names[0]].device)
                  for (shape, *_), names in self.groups]
        self.s = [0.0] * len(self.groups)

    @torch.no_grad()
    def step(self, gradients, factor, mu):
        for i in range(len(self.groups)):
            self._step_group(i, gradients, factor, mu)

    def _step_group(self, i, gradients, factor, mu):
        ((rows, cols), matrices, beta2, wide), names = self.groups[i]
        g, m = torch.stack([gradients[n] for n in names]), self.m[i]
        m.lerp_(g, 1 - mu)
        u = g.lerp(m, mu)
        if matrices > 1:                                      # [d, 4d] in memory order is q, k, v, o one after another
            u = u.view(-1, rows, cols // matrices)
        o = orthogonalize(u, self.ns, self.half and not wide)
        o = self._normalize(i, o, -2 if rows < cols else -1, beta2).view(-1, rows, cols)
        w = torch.stack([self.p[n] for n in names])
        wd = self.lr * factor * self.weight_decay
        o = torch.where(o * w >= 0, o + wd * w, o)
        for j, n in enumerate(names):
            lr = self.lr * factor * self.specs[n].update.lr * max(1.0, rows / cols) ** 0.5
            self.p[n].copy_(w[j] - lr * o[j])
            if self.half and self.specs[n].storage == "bf16":
                self.p[n].copy_(self.p[n].bfloat16())

    def _normalize(self, i, o, axis, beta2):
        """Divides by the running root mean square along `axis`, then restores each matrix's Frobenius norm."""
        c = o.square().mean(axis, keepdim=True)
        self.s[i] = self.s[i] + (1 - beta2) * (c - self.s[i])
        scaled = o * self.s[i].clamp_min(FLOOR).rsqrt()
        return scaled * (frobenius(o) / frobenius(scaled).clamp_min(FLOOR))
