import copy

import torch
from torch import nn


class EMA(nn.Module):
    def __init__(self, model, beta = 0.995, update_after_step = 10, update_every = 5):
        super().__init__()
        self.beta = beta
        self.online_model = [model]  # in a list, so it is not registered as a submodule
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)
        self.update_after_step = update_after_step
        self.update_every = update_every
        self.register_buffer('step', torch.tensor(0))

    @property
    def model(self):
        return self.online_model[0]

    def get_current_decay(self):
        epoch = max(self.step.item() - self.update_after_step - 1, 0.)
        value = 1 - (1 + epoch) ** -(2 / 3)
        return min(max(value, 0.), self.beta)

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.update_every != 0:
            return
        decay = self.get_current_decay()
        for ma, cur in zip(self.ema_model.parameters(), self.model.parameters()):
            ma.lerp_(cur, 1. - decay)
        for ma, cur in zip(self.ema_model.buffers(), self.model.buffers()):
            ma.copy_(cur)
