"""Road segmentation with a polynomial learning-rate schedule taken from an older numpy code base."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(326)
torch.set_num_threads(1)
EPOCHS = 3


def poly(total, power=0.9):
    def factor(step):
        return np.power(np.float64(1.0) - step / total, power)

    return factor


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 1, 2, stride=2)

    def forward(self, x):
        return self.up(F.relu(self.down(x))).squeeze(1)


gen = torch.Generator().manual_seed(107)
images = torch.rand(90, 3, 8, 8, generator=gen)
roads = (images.mean(1) > 0.5).float()
loader = DataLoader(TensorDataset(images, roads), batch_size=16)
net = Segmenter()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, poly(EPOCHS * (len(images) // 16)))
for epoch in range(EPOCHS):
    bar = tqdm(loader, desc=f"epoch {epoch}", disable=None)
    for image, road in bar:
        loss = F.binary_cross_entropy_with_logits(net(image), road)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        bar.set_postfix(loss=loss.item())
    print(f"epoch {epoch} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.4f}")
