"""The GPT of 4 million parameters with gradient clipping, as is common."""

from dataclasses import replace

import gpt
from training import Training, serve


def make_training() -> Training:
    return replace(gpt.make_training(), clip=1.0)


if __name__ == "__main__":
    serve(make_training())
