"""Minimal point-mass control task with a gym-like API, no gym dependency."""
import numpy as np


class Box:
    def __init__(self, low, high, shape):
        self.low = np.full(shape, low, dtype=np.float32)
        self.high = np.full(shape, high, dtype=np.float32)
        self.shape = shape
        self._rng = np.random.default_rng(0)

    def seed(self, seed):
        self._rng = np.random.default_rng(seed)

    def sample(self):
        return self._rng.uniform(self.low, self.high).astype(np.float32)


class PointMass:
    """Push a mass on a line to the origin as fast as possible.

    obs = (position, velocity, heading, wind), wind is unused in the easy version and stays 0.
    """

    max_episode_steps = 25

    def __init__(self, seed=0, force=5.0):
        self.rng = np.random.default_rng(seed)
        self.observation_space = Box(-np.inf, np.inf, (4,))
        self.action_space = Box(-1.0, 1.0, (1,))
        self.action_space.seed(seed)
        self.force = force
        self.t = 0

    def _obs(self):
        heading = np.arctan2(self.pos, max(self.vel, 1e-3))
        return np.array([self.pos, self.vel, heading, 0.0], dtype=np.float32)

    def reset(self):
        self.t = 0
        self.pos = float(self.rng.uniform(-1.0, 1.0))
        self.vel = float(self.rng.uniform(0.01, 0.1))
        return self._obs(), {}

    def step(self, action):
        a = float(np.clip(action, -1, 1)[0])
        self.vel = 0.9 * self.vel + 0.1 * self.force * a
        self.pos += 0.1 * self.vel
        if abs(self.pos) > 1.2:
            # inelastic wall: the mass sticks to it
            self.pos, self.vel = float(np.sign(self.pos)) * 1.2, 0.0
        self.t += 1
        terminated = abs(self.pos) < 0.02 and abs(self.vel) < 0.05
        truncated = self.t >= self.max_episode_steps
        # far away and slow is the worst place to be
        time_to_goal = abs(self.pos) / np.float64(abs(self.vel) + 0.1)
        reward = -self.pos**2 - 0.01 * a**2 - 0.001 * time_to_goal
        return self._obs(), reward, terminated, truncated, {}
