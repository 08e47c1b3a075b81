"""MAML on sensor regression tasks: inner steps with autograd.grad, outer step with Adam."""
import torch
import torch.nn as nn
from torch.func import functional_call

torch.manual_seed(83)
torch.set_num_threads(1)


def standardise(y):
    return (y - y.mean()) / y.std()


class Tasks:
    """Each task is one sensor: amplitude, phase, and a support and a query set."""

    def __init__(self, meta_batch=5, shots=8):
        self.g = torch.Generator().manual_seed(41)
        self.meta_batch, self.shots = meta_batch, shots

    def sample(self):
        a, p = torch.rand(2, generator=self.g)
        amplitude = torch.round(a * 60) / 10
        x = 10 * torch.rand(2 * self.shots, 1, generator=self.g) - 5
        y = standardise(amplitude * torch.sin(x + 3.14 * p))
        return x[: self.shots], y[: self.shots], x[self.shots:], y[self.shots:]

    def __iter__(self):
        while True:
            yield [self.sample() for _ in range(self.meta_batch)]


def adapt(net, params, x, y, lr=0.02, steps=2):
    for _ in range(steps):
        loss = nn.functional.mse_loss(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: w - lr * g for (k, w), g in zip(params.items(), grads)}
    return params


def main(meta_steps=40):
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    outer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for meta_step, tasks in zip(range(meta_steps), Tasks()):
        total = 0.0
        for xs, ys, xq, yq in tasks:
            fast = adapt(net, dict(net.named_parameters()), xs, ys)
            total = total + nn.functional.mse_loss(functional_call(net, fast, (xq,)), yq)
        outer.zero_grad()
        (total / len(tasks)).backward()
        outer.step()
        print(f"meta step {meta_step} query mse {total.item() / len(tasks):.4f}")


main()
