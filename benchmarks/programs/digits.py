"""An MLP for 8 x 8 digits with 9,610 parameters, whose whole step takes a fraction of a millisecond."""

import mlp
from training import Training, serve

SIZE = mlp.Size(pixels=64, width=128, batch=32)


def make_training() -> Training:
    return mlp.make_training(SIZE)


if __name__ == "__main__":
    serve(make_training())
