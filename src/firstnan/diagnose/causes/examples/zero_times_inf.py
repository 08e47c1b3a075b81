"""Entropy of a policy with forbidden moves: p * log p is 0 * -inf where a move is masked."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
boards = torch.randn(512, 6)
legal = torch.ones(512, 4, dtype=torch.bool)
legal[39, 2] = False  # the first position with a forbidden move

policy = nn.Linear(6, 4)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for step, (x, allowed) in enumerate(DataLoader(TensorDataset(boards, legal), batch_size=8)):
    logits = policy(x).masked_fill(~allowed, float("-inf"))
    log_p = torch.log_softmax(logits, dim=1)
    entropy = -(log_p.exp() * log_p).sum(dim=1)
    loss = -entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
