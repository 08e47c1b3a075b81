"""Sharpness aware minimisation on a hinge loss; once every margin is met the gradient is exactly 0."""
import torch
from torch import nn

torch.manual_seed(10)


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        scale = self.rho / norm
        self.eps = [p.grad * scale for p in self.params]
        for p, e in zip(self.params, self.eps):
            p.add_(e)

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.eps):
            p.sub_(e)
        self.base.step()


x = torch.cat([torch.randn(20, 2) + 4, torch.randn(20, 2) - 4])
y = torch.cat([torch.ones(20), -torch.ones(20)])
model = nn.Linear(2, 1)
base = torch.optim.SGD(model.parameters(), lr=0.3)
sam = SAM(model.parameters(), base)


def hinge():
    return torch.relu(1 - y * model(x).squeeze(1)).mean()


for epoch in range(30):
    base.zero_grad()
    loss = hinge()
    loss.backward()
    sam.ascend()
    base.zero_grad()
    hinge().backward()
    sam.descend()
    print(epoch, loss.item())
