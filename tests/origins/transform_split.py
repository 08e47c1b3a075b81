"""Images; per-image standardisation in a transform, behind random_split with two workers; one flat image (index 77)."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Standardise:
    def __call__(self, image):
        image = image.astype(np.float32)
        return (image - image.mean()) / image.std()  # ORIGIN


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image)[None]


class Compose:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Tiles(Dataset):
    def __init__(self, n, transform):
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 255, (n, 8, 8), dtype=np.uint8)
        self.images[77] = 12
        self.labels = rng.integers(0, 4, n)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), int(self.labels[i])


def train():
    torch.manual_seed(0)
    data = Tiles(200, Compose(Standardise(), ToTensor()))
    training, validation = random_split(data, [160, 40], generator=torch.Generator().manual_seed(5))
    assert 77 in training.indices
    loader = DataLoader(training, batch_size=16, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(3):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    train()
