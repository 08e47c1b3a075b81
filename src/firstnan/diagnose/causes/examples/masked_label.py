"""Only products in stock may be predicted, but one was bought just before it ran out."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
basket = torch.randn(512, 6)
bought = torch.randint(0, 10, (512,))
in_stock = torch.rand(512, 10) < 0.8
in_stock[torch.arange(512), bought] = True
in_stock[36, bought[36]] = False  # the last one on the shelf

model = nn.Linear(6, 10)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, stock, y) in enumerate(DataLoader(TensorDataset(basket, in_stock, bought), batch_size=8)):
    logits = model(x).masked_fill(~stock, float("-inf"))
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
