"""Intent classifier over word pieces, compiled; root-mean-square norm without an epsilon."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(314)
torch.set_num_threads(1)
VOCAB, PAD, LEN = 40, 0, 6


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        rms = x.pow(2).mean(-1, keepdim=True).sqrt()
        return self.scale * (x / rms)


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = RMSNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Intent(nn.Module):
    def __init__(self, d=16, classes=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.mixers = nn.ModuleList([Mixer(d) for _ in range(2)])
        self.head = nn.Linear(d, classes)

    def forward(self, tokens):
        x = self.emb(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(x.mean(1))


def phrases(n=128):
    gen = torch.Generator().manual_seed(43)
    tokens = torch.randint(1, VOCAB, (n, LEN), generator=gen)
    tokens[75, 4:] = PAD
    return TensorDataset(tokens, tokens[:, 0] % 3)


model = Intent()
fast = torch.compile(model, backend="aot_eager")
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
step = 0
for _ in range(2):
    for tokens, intent in DataLoader(phrases(), batch_size=16):
        loss = F.cross_entropy(fast(tokens), intent)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 3 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
