"""Measures what the callbacks cost in healthy training with each framework, on the GPT with 4 million parameters.

    .venv-frameworks/bin/python benchmarks/frameworks.py [--rounds R] [--own] [lightning transformers accelerate ignite]

One process for each framework, in which the callback's detector is attached for a block of steps and detached for the
next. The ratio of their processor times is printed: other programs on the machine affect it less than the clock's time.
With `--own` the detector stays attached, and the processor time inside firstnan's own functions is measured instead, as
a part of all other time: less precise (the profiler costs something as well), but nothing else on the machine matters.
What `firstnan run` costs is measured by run_overhead.py.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from side_by_side import STEADY, compare, show

BLOCK, UNTIMED = 12, 4
"""Steps before the detector is attached or detached, and how many of them are not measured."""


PROFILED = 40
PROGRAM_OWN = ("backward", "__next__", "grad", "closure", "step", "wrapper", "zero_grad")
"""Functions that we call on behalf of the program: what they take is the program's own time."""


def own_share(profile: cProfile.Profile) -> float:
    """The time inside firstnan, and inside functions of others that it calls for itself, per other time."""
    ours = os.path.join("src", "firstnan", "")
    own = total = 0.0
    for (file, _, name), (_, _, inside, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        total += inside
        if ours in file:
            own += inside
        elif name not in PROGRAM_OWN:
            # Of a function of Python only its own time is known for each caller; of one of C that is all there is.
            own += sum(numbers[2] for (caller, _, _), numbers in callers.items() if ours in caller)
    return own / (total - own)


class Pace:
    """Attaches and detaches the detector between steps, and prints how much processor time each block took."""

    def __init__(self, rounds: int) -> None:
        """No rounds: the detector stays attached, and the time inside our own functions is measured."""
        self._steps, self._blocks, self._since = -BLOCK, 2 * rounds, 0.0
        self.detector: Callable[[], Any] = lambda: None
        self._profile = cProfile.Profile(time.process_time) if not rounds else None

    def step_begins(self) -> None:
        if self._profile is not None:
            if self._steps == BLOCK:
                self._profile.enable()
            elif self._steps == BLOCK + PROFILED:
                self._profile.disable()
                print("own", own_share(self._profile), flush=True)
                os._exit(0)
        elif self._steps >= 0:
            self._block_goes_on(*divmod(self._steps, BLOCK))
        self._steps += 1

    def _block_goes_on(self, block: int, step: int) -> None:
        if step == 0:
            if block:
                seconds = (time.process_time() - self._since) / (BLOCK - UNTIMED)
                print("took", "bare" if block % 2 else "firstnan", seconds, flush=True)
            if block == self._blocks:
                os._exit(0)
            detector = self.detector()
            detector.detach() if block % 2 == 0 else detector.attach()
        elif step == UNTIMED:
            self._since = time.process_time()


def tokens(size: Any) -> Iterator[Any]:
    import torch

    while True:
        yield torch.randint(0, size.vocab, (size.length + 1,))


def model_and_data(rounds: int) -> tuple[Any, Any, Pace]:
    from gpt import GPT, Size
    from torch.utils.data import DataLoader, IterableDataset
    from training import make_steady

    make_steady()
    size, pace = Size(), Pace(rounds)

    class Tokens(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for i, one in enumerate(tokens(size)):
                if i % size.batch == 0:
                    pace.step_begins()
                yield one

    return GPT(size), DataLoader(Tokens(), batch_size=size.batch), pace


def loss_of(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def lightning(rounds: int, folder: str) -> None:
    import torch
    from lightning import LightningModule, Trainer

    from firstnan.integrations.lightning import FirstNaN

    gpt, loader, pace = model_and_data(rounds)

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.gpt, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    callback = FirstNaN()
    pace.detector = lambda: callback.detector
    trainer = Trainer(
        max_steps=1 << 30, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Net(), loader)


def transformers(rounds: int, folder: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from firstnan.integrations.transformers import FirstNaNCallback

    gpt, loader, pace = model_and_data(rounds)

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return loss_of(model, inputs["tokens"])

    callback = FirstNaNCallback()
    pace.detector = lambda: callback.detector
    arguments = TrainingArguments(
        folder, max_steps=1 << 30, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, per_device_train_batch_size=8, logging_steps=500, lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )  # fmt: skip
    Own(
        model=gpt,
        args=arguments,
        train_dataset=loader.dataset,
        callbacks=[callback],
        data_collator=lambda rows: {"tokens": torch.stack(rows)},
    ).train()


def accelerate(rounds: int, folder: str) -> None:
    import torch
    from accelerate import Accelerator

    from firstnan import NaNDetector

    gpt, loader, pace = model_and_data(rounds)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(gpt, torch.optim.AdamW(gpt.parameters(), lr=3e-4), loader)

    with NaNDetector(model, optimizer) as detector:
        pace.detector = lambda: detector
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def ignite(rounds: int, folder: str) -> None:
    import torch
    from ignite.engine import Engine

    from firstnan.integrations.ignite import FirstNaN

    gpt, loader, pace = model_and_data(rounds)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4)

    def update(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(gpt, batch).backward()
        optimizer.step()

    trainer = Engine(update)
    handler = FirstNaN(gpt, optimizer)
    handler.attach(trainer)
    pace.detector = lambda: handler.detector
    trainer.run(loader, max_epochs=1, epoch_length=1 << 30)


TRAIN: dict[str, Callable[[int, str], None]] = {
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "ignite": ignite,
}


def own(framework: str) -> float:
    for line in run(framework, 0).splitlines():
        if line.startswith("own "):
            return float(line.split()[1])
    raise SystemExit("the program ended early")


def run(framework: str, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, framework, "--rounds", str(rounds), "--folder", folder],
            env={**os.environ, **STEADY, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the program ended early\n{done.stderr[-2000:]}")
    return done.stdout


def measure(framework: str, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"bare": [], "firstnan": []}
    for line in run(framework, rounds).splitlines():
        if line.startswith("took "):
            _, way, number = line.split()
            seconds[way].append(float(number))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "frameworks", nargs="*", metavar="FRAMEWORK", help=f"of {', '.join(TRAIN)}; all if none is given"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--own", action="store_true", help="measure the time inside firstnan's own functions")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        TRAIN[options.frameworks[0]](options.rounds, options.folder)
        return
    for framework in options.frameworks or TRAIN:
        if options.own:
            print(f"{framework}: {1 + own(framework):.4f}", flush=True)
            continue
        seconds = measure(framework, options.rounds)
        show(framework, {way: compare(seconds[way], seconds["bare"]) for way in seconds})


if __name__ == "__main__":
    main()
