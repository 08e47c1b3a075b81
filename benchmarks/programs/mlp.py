"""A tiny MLP for images of 28 x 28, with 0.2 M parameters: a step is mostly Python, and a check shows."""

import itertools

import torch
from torch import Tensor, nn
from training import Training, make_steady, serve

PIXELS, WIDTH, CLASSES, BATCH = 784, 256, 10, 256
# So many that the model cannot learn them by heart: gradients that fade into subnormal numbers are slow to compute.
BATCHES = 64


def make_training() -> Training:
    make_steady()
    model = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    images, labels = torch.randn(BATCHES, BATCH, PIXELS), torch.randint(0, CLASSES, (BATCHES, BATCH))

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    batches = itertools.cycle(list(zip(images, labels, strict=True)))
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-4), batches, loss)


if __name__ == "__main__":
    serve(make_training())
