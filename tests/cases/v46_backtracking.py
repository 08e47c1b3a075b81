"""Gradient descent with backtracking: a trial step that makes the loss infinite is taken back."""

import torch

torch.manual_seed(446)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(13)
x = torch.randn(60, 3, generator=g)
counts = torch.poisson(torch.exp(x @ torch.tensor([0.8, -0.5, 0.3])), generator=g)
w = torch.zeros(3, requires_grad=True)


def loss_of(weights):
    rate = torch.exp(x @ weights)
    return (rate - counts * torch.log(rate)).mean()


size, rejected = 4096.0, 0
for step in range(15):
    loss = loss_of(w)
    w.grad = None
    loss.backward()
    while True:
        trial = (w.detach() - size * w.grad).requires_grad_()
        value = loss_of(trial)
        if torch.isfinite(value) and value < loss:
            break
        rejected += 1
        size /= 2
    with torch.no_grad():
        w.copy_(trial)
    size *= 2
    print(f"step {step}: loss {value.item():.4f} size {size:g} rejected {rejected}")
