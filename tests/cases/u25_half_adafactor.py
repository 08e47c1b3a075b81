"""Energy load regression with a factored second moment that is stored in half precision."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(325)
torch.set_num_threads(1)


class HalfFactor(torch.optim.Optimizer):
    """row and column means of the squared gradient, kept as float16"""

    def __init__(self, params, lr=1e-2, decay=0.9, eps=1e-4):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad if p.dim() == 2 else p.grad.unsqueeze(1)
                square = g.square() + group["eps"]
                state = self.state[p]
                for name, dim in (("row", 1), ("col", 0)):
                    fresh = square.mean(dim)
                    kept = state[name].float() if name in state else fresh
                    blend = group["decay"] * kept + (1 - group["decay"]) * fresh
                    state[name] = blend.half()
                row, col = state["row"].float(), state["col"].float()
                second = row.unsqueeze(1) * (col / row.mean()).unsqueeze(0)
                p.sub_((g / second.sqrt()).view_as(p), alpha=group["lr"])


def meters(n=300):
    gen = torch.Generator().manual_seed(103)
    x = torch.randn(n, 6, generator=gen)
    load = 3.0 * x[:, 0] + x[:, 1] * x[:, 2]
    load[226] = 90_000.0  # watts instead of kilowatts
    return TensorDataset(x, load)


model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
opt = HalfFactor(model.parameters())
for epoch in range(2):
    for n, (x, load) in enumerate(DataLoader(meters(), batch_size=20)):
        loss = nn.functional.mse_loss(model(x).squeeze(1), load)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"epoch {epoch} batch {n:2d} loss {loss.item():.3f}")
