"""A diffusion model that draws the time steps inside its own loss; at the first one there is no noise to divide by."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)


class Diffusion(nn.Module):
    def __init__(self, steps=150):
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.register_buffer("noise_share", torch.linspace(0, 1, steps))

    def forward(self, clean):
        t = torch.randint(0, len(self.noise_share), (len(clean),))
        share = self.noise_share[t].unsqueeze(1)
        mixed = (1 - share) * clean + share * torch.randn_like(clean)
        guess = self.net(torch.cat([mixed, share], 1))
        weight = (1 - share) / share  # ORIGIN
        return (weight * (guess - clean) ** 2).mean()


model = Diffusion()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(TensorDataset(torch.randn(600, 2)), batch_size=20, shuffle=True)
for step, (x,) in enumerate(loader):
    loss = model(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
