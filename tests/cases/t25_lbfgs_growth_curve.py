"""Fitting a bacterial growth curve with L-BFGS and a closure."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


def measurements():
    g = torch.Generator().manual_seed(35)
    hours = torch.linspace(0, 12, 40)
    density = 1.6 / (1 + torch.exp(-0.9 * (hours - 5)))
    return hours, density * (1 + 0.03 * torch.randn(40, generator=g))


class GrowthCurve(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.capacity = torch.nn.Parameter(torch.tensor(0.1))
        self.rate = torch.nn.Parameter(torch.tensor(0.3))
        self.midpoint = torch.nn.Parameter(torch.tensor(10.0))

    def log_density(self, hours):
        return torch.log(self.capacity) - torch.log1p(torch.exp(-self.rate * (hours - self.midpoint)))

    def forward(self, hours):
        return self.log_density(hours)


def fit(rounds=8):
    hours, density = measurements()
    curve = GrowthCurve()
    optimizer = torch.optim.LBFGS(curve.parameters(), lr=1.0, max_iter=4)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (curve(hours) - density.log()).square().sum()
        loss.backward()
        return loss

    for i in range(rounds):
        loss = optimizer.step(closure)
        print(f"round {i} calls {calls} loss {loss.item():.5f}", [round(p.item(), 3) for p in curve.parameters()])


fit()
