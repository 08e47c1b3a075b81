"""Multi-task regression with a small layer-wise adaptive (LARS) optimizer."""

import torch
import torch.nn as nn

torch.manual_seed(323)
torch.set_num_threads(1)


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, trust=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "trust": trust, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = p.norm() / p.grad.norm()
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad * ratio, alpha=group["trust"])
                p.sub_(velocity, alpha=group["lr"])


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(7, 24), nn.Tanh())
        self.heads = nn.ModuleDict({k: nn.Linear(24, 1) for k in ("wind", "rain", "frost")})

    def forward(self, x):
        h = self.shared(x)
        return {k: head(h).squeeze(1) for k, head in self.heads.items()}


def weather(day, gen):
    x = torch.randn(20, 7, generator=gen)
    truth = {"wind": x[:, 0], "rain": x[:, 1].abs(), "frost": x[:, 2] * x[:, 3]}
    return x, {k: v for k, v in truth.items() if k != "frost" or day < 11}  # no frost in summer


def main():
    gen = torch.Generator().manual_seed(97)
    model = Tasks()
    for p in model.heads.parameters():
        nn.init.normal_(p, std=0.2)
    opt = LARS(model.parameters())
    for day in range(20):
        x, truth = weather(day, gen)
        out = model(x)
        loss = sum((out[k] - v).square().mean() for k, v in truth.items())
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        print(f"day {day:2d} tasks {len(truth)} loss {loss.item():.4f}")


main()
