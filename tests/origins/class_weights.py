"""Classifier; inverse-frequency class weights with an empty class."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
NUM_CLASSES = 6


def make_data(n=600):
    x = torch.randn(n, 12)
    y = (x[:, 0] * 1.5 + x[:, 1]).clamp(-2, 2).add(2).long().clamp(0, 4)
    return x, y


def class_weights(labels):
    counts = torch.bincount(labels, minlength=NUM_CLASSES).float()
    weights = len(labels) / (NUM_CLASSES * counts)  # ORIGIN
    return weights / weights.sum()


x, y = make_data()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss(weight=class_weights(y))
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for epoch in range(2):
    for xb, yb in loader:
        loss = criterion(net(xb), yb)  # READ
        opt.zero_grad()
        loss.backward()
        opt.step()
