"""A tiny MLP for 28 x 28 images with 0.2 M parameters: a step is mostly Python, so any check is noticeable."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from training import Training, make_steady, serve


@dataclass(frozen=True)
class Size:
    pixels: int = 784
    width: int = 256
    classes: int = 10
    batch: int = 256


# Enough that the model cannot memorise them: gradients that become subnormal are slow to compute.
BATCHES = 64


def make_training(size: Size | None = None) -> Training:
    make_steady()
    size = size or Size()
    model = nn.Sequential(nn.Linear(size.pixels, size.width), nn.ReLU(), nn.Linear(size.width, size.classes))
    images = torch.randn(BATCHES, size.batch, size.pixels)
    labels = torch.randint(0, size.classes, (BATCHES, size.batch))

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    batches = itertools.cycle(list(zip(images, labels, strict=True)))
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-4), batches, loss)


if __name__ == "__main__":
    serve(make_training())
