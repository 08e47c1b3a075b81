"""Behaviour cloning of a pedal controller with a Beta policy; actions live in [0, 1]."""
import torch
import torch.nn as nn
from torch.distributions import Beta
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(77)
torch.set_num_threads(1)


class Drives(IterableDataset):
    """Recorded drives: speed, slope, distance, target speed -> pedal."""

    def __init__(self, seconds=360):
        self.seconds = seconds

    def __iter__(self):
        g = torch.Generator().manual_seed(24)
        for second in range(self.seconds):
            state = torch.rand(4, generator=g)
            pedal = (0.5 + 0.4 * (state[3] - state[0]) + 0.03 * torch.randn((), generator=g)).clamp(0.02, 0.98)
            if second == 263:
                pedal = torch.ones(())  # kick-down
            yield state, pedal


class PedalPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU())
        self.heads = nn.ModuleDict({"alpha": nn.Linear(24, 1), "beta": nn.Linear(24, 1)})

    def forward(self, state):
        h = self.trunk(state)
        alpha, beta = (nn.functional.softplus(head(h)).squeeze(-1) + 1.0 for head in self.heads.values())
        return Beta(alpha, beta)


policy = PedalPolicy()
opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
for step, (state, pedal) in enumerate(DataLoader(Drives(), batch_size=18)):
    nll = -policy(state).log_prob(pedal)
    loss = nll.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} nll {loss.item():.4f} worst {nll.max().item():.3f}")
