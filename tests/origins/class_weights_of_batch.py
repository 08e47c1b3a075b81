"""Segmentation with per batch inverse-frequency class weights."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(5)
K = 4


def class_weights(mask):
    w = torch.bincount(mask.flatten(), minlength=K).float()
    w = 1.0 / w  # ORIGIN
    w /= w.sum()
    return w * K


def sample_batch(step):
    g = torch.Generator().manual_seed(100 + step)
    img = torch.rand(4, 1, 16, 16, generator=g)
    mask = (img[:, 0] * K).long().clamp(max=K - 1)
    if step == 3:
        img = img * 0.7
        mask = (img[:, 0] * K).long()
    return img, mask


net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, K, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
history = []
for step in range(10):
    img, mask = sample_batch(step)
    logits = net(img)
    loss = F.cross_entropy(logits, mask, weight=class_weights(mask))
    opt.zero_grad()
    loss.backward()
    opt.step()
    history.append(loss.item())
print(history)
