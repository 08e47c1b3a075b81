from typing import NamedTuple

import numpy as np
import torch


class ReplayBufferSamples(NamedTuple):
    observations: torch.Tensor
    actions: torch.Tensor
    next_observations: torch.Tensor
    dones: torch.Tensor
    rewards: torch.Tensor


class ReplayBuffer:
    def __init__(self, buffer_size, observation_space, action_space, device="cpu", seed=0):
        self.buffer_size = buffer_size
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.observations = np.zeros((buffer_size, *observation_space.shape), dtype=np.float32)
        self.next_observations = np.zeros_like(self.observations)
        self.actions = np.zeros((buffer_size, *action_space.shape), dtype=np.float32)
        self.rewards = np.zeros((buffer_size,), dtype=np.float32)
        self.dones = np.zeros((buffer_size,), dtype=np.float32)
        self.pos = 0
        self.full = False

    def add(self, obs, next_obs, action, reward, done):
        self.observations[self.pos] = obs
        self.next_observations[self.pos] = next_obs
        self.actions[self.pos] = action
        self.rewards[self.pos] = reward
        self.dones[self.pos] = done
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def sample(self, batch_size):
        upper = self.buffer_size if self.full else self.pos
        idxs = self.rng.integers(0, upper, size=batch_size)
        return ReplayBufferSamples(
            self.to_torch(self.observations[idxs]),
            self.to_torch(self.actions[idxs]),
            self.to_torch(self.next_observations[idxs]),
            self.to_torch(self.dones[idxs]),
            self.to_torch(self.rewards[idxs]),
        )

    def to_torch(self, array):
        return torch.as_tensor(array, device=self.device)
