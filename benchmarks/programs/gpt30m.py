"""A GPT of about 30 million parameters on random tokens."""

import gpt
from training import Training, serve


def make_training() -> Training:
    return gpt.make_training(gpt.Size(vocab=4000, width=512, layers=8, heads=8, length=128, batch=4))


if __name__ == "__main__":
    serve(make_training())
