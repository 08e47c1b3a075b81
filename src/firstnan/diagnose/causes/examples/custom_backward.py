"""A hand-written derivative of x * |x|: it divides by x, which is 0 in one sample."""

import torch
from torch.utils.data import DataLoader, TensorDataset


class SignedSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * x.abs()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * 2 * y / x


torch.manual_seed(0)
force = torch.randn(512, 3)
force[34, 1] = 0.0  # at rest

scale = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([scale], lr=1e-2)
for step, (x,) in enumerate(DataLoader(TensorDataset(force), batch_size=8)):
    loss = (SignedSquare.apply(scale * x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
