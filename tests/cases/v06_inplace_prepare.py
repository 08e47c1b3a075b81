"""Insurance claims: the data set prepares its table in place when it is built."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

torch.manual_seed(406)
torch.set_num_threads(1)


class Claims(Dataset):
    def __init__(self, n=300):
        gen = torch.Generator().manual_seed(86)
        self.table = torch.rand(n, 5, generator=gen) * 40
        self.table[:, 2] = torch.randint(1, 90, (n,), generator=gen)
        self.table[211, 2] = 0
        self.cost = self.table[:, [0, 3]].sum(1) / 40
        self._prepare()

    def _prepare(self):
        t = self.table
        t[:, 0] -= t[:, 0].mean()
        t[:, 1].sqrt_()
        t[:, 2].log_()
        t[:, 3:] /= t[:, 3:].amax(0)
        t[:, 0] /= t[:, 0].std()

    def __getitem__(self, i):
        return self.table[i], self.cost[i]

    def __len__(self):
        return len(self.table)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.log = []

    def one(self, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x).flatten(), y)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.log.append(loss.item())

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for batch in loader:
                self.one(batch)
            print(epoch, self.log[-1])


train, held_out = random_split(Claims(), [250, 50], generator=torch.Generator().manual_seed(1))
shuffled = DataLoader(train, batch_size=25, shuffle=True, generator=torch.Generator().manual_seed(2))
Trainer(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)), lr=1e-2).fit(shuffled, epochs=2)
