"""Random-restart curve fitting: the best error of every restart starts at infinity."""

import torch
import torch.nn as nn

torch.manual_seed(346)
torch.set_num_threads(1)
RESTARTS = 6


class Curves(nn.Module):
    def __init__(self):
        super().__init__()
        self.amp = nn.Parameter(torch.randn(RESTARTS, 4))
        self.freq = nn.Parameter(3 * torch.rand(RESTARTS, 4))
        self.register_buffer("best", torch.full((RESTARTS,), float("inf")))

    def forward(self, t):
        return (self.amp.unsqueeze(1) * torch.sin(self.freq.unsqueeze(1) * t.view(1, -1, 1))).sum(-1)


t = torch.linspace(0, 4, 50)
target = torch.sin(1.7 * t) + 0.3 * torch.sin(0.4 * t)
model = Curves()
opt = torch.optim.Adam(model.parameters(), lr=0.03)
overall, patience = torch.tensor(float("inf")), 0
lowest = torch.full((len(t),), torch.inf)
for step in range(60):
    residual = model(t) - target
    error = residual.square().mean(1)
    opt.zero_grad()
    error.sum().backward()
    opt.step()
    with torch.no_grad():
        model.best = torch.minimum(model.best, error)
        lowest = torch.minimum(lowest, residual.abs().min(0).values)
        patience = 0 if error.min() < overall else patience + 1
        overall = torch.minimum(overall, error.min())
    if patience > 10:
        break
print("best per restart", [round(v, 3) for v in model.best.tolist()], "overall", round(overall.item(), 4))
