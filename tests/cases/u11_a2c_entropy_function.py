"""Advantage actor-critic on a card game; the entropy bonus is a fused autograd function."""

import torch
import torch.nn as nn

torch.manual_seed(311)
torch.set_num_threads(1)
ACTIONS = 4


class Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        ctx.save_for_backward(p)
        return -torch.xlogy(p, p).sum(-1)

    @staticmethod
    def backward(ctx, grad_out):
        (p,) = ctx.saved_tensors
        slope = p.log() + 1.0
        return -grad_out.unsqueeze(-1) * slope


class ActorCritic(nn.Module):
    def __init__(self, obs=9, hidden=32):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh())
        self.actor = nn.Linear(hidden, ACTIONS)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, obs, legal):
        h = self.torso(obs)
        logits = self.actor(h).masked_fill(~legal, float("-inf"))
        return torch.softmax(logits, -1), self.critic(h).squeeze(-1)


def deal(round_no, gen, hands=20):
    """the deck runs low late in the game: then some hands cannot draw"""
    obs = torch.randn(hands, 9, generator=gen)
    legal = torch.ones(hands, ACTIONS, dtype=torch.bool)
    if round_no >= 9:
        legal[:, 3] = obs[:, 0] < 1.0
    return obs, legal


def play(net, rounds=25):
    gen = torch.Generator().manual_seed(37)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for round_no in range(rounds):
        obs, legal = deal(round_no, gen)
        probs, value = net(obs, legal)
        action = torch.multinomial(probs.detach(), 1, generator=gen)
        reward = obs.gather(1, action).squeeze(1)
        advantage = reward - value
        log_p = probs.gather(1, action).squeeze(1).log()
        policy_loss = -(advantage.detach() * log_p).mean()
        loss = policy_loss + 0.5 * advantage.pow(2).mean() - 0.01 * Entropy.apply(probs).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"round {round_no:2d} reward {reward.mean():+.3f} loss {loss.item():+.3f}")


play(ActorCritic())
