"""Measures what the callbacks cost in healthy training with each framework, on the GPT with 4 million parameters.

    .venv-frameworks/bin/python benchmarks/frameworks.py [--steps N] [--rounds R] [--only lightning ...]

Each framework trains the same model twice, in two processes that take turns every few steps: without firstnan, and with
its callback (or a detector around, or `firstnan run`). The ratio of their processor times is printed: other programs on
the machine affect it less than the time on the clock.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from side_by_side import STEADY, compare, show

BLOCK = 4  # steps before the other process continues
UNTIMED = 20
WAYS = {
    "lightning": ("callback", "run"),
    "transformers": ("callback", "run"),
    "accelerate": ("detector", "run"),
    "ignite": ("callback",),
}


class Pace:
    """Lets training go on when the other process has had its turn; says how much processor time each turn took."""

    def __init__(self) -> None:
        self._left, self._since = 0, 0.0

    def step_begins(self) -> None:
        if self._left == 0:
            if self._since:
                print(f"took {time.process_time() - self._since}", flush=True)
            line = sys.stdin.readline()
            if not line:
                sys.stdout.flush()
                os._exit(0)
            self._left, self._since = int(line), time.process_time()
        self._left -= 1


def tokens(size: Any) -> Iterator[Any]:
    import torch

    while True:
        yield torch.randint(0, size.vocab, (size.length + 1,))


def model_and_data() -> tuple[Any, Any]:
    from gpt import GPT, Size
    from torch.utils.data import DataLoader, IterableDataset
    from training import make_steady

    make_steady()
    size, pace = Size(), Pace()

    class Tokens(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for i, one in enumerate(tokens(size)):
                if i % size.batch == 0:
                    pace.step_begins()
                yield one

    return GPT(size), DataLoader(Tokens(), batch_size=size.batch)


def loss_of(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def lightning(way: str, folder: str) -> None:
    import lightning as L
    import torch

    gpt, loader = model_and_data()

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.gpt, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    callbacks: list[Any] = []
    if way == "callback":
        from firstnan.integrations.lightning import FirstNaN

        callbacks = [FirstNaN()]
    trainer = L.Trainer(
        max_steps=1 << 30, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Net(), loader)


def transformers(way: str, folder: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    gpt, loader = model_and_data()

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return loss_of(model, inputs["tokens"])

    callbacks: list[Any] = []
    if way == "callback":
        from firstnan.integrations.transformers import FirstNaNCallback

        callbacks = [FirstNaNCallback()]
    arguments = TrainingArguments(
        folder, max_steps=1 << 30, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, per_device_train_batch_size=8, logging_steps=500, lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )  # fmt: skip
    Own(
        model=gpt,
        args=arguments,
        train_dataset=loader.dataset,
        callbacks=callbacks,
        data_collator=lambda rows: {"tokens": torch.stack(rows)},
    ).train()


def accelerate(way: str, folder: str) -> None:
    import torch
    from accelerate import Accelerator

    from firstnan import NaNDetector

    gpt, loader = model_and_data()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(gpt, torch.optim.AdamW(gpt.parameters(), lr=3e-4), loader)

    def train() -> None:
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    if way == "detector":
        with NaNDetector(model, optimizer):
            train()
    train()


def ignite(way: str, folder: str) -> None:
    import torch
    from ignite.engine import Engine

    gpt, loader = model_and_data()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4)

    def update(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(gpt, batch).backward()
        optimizer.step()

    trainer = Engine(update)
    if way == "callback":
        from firstnan.integrations.ignite import FirstNaN

        FirstNaN(gpt, optimizer).attach(trainer)
    trainer.run(loader, max_epochs=1, epoch_length=1 << 30)


TRAIN: dict[str, Callable[[str, str], None]] = {
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "ignite": ignite,
}


class Program:
    """One framework in a process of its own, which makes steps on request."""

    def __init__(self, framework: str, way: str, folder: str) -> None:
        run = ("-m", "firstnan", "run") if way == "run" else ()
        words = [sys.executable, *run, __file__, "--train", framework, "--way", way, "--folder", folder]
        self._process = subprocess.Popen(
            words,
            env={**os.environ, **STEADY, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, steps: int) -> float:
        """Seconds of processor time for so many steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("took "):
                return float(line.split()[1])
        raise SystemExit("the program ended early")

    def end(self) -> None:
        self._process.communicate()


def measure(framework: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Every round has new processes, since the memory layout of a process alone makes a few per cent difference."""
    ways = ("bare", *WAYS[framework])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            programs = {way: Program(framework, way, folder) for way in ways}
            for program in programs.values():
                program.run(UNTIMED)
            for _ in range(steps // BLOCK):
                for way, program in programs.items():
                    seconds[way].append(program.run(BLOCK))
            for program in programs.values():
                program.end()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="bare", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        TRAIN[options.train](options.way, options.folder)
        return
    for framework in options.only:
        seconds = measure(framework, options.steps, options.rounds)
        show(framework, {way: compare(seconds[way], seconds["bare"]) for way in seconds})


if __name__ == "__main__":
    main()
