"""exp overflow: a hand-written softmax in a mixture of experts that does not subtract the maximum first."""

import torch
from torch import nn

torch.manual_seed(9)
torch.set_num_threads(1)


class Router(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts)

    def forward(self, x):
        score = torch.exp(self.gate(x))
        return score / score.sum(dim=-1, keepdim=True)


class Mixture(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        weights = self.router(x)
        return sum(weights[:, i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))


def batches(count):
    """A stream of readings; the tenth batch has one with the wrong unit."""
    for index in range(count):
        x = torch.randn(32, 16)
        if index == 9:
            x[21] *= 1000.0
        yield x, x.roll(1, dims=1).tanh()


model = Mixture()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step, (x, y) in enumerate(batches(14)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
