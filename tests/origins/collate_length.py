"""Bags of words averaged by length in the collate function; one empty document (index 101)."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Documents(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(2)
        self.docs = [torch.randint(0, 50, (int(torch.randint(2, 9, (), generator=g)),), generator=g) for _ in range(n)]
        self.docs[101] = torch.zeros(0, dtype=torch.long)
        self.labels = torch.randint(0, 2, (n,), generator=g)

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.docs[i], self.labels[i]


def collate(batch):
    docs, labels = zip(*batch)
    bags = torch.zeros(len(docs), 50)
    for row, doc in enumerate(docs):
        bags[row] = torch.bincount(doc, minlength=50).float()
    lengths = torch.tensor([len(d) for d in docs]).float()
    return {"bags": bags / lengths[:, None], "labels": torch.stack(labels)}  # ORIGIN


loader = DataLoader(Documents(), batch_size=12, shuffle=True, collate_fn=collate)
model = nn.Sequential(nn.Linear(50, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["bags"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
