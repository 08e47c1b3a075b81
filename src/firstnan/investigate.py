"""The one conductor: gate, trip, replay, trace, blame, rules, report."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from firstnan.capsule import Wanted
from firstnan.child import Order, Start
from firstnan.importing import when_imported
from firstnan.records import Report
from firstnan.report import ReportError, print_text, write
from firstnan.runner import Program
from firstnan.site import Ownership

if TYPE_CHECKING:
    from firstnan.capsule.content import Capsule
    from firstnan.replaying import Rerun
    from firstnan.watch import Watch

FOUND = 3
_PATIENCE = 300.0
"""Seconds of running time up to which the program is started again only to find where bad data was made."""


@dataclass(frozen=True)
class Options:
    json: Path | None
    output: Path | None
    trace: bool
    replay: Literal["auto", "never"]
    program: Program
    capsule: Wanted | None = None
    landing: Capsule | None = None
    """The step to land in."""


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
            if watch.keeper is not None:
                try:
                    self.report = watch.keeper.finish(self.report)
                except Exception as error:  # the report is worth more than its capsule
                    watch.internal_error(error)
        if self.order is not None:
            write(self.report, self.order.report)
            return 0
        landing = self._tell_of_landing()
        self._deliver()
        return FOUND if self.report.verdict == "nonfinite" else landing

    def _tell_of_landing(self) -> int | None:
        """Says what became of the captured step, where one was to be played again; the exit code that follows."""
        if self.options.landing is None or self.watch is None:
            return None
        watch = cast("Rerun", self.watch)
        self.report = watch.told(self.report, self.options.program.target)
        if self.report.verdict == "clean":
            for note in self.report.notes:
                say(note)
            say(watch.outcome)
        return 0 if watch.was_finite else None

    # The rest.

    def _torch_imported(self) -> None:
        self.start.torch_imported()
        if self.order is not None:
            self.start.follow_numpy(self.order)
        ownership = Ownership(program_directories(self.options.program))
        if self.options.landing is not None:
            from firstnan.replaying import Rerun

            self.watch = Rerun(self.options.landing, ownership=ownership, save=self._save)
            return
        from firstnan.watch import Watch

        self.watch = Watch(
            ownership=ownership,
            trace_from=0 if self.options.trace else self.order.step if self.order else None,
            tracing=self.options.trace or self.order is not None,
            outputs_decide=self.order is not None and self.order.what == "output",
            may_replay=self.options.replay == "auto",
            save=self._save,
            wanted=self._wanted(),
        )

    def _wanted(self) -> Wanted | None:
        if self.order is not None and self.order.capsule is not None:
            folder, limit = self.order.capsule
            return Wanted(Path(folder), limit, self.order.step)
        return self.options.capsule

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
            same = second.noticed is not None and (output or told or first.noticed is None or second.step is not None)
            self.report = replace(
                second,
                reproduced="deterministic" if same else "transient",
                replay="the program was run again, traced in the failing step",
                batch=second.batch or first.batch,
            )
        elif output:
            self.report = Report("clean")
        elif not told:
            lost = (
                "the second run did not fail in the same way"
                if second is not None
                else "the second run was not finished"
            )
            self.report = replace(
                first, notes=(*first.notes, lost), reproduced="transient" if second is not None else "not_replayed"
            )

    def _second_run(self, step: int | None) -> Report | None:
        """The child's report; once more where a closer look shows that it began in an earlier step."""
        what, program = "output" if step is None else "step", self.options.program
        report = self.start.run_again(program, step=step, what=what, capsule=self._still_wanted())
        if report is None or report.step is None or step is None or report.step >= step - 1:
            return report
        if report.origin is not None and report.origin.site is not None:
            return report
        wanted = None if report.capsule else self._still_wanted()
        return self.start.run_again(program, step=report.step, what=what, capsule=wanted) or report

    def _still_wanted(self) -> tuple[str, int] | None:
        """Where the second run is to put the capsule that the first could not write."""
        keeper = self.watch.keeper if self.watch is not None else None
        return (str(keeper.wanted.folder), keeper.wanted.limit) if keeper is not None and not keeper.is_done else None

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
