"""A policy gradient with a replay buffer (a deque and random.sample), logged with logging.FileHandler."""

import logging
import random
from collections import deque

import torch
from torch import nn


class Buffer:
    def __init__(self, size):
        self.items = deque(maxlen=size)

    def push(self, *item):
        self.items.append(item)

    def sample(self, n):
        state, action, reward = zip(*random.sample(self.items, n), strict=True)
        return torch.stack(state), torch.tensor(action), torch.tensor(reward)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, s):
        legal = torch.ones(len(s), 3)
        legal[:, 2] = (s[:, 0] > -1.8).float()  # the third action is illegal in some states
        p = self.net(s).softmax(1) * legal
        return p / p.sum(1, keepdim=True)


def main():
    random.seed(1)
    torch.manual_seed(1)
    log = logging.getLogger("agent")
    log.setLevel("INFO")
    log.addHandler(logging.FileHandler("agent.log", mode="w"))
    policy, buffer = Policy(), Buffer(500)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for update in range(70):
        for _ in range(4 if update else 40):
            buffer.push(torch.randn(4), random.randrange(3), random.random())
        state, action, reward = buffer.sample(8)
        probability = policy(state).gather(1, action[:, None]).squeeze(1)
        loss = -(torch.log(probability) * reward).mean()  # <-
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("%d loss %s", update, loss.item())


if __name__ == "__main__":
    main()
