"""Small convolution-free vision model trained with a compact Shampoo optimizer."""

import torch
import torch.nn as nn

torch.manual_seed(414)
torch.set_num_threads(1)


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, every=4):
        super().__init__(params, {"lr": lr, "every": every})

    @staticmethod
    def inverse_root(m):
        values, vectors = torch.linalg.eigh(m)
        return (vectors * values ** -0.25) @ vectors.T

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad if p.grad.dim() == 2 else p.grad[:, None]
                state = self.state[p]
                if not state:
                    state.update(n=0, left=torch.eye(g.shape[0]) * 1e-3, right=torch.eye(g.shape[1]) * 1e-3)
                state["left"].mul_(0.4).add_(g @ g.T)
                state["right"].mul_(0.4).add_(g.T @ g)
                if state["n"] % group["every"] == 0:
                    state["roots"] = self.inverse_root(state["left"]), self.inverse_root(state["right"])
                state["n"] += 1
                left, right = state["roots"]
                p.sub_((left @ g @ right).view_as(p), alpha=group["lr"])
        return loss


def glyphs(n, g):
    kind = torch.randint(0, 4, (n,), generator=g)
    image = torch.zeros(n, 36)
    image[torch.arange(n), kind * 9 + 4] = 1.0
    return image + 0.2 * torch.rand(n, 36, generator=g), kind


model = nn.Sequential(nn.Linear(36, 18), nn.GELU(), nn.Linear(18, 4))
opt = Shampoo(model.parameters())
gen = torch.Generator().manual_seed(3)
for it in range(48):
    image, kind = glyphs(32, gen)
    loss = nn.functional.cross_entropy(model(image), kind)
    model.zero_grad()
    loss.backward()
    opt.step()
    print(it, f"{loss.item():.5f}")
