"""2,000 steps of a small language model; in step 1,700 one sequence is all padding, and its mean is 0/0."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

STEPS, BAD, BATCH, LENGTH, VOCABULARY, WIDTH = 2000, 1700, 16, 64, 256, 128


class Text(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = 0 if i == BAD * BATCH + 5 else int(torch.randint(8, LENGTH, (), generator=g))
        return torch.randint(1, VOCABULARY, (LENGTH,), generator=g), torch.arange(LENGTH) < length


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, (x, mask) in enumerate(DataLoader(Text(), batch_size=BATCH)):
    loss = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
    each = (loss * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)
    optimizer.zero_grad()
    each.mean().backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, f"{each.mean().item():.3f}", flush=True)
