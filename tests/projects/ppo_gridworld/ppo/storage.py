import torch


class RolloutStorage:
    def __init__(self, cfg, obs_dim, n_actions):
        T, N = cfg.num_steps, cfg.num_envs
        dtype = getattr(torch, cfg.storage_dtype)
        self.cfg = cfg
        self.obs = torch.zeros(T, N, obs_dim)
        self.masks = torch.zeros(T, N, n_actions, dtype=torch.bool)
        self.actions = torch.zeros(T, N, dtype=torch.long)
        self.logprobs = torch.zeros(T, N)
        self.rewards = torch.zeros(T, N)
        self.dones = torch.zeros(T, N)
        self.values = torch.zeros(T, N)
        self.advantages = torch.zeros(T, N)
        self.returns = torch.zeros(T, N, dtype=dtype)

    def insert(self, t, obs, mask, action, logprob, reward, done, value):
        self.obs[t] = obs
        self.masks[t] = mask
        self.actions[t] = action
        self.logprobs[t] = logprob
        self.rewards[t] = reward
        self.dones[t] = done
        self.values[t] = value

    @torch.no_grad()
    def compute_returns(self, next_value):
        gae = torch.zeros_like(next_value)
        for t in reversed(range(self.cfg.num_steps)):
            nonterminal = 1.0 - self.dones[t]
            nextvalues = next_value if t == self.cfg.num_steps - 1 else self.values[t + 1]
            delta = self.rewards[t] + self.cfg.gamma * nextvalues * nonterminal - self.values[t]
            gae = delta + self.cfg.gamma * self.cfg.gae_lambda * nonterminal * gae
            self.advantages[t] = gae
        self.returns.copy_(self.advantages + self.values)

    def minibatches(self, generator):
        flat = {
            name: getattr(self, name).flatten(0, 1)
            for name in ("obs", "masks", "actions", "logprobs", "advantages", "returns")
        }
        perm = torch.randperm(self.cfg.batch_size, generator=generator)
        for chunk in perm.split(self.cfg.minibatch_size):
            yield {name: t[chunk] for name, t in flat.items()}
