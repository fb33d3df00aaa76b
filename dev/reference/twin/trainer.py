"""One optimizer step and one validation; owns the model, both optimizers and the window."""
import torch

from . import data, model, record, schedule
from .optimizer import Adam, NorMuon


class Trainer:
    def __init__(self, cfg, parameters, device="cpu"):
        self.cfg, self.device, self.t = cfg, device, 0
        self.model = model.Model(cfg, parameters, device)
        self.ar = self.model.ar
        self.yarn = schedule.Yarn(cfg.head_dim, cfg.block_size, self.ar.wide, schedule.stage(cfg, 0).window, device)
        table = record.tensors(cfg)
        self.adam = Adam(table, self.model.p, cfg.record.adam_lr, self.ar.half)
        self.normuon = NorMuon(table, self.model.p, cfg.ns, cfg.record.normuon_lr, cfg.weight_decay, self.ar.half)
        self.tables = {}
        self._loss = torch.compile(self.model.loss) if cfg.compile else self.model.loss

    def _rope(self, length):
        key = (self.yarn.window, length)
        if key not in self.tables:
            self.tables = {k: v for k, v in self.tables.items() if k[0] == key[0]} | {
                key: self.yarn.tables(length, self.ar.act)}
        return self.tables[key]

    def set_window(self, t):
        self.yarn.set_window(schedule.stage(self.cfg, t).window)

    def loss(self, batch, ws_long=None, fp8=False):
        """Summed loss of one sequence at the present window (ws_long: another long window, same rope and scale)."""
        window = self.yarn.window
        return self._loss(batch, self._rope(len(batch.inputs)), self.yarn.scale, window // 2, ws_long or window, fp8)

    def gradients(self, batches):
        """(losses summed over tokens per micro-batch, {name: unscaled sum of gradients over the micro-batches})."""
        losses = []
        for p in self.model.p.values():
            p.grad = torch.zeros_like(p)
        for b in batches:
            loss = self.loss(b, fp8=self.cfg.head == "fp8")
            loss.backward()
            losses.append(loss.detach())
        return losses, {n: p.grad for n, p in self.model.p.items()}

    def step(self, batches):
        """Trains on the micro-batches of step t; returns their summed losses (tensors) before the update."""
        cfg, t = self.cfg, self.t
        self.set_window(t)
        losses, gradients = self.gradients(batches)
        factor, mu = schedule.lr_factor(cfg, t), schedule.momentum(cfg, t)
        for g in gradients.values():
            g.div_(cfg.micro_batches)
        self.adam.step(t, gradients, factor)
        self.normuon.step(gradients, factor, mu)
        self.t += 1
        return losses

    @torch.no_grad()
    def validate(self, final=False):
        """Mean loss over the validation tokens with the plain head; final: the widest window."""
        self.set_window(self.t)
        total = 0.0
        for tokens, cu_seqlens in data.validation_sequences(self.cfg):
            b = model.Batch(tokens, cu_seqlens, self.device)
            total += float(self.loss(b, ws_long=self.cfg.record.final_window if final else None))
        return total / self.cfg.val_tokens
