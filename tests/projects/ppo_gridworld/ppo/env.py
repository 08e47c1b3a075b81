import torch


class VecGridWorld:
    """Batch of 5x5 grid worlds. Moves that leave the grid are illegal and masked out.

    Reaching the goal pays more the longer the bonus has been growing.
    """

    SIZE = 5
    MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]])

    def __init__(self, num_envs, seed=0):
        self.num_envs = num_envs
        self.g = torch.Generator().manual_seed(seed)
        self.obs_dim = 4
        self.n_actions = len(self.MOVES)
        self.jackpot = torch.full((num_envs,), 1.0)

    def reset(self):
        self.pos = torch.randint(0, self.SIZE, (self.num_envs, 2), generator=self.g)
        self.goal = torch.randint(0, self.SIZE, (self.num_envs, 2), generator=self.g)
        return self._obs()

    def _obs(self):
        return torch.cat([self.pos, self.goal], dim=1).float() / (self.SIZE - 1)

    def legal_actions(self):
        nxt = self.pos[:, None, :] + self.MOVES[None]
        return ((nxt >= 0) & (nxt < self.SIZE)).all(-1)

    def step(self, action):
        self.pos = self.pos + self.MOVES[action]
        at_goal = (self.pos == self.goal).all(-1)
        reward = torch.where(at_goal, self.jackpot, torch.full_like(self.jackpot, -0.05))
        self.jackpot = torch.where(at_goal, torch.ones_like(self.jackpot), (self.jackpot * 1.05).clamp(max=5.0))
        if at_goal.any():
            n = int(at_goal.sum())
            self.pos[at_goal] = torch.randint(0, self.SIZE, (n, 2), generator=self.g)
            self.goal[at_goal] = torch.randint(0, self.SIZE, (n, 2), generator=self.g)
        return self._obs(), reward, at_goal.float()
