"""Runs a whole investigation of a program: gate, trip, replay, trace, blame, rules, report."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isclose, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firstnan.capsule import Wanted
from firstnan.diagnose.rules import transient
from firstnan.engine import trials
from firstnan.engine.isolation import IsolationError, is_of_isolation, kept_waiting
from firstnan.engine.launched import LaunchedProcesses
from firstnan.engine.ranks import HeldRank, Ranks
from firstnan.engine.second_run import Instructions, SecondRun, Start
from firstnan.engine.step_log import StepLog
from firstnan.engine.workers import WorkerReports, announce
from firstnan.observe.runner import (
    Program,
    before_leaving,
    before_replacing,
    before_starting,
    overlay_sources,
    retrieve_from_tasks,
    when_imported,
)
from firstnan.observe.sites import Ownership
from firstnan.observe.standstill import own_handlers_interrupt, timers_stopped, wait_for_standstill
from firstnan.records import Batch, NaNEvent, Origin, Report
from firstnan.records.errors import NonFiniteError
from firstnan.records.files import write_whole
from firstnan.records.forecast_words import sentence
from firstnan.records.words import came_with_numbers, headline
from firstnan.repair.patch import choose, how_to_apply, portable
from firstnan.repair.verdict import Reach, TrialOutcome, ended_by, last_bad_step
from firstnan.report import Progress, github_annotation, print_text, write
from firstnan.report.live import LiveStatus

if TYPE_CHECKING:
    from firstnan.capsule.content import Capsule
    from firstnan.engine.capsule_replay import CapsuleReplay
    from firstnan.engine.program_watch import ProgramWatch
    from firstnan.engine.replicas import Replicas
    from firstnan.engine.session import Session
    from firstnan.engine.step_trial import StepTrials
    from firstnan.engine.trial_policy import Trial

FOUND = 3
_UPDATES_BEFORE = 16
"""How many updates a second run records before the failing one, where several optimizers make them."""
_SPREAD = "each rank holds a part of the weights, so a fix would have to be tried by all ranks together"
_STILL_WAITS = "rank {} has waited {:.0f} seconds in its backward pass for the other ranks, and still waits"
_LEFT_RANGE = "the loss left its initial range in step {} and did not return"
_FINITE = "the second run did not fail in the same way"
_SAME_LOSS = 1e-3
_STARTERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun")
_ELSEWHERE = "but the program started {}, which was not watched; FIRSTNAN=1 python instead of firstnan run watches both"
_ENDED = "the launcher has ended the job"
_GONE_ON = "this rank had gone on with its step when the others failed"
_INPUT_IS_READ = "the program has read its standard input, which cannot be read again"
_UNFINISHED = "the second run did not finish"
_FIRST_SKIPPED = (
    "running the program again to see the first loss that it skipped, in step {} (its output is hidden; Ctrl-C skips "
    "this)"
)
_GAVE_UP = "the program skipped several non-finite losses, the first in step {}, and gave up in step {}"
_BATCH_FIRST = (
    "starting the program again with the failing batch first, to see where the bad value was created (its output is "
    "hidden; Ctrl-C skips this)"
)
_IN_WORKER = "it happened in a process that the program had started; that process was not ended"
_NOT_HERE = "it happened in another process of the program"
_OWN_STATE = (
    "the step was finite when replayed in the first run, so it depends on other program state, such as a counter or a "
    "cache"
)


@dataclass(frozen=True)
class Options:
    json: Path | None
    output: Path | None
    trace: bool
    replay: Literal["auto", "never"]
    program: Program
    verify: int | None = None
    """How many steps past the failing one a trial runs; 0 for no trials, None if not given."""
    fix: Path | None = None
    """Where to write the best proven fix."""
    capsule: Wanted | None = None
    restart: Capsule | None = None
    """The captured step to begin with."""
    isolation: bool = True
    """Whether what runs again must change nothing of the user's; if that is impossible, it is not run."""
    check_replicas: int = 0
    """After how many updates the parameters of all ranks are compared; 0 for never."""
    logs: StepLog | None = None
    """Where the numbers of each step are written."""
    live: bool = False
    """Whether one line shows how training is doing."""
    annotate: bool = False
    """Whether to print the finding as a GitHub workflow shows it at its source line."""
    if_trained: bool = False
    """Whether this may be any process of a job, such as its launcher: a clean report is written only if it trained,
    and not over the report of another process."""
    launches: bool = False
    """Whether this is a launcher, whose processes are watched because of their environment."""
    watched: Callable[[list[str]], list[str] | None] = lambda words: None
    """The words that start and watch the program which these words of python start; None if there is none."""


class Investigation:
    """Investigates a program from its first line to its last (a runner.Watcher)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.start = Start()
        self.order = Instructions.given()
        if self.order is not None and self.order.contents:
            overlay_sources({path: text.encode("latin-1") for path, text in self.order.contents.items()})
        self.began, self._began_at = time.monotonic(), time.time()
        self.seconds = 0.0
        """The running time of the program itself."""
        self.watch: ProgramWatch[Any] | None = None
        self._trial: Trial | None = None
        self._first_batch: tuple[list[int], int] | None = None
        """The samples of the failing batch and the size of its dataset, if that batch alone makes the program fail."""
        self._replay: CapsuleReplay | None = None
        self.report = Report("clean")
        self._interrupted = self._tried = self._over = self._first_part_printed = self._all_printed = False
        self._capsule_is_finished = False
        self._replicas: Replicas | None = None
        self.workers, self.ranks, self.launched = WorkerReports(), Ranks(), LaunchedProcesses()
        self._held_rank: HeldRank | None = None
        self._answer: Report | None = None
        """The answer of the first of several ranks, if that is another one."""
        self.logs = options.logs if self.order is None else None
        self._skips = False
        """Whether the program skips bad losses, and the first of them is reported."""
        self._live = LiveStatus() if options.live and self.order is None else None
        self._unwritten: set[Path] = set()
        """Files of the report that could not be written."""
        self._warnings = 0
        """How many lines there were about forecasts."""
        self._not_watched = ""
        """A program of python's that this one has started."""
        self._fate = TrialOutcome()
        """How the program ended, as text; the exception itself would keep tensors alive."""

    # Called by the runner.

    def begin(self) -> None:
        if self.order is not None:
            self.start.follow(self.order)
        if self.options.launches:
            os.environ.update(self.launched.environment())
        before_leaving(self._left_at_once)
        if not self.options.if_trained:  # otherwise python watches the next program too, if it is one of python's
            before_replacing(self._replaced_by_program)
            before_starting(self._started_by_program)
        if self.order is None:
            self.workers.watch_spawned(program_directories(self.options.program), tries=self._tries)
        when_imported("torch", self._torch_imported)

    def _replaced_by_program(self, path: str, words: list[str]) -> list[str]:
        """What the program replaces itself with; watched as well if it is the same python with a program."""
        is_same = self.order is None and os.path.abspath(path) == os.path.abspath(sys.executable)
        again = self.options.watched(words) if is_same else None
        if again is None:
            say(f"the program replaces itself with {path}, which is not watched")
        return again or words

    def replays_here(self) -> bool:
        return self.watch is not None and self.watch.session.in_child

    def failed(self, error: BaseException) -> None:
        strip_our_frames(error)
        if isinstance(error, NonFiniteError) and self.watch is not None and self.watch.session.is_detected:
            error.text = f"firstnan: {headline(error.report)} (the report of firstnan run has more)"
        if type(error).__name__ == "Stop":  # of `policies`, which would import torch
            retrieve_from_tasks(error)
        self._interrupted = isinstance(error, KeyboardInterrupt)
        self._fate = ended_by(error)
        if self.order is not None and is_of_isolation(error):
            self._fate = replace(self._fate, not_continued=f"there is no server or other process ({self._fate.error})")
        if self.watch is not None:
            self.watch.values.program_failed(error)

    def _started_by_program(self, words: list[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
        """What to start instead of these words, and what to add to its environment."""
        is_rank = any(env.get(name) not in (None, os.environ.get(name)) for name in ("RANK", "LOCAL_RANK"))
        is_same = words and os.path.abspath(words[0]) == os.path.abspath(sys.executable)
        again = self.options.watched(words) if is_rank and is_same and self.order is None else None
        if again is not None:
            return again, self.launched.environment()
        scripts = [word for word in words[1:] if word.endswith(".py")]
        programs = [os.path.basename(word) for word in words]
        if any("python" in name or name in _STARTERS for name in programs) and scripts and not self._not_watched:
            self._not_watched = scripts[0]
        return None

    def _left_at_once(self, code: int) -> int:
        """The program calls `os._exit`; returns the exit code to use."""
        wait_for_standstill()
        if self._over:
            return code
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        replaced = self.end()
        return code if replaced is None else replaced

    def end(self) -> int | None:
        try:
            with timers_stopped(over=True):
                return self._end()
        finally:
            if self.watch is not None and self.watch.session.values is not None:
                # Torch still knows our functions. The program's variables are to be freed as usual: that flushes files.
                self.watch.session.values.forget()

    def _end(self) -> int | None:
        self._over = True
        if self._live is not None:
            self._live.end()
        if self.logs is not None:
            self.logs.flush()
        self.seconds = time.monotonic() - self.began
        self.ranks.join()
        watch = self.watch
        if watch is not None:
            report = watch.end()
            if self._tried:  # it is complete, with the results of the trials
                self._add_notes(report.notes)
            else:
                self.report = report
                if watch.policy.unresolved and not self._interrupted:
                    self._run_again(watch)
        if self.order is None and self.report.verdict == "clean" and (found := self.workers.first()) is not None:
            remedies = tuple(r if r.tried or r.note else replace(r, note=_NOT_HERE) for r in found.remedies)
            self.report = found.with_(remedies=remedies, notes=(*found.notes, _IN_WORKER))
            self._tried = True
        code = self._tell_of_restart()
        if self.order is None and not self._tried and self.ranks.are_many:
            self._is_first_of_ranks(self.report)
        if self.order is None and self.options.restart is None and not self._tried:
            if self._interrupted or (watch is not None and watch.policy.interrupted):
                self.report = trials.left_out(self.report)
            else:
                self._try_remedies(self.report)
        self._finish_capsule()
        if self.order is not None:
            if self.order.what == "trial":
                self._tell(self._trial.outcome(self._fate) if self._trial else self._fate)
            else:
                self._answer_order(self.report)
            return 0
        self._deliver()
        if self.launched.have_found() or self.report.verdict != "clean":
            self.launched.note()
            code = FOUND
        self.ranks.termination.obey(goes_on=False)
        if self.ranks.hangs_in_store and self.report.verdict != "clean":
            # If the store answers while Python is torn down, the thread that waits for it ends the process by SIGABRT.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(FOUND)
        return code

    def _finish_capsule(self) -> None:
        watch = self.watch
        if watch is not None and watch.capsules is not None and not self._capsule_is_finished:
            self._capsule_is_finished = True
            try:
                self.report = watch.capsules.finish(self.report)
            except Exception as error:  # the report is worth more than its capsule
                watch.internal_error(error)

    def _tell_of_restart(self) -> int | None:
        """Prints the result of replaying a captured step, if that was requested; returns the exit code."""
        replay, wanted = self._replay, self.options.restart
        if wanted is None:
            return None
        failed = self._fate.error or self._fate.exit or self._interrupted  # then the exit code is the program's own
        if replay is None:
            say(f"the program reached no training step, so step {wanted.steps.current} of the capsule was not replayed")
            return None if failed else 2
        self.report = replay.told(self.report, self.options.program.target)
        if self.report.verdict == "clean" and replay.mismatch:
            self.report = replace(self.report, notes=(f"but {replay.outcome}",))
        elif self.report.verdict == "clean":
            for note in self.report.notes:
                say(note)
            say(replay.outcome)
        if replay.mismatch:
            return 2
        return 0 if replay.was_finite else None if failed else 2

    # The report.

    def _torch_imported(self) -> None:
        self.start.torch_imported()
        ownership = Ownership(program_directories(self.options.program))
        if self.order is not None:
            self.start.follow_imported(self.order)
        from firstnan.engine import program_watch

        order = self.order
        if order is not None and order.what == "trial":
            step, reach = order.step or 0, Reach(**(order.reach or {"last": 0}))
            trial = program_watch.watch_trial(
                ownership,
                self._tell,
                step=step,
                reach=reach,
                made=order.made,
                first_batch=order.first_batch,
                reads_decide=order.reads_decide,
            )
            self.watch, self._trial = trial, trial.policy
        elif self.options.restart is not None:
            restarted = program_watch.watch_capsule(ownership, self._save, self.options.restart)
            self.watch, self._replay = restarted, restarted.policy
        else:
            self.watch = program_watch.watch(
                ownership,
                self._save,
                self._explained,
                trace_from=0 if self.options.trace else order.updates if order else None,
                tracing=self.options.trace or order is not None,
                outputs_decide=order is not None and order.what == "output",
                reads_decide=order is not None and order.reads_decide,
                may_replay=self.options.replay == "auto",
                wanted=self._wanted(),
                again=order is not None,
                lines=order.lines if order else None,
                first_batch=order.first_batch if order else None,
                replicas=self._compared_replicas(),
                tell=self._foreseen if order is None else lambda event: None,
                on_step=self._on_step() if order is None else None,
                held=self._held,
                released=self._released,
            )

    @property
    def _tries(self) -> bool:
        """Whether fixes may be tried."""
        return self.options.verify != 0 and (self.options.verify is not None or self.options.replay == "auto")

    @property
    def _own_seconds(self) -> float:
        """The running time of the program, without what it has waited for a processor."""
        return max(self.seconds - kept_waiting(os.getpid()), 0.0)

    def _compared_replicas(self) -> Replicas | None:
        if not self.options.check_replicas or self.order is not None:
            return None
        from firstnan.engine.replicas import Replicas

        self._replicas = Replicas(self.options.check_replicas, lambda text, step, name: say(f"warning: {text}"))
        return self._replicas

    def _on_step(self) -> Callable[[Session], None] | None:
        """What is called after each step: the log and the status line, if they are wanted."""
        logs, live = self.logs, self._live
        if live is None:
            return logs.add if logs is not None else None

        def after(session: Session) -> None:
            if logs is not None:
                logs.add(session)
            if live.is_due() and not session.in_child:
                live.show(*status(session))

        return after

    def _foreseen(self, event: NaNEvent) -> None:
        """One line for the first forecast that holds, however many follow, and one when none holds any more.

        Those that name a step and those that do not are counted apart: the second say less.
        """
        watch = self.watch
        kept = watch.session.gate.forecasts if watch is not None else []
        dated = event.what != "parameter"
        holding = sum(f.withdrawn is None and (f.in_steps is not None) == dated for f in kept)
        first = holding == (1 if event.kind == "forecast" else 0)
        if first and not self.replays_here() and not self.workers.is_elsewhere:
            if self.logs is not None:
                self.logs.event(event)
            self._warnings += 1
            if self.ranks.says_first(f"{event.kind} {self._warnings}"):
                say(f"warning: {event.message}")

    def _wanted(self) -> Wanted | None:
        if self.order is not None and self.order.capsule is not None:
            folder, limit = self.order.capsule
            return Wanted(Path(folder), limit, self.order.step)
        return self.options.capsule

    def _run_again(self, watch: ProgramWatch[Any]) -> None:
        """Completes the report from a child process that traces the failing step."""
        first, output = self.report, self.report.verdict == "clean"
        if self.options.replay == "never" or self.order is not None or self.options.trace:
            if output:
                self.report = Report("clean")
            return
        told = first.origin is not None and not watch.session.maker_is_left_out
        if told and (found := self._with_failing_batch_first(first, watch)) is not None:
            self.report = found
            return
        if told and self.seconds > trials.PATIENCE:
            return
        # An infinity that a program returns is usually intended, so nothing is printed until that is known.
        announced = not output or (watch.values.bad_output is not None and watch.values.bad_output.name)
        why = "where the bad value was created" if told else "its operators"
        where = "" if output or first.step is None else f" in step {first.step}"
        text = f"running the program again to see {why}{where} (its output is hidden; Ctrl-C skips this)"
        try:
            with own_handlers_interrupt():
                run = self._second_run(None if output else first.step, text if announced else "")
        except KeyboardInterrupt:
            run = None
        except IsolationError as error:
            self.report = Report("clean") if output else replace(first, notes=(*first.notes, _not_isolated(error)))
            return
        second = run.report if run is not None else None
        if run is not None and second is not None and second.origin is not None:
            same, alike = output or _is_same_failure(first, second), _are_same_losses(first, second)
            second = second if alike else second.with_other_numbers()
            notes = (*second.notes, *((_OWN_STATE,) if first.reproduced == "transient" else ()))
            if not same:
                notes = (*notes, _other_failure(first, second))
            # A failure in two runs of the whole program is reproducible, whatever a replay of the step has shown.
            causes = [c for c in (second.cause, *second.other_causes) if c is not None and c.slug != "transient"]
            self.report = replace(
                second,
                reproduced="transient" if not same else "deterministic" if alike else "similar",
                cause=causes[0] if causes else second.cause,
                other_causes=tuple(causes[1:]),
                notes=notes,
                replay=f"{trials.RUN_AGAIN}, traced in the failing step",
                loops=second.loops or (first.loops if second.step == first.step else ()),
                batch=_batch_of(first, second),
            )
        elif output:
            self.report = Report("clean")
        else:
            self.report = self._not_repeated(first, run)

    def _with_failing_batch_first(self, first: Report, watch: ProgramWatch[Any]) -> Report | None:
        """The report with the line that created bad data, from a second run whose first batch is the failing one."""
        from firstnan.engine.conclude import came_from_outside

        batch = watch.policy.first_batch
        if batch is None or self._still_wanted() is not None:
            return None
        if batch.is_of_loop and self.seconds <= trials.PATIENCE:
            return None  # the whole program is run again instead, which finds more
        given = list(batch.indices), batch.length
        try:
            with own_handlers_interrupt():
                second = self.start.run_again(
                    self.options.program,
                    step=0,
                    what="step",
                    seconds=trials.Limits.after(min(self._own_seconds, trials.PATIENCE)).one,
                    first_batch=given,
                    isolated=self.options.isolation,
                    started=lambda: say(_BATCH_FIRST),
                ).report
        except KeyboardInterrupt:
            return self._not_repeated(first, None)
        except IsolationError:
            return None
        if second is None or second.step != 0 or second.origin is None or came_from_outside(second.origin):
            return None
        self._first_batch = given
        # Where the line that created it cannot be changed, the data can still be cleaned where the loop gets it.
        known = {remedy.diff for remedy in second.remedies}
        others = tuple(remedy for remedy in first.remedies if remedy.diff and remedy.diff not in known)
        return replace(
            second,
            remedies=second.remedies + others,
            step=first.step,
            batch=first.batch,
            noticed=first.noticed,
            history=first.history,
            events=first.events,
            loops=first.loops,
            reproduced="deterministic",
            replay=f"{trials.RUN_AGAIN}, with the failing batch first",
        )

    def _with_first_skipped(self, last: Report, step: int) -> Report | None:
        """The report of the first bad loss that the program has skipped, from a second run that ends there."""
        if self.options.replay == "never" or self.options.trace or self.seconds > trials.PATIENCE:
            return None
        try:
            with own_handlers_interrupt():
                second = self.start.run_again(
                    self.options.program,
                    step=step,
                    what="step",
                    seconds=trials.Limits.after(self._own_seconds).one,
                    updates=self._updates_before(step),
                    reads_decide=True,
                    isolated=self.options.isolation,
                    started=lambda: say(_FIRST_SKIPPED.format(step)),
                ).report
        except (KeyboardInterrupt, IsolationError):
            return None
        if second is None or second.origin is None or second.step != step:
            return None
        return replace(
            second,
            reproduced="deterministic",
            replay=f"{trials.RUN_AGAIN}, traced in the failing step",
            events=last.events,
        )

    def _not_repeated(self, first: Report, run: SecondRun | None) -> Report:
        """The report of the first run, and what can be said of a second one without that failure."""
        if run is None or (run.report is None and run.in_time):
            return replace(first, notes=(*first.notes, _UNFINISHED))
        if not run.in_time:
            return replace(first, notes=(*first.notes, f"{_UNFINISHED}: it took longer than the first"))
        step, fate = first.step or 0, run.fate
        if fate.passed < step or (fate.error and fate.passed == step):
            how = fate.error or fate.exit or "its end"
            text = f"the second run did not reach step {step}; it ended after {fate.passed} steps with {how}"
            return replace(first, notes=(*first.notes, text))
        if first.origin is not None:
            return replace(first, notes=(*first.notes, _FINITE))
        cause = first.cause or transient("The program was run again from its start, and was finite")
        return replace(first, notes=(*first.notes, _FINITE), reproduced="transient", cause=cause)

    def _second_run(self, step: int | None, text: str) -> SecondRun:
        """The second run, announced by `text`; a third if the failure turns out to begin in an earlier step."""
        run = self._once_more(step, "output" if step is None else "step", self._still_wanted(), text)
        report = run.report
        if report is not None and report.origin is not None and report.origin.phase == "input" and run.bad_since:
            third = self._once_more(step, "step", None, lines=run.bad_since)
            if third.report is None or not _is_created(third.report.origin):
                return run
            batch = report.batch if third.report.step == report.step else third.report.batch
            return replace(third, report=replace(third.report, batch=batch, capsule=report.capsule))
        if report is None or report.step is None or step is None or report.step >= step - 1:
            return run
        if report.origin is None or report.origin.site is not None:
            return run
        third = self._once_more(report.step, "step", None if report.capsule else self._still_wanted())
        return third if third.report is not None else run

    def _once_more(
        self,
        step: int | None,
        what: str,
        capsule: tuple[str, int] | None,
        text: str = "",
        lines: tuple[int, int] | None = None,
    ) -> SecondRun:
        return self.start.run_again(
            self.options.program,
            step=step,
            what=what,
            seconds=trials.Limits.after(self._own_seconds).one,
            updates=self._updates_before(step) if lines is None else max(lines[0], 1),
            lines=lines,
            capsule=capsule,
            isolated=self.options.isolation,
            started=lambda: say(text) if text else None,
        )

    def _updates_before(self, step: int | None) -> int | None:
        """After how many updates a second run begins to record: one step before the given one."""
        if step is None or self.watch is None:
            return None
        steps = self.watch.session.gate.steps
        if len(steps.done) < 2 or step != self.report.step:
            return max(step - 1, 1)
        return max(steps.updates - _UPDATES_BEFORE, 1)

    def _still_wanted(self) -> tuple[str, int] | None:
        """Where the second run should write the capsule that the first could not write."""
        capsules = self.watch.capsules if self.watch is not None else None
        wanted = capsules.wanted if capsules is not None and not capsules.is_done else None
        return (str(wanted.folder), wanted.limit) if wanted is not None else None

    def _explained(self, report: Report, session: Session) -> None:
        """The failure is explained, and the program still stands at the failing step: tries the remedies there."""
        if self.order is not None or self.options.restart is not None or self._interrupted:
            return
        from firstnan.engine.block_trials import try_fixes_in_worker
        from firstnan.engine.sharded import are_gathered
        from firstnan.engine.step_trial import StepTrials

        if self.workers.is_elsewhere:
            announce(report)
            if self._tries:
                try_fixes_in_worker(report, session, self.workers.add)
            return
        self.seconds, report = time.monotonic() - self.began, session.complete(report)
        self.ranks.join()
        by_all = session.reaches_others or report.origin is None  # it may have come from another
        if self.ranks.are_many and not self._is_first_of_ranks(report, by_all=by_all):
            self.ranks.termination.obey(goes_on=session.is_detected)
            return
        spread = are_gathered(list(session.gate.steps.done))
        here = session.failure is not None and (session.weights.are_here or not spread)
        at_step = StepTrials(session, session.failure) if here and session.failure is not None else None
        skipped = session.values.first_skipped if session.values is not None and not self.ranks.are_many else None
        if skipped is not None:
            found, last = self._with_first_skipped(report, skipped), report.step
            if found is not None:
                report, at_step, self._skips = found, None, True
            report = replace(report, notes=(*report.notes, _GAVE_UP.format(skipped, last)))
        self._try_remedies(self.report if self.ranks.are_many else report, at_step, _SPREAD if spread else "")
        saved = self.options.json or self.options.output
        if self.ranks.are_many:  # the launcher may end this process as soon as another one ends
            self._answer_for_all(str(saved) if saved else "")
            self.ranks.termination.obey(goes_on=session.is_detected)
        elif self._first_part_printed and self.options.capsule is None:
            self._print_rest(str(saved) if saved else "")

    def _held(self, report: Report) -> bool:
        """This rank has found something, and others wait for it in the backward pass; False if it has to end now."""
        self.ranks.join()
        if self.ranks.termination.asked:
            return False
        report = self.ranks.placed(report)
        self.ranks.announce(report)
        late, ended = lambda: self._is_late(report), lambda: self._ended_held(report)
        self._held_rank = HeldRank(self.ranks.patience, late, ended, self.ranks.is_named)
        return True

    def _released(self) -> None:
        held, self._held_rank = self._held_rank, None
        if held is not None:
            held.release()

    def _is_late(self, report: Report) -> None:
        """The other ranks do not come; they may be busy with something else. Called by another thread."""
        self.report = report
        self._print_first_part()
        say(_STILL_WAITS.format(report.rank, self.ranks.patience))

    def _ended_held(self, report: Report) -> None:
        """The launcher, or the others, end this rank while it waits in the backward pass. Called by another thread."""
        termination = self.ranks.termination
        if not termination.is_put_off and not self.ranks.is_named():  # the program handles it
            return
        why = _GONE_ON if self.ranks.is_named() else _ENDED
        termination.asked = self._over = True
        first = self.ranks.exchange(trials.left_out(report, why))
        self.report = first or report
        self._save(self.report)
        if first is not None:
            self._write(first)
            self._print_rest()
            self.ranks.settle(first)
        os._exit(FOUND)

    def _is_first_of_ranks(self, report: Report, *, by_all: bool = True) -> bool:
        """Whether this rank's failure was the first of all; otherwise another rank has the answer."""
        report = self.ranks.placed(report)
        if report.verdict == "clean":
            self.report = report
            if self.ranks.writes_for_all:
                self._answer = self.ranks.answer()
            return False
        first = self.ranks.exchange(report, by_all=by_all)
        if first is not None:
            self.report = first
            return True
        self.report, self._tried, self._all_printed = report, True, True
        self._save(report)
        with contextlib.suppress(KeyboardInterrupt):
            if self.ranks.writes_for_all and (answer := self.ranks.answer()) is not None:
                self._answer = answer
                self._write(answer)
                self.ranks.written()
            self.ranks.wait_for_end()
        return False

    def _answer_for_all(self, saved: str) -> None:
        """Writes and prints everything, and gives the other ranks the answer."""
        self._finish_capsule()
        self._save(self.report)
        self._write(self.report)
        self._print_rest(saved)
        self.ranks.settle(self.report)

    def _try_remedies(self, report: Report, at_step: StepTrials | None = None, why_not: str = "") -> None:
        """Tries each fix, until one is known to help; prints what is known before. `why_not`: none can be tried."""
        options = self.options
        self.report, self._tried = report, True
        count = min(sum(1 for remedy in report.remedies if remedy.diff), trials.MOST)
        if not count:
            return
        why, from_start = reason_not_to_try(report, options), why_not or reason_not_to_start(options, self.seconds)
        if self.start.has_lost_input():
            from_start = from_start or _INPUT_IS_READ
        here = at_step is not None and at_step.is_possible()
        if why or (from_start and not here and self._first_batch is None):
            self.report = report.with_(remedies=tuple(replace(r, note=why or from_start) for r in report.remedies))
            return
        self._save(report)
        if report.verdict == "diverged":
            say(f"{_LEFT_RANGE.format(report.step)}. Smaller learning rates will show whether training has diverged")
        else:
            try:
                self._print_first_part()
            except KeyboardInterrupt:
                self._first_part_printed, self.report = False, trials.left_out(report)
                return
        progress = Progress(count)
        steps = trials.STEPS if options.verify is None else options.verify
        limits = trials.Limits.after(self._own_seconds, options.verify)
        attempts = trials.Trials(
            self.start,
            options.program,
            steps,
            limits,
            isolated=options.isolation,
            at_step=at_step,
            from_start=from_start,
            first_batch=self._first_batch,
            reads_decide=self._skips,
        )
        try:
            with self.ranks.termination.interrupts(), own_handlers_interrupt():
                attempts.run(report, lambda tried: self._keep(tried, progress))
        except KeyboardInterrupt:  # what was tried until now is in the report
            self.report = trials.left_out(self.report)
        except Exception as error:
            say(f"internal error: {type(error).__name__}: {error}")
        finally:
            progress.end()
        if self.ranks.termination.asked:
            self.report = trials.left_out(self.report, _ENDED)
        if attempts.refute_divergence:
            note = f"but {_LEFT_RANGE.format(report.step)}; with smaller learning rates it becomes even larger"
            self.report = Report("clean", events=report.events, history=report.history, notes=(note,))
            self._save(self.report)

    def _keep(self, report: Report, progress: Progress) -> None:
        self.report = report
        self._save(report)
        progress.tried(sum(1 for remedy in report.remedies if remedy.tried))

    def _tell(self, outcome: TrialOutcome) -> None:
        assert self.order is not None
        self.order.answer(asdict(outcome))

    def _answer_order(self, report: Report) -> None:
        """Sends what this second run has seen so far."""
        assert self.order is not None
        watch = self.watch
        passed = watch.session.gate.steps.current if watch is not None else 0
        since = None
        if watch is not None and watch.bad_since is not None:
            session = watch.session
            with session.microscope.unseen():
                watch.bad_since.look(session.handouts.state, session.gate.steps.updates + 1)
            since = watch.bad_since.found
        fate = asdict(replace(self._fate, passed=passed))
        self.order.answer({"report": report.to_dict(), "fate": fate, "bad_since": since})

    def _save(self, report: Report) -> None:
        """Writes the report to disk as soon as something is found."""
        if self.order is not None:
            self._answer_order(report)
            return
        if self.workers.is_elsewhere:
            self.workers.add(report)
            return
        if report.verdict != "clean":
            self.ranks.join()
            if self.ranks.are_many:
                self.ranks.termination.put_off()
                self.ranks.begin()
        if report.verdict == "nonfinite":
            self.launched.note()
        self._write(report, own=self.ranks.are_many)

    def _write(self, report: Report, *, own: bool = False) -> None:
        """`own`: to the file of this rank, not to that of all ranks."""
        if own and report.verdict == "clean":
            return
        json = self.options.json
        saved = self.ranks.path(json) if own and json is not None else json
        for path, extension in ((json, ".json"), (self.options.output, None)):
            if path is not None and not self._is_others(path, report):
                place = self.ranks.path(path) if own else path
                try:
                    write(report, place, extension=extension, saved=saved)
                    self._unwritten.discard(place)
                except Exception as error:  # a file that cannot be written must not cost the report
                    if place not in self._unwritten:
                        say(f"can't write {place}: {getattr(error, 'strerror', None) or error}")
                    self._unwritten.add(place)

    def _is_others(self, path: Path, report: Report) -> bool:
        """Whether this file belongs to another process of the job."""
        if report.verdict != "clean" or not (self.options.if_trained or self.launched.are_any):
            return False
        return not self._has_trained or (path.exists() and path.stat().st_mtime >= self._began_at)

    @property
    def _has_trained(self) -> bool:
        return self.watch is not None and self.watch.session.gate.trained

    def _add_notes(self, notes: tuple[str, ...]) -> None:
        """Adds what was noticed after the report was printed."""
        new = tuple(note for note in notes if note not in self.report.notes)
        self.report = self.report.with_(notes=(*self.report.notes, *new))
        for note in new if self._all_printed else ():
            say(note)

    def _print_first_part(self) -> None:
        """Everything but the fixes, which are still to be tried."""
        if not self._first_part_printed:  # a rank that has waited for others has printed it
            self._first_part_printed = True
            print_text(self.report, sys.stderr, parts="first")

    def _print_rest(self, saved: str = "") -> None:
        """What was not printed yet."""
        if not self._all_printed:
            self._all_printed = True
            print_text(self.report, sys.stderr, saved=saved, parts="rest" if self._first_part_printed else "whole")

    def _deliver(self) -> None:
        if self._not_watched and self.report.verdict == "clean" and not self._has_trained:
            self.report = self.report.with_(notes=(*self.report.notes, _ELSEWHERE.format(self._not_watched)))
        if self.logs is not None and self.report.verdict == "nonfinite":
            self.logs.failed(self.report)
        notes = self.report.notes
        if self._replicas is not None and (found := self._replicas.told()):
            self.report = self.report.with_(notes=(*notes, found))
        self._save(self.report)
        own = not self.ranks.are_many or self.ranks.is_first
        if self.ranks.are_many and self.ranks.writes_for_all:
            self._write(self.report if own else self._answer or self.report)
        if self.report.verdict != "clean":
            paths = [path for path in (self.options.json, self.options.output) if path is not None]
            saved = [str(path) for path in paths if path not in self._unwritten]
            self._print_rest(saved[0] if saved else "")
            if self.options.fix is not None and own:
                self._write_fix(self.options.fix)
            if self.options.annotate and (self.ranks.writes_for_all or not self.ranks.are_many):
                sys.stderr.write(github_annotation(self._answer or self.report))
        elif notes:
            pause = "," if notes[0].startswith("but ") else ";"
            say(f"warning: no NaN or Inf reached training{pause} {notes[0]}")
        if self.ranks.is_first:
            self.ranks.settle(self.report)

    def _write_fix(self, path: Path) -> None:
        remedy = choose(self.report)
        if remedy is None:
            say("no fix is proven, so no patch was written")
            return
        here = self.start.directory or ""
        diff, folder = portable(remedy, here)
        try:
            write_whole(path, diff)
        except OSError as error:
            say(f"can't write {path}: {error.strerror}")
        else:
            command = how_to_apply(folder, here, str(path))
            say(f"wrote the best proven fix to {path}" + (f"; apply it with {command}" if command else ""))


def _is_same_failure(first: Report, second: Report) -> bool:
    """Whether the second run failed in the same step, or noticed bad weights sooner: it reads all after each update."""
    if first.step is None or second.step is None or first.step == second.step:
        return True
    steps = last_bad_step(first), last_bad_step(second)
    closer = second.noticed is not None and second.noticed.what in ("parameter", "state", "buffer")
    return steps[0] == steps[1] or (closer and steps[1] < steps[0])


def _are_same_losses(first: Report, second: Report) -> bool:
    """Whether two runs had the same losses, as far as both are known; an unseeded program has others every time."""
    losses = {record.step: record.loss for record in first.history.steps}
    pairs = [(losses.get(record.step), record.loss) for record in second.history.steps]
    known = [(a, b) for a, b in pairs if a is not None and b is not None and isfinite(a) and isfinite(b)]
    return all(isclose(a, b, rel_tol=_SAME_LOSS, abs_tol=1e-9) for a, b in known)


def _batch_of(first: Report, second: Report) -> Batch | None:
    """What both runs know of the batch: only the first has seen the names of its data, if it had no loader."""
    if first.batch is not None and (first.batch.confirmed or (first.batch.replays and first.batch.bad_samples)):
        return first.batch
    if second.step != first.step:
        return second.batch
    if second.batch is None or first.batch is None or second.batch.unit != "sample":
        return second.batch or first.batch
    return replace(second.batch, unit=first.batch.unit)


def _is_created(origin: Origin | None) -> bool:
    """Whether this says what created the value, and not only where the step reads it."""
    from firstnan.engine.conclude import came_from_outside

    if origin is None or origin.site is None:
        return False
    return origin.read_at is not None or not (came_from_outside(origin) or came_with_numbers(origin))


def _other_failure(first: Report, second: Report) -> str:
    return (
        f"not the same failure: the first run failed in step {last_bad_step(first)}, "
        f"the second, which is shown here, in step {last_bad_step(second)}"
    )


def _not_isolated(error: OSError) -> str:
    return (
        f"the program was not run again, since it could not be kept away from your files here ({error}); "
        "--isolation off runs it again anyway"
    )


def say(text: str) -> None:
    print(f"firstnan: {text}", file=sys.stderr, flush=True)


def status(session: Session) -> tuple[list[str], str]:
    """How training is doing, for one line; and the forecast that holds, if there is one."""
    count = session.gate.steps.updates
    parts = [f"{count} step{'s' * (count != 1)}"]
    known = session.gate.last_step()
    if known is not None:
        last = known[1]
        numbers = (
            ("loss", last.loss),
            ("gradient norm", session.gate.norm if last.grad_norm is None else last.grad_norm),
        )
        parts += [f"{what} {value:.4g}" for what, value in numbers if value is not None]
    nearest = session.headroom()[:1]
    for one in nearest:
        parts.append(f"nearest limit: {one.op} at line {one.line}, {one.argument} {one.value:.3g}")
    holding = [f for f in session.gate.forecasts if f.withdrawn is None]
    return parts, sentence(holding[-1]) if holding else ""


def reason_not_to_try(report: Report, options: Options) -> str:
    """Why no fix is tested; empty if there is no reason not to."""
    if report.reproduced == "transient":
        return "the failure is not reproducible, so a trial would prove nothing"
    if options.verify == 0:
        return "--verify 0"
    if options.verify is None and options.replay == "never":
        return "--replay never"
    return ""


def reason_not_to_start(options: Options, seconds: float) -> str:
    """Why the program is not run from its start with a fix that cannot be tried at the failing step."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        return "one of several processes cannot be run alone"
    if options.verify is None and seconds > trials.PATIENCE:
        return f"the program ran for {seconds / 60:.0f} minutes; pass --verify {trials.STEPS} to try anyway"
    return ""


def program_directories(program: Program) -> tuple[str, ...]:
    """The folders of the program itself: user code even inside an installed package."""
    if not program.module:
        return (os.path.dirname(os.path.realpath(program.target)),)
    top = sys.modules.get(program.target.partition(".")[0])
    return tuple(getattr(top, "__path__", ()))


def strip_our_frames(error: BaseException | None, seen: set[int] | None = None) -> None:
    """Removes the frames of this package from a traceback and from those chained to it."""
    seen = seen or set()
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    programs = tuple(
        os.path.join(here, *names, "") for names in (("cli", "demos", "programs"), ("diagnose", "causes", "examples"))
    )
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kept = []
        at = error.__traceback__
        while at is not None:
            name = at.tb_frame.f_code.co_filename
            if not name.startswith(here) or name.startswith(programs):
                kept.append(at)
            at = at.tb_next
        for one, following in zip(kept, [*kept[1:], None], strict=False):
            one.tb_next = following
        error.__traceback__ = kept[0] if kept else None
        if error.__cause__ is not None:
            strip_our_frames(error.__cause__, seen)
        error = error.__context__
