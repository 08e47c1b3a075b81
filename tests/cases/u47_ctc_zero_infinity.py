"""Handwriting lines with CTC; transcripts that do not fit are dropped with zero_infinity."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(347)
torch.set_num_threads(1)


class Lines(Dataset):
    def __init__(self, n=96):
        gen = torch.Generator().manual_seed(151)
        self.x = torch.randn(n, 12, 5, generator=gen)
        self.text = [torch.randint(1, 8, (int(k),), generator=gen) for k in torch.randint(1, 6, (n,), generator=gen)]
        self.text[33] = torch.tensor([3] * 10)  # ten equal letters need 19 frames

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.text[i]


def collate(items):
    x, text = zip(*items, strict=True)
    return torch.stack(x), torch.cat(text), torch.tensor([len(t) for t in text])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(5, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 8)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)


reader = Reader()
opt = torch.optim.Adam(reader.parameters(), lr=5e-3)
for epoch in range(2):
    for x, text, sizes in DataLoader(Lines(), batch_size=12, collate_fn=collate):
        frames = torch.full((len(x),), 12)
        loss = F.ctc_loss(reader(x), text, frames, sizes, zero_infinity=True)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} ctc {loss.item():.4f}")
