"""Measures how long the answer takes: processor time from the failing step to the report with a proven fix.

    python benchmarks/answer.py [--early N] [--late N] [--rounds N] [--only SOURCE...] [--json FILE] [--markdown]

The same program fails early (step 50) and late (step 5,000), for each way in which firstnan can get the failing step
again. The answer should not depend on the length of the run: the aim is a ratio of 1.2 at most. Processor time is that
of the whole process tree, less what the program had used when its failing step began.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from side_by_side import STEADY

# A regression on the logarithm of a target that is 0 in one sample of the failing step. That step notes the times at
# which it begins; a copy of the program may note them again, so the first line counts.
BEGINNING = """\
import os
import sys
import time

import torch
from torch import nn

FAILS = int(sys.argv[1])
TURNS = FAILS + 40
torch.manual_seed(0)
x = torch.rand(TURNS * 8, 4) + 0.1
y = x.sum(1)
model = nn.Linear(4, 1)
clock = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(turn):
    if turn == FAILS:
        os.write(clock, f"{time.monotonic()} {time.process_time()}\\n".encode())
"""

SPOILED_IN_ORDER = "y[FAILS * 8 + 3] = 0.0\n"

LOADER = """
from torch.utils.data import DataLoader, TensorDataset

optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for turn, (inputs, target) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    note(turn)
    loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=1)
for turn in range(TURNS):
    note(turn)
    inputs, target = x[8 * turn : 8 * turn + 8], y[8 * turn : 8 * turn + 8]

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
"""

FUNCTION = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batches = list(zip(x.split(8), y.split(8)))


def train_step(inputs, target):
    loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for turn, (inputs, target) in enumerate(batches):
    note(turn)
    train_step(inputs, target)
"""

RANDOM = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state = torch.get_rng_state()
*earlier, failing = torch.randint(len(x), (FAILS + 1, 8)).tolist()  # what the steps will draw, in one call
torch.set_rng_state(state)
y[min(set(failing).difference(*earlier))] = 0.0  # drawn in the failing step first


def get_batch():
    chosen = torch.randint(len(x), (8,))
    return x[chosen], y[chosen]


for turn in range(TURNS):
    note(turn)
    inputs, target = get_batch()
    loss = (model(inputs).squeeze(1) - target.log()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SLICES = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for turn in range(TURNS):
    note(turn)
    rows = slice(8 * turn, 8 * turn + 8)
    loss = (model(x[rows]).squeeze(1) - y[rows].log()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Source:
    title: str
    program: str


SOURCES = {
    "loader": Source("`DataLoader`", BEGINNING + SPOILED_IN_ORDER + LOADER),
    "closure": Source("`optimizer.step(closure)`", BEGINNING + SPOILED_IN_ORDER + CLOSURE),
    "function": Source("a step function", BEGINNING + SPOILED_IN_ORDER + FUNCTION),
    "random": Source("`get_batch`, random indices", BEGINNING + RANDOM),
    "slices": Source("slices of a tensor", BEGINNING + SPOILED_IN_ORDER + SLICES),
}


@dataclass(frozen=True)
class Answer:
    """From the moment at which the failing step began to the end of the process."""

    step: int
    cpu_seconds: float
    seconds: float
    replay: str
    """How the step was had again, in the words of the report."""
    proven: bool
    found_line: bool
    """Whether the report names the line of the logarithm, and the right step."""


def answer(source: Source, step: int, folder: Path) -> Answer:
    program, report, clock = folder / "train.py", folder / "report.json", folder / "clock"
    program.write_text(source.program, encoding="utf-8")
    for left in (report, clock):
        left.unlink(missing_ok=True)
    words = ["-m", "firstnan", "run", "--json", str(report), str(program), str(step), str(clock)]
    environment = {**os.environ, **STEADY, "OMP_NUM_THREADS": "1"}
    with (folder / "stderr").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, stderr=said)
        _, status, used = os.wait4(process.pid, 0)  # the processor time of all children that were waited for, too
        said.seek(0)
        stderr = said.read()
    ended = time.monotonic()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 3 or not report.exists():
        raise SystemExit(f"{source.title}: exit code {process.returncode}, no report\n{stderr}")
    began, cpu_before = map(float, clock.read_text().splitlines()[0].split())
    found = json.loads(report.read_text(encoding="utf-8"))
    proven = [remedy for remedy in found["remedies"] if remedy["tried"] and remedy["failing_step_finite"]]
    return Answer(
        step,
        cpu_seconds=used.ru_utime + used.ru_stime - cpu_before,
        seconds=ended - began,
        replay=found["replay"] or "",
        proven=bool(proven),
        found_line=found["step"] == step and ".log()" in ((found["origin"] or {}).get("code") or ""),
    )


@dataclass(frozen=True)
class Result:
    title: str
    early: Answer
    late: Answer

    @property
    def ratio(self) -> float:
        return self.late.cpu_seconds / self.early.cpu_seconds


def measure(source: Source, steps: tuple[int, int], rounds: int) -> Result:
    """Early and late alternate, so a busy machine slows both down; of each, the round with the median time counts."""
    taken: dict[int, list[Answer]] = {step: [] for step in steps}
    with tempfile.TemporaryDirectory(prefix="firstnan-answer-") as folder:
        for _ in range(rounds):
            for step in steps:
                taken[step].append(answer(source, step, Path(folder)))
    middle = (sorted(taken[step], key=lambda one: one.cpu_seconds)[(rounds - 1) // 2] for step in steps)
    return Result(source.title, *middle)


HEADER = ["batches from", "step", "CPU s", "seconds", "step", "CPU s", "seconds", "ratio", "line", "proven fix"]


def row(result: Result) -> list[str]:
    both = (result.early, result.late)
    numbers = [text for one in both for text in (f"{one.step:,}", f"{one.cpu_seconds:.1f}", f"{one.seconds:.1f}")]
    line, proven = (
        "yes" if all(flags) else "no" for flags in zip(*((a.found_line, a.proven) for a in both), strict=True)
    )
    return [result.title, *numbers, f"{result.ratio:.2f}", line, proven]


def show(results: list[Result]) -> None:
    rows = [HEADER, *map(row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers in rows:
        print(first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)))


def markdown(results: list[Result]) -> str:
    rows = [HEADER, ["---", *("---:" for _ in HEADER[1:])], *map(row, results)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--early", type=int, default=50, metavar="N", help="the early failing step (default: 50)")
    parser.add_argument("--late", type=int, default=5000, metavar="N", help="the late failing step (default: 5000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each program (default: 3)")
    parser.add_argument(
        "--only", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="SOURCE", help=", ".join(SOURCES)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print a table in markdown to stdout at the end")
    options = parser.parse_args()
    results: dict[str, Result] = {}
    for name in options.only:
        result = results[name] = measure(SOURCES[name], (options.early, options.late), options.rounds)
        how = dict.fromkeys((result.early.replay, result.late.replay))
        print(f"{name}: ratio {result.ratio:.2f}; {'; '.join(how)}", file=sys.stderr, flush=True)
        if options.json:
            found = {done: asdict(each) | {"ratio": each.ratio} for done, each in results.items()}
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        print(markdown(list(results.values())))
    else:
        show(list(results.values()))


if __name__ == "__main__":
    main()
