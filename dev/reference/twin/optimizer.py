"""Adam for tables, head and scalars; NorMuon for everything that is a matrix."""
import torch

from .newton_schulz import frobenius, orthogonalize

ADAM_LR, ADAM_BETA1, ADAM_BETA2, ADAM_EPS = 0.008, 0.65, 0.95, 1e-8
NORMUON_LR, NORMUON_BETA2, FLOOR = 0.03, 0.95, 1e-10


def adam_lr_multiplier(name):
    """None for the parameters that NorMuon owns."""
    if name.startswith(("embed", "value_embeds")):
        return 75.0
    return {"lm_head.weight": 1.0, "scalars": 5.0}.get(name)


def normuon_lr_multiplier(name):
    return 2.0 if name.endswith("c_fc") else 1.0


class Adam:
    """half: tables and their moments are rounded to bf16 after each step (scalars never)."""

    def __init__(self, parameters, half):
        self.p = {n: t for n, t in parameters.items() if adam_lr_multiplier(n)}
        self.m = {n: torch.zeros_like(t) for n, t in self.p.items()}
        self.v = {n: torch.zeros_like(t) for n, t in self.p.items()}
        self.half, self.k = half, 0

    @torch.no_grad()
    def step(self, gradients, factor):
        self.k += 1
        correction = (1 - ADAM_BETA2 ** self.k) ** 0.5 / (1 - ADAM_BETA1 ** self.k)
        for name, p in self.p.items():
            g, m, v = gradients[name], self.m[name], self.v[name]
            m.mul_(ADAM_BETA1).add_(g, alpha=1 - ADAM_BETA1)
            v.mul_(ADAM_BETA2).addcmul_(g, g, value=1 - ADAM_BETA2)
            lr = ADAM_LR * factor * adam_lr_multiplier(name)
            p.sub_(lr * correction * m / (v.sqrt() + ADAM_EPS))
            if self.half and name != "scalars":
                for t in (p, m, v):
                    t.copy_(t.bfloat16())


class NorMuon:
    """half: Newton-Schulz in half precision (gates excepted), gates rounded to bf16 after each step."""

    def __init__(self, parameters, ns, weight_decay, half):
        self.p = {n: t for n, t in parameters.items() if not adam_lr_multiplier(n)}
        self.ns, self.weight_decay, self.half = ns, weight_decay, half
        by_kind = {}
        for n, t in self.p.items():
            by_kind.setdefault((tuple(t.shape), n.endswith("qkvo_w")), []).append(n)
        self.groups = list(by_kind.items())
        self.m = [torch.zeros(len(names), *shape, dtype=self.p[names[0]].dtype, device=self.p[names[0]].device)
                  for (shape, _), names in self.groups]
        self.s = [0.0] * len(self.groups)

    @torch.no_grad()
    def step(self, gradients, factor, mu):
        for i in range(len(self.groups)):
            self._step_group(i, gradients, factor, mu)

    def _step_group(self, i, gradients, factor, mu):
        ((rows, cols), stacked), names = self.groups[i]
        g, m = torch.stack([gradients[n] for n in names]), self.m[i]
        m.lerp_(g, 1 - mu)
        u = g.lerp(m, mu)
        if stacked:                                           # [d, 4d] in memory order is q, k, v, o one after another
            u = u.view(-1, rows, rows)
        is_gate = names[0].endswith("gate.weight")
        o = orthogonalize(u, self.ns, self.half and not is_gate)
        o = self._normalize(i, o, -2 if rows < cols else -1).view(-1, rows, cols)
        w = torch.stack([self.p[n] for n in names])
        wd = NORMUON_LR * factor * self.weight_decay
        o = torch.where(o * w >= 0, o + wd * w, o)
        for j, n in enumerate(names):
            lr = NORMUON_LR * factor * normuon_lr_multiplier(n) * max(1.0, rows / cols) ** 0.5
            self.p[n].copy_(w[j] - lr * o[j])
            if self.half and is_gate:
                self.p[n].copy_(self.p[n].bfloat16())

    def _normalize(self, i, o, axis):
        """Divides by the running root mean square along `axis`, then restores each matrix's Frobenius norm."""
        c = o.square().mean(axis, keepdim=True)
        self.s[i] = self.s[i] + (1 - NORMUON_BETA2) * (c - self.s[i])
        scaled = o * self.s[i].clamp_min(FLOOR).rsqrt()
        return scaled * (frobenius(o) / frobenius(scaled).clamp_min(FLOOR))
