"""A reward that is undefined is kept in a buffer, and drawn some steps later."""
import numpy as np
import torch
from torch import nn

np.seterr(all="ignore")


class Memory:
    def __init__(self, size):
        self.state = np.zeros((size, 2), np.float32)
        self.reward = np.zeros(size, np.float32)
        self.count = 0

    def push(self, state, reward):
        self.state[self.count] = state
        self.reward[self.count] = reward
        self.count += 1

    def sample(self, first, n):
        rows = np.arange(first, first + n)
        return [torch.from_numpy(column[rows]) for column in (self.state, self.reward)]


def step(position):
    distance = np.linalg.norm(position)
    return float((position / distance).sum())  # ORIGIN


rng = np.random.default_rng(0)
memory = Memory(100)
model = nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), 0.01)
for t in range(60):
    position = rng.normal(size=2).astype(np.float32) if t != 20 else np.zeros(2, np.float32)
    memory.push(position, step(position))
    if t < 16:
        continue
    state, reward = memory.sample(t - 15, 8)
    loss = (model(state)[:, 0] - reward).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
