"""Trains in the style named on the command line; sample 21 of 40 is 0, so batch 5 goes wrong."""

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STYLE = sys.argv[1]
torch.manual_seed(0)
data = torch.rand(40, 4) + 0.5
data[21] = 0.0
loader = DataLoader(TensorDataset(data), batch_size=4)


def length(x: Tensor) -> Tensor:
    return torch.sqrt((x * x).sum(1))  # <- backward


def surprise(x: Tensor) -> Tensor:
    return torch.log(x).sum(1)  # <- forward


def lbfgs() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for (x,) in loader:

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x).squeeze(1) - surprise(x)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def by_hand() -> None:
    net = nn.Linear(4, 4)
    for (x,) in loader:
        length(net(x) * x).mean().backward()
        for p in net.parameters():
            p.data -= 0.01 * p.grad
            p.grad = None


def functional() -> None:
    weights = [torch.randn(4, 4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    for (x,) in loader:
        loss = length((x @ weights[0] + weights[1]) * x).mean()
        gradients = torch.autograd.grad(loss, weights)
        weights = [(w - 0.01 * g).detach().requires_grad_() for w, g in zip(weights, gradients, strict=True)]


def tensors_only() -> None:
    weights = [torch.randn(4, 4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for (x,) in loader:
        optimizer.zero_grad()
        length((x @ weights[0] + weights[1]) * x).mean().backward()
        optimizer.step()


def two_models() -> None:
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(itertools.chain(encoder.parameters(), head.parameters()), lr=0.01)
    for (x,) in loader:
        optimizer.zero_grad()
        (length(encoder(x) * x).mean() + head(encoder(x)).square().mean()).backward()
        optimizer.step()


class Trainer:
    """Calls the module that it is given, as trainers do."""

    def __init__(self, module: Any) -> None:
        self.module, self.callbacks = module, [lambda step: None]

    def fit(self, batches: Any) -> None:
        optimizer = self.module.configure_optimizers()
        for index, batch in enumerate(batches):
            optimizer.step(lambda batch=batch, index=index: self.closure(batch, index))
            optimizer.zero_grad()
            for callback in self.callbacks:
                callback(index)

    def closure(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.module.training_step(batch, index)
        loss.backward()
        return loss


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return length(self.net(batch[0]) * batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer() -> None:
    Trainer(Task()).fit(loader)


def thread() -> None:
    worker = threading.Thread(target=two_models)
    worker.start()
    worker.join()
    print("joined")


def clip() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for (x,) in loader:
        optimizer.zero_grad()
        length(net(x) * x).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()


def scaled(loss_of: Callable[[nn.Module, Tensor], Tensor], scale: float, batches: Any = loader) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for (x,) in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, x)).backward()
        scaler.step(optimizer)
        scaler.update()
    print("scale", scaler.get_scale())


def scaler_nan() -> None:
    data[21] = -0.5
    scaled(lambda net, x: (net(x).sum(1) - surprise(x)).square().mean(), 8.0)


def scaler_first_overflows() -> None:
    data[21] = 1.0
    scaled(lambda net, x: 1e3 * net(x).square().mean(), 2.0**127)


def scaler_sinks() -> None:
    scaled(lambda net, x: length(net(x) * x).mean(), 4.0, itertools.repeat((torch.zeros(4, 4),), 12))


globals()[STYLE]()
