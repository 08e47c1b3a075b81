"""A small CNN on random 32x32 images from a DataLoader."""

import itertools

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import Training, make_steady, serve

CLASSES, BATCH = 10, 32


def layer(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))


def make_model() -> nn.Sequential:
    return nn.Sequential(layer(3, 32), layer(32, 64), layer(64, 128), nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    images, labels = torch.randn(BATCH * 8, 3, 32, 32), torch.randint(0, CLASSES, (BATCH * 8,))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)


def make_training() -> Training:
    make_steady()
    model, loader = make_model(), make_loader()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Training(model, optimizer, itertools.chain.from_iterable(itertools.repeat(loader)), loss)


if __name__ == "__main__":
    serve(make_training())
