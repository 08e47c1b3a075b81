"""The GPT of 4 million parameters with 512 tokens a step, half of its default."""

import gpt
from training import Training, serve


def make_training() -> Training:
    return gpt.make_training(gpt.Size(batch=4))


if __name__ == "__main__":
    serve(make_training())
