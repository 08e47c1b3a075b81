"""Two-tower search model scored by squared distance; the document tower runs in half precision."""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(19)
torch.set_num_threads(1)


class DocumentTower(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.proj = nn.Linear(vocab, d, bias=False)

    def forward(self, counts):
        h = self.proj(counts).half()
        energy = (h * h).sum(-1)
        return h.float(), energy.float()


class Search(nn.Module):
    def __init__(self, vocab=32, d=16):
        super().__init__()
        self.query = nn.Linear(vocab, d)
        self.document = DocumentTower(vocab, d)
        self.scale = nn.Parameter(torch.tensor(9.0))

    def forward(self, q, doc):
        h, energy = self.document(doc)
        return 2 * self.query(q) @ h.t() / self.scale - energy / self.scale.square()


def logs(n=256, vocab=32):
    g = torch.Generator().manual_seed(71)
    doc = torch.poisson(torch.rand(n, vocab, generator=g) * 3, generator=g)
    q = (doc > 2).float()
    doc[203] = torch.poisson(torch.full((vocab,), 400.0), generator=g)  # a whole book in one record
    return TensorDataset(q, doc)


def main(steps=30):
    model = Search()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = itertools.cycle(DataLoader(logs(), batch_size=16))
    for step, (q, doc) in zip(range(steps), batches):
        scores = model(q, doc)
        target = torch.arange(len(q))
        loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step} in-batch loss {loss.item():.4f}")


main()
