"""A layer that allocates its scale with torch.empty and never writes to it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)  # new memory is then filled with NaN

x = torch.randn(512, 5)
y = torch.randint(0, 3, (512,))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5))

    def forward(self, x):
        return x * self.scale


model = nn.Sequential(Scaled(), nn.Linear(5, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
