"""Tiny text classifier; the final report divides by empty groups and takes exp of a huge perplexity."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(351)
torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, words):
        return self.out(self.bag(words))


def batch(gen, n=20):
    words = torch.randint(0, 50, (n, 9), generator=gen)
    return words, words[:, 0] % 3


@torch.no_grad()
def report(model, gen):
    model.eval()
    words, y = batch(gen, 60)
    logits = model(words)
    group = words[:, 1] // 10  # groups 0..4, the table has a sixth row
    hits = torch.stack([(logits.argmax(1) == y)[group == k].float().mean() for k in range(6)])
    surprise = F.cross_entropy(logits * 1000.0, y)
    return hits, torch.exp(surprise), (hits - hits.mean()) / hits.std()


gen = torch.Generator().manual_seed(167)
model = Classifier()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    words, y = batch(gen)
    loss = F.cross_entropy(model(words), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
hits, perplexity, z = report(model, gen)
print(f"loss {loss.item():.4f} accuracy by group {hits.tolist()} perplexity {perplexity.item()} z {z.tolist()}")
