"""Region classification: mean feature inside an integer box; one box has no height."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(46)


class RoiNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.back = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(6, 3)

    def roi_pool(self, f, boxes):
        return torch.stack([fm[:, y0:y1, x0:x1].mean(dim=(1, 2)) for fm, (x0, y0, x1, y1) in zip(f, boxes.tolist())])

    def forward(self, img, boxes):
        return self.fc(self.roi_pool(self.back(img), boxes))


g = torch.Generator().manual_seed(47)
imgs = torch.rand(80, 1, 12, 12, generator=g)
p0 = torch.randint(0, 6, (80, 2), generator=g)
boxes = torch.cat([p0, p0 + torch.randint(1, 6, (80, 2), generator=g)], 1)
boxes[47, 3] = boxes[47, 1]
labels = torch.randint(0, 3, (80,), generator=g)
net = RoiNet()
opt = torch.optim.Adam(net.parameters())
for epoch in range(2):
    for img, box, lab in DataLoader(TensorDataset(imgs, boxes, labels), batch_size=10):
        loss = nn.functional.cross_entropy(net(img, box), lab)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("%.4f" % loss.item(), end=" ")
    print()
