"""Fine-tuning from a checkpoint that was saved after its training had already broken."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 5)
y = torch.randint(0, 3, (512,))


def checkpoint_of_another_run(folder):
    broken = nn.Linear(5, 3)
    broken.weight.data[1] /= 0.0
    torch.save(broken.state_dict(), os.path.join(folder, "last.pt"))
    return os.path.join(folder, "last.pt")


model = nn.Linear(5, 3)
with tempfile.TemporaryDirectory() as folder:
    model.load_state_dict(torch.load(checkpoint_of_another_run(folder)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
