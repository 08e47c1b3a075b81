"""Policy gradient with invalid moves at -inf logits; torch.distributions keeps entropy and log-probability finite."""

import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(447)
torch.set_num_threads(1)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 24), nn.Tanh())
        self.move, self.value = nn.Linear(24, 5), nn.Linear(24, 1)

    def forward(self, state, allowed):
        h = self.body(state)
        return Categorical(logits=self.move(h).masked_fill(~allowed, -torch.inf)), self.value(h).squeeze(-1)


def rollout(gen, n=20):
    state = torch.randn(n, 7, generator=gen)
    allowed = torch.rand(n, 5, generator=gen) < 0.5
    allowed[:, 0] = True
    allowed[0, 1:] = False
    return state, allowed


policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(2)
for update in range(10):
    state, allowed = rollout(gen)
    with torch.no_grad():
        dist, value = policy(state, allowed)
        action = dist.sample()
        old = dist.log_prob(action)
        gain = (action == state.argmax(1).clamp(max=4)).float() - value
    for _ in range(3):
        dist, value = policy(state, allowed)
        ratio = (dist.log_prob(action) - old).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        kl = torch.distributions.kl_divergence(dist, Categorical(logits=dist.logits.detach())).mean()
        loss = -surrogate + 0.5 * (gain + value.detach() - value).square().mean() - 0.01 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
    print(update, f"loss {loss.item():.4f} kl {kl.item():.2e}")
