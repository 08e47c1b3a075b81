"""A number of the configuration makes a scale that is infinite, kept in the model as a Python number."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {"width": 16, "temperature": 0.0, "lr": 0.01}


class Scorer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.body = nn.Linear(8, config["width"])
        self.head = nn.Linear(config["width"], 3)
        with np.errstate(divide="ignore"):
            self.scale = float(np.float32(1.0) / np.float32(config["temperature"]))  # ORIGIN

    def forward(self, x):
        return self.head(torch.relu(self.body(x))) * self.scale  # READ


torch.manual_seed(0)
model = Scorer(CONFIG)
optimizer = torch.optim.SGD(model.parameters(), CONFIG["lr"])
data = TensorDataset(torch.randn(60, 8), torch.randint(0, 3, (60,)))
for x, y in DataLoader(data, batch_size=10):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
