"""Physics-informed net for stationary heat in a cylinder: u'' + u'/r = -q(r)."""
import torch
import torch.nn as nn

torch.manual_seed(29)
torch.set_num_threads(1)


class Temperature(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        hidden = [nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, r):
        return self.net(r)


def derivative(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def residual(u, r):
    r = r.requires_grad_(True)
    value = u(r)
    u_r = derivative(value, r)
    u_rr = derivative(u_r, r)
    source = 4.0 * torch.exp(-r)
    return u_rr + u_r / r + source


def collocation(iteration, g, n=32):
    """Random points; every tenth iteration a regular grid so that no region is forgotten."""
    if iteration % 10 == 9:
        return torch.linspace(0.0, 1.0, n).unsqueeze(1)
    return 0.02 + 0.98 * torch.rand(n, 1, generator=g)


def solve(iterations=30):
    u = Temperature()
    opt = torch.optim.Adam(u.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(8)
    wall = torch.ones(1, 1)
    for iteration in range(iterations):
        physics = residual(u, collocation(iteration, g)).square().mean()
        boundary = u(wall).square().mean()
        loss = physics + 10 * boundary
        opt.zero_grad()
        loss.backward()
        opt.step()
        if iteration % 3 == 0:
            print(f"{iteration:3d} physics {physics.item():.4f} boundary {boundary.item():.4f}")


if __name__ == "__main__":
    solve()
