"""Single-cell counts: an autoencoder with a negative binomial likelihood."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

GENES = 20


class CountAutoencoder(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(GENES, 32), nn.Tanh(), nn.Linear(32, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.Tanh())
        self.mean = nn.Linear(32, GENES)
        self.dispersion = nn.Linear(32, GENES)
        nn.init.constant_(self.dispersion.bias, 1.0)

    def forward(self, counts):
        h = self.decoder(self.encoder(torch.log1p(counts)))
        return F.softplus(self.mean(h)) + 1e-4, F.relu(self.dispersion(h))


def nb_nll(k, mu, r):
    """-log NB(k; mean mu, dispersion r)"""
    log_norm = torch.lgamma(k + r) - torch.lgamma(r) - torch.lgamma(k + 1)
    log_p = r * torch.log(r / (r + mu) + 1e-8) + k * torch.log(mu / (r + mu) + 1e-8)
    return -(log_norm + log_p).sum(-1).mean()


def cells(n=360):
    g = torch.Generator().manual_seed(52)
    rate = torch.rand(n, GENES, generator=g) * 6
    return TensorDataset(torch.poisson(rate * torch.rand(n, 1, generator=g).square() * 3, generator=g))


def main():
    torch.manual_seed(37)
    torch.set_num_threads(1)
    model = CountAutoencoder()
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    step = 0
    for epoch in range(20):
        for (counts,) in DataLoader(cells(), batch_size=30):
            loss = nb_nll(counts, *model(counts))
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 10 == 0:
                print(epoch, step, f"nll {loss.item():.3f}")
            step += 1


if __name__ == "__main__":
    main()
