import numpy as np
import torch
from torch.utils.data import Dataset


class ShapesDataset(Dataset):
    """Gray scale drawings of boxes on a white page, each scaled to zero mean and unit contrast."""

    def __init__(self, n = 512, image_size = 8, seed = 0):
        rng = np.random.default_rng(seed)
        self.images = np.full((n, image_size, image_size), 255, dtype = np.uint8)
        for i in range(n):
            if i % 400 == 333:
                continue  # an empty page
            y, x = rng.integers(0, image_size - 3, 2)
            h, w = rng.integers(2, 4, 2)
            self.images[i, y:y + h, x:x + w] = rng.integers(0, 128)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        img = torch.from_numpy(self.images[index]).float().div(255)
        img = (img - img.mean()) / (img.std() + 1e-5)
        return img.unsqueeze(0)
