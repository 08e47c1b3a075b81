"""A tiny MLP on random features, where a step is little but Python and every microsecond of a check shows."""

import itertools

import torch
from torch import Tensor, nn
from training import Training, make_steady, serve

FEATURES, WIDTH, CLASSES, BATCH = 64, 128, 10, 32
# So many that the model cannot learn them by heart: gradients that fade into subnormal numbers are slow to compute.
BATCHES = 512


def make_training() -> Training:
    make_steady()
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    features, labels = torch.randn(BATCHES, BATCH, FEATURES), torch.randint(0, CLASSES, (BATCHES, BATCH))

    def loss(features: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(features), labels)

    batches = itertools.cycle(list(zip(features, labels, strict=True)))
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), batches, loss)


if __name__ == "__main__":
    serve(make_training())
