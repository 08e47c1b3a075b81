"""Low-rank completion of a gene expression matrix by plain gradient descent, weights updated by hand."""
import torch

torch.manual_seed(30)
torch.set_num_threads(1)

ROWS, COLS, RANK = 60, 45, 4
LEARNING_RATE = 0.08


def observed_matrix():
    g = torch.Generator().manual_seed(10)
    left, right = torch.randn(ROWS, RANK, generator=g), torch.randn(RANK, COLS, generator=g)
    return left @ right, torch.rand(ROWS, COLS, generator=g) < 0.6


def objective(u, v, target, seen):
    error = (u @ v - target)[seen]
    return error.square().sum() / 2


target, seen = observed_matrix()
u = (0.3 * torch.randn(ROWS, RANK)).requires_grad_()
v = (0.3 * torch.randn(RANK, COLS)).requires_grad_()

for step in range(40):
    loss = objective(u, v, target, seen)
    loss.backward()
    with torch.no_grad():
        for w in (u, v):
            w -= LEARNING_RATE * w.grad
            w.grad = None
    print(f"step {step} squared error {loss.item():.4g} |u| {u.detach().norm():.3g} |v| {v.detach().norm():.3g}")
