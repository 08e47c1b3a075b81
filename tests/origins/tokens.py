"""Word vectors over a stream of tokens, without a loader; one token (id 7) has a zero vector, which is normalised."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
text = torch.randint(8, 60, (900,))
text[413] = 7


class SkipGram(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Embedding(words, width, padding_idx=7)
        self.out = nn.Linear(width, words)

    def forward(self, tokens):
        v = self.table(tokens)
        v = v / v.norm(dim=-1, keepdim=True)  # ORIGIN
        return self.out(v)


model = SkipGram(60, 12)
opt = torch.optim.Adam(model.parameters(), 1e-2)
for start in range(0, 800, 50):
    tokens = text[start : start + 50]
    nxt = text[start + 1 : start + 51]
    loss = F.cross_entropy(model(tokens), nxt)
    opt.zero_grad()
    loss.backward()
    opt.step()
