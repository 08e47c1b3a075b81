"""Calibrating a stochastic volatility model by simulation; leaves the loop when the loss is NaN."""
import torch
import torch.nn as nn

torch.set_num_threads(1)


class Heston(nn.Module):
    def __init__(self):
        super().__init__()
        self.kappa = nn.Parameter(torch.tensor(1.5))
        self.theta = nn.Parameter(torch.tensor(0.09))
        self.vol_of_vol = nn.Parameter(torch.tensor(0.12))
        self.rho = nn.Parameter(torch.tensor(-0.3))

    def forward(self, noise, dt=1 / 50, v0=0.09):
        paths = noise.shape[2]
        log_s, v = torch.zeros(paths), torch.full((paths,), v0)
        for dw1, dw2 in noise:
            sigma = v.sqrt()
            dz = self.rho * dw1 + (1 - self.rho.square()) ** 0.5 * dw2
            log_s = log_s - 0.5 * v * dt + sigma * dw1 * dt**0.5
            v = v + self.kappa * (self.theta - v) * dt + self.vol_of_vol * sigma * dz * dt**0.5
        return log_s, v


def moments(log_s, v):
    return torch.stack([log_s.mean(), log_s.std(), v.mean(), v.std()])


def calibrate(steps=60):
    torch.manual_seed(4)
    model = Heston()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    market = torch.tensor([-0.045, 0.31, 0.1, 0.07])
    scale = torch.tensor([0.02, 0.02, 0.01, 0.005])
    best = float("inf")
    for step in range(steps):
        log_s, v = model(torch.randn(50, 2, 256))
        loss = ((moments(log_s, v) - market) / scale).square().mean()
        if loss.isnan():
            print(f"step {step}: loss is nan, giving up (best so far {best:.5f})")
            break
        best = min(best, loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.5f} vol-of-vol {model.vol_of_vol.item():.4f}")


calibrate()
