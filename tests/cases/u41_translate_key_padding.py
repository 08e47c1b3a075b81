"""Sequence-to-sequence copy task with nn.Transformer, -inf causal mask and key padding masks."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(341)
torch.set_num_threads(1)
PAD, BOS, VOCAB, LEN = 0, 1, 14, 7


class Translator(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.place = nn.Parameter(0.02 * torch.randn(LEN + 1, d))
        self.core = nn.Transformer(d, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, src, tgt):
        n = tgt.shape[1]
        causal = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
        src_pad = torch.zeros(src.shape).masked_fill(src == PAD, float("-inf"))
        tgt_pad = torch.zeros(tgt.shape).masked_fill(tgt == PAD, float("-inf"))
        h = self.core(
            self.emb(src) + self.place[: src.shape[1]],
            self.emb(tgt) + self.place[:n],
            tgt_mask=causal,
            src_key_padding_mask=src_pad,
            tgt_key_padding_mask=tgt_pad,
            memory_key_padding_mask=src_pad,
        )
        return self.out(h)


def pairs(n=192):
    gen = torch.Generator().manual_seed(127)
    src = torch.randint(2, VOCAB, (n, LEN), generator=gen)
    length = torch.randint(2, LEN + 1, (n, 1), generator=gen)
    return TensorDataset(src.masked_fill(torch.arange(LEN) >= length, PAD))


model = Translator()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
best = float("inf")
for _ in range(2):
    for (src,) in DataLoader(pairs(), batch_size=24, shuffle=True):
        tgt = torch.cat([torch.full((len(src), 1), BOS), src[:, :-1]], dim=1)
        logits = model(src, tgt)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), src.flatten(), ignore_index=PAD)
        opt.zero_grad()
        loss.backward()
        opt.step()
        best = min(best, loss.item())
print(f"best loss {best:.4f}")
