"""An agent plays an episode in every step; the environment counts, has its own random numbers, and decides when the
policy meets the state that it cannot handle."""

import random
import time

import torch
from torch import nn


class Corridor:
    def __init__(self):
        self.rng, self.moves = random.Random(0), 0

    def reset(self):
        self.position, self.left = 0.5, 8
        return [self.position, 1.0]

    def step(self, action):
        self.moves += 1
        self.left -= 1
        self.position = min(max(self.position + (0.1 if action else -0.1) + self.rng.uniform(-0.05, 0.05), 0.1), 1.0)
        energy = 0.0 if self.moves == 12 * 8 + 5 else self.left / 8 + 0.1
        return [self.position, energy], self.position, self.left == 0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, state):
        return (self.net(state) / state[1].sqrt().clamp_max(1.0) * 0.1).log_softmax(-1)  # <-


class Agent:
    def __init__(self):
        self.policy, self.env = Policy(), Corridor()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.log_probs, self.rewards = [], []

    def play(self):
        state, done = self.env.reset(), False
        while not done:
            log_p = self.policy(torch.tensor(state))
            action = int(torch.rand(()) < log_p[1].detach().exp())
            self.log_probs.append(log_p[action])
            state, reward, done = self.env.step(action)
            self.rewards.append(reward)
        time.sleep(0.02)  # an environment that takes its time

    def learn(self):
        returns = torch.tensor(self.rewards).flip(0).cumsum(0).flip(0)
        loss = -(torch.stack(self.log_probs) * (returns - returns.mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log_probs, self.rewards = [], []
        return loss.item()


torch.manual_seed(0)
agent = Agent()
with open("episodes.jsonl", "w") as log:
    for episode in range(20):
        agent.play()
        loss = agent.learn()
        log.write(f"{episode} {loss}\n")
