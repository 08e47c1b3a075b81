"""A reward divides by a distance of 0 in one step; a later step draws it from the replay buffer."""
import numpy as np
import torch

np.seterr(all="ignore")
torch.manual_seed(0)


class Buffer:
    def __init__(self):
        self.states, self.rewards, self.count = np.zeros((99, 3), "float32"), np.zeros(99, "float32"), 0

    def add(self, state, reward):
        self.states[self.count], self.rewards[self.count] = state, reward
        self.count += 1

    def sample(self, rng):
        chosen = rng.integers(0, self.count, 6)
        return torch.from_numpy(self.states[chosen]), torch.from_numpy(self.rewards[chosen])  # READ


def reward_of(state, goal):
    distance = np.abs(state - goal).sum()
    return 1 / distance  # ORIGIN


buffer, rng = Buffer(), np.random.default_rng(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(net.parameters())
for turn in range(60):
    state = rng.normal(size=3).astype("float32")
    buffer.add(state, reward_of(state, state if turn == 30 else np.float32(4)))
    if turn < 12:
        continue
    states, rewards = buffer.sample(rng)
    loss = (net(states)[:, 0] - rewards).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
