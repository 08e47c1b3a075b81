import torch
from torch import nn


def layer_init(layer, std=2 ** 0.5, bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class MaskedCategorical:
    """Categorical distribution over the legal actions only."""

    def __init__(self, logits, mask):
        self.mask = mask
        self.logp = logits.masked_fill(~mask, float("-inf")).log_softmax(-1)
        self.p = self.logp.exp()

    def sample(self):
        return torch.multinomial(self.p, 1).squeeze(-1)

    def log_prob(self, action):
        return self.logp.gather(-1, action[:, None]).squeeze(-1)

    def entropy(self):
        plogp = self.p * self.logp.masked_fill(~self.mask, 0.0)
        return -plogp.sum(-1)


class Agent(nn.Module):
    def __init__(self, obs_dim, n_actions, width=48):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, width)), nn.Tanh(),
            layer_init(nn.Linear(width, width)), nn.Tanh(),
            layer_init(nn.Linear(width, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, width)), nn.Tanh(),
            layer_init(nn.Linear(width, width)), nn.Tanh(),
            layer_init(nn.Linear(width, n_actions), std=0.01),
        )

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    def policy(self, obs, mask):
        return MaskedCategorical(self.actor(obs), mask)
