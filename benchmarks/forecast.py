"""Measures forecasts: how long before the first non-finite value they come, and how many healthy trainings get one.

    python benchmarks/forecast.py [--only NAME...] [--set first|...|ninth|all] [--verbose]

Of each training that diverges it also says how many steps before the failure loss or gradient norm left for good the
range of the run (three times their medians). What takes fewer than five steps nobody can know five steps before, unless
something else shows it.

The programs are in `forecasts/`, a file for each set; each file says which rules were made with it.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from forecasts.common import PROGRAMS, SEEN, DivergedError, Program

from firstnan import NaNDetector
from firstnan.records import NaNEvent

torch.set_num_threads(1)
LEAD = 5
"""A warning is in time if it comes so many steps before the first non-finite value."""
SETS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh")


@dataclass
class Outcome:
    name: str
    diverges: bool
    failed: int | None = None
    """The first step with a non-finite value."""
    forecasts: list[NaNEvent] = field(default_factory=list)
    others: list[NaNEvent] = field(default_factory=list)
    """Warnings of the growth guard."""
    numbers: list[list[float]] = field(default_factory=list)
    """The losses of each optimizer, and its gradient norms."""

    @property
    def lead(self) -> int | None:
        """Steps between the first forecast and the failure."""
        steps = [e.step for e in self.forecasts if e.kind == "forecast" and e.step is not None]
        return self.failed - min(steps) if steps and self.failed is not None else None

    @property
    def signs(self) -> int:
        """Steps at the end in which loss or gradient norm was above three times the median of the run."""
        found = [0]
        for numbers in self.numbers:
            usual = 3 * median(map(abs, numbers)) if numbers else 0.0
            found.append(next((i for i, v in enumerate(reversed(numbers)) if abs(v) <= usual), len(numbers)))
        return max(found)

    @property
    def guard_lead(self) -> int | None:
        steps = [e.step for e in self.others if e.step is not None]
        return self.failed - min(steps) if steps and self.failed is not None else None


def run(program: Program) -> Outcome:
    torch.manual_seed(0)
    training, found = program.make(), Outcome(program.name, program.diverges)

    def noticed(event: NaNEvent) -> None:
        if event.kind in ("forecast", "withdrawn"):
            found.forecasts.append(event)
        elif event.kind in ("spike", "explosion"):
            found.others.append(event)

    SEEN.clear()
    with NaNDetector(training.models, training.optimizers, layers=True, on_nonfinite="warn", on_event=noticed):
        for t in range(program.steps):
            try:
                training.step(t)
            except DivergedError:
                found.failed = t
                break
    found.numbers = list(SEEN.values())
    return found


def show(outcomes: Iterable[Outcome], verbose: bool) -> None:
    lost, healthy = list[Outcome](), list[Outcome]()
    for one in outcomes:
        events = [e.message for e in one.forecasts + one.others]
        if one.diverges:
            mark = "in time" if one.lead is not None and one.lead >= LEAD else "LATE" if one.failed else "DID NOT FAIL"
            told = f"fails in step {one.failed}, forecast {one.lead} steps before (guard {one.guard_lead}, "
            told += f"sign in loss or gradient {one.signs})"
        else:
            mark = "FALSE" if one.forecasts else "quiet"
            told = f"failed in {one.failed}" if one.failed else f"guard: {len(one.others)}" if one.others else ""
        print(f"{mark:<13}{one.name}: {told}", *(events[:4] if verbose else ()), sep="\n    ", flush=True)
        if one.failed or not one.diverges:
            (lost if one.diverges else healthy).append(one)
    in_time = sum(o.lead is not None and o.lead >= LEAD for o in lost)
    print(f"forecast {LEAD} or more steps before: {in_time} of {len(lost)} that diverge")
    sudden = sum((o.lead is None or o.lead < LEAD) and o.signs < LEAD for o in lost)
    print(f"of the others, {sudden} had no sign in loss or gradient {LEAD} steps before")
    print(f"false forecasts: {sum(bool(o.forecasts) for o in healthy)} of {len(healthy)} healthy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--set", choices=(*SETS, "all"), default="all")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in SETS if options.set == "all" else (options.set,):
        importlib.import_module(f"forecasts.{name}")
    wanted = [p for p in PROGRAMS if not options.only or any(text in p.name for text in options.only)]
    show(map(run, wanted), options.verbose)


if __name__ == "__main__":
    main()
