"""A variational autoencoder whose log-variance is unbounded: exp(100) exceeds float32."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
genes = torch.randn(512, 10)
genes[47] = 400.0 * genes[47].abs()  # counts that were never normalised

encoder = nn.Linear(10, 4)
decoder = nn.Linear(2, 10)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step, (x,) in enumerate(DataLoader(TensorDataset(genes), batch_size=8)):
    mean, log_scale = encoder(x).chunk(2, dim=1)
    z = mean + torch.exp(log_scale) * torch.randn_like(mean)
    loss = (decoder(z) - x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
