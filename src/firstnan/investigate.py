"""The one conductor: gate, trip, replay, trace, blame, rules, report."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from firstnan.child import Order, Start
from firstnan.importing import when_imported
from firstnan.records import Report
from firstnan.report import ReportError, print_text, write
from firstnan.rules import transient
from firstnan.runner import Program
from firstnan.site import Ownership

if TYPE_CHECKING:
    from firstnan.watch import Watch

FOUND = 3
_PATIENCE = 300.0
"""Seconds of running time up to which the program is started again only to find where bad data was made."""
_FINITE = "the second run did not fail in the same way"
_UNFINISHED = "the second run was not finished"
_OWN_STATE = (
    "the step was finite when it was played again in the first run: it depends on something that the program keeps "
    "besides weights, batch and random numbers, a counter or a cache"
)


@dataclass(frozen=True)
class Options:
    json: Path | None
    output: Path | None
    trace: bool
    replay: Literal["auto", "never"]
    program: Program


class Investigation:
    """Stands beside a program from its first line to its last (a runner.Watcher)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.start = Start()
        self.order = Order.given()
        self.began = time.monotonic()
        self.watch: Watch | None = None
        self.report = Report("clean")

    # What the runner calls.

    def begin(self) -> None:
        if self.order is not None:
            self.start.follow(self.order)
        when_imported("torch", self._torch_imported)

    def failed(self, error: BaseException) -> None:
        strip_our_frames(error)
        if self.watch is not None:
            self.watch.program_failed(error)

    def end(self) -> int | None:
        watch = self.watch
        if watch is not None:
            try:
                watch.program_ended()
                watch.hooks.remove()
            except Exception as error:  # What was found so far is still to be told.
                watch.internal_error(error)
            self.report = watch.report
            if watch.unresolved:
                self._run_again(watch)
        if self.order is not None:
            write(self.report, self.order.report)
            return 0
        self._deliver()
        return FOUND if self.report.verdict == "nonfinite" else None

    # The rest.

    def _torch_imported(self) -> None:
        from firstnan.watch import Watch

        self.start.torch_imported()
        if self.order is not None:
            self.start.follow_numpy(self.order)
        self.watch = Watch(
            ownership=Ownership(program_directories(self.options.program)),
            trace_from=0 if self.options.trace else self.order.step if self.order else None,
            tracing=self.options.trace or self.order is not None,
            outputs_decide=self.order is not None and self.order.what == "output",
            may_replay=self.options.replay == "auto",
            save=self._save,
        )

    def _run_again(self, watch: Watch) -> None:
        """Fills in what the program itself could not show, from a child that traces the failing step."""
        first, output = self.report, watch.report.verdict == "clean"
        if self.options.replay == "never" or self.order is not None or self.options.trace:
            if output:
                self.report = Report("clean")
            return
        told = first.origin is not None
        if told and time.monotonic() - self.began > _PATIENCE:
            return
        # An infinity that a program returns is mostly meant: nothing is said until that is known.
        if not output or (watch.bad_output is not None and watch.bad_output.name):
            why = "where the bad value was made" if told else "its operators"
            step = "" if output or first.step is None else f" in step {first.step}"
            say(f"running the program again to see {why}{step} (its output is hidden; Ctrl-C skips this)")
        try:
            second = self._second_run(None if output else first.step)
        except OSError as error:
            say(f"the program cannot be run again: {error}")
            second = None
        if second is not None and second.origin is not None:
            same = output or told or first.step is None or second.step is None or second.step <= first.step
            own_state = (_OWN_STATE,) if first.reproduced == "transient" else ()
            # What came in two runs of the whole program comes again, whatever a replay of the step has shown.
            causes = [c for c in (second.cause, *second.other_causes) if c is not None and c.slug != "transient"]
            self.report = replace(
                second,
                reproduced="deterministic" if same else "transient",
                cause=causes[0] if causes else second.cause,
                other_causes=tuple(causes[1:]),
                notes=(*second.notes, *own_state),
                replay="the program was run again, traced in the failing step",
                batch=first.batch if first.batch is not None and first.batch.confirmed else second.batch or first.batch,
            )
        elif output:
            self.report = Report("clean")
        elif not told:
            self.report = replace(first, notes=(*first.notes, _UNFINISHED))
            if second is not None:
                cause = first.cause or transient("The program was run again from its start, and was finite")
                self.report = replace(first, notes=(*first.notes, _FINITE), reproduced="transient", cause=cause)

    def _second_run(self, step: int | None) -> Report | None:
        """The child's report; once more where a closer look shows that it began in an earlier step."""
        what = "output" if step is None else "step"
        report = self.start.run_again(self.options.program, step=step, what=what)
        if report is None or report.step is None or step is None or report.step >= step - 1:
            return report
        if report.origin is not None and report.origin.site is not None:
            return report
        return self.start.run_again(self.options.program, step=report.step, what=what) or report

    def _save(self, report: Report) -> None:
        """A finding is on disk the moment it is made."""
        if self.order is not None:
            write(report, self.order.report)
        for path, extension in ((self.options.json, ".json"), (self.options.output, None)):
            if path is not None:
                try:
                    write(report, path, extension=extension)
                except (OSError, ReportError) as error:
                    say(f"can't write {path}: {getattr(error, 'strerror', None) or error}")

    def _deliver(self) -> None:
        self._save(self.report)
        if self.report.verdict == "nonfinite":
            saved = self.options.json or self.options.output
            print_text(self.report, sys.stderr, saved=str(saved) if saved else "")
        elif self.report.events:
            say(f"warning: no NaN or Inf was found; {self.report.notes[0]}")


def say(text: str) -> None:
    print(f"firstnan: {text}", file=sys.stderr, flush=True)


def program_directories(program: Program) -> tuple[str, ...]:
    """Where the program itself lives: that is the user's code even inside an installed package."""
    if not program.module:
        return (os.path.dirname(os.path.realpath(program.target)),)
    top = sys.modules.get(program.target.partition(".")[0])
    return tuple(getattr(top, "__path__", ()))


def strip_our_frames(error: BaseException | None, seen: set[int] | None = None) -> None:
    """Takes the frames of this package out of a traceback and of those chained to it."""
    seen = seen or set()
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    demos = os.path.join(here, "demos") + os.sep
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kept = []
        at = error.__traceback__
        while at is not None:
            name = at.tb_frame.f_code.co_filename
            if not name.startswith(here) or name.startswith(demos):
                kept.append(at)
            at = at.tb_next
        for one, following in zip(kept, [*kept[1:], None], strict=False):
            one.tb_next = following
        error.__traceback__ = kept[0] if kept else None
        if error.__cause__ is not None:
            strip_our_frames(error.__cause__, seen)
        error = error.__context__
