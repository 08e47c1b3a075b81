"""Question answering reader: the question attends to retrieved passages with nn.MultiheadAttention."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

torch.manual_seed(2)
torch.set_num_threads(1)


class Questions(Dataset):
    def __init__(self, n=168, q_len=5, slots=6):
        g = torch.Generator().manual_seed(40)
        self.q = torch.randint(0, 50, (n, q_len), generator=g)
        self.p = torch.randint(0, 50, (n, slots), generator=g)
        self.found = torch.randint(1, slots + 1, (n,), generator=g)
        self.found[94] = 0
        self.answer = torch.randint(0, 5, (n,), generator=g)

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        unused = torch.arange(self.p.shape[1]) >= self.found[i]
        return self.q[i], self.p[i], unused, self.answer[i]


class CrossReader(nn.Module):
    def __init__(self, d=24, heads=3):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.norm = nn.LayerNorm(d)

    def forward(self, q, passages, unused):
        mixed, weights = self.attention(q, passages, passages, key_padding_mask=unused)
        return self.norm(q + mixed), weights


class QA(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.words = nn.Embedding(50, d)
        self.reader = CrossReader(d)
        self.score = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, 5))

    def forward(self, q, p, unused):
        h, _ = self.reader(self.words(q), self.words(p), unused)
        return self.score(h.mean(1))


def main():
    model = QA()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=28)
    bar = tqdm(DataLoader(Questions(), batch_size=12), disable=True)
    for step, (q, p, unused, answer) in enumerate(bar):
        loss = F.cross_entropy(model(q, p, unused), answer, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        bar.set_postfix(loss=loss.item())
        if step % 3 == 0:
            print("step", step, "loss", loss.item())


main()
