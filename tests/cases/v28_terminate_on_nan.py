"""Keras-like trainer with callbacks; one callback stops training when numpy finds the loss undefined."""

import numpy as np
import torch
from torch import nn


class Callback:
    def on_batch(self, trainer, loss): ...
    def on_epoch(self, trainer, epoch): ...


class TerminateOnNaN(Callback):
    def on_batch(self, trainer, loss):
        if not np.isfinite(loss):
            print(f"batch {trainer.seen}: invalid loss, terminating training")
            trainer.stop = True


class Printer(Callback):
    def on_epoch(self, trainer, epoch):
        print(f"epoch {epoch}: {np.mean(trainer.history):.4f}")


class Trainer:
    def __init__(self, model, objective, optimizer, callbacks):
        self.model, self.objective, self.optimizer, self.callbacks = model, objective, optimizer, callbacks
        self.stop, self.seen, self.history = False, 0, []

    def train_batch(self, x, y):
        value = self.objective(self.model(x), y)
        for callback in self.callbacks:
            callback.on_batch(self, value.detach().numpy())
        if self.stop:
            return
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        self.history.append(value.detach().numpy().item())
        self.seen += 1

    def fit(self, data, epochs):
        for epoch in range(epochs):
            for x, y in data:
                self.train_batch(x, y)
                if self.stop:
                    return
            for callback in self.callbacks:
                callback.on_epoch(self, epoch)


def relative_error(predicted, wanted):
    return ((predicted - wanted) / wanted).abs().mean()


torch.manual_seed(428)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(12)
inputs = torch.rand(240, 3, generator=g)
demand = torch.poisson(40 * inputs.mean(1), generator=g).clamp_min(1)[:, None]
demand[199] = 0
batches = list(zip(inputs.split(16), demand.split(16), strict=True))
net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
Trainer(net, relative_error, torch.optim.Adam(net.parameters(), lr=1e-2), [Printer(), TerminateOnNaN()]).fit(batches, 3)
