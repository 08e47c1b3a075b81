"""Reaching task: the distance of a two-link arm's tip to its goal, plain functions and a dict of weights."""

import torch

torch.manual_seed(302)
torch.set_num_threads(1)


def init(d_in, hidden):
    return {
        "w1": (torch.randn(d_in, hidden) / d_in**0.5).requires_grad_(),
        "b1": torch.zeros(hidden, requires_grad=True),
        "w2": (torch.randn(hidden, 2) / hidden**0.5).requires_grad_(),
    }


def policy(params, state):
    return torch.tanh(state @ params["w1"] + params["b1"]) @ params["w2"]


def miss(tip, goal, movable):
    """how far the tip ends from the goal; a parked arm does not move"""
    dx = (tip[:, 0] - goal[:, 0]) * movable
    dy = (tip[:, 1] - goal[:, 1]) * movable
    return torch.hypot(dx, dy)


def episodes(n_batches, size, gen):
    for b in range(n_batches):
        goal = torch.rand(size, 2, generator=gen) * 2 - 1
        state = torch.cat([goal, torch.randn(size, 4, generator=gen)], dim=1)
        movable = torch.ones(size)
        if b == 14:
            movable[3] = 0.0
            movable[9] = 0.0
        yield state, goal, movable


gen = torch.Generator().manual_seed(7)
params = init(6, 32)
optimizer = torch.optim.SGD(params.values(), lr=0.05)
running = None
for i, (state, goal, movable) in enumerate(episodes(30, 16, gen)):
    loss = miss(policy(params, state), goal, movable).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
    if i % 5 == 4:
        print(f"{i + 1:3d} episodes, average miss {running:.3f}")
