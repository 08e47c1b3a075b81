import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, random_split


class Blobs(Dataset):
    """Gaussian blobs as gray images in [-1, 1]."""

    def __init__(self, n, size, transform=None):
        rng = np.random.RandomState(0)
        yy, xx = np.mgrid[0:size, 0:size]
        imgs = []
        for i in range(n):
            cy, cx = rng.uniform(1, size - 2, 2)
            brightness = 0.0 if i == 217 else rng.uniform(0.3, 1.0)  # 217: shutter stayed closed
            imgs.append(brightness * np.exp(-((yy - cy) ** 2 + (xx - cx) ** 2) / 3.0))
        self.imgs = np.stack(imgs).astype(np.float32)
        self.transform = transform

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, i):
        img = torch.from_numpy(self.imgs[i])[None]
        if self.transform:
            img = self.transform(img)
        return img


class PeakNormalize(object):
    """Brightest pixel becomes 1, background -1."""

    def __init__(self, eps=1e-6):
        self.eps = eps

    def __call__(self, img):
        img = img / (img.max() + self.eps)
        return img * 2 - 1


def get_loaders(opt):
    full = Blobs(320, opt.img_size, transform=PeakNormalize())
    g = torch.Generator().manual_seed(opt.seed)
    train_set, val_set = random_split(full, [288, 32], generator=g)
    train = DataLoader(train_set, batch_size=opt.batch_size, shuffle=True, generator=g)
    val = DataLoader(val_set, batch_size=opt.batch_size)
    return train, val
