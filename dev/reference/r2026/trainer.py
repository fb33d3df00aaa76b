"""Steps of a run: stage, windows and YaRN, gradients of the micro-batches, updates."""

import torch

from .model import Model, Rope
from .optimizer import Optimizers


class Trainer:
    """sequential: the delayed scales of FP8 follow all micro-batches, as the published program's on one rank;
    otherwise those of a micro-batch number follow its own. half_fp8: what FP8 products read and give is bf16.
    """

    def __init__(
        self, r, parameters, signs, prefix, fp8=(), half=False, sequential=False, mask=None, half_fp8=True
    ):
        self.r, self.schedule, self.t = r, r.schedule, 0
        sets = 1 if sequential else r.sizes.micro_batches
        self.model = Model(r, parameters, signs, prefix, fp8, sets, mask, half_fp8)
        self.rope = Rope.start(r.sizes, self.model.dtype)
        self.window_long = r.schedule.stage(0).window_long
        self.optimizers = Optimizers(r, self.model.p, half)
        self.model.quantize_weights(True)

    def follow(self):
        """Windows of step t; (short, long)."""
        s = self.schedule.stage(self.t)
        self.rope.follow(self.window_long, s.window_long)
        self.window_long = s.window_long
        return s.window_short, s.window_long

    def gradients(self, batches):
        """(summed loss of each micro-batch, {name: unscaled sum of the gradients})."""
        windows, (targets, prefix) = self.follow(), self.schedule.weights(self.t)
        losses = []
        for p in self.model.p.values():
            p.grad = torch.zeros_like(p)
        for number, b in enumerate(batches):
            self.model.begin_micro_batch(number)
            loss = self.model.loss(b, windows, self.rope, targets, prefix)
            loss.backward()
            losses.append(loss.detach())
        return losses, {n: p.grad.clone() for n, p in self.model.p.items()}

    def step(self, batches):
        losses, gradients = self.gradients(batches)
        self.update(gradients)
        return losses

    def update(self, gradients):
        """The updates of a step; gradients: unscaled sums, as gradients() gives them."""
        means = {n: g / self.r.sizes.micro_batches for n, g in gradients.items()}
        self.optimizers.step(self.t, means)
        if self.model.full_state:
            self.model.full_state.end_of_step()
        self.model.quantize_weights(self.t < self.schedule.exact_scales)
        self.t += 1

    def validate(self, batch, final=False):
        """Summed loss of one sequence with the windows of the step that would follow."""
        windows = self.follow()
        if final:
            windows = windows[0], self.schedule.final_window
        return self.model.validation_loss(batch, windows, self.rope, final and self.r.masked)
