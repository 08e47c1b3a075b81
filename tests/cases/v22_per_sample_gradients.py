"""Per-sample gradients with torch.func, each brought to length one before they are averaged."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(422)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def margin_loss(weights, x, y):
    score = functional_call(net, weights, (x[None],)).squeeze()
    return torch.relu(1.0 - y * score)


per_sample = vmap(grad(margin_loss), in_dims=(None, 0, 0))


def unit_average(grads):
    sizes = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    return {
        name: torch.einsum("b...,b->...", g, 1 / sizes) / len(sizes)
        for name, g in grads.items()
    }


def update(x, y):
    weights = {k: p.detach() for k, p in net.named_parameters()}
    average = unit_average(per_sample(weights, x, y))
    for name, p in net.named_parameters():
        p.grad = average[name]
    optimizer.step()
    with torch.no_grad():
        return torch.relu(1.0 - y * net(x).squeeze(1)).mean()


gen = torch.Generator().manual_seed(66)
for i in range(60):
    x = torch.randn(6, 4, generator=gen)
    y = torch.sign(x[:, 0] + 0.3 * x[:, 1])
    value = update(x, y)
    if i % 6 == 0:
        print(f"{i}: margin loss {value.item():.4f}")
