"""Writes the failing step of a run to a capsule: when it fails, and again with the final report."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from firstnan.capsule import Wanted, file
from firstnan.capsule.state import Capture
from firstnan.engine.conclude import environment
from firstnan.engine.handouts import Handouts
from firstnan.gate.gate import Gate
from firstnan.records import Report
from firstnan.tensors.models import TrainingObjects
from firstnan.tensors.state import RandomState

_LARGEST_SOURCE = 1 << 20
_NONE = "no capsule was written"


class CapsuleWriter:
    """Writes capsules if they are wanted; problems are put into the report, never raised."""

    def __init__(
        self,
        wanted: Wanted,
        gate: Gate,
        handouts: Handouts,
        find: Callable[[], TrainingObjects],
        batch_of: Callable[[Any], Any] = lambda batch: batch,
        most: int | None = None,
    ) -> None:
        """`most`: where training goes on, so many failures are worth a file."""
        self._left = most
        self.wanted = wanted
        self.path: Path | None = None
        """The capsule of the last failure."""
        self._gate, self._handouts, self._find, self._batch_of = gate, handouts, find, batch_of
        self._why = self._missing = ""
        self._healthy = True
        self._held: deque[Capture] = deque(maxlen=2)
        self._between: tuple[RandomState, list[Any], int] | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is a capsule with finite weights, so of the step in which the failure began."""
        return self.path is not None and self._healthy

    # Before the failure.

    def step_ended(self) -> None:
        """Without a batch from a loader, a step begins where the last one ended."""
        if self._handouts.latest is None:
            self._between = (RandomState.now(), self._handouts.copied_buffers(), self._gate.steps.updates)
        self._hold(with_random=True)

    def backward_begins(self) -> None:
        """Without a loader, this is where the very first step is noticed."""
        if self._handouts.latest is None and not self._held and not self._gate.trained:
            self._hold()

    def handed_out(self) -> None:
        if self._holds and not self._held[-1].manifest["batches"]:
            self._held.pop()  # the program may have changed its weights since the last step
        self._hold()
        latest = self._handouts.latest
        if latest is not None and self._holds:
            at = next(i for i, step in enumerate(self._handouts.of_this_step()) if step[-1] is latest)
            self._held[-1].add_batch(at, latest, self._batch_of(latest.batch))

    @property
    def _holds(self) -> bool:
        """Whether the current step was already copied."""
        return bool(self._held) and self._held[-1].turn == self._gate.steps.updates

    def _hold(self, *, with_random: bool = False) -> None:
        """Copies the state before the step expected to fail, and before the previous one, which may fail instead."""
        wanted, steps = self.wanted.step, self._gate.steps
        if wanted is None or steps.current < wanted - 1 or self._holds:
            return
        self._held.append(self._captured([], 0, copies=True))
        if with_random:
            self._held[-1].set_random(RandomState.now())

    # At the failure.

    def tripped(
        self, report: Report, *, written: bool, buffers: list[Any] | None = None, random: RandomState | None = None
    ) -> None:
        """Something is non-finite; `written` if the weights already contain the step's update.

        `buffers` and `random` are those from before the step, if the batches do not tell.
        """
        self.path, self._why, self._missing = None, "", ""
        if self.wanted.step is None:
            self._keep(lambda: self._now(written, buffers, random), report)

    def settled(
        self,
        report: Report,
        before_update: bool,
        undo: Callable[[], bool] | None,
        buffers: list[Any],
        random: RandomState | None,
    ) -> Report:
        """All is known of a failure: the report with its capsule; `undo` takes a bad update back for it."""
        if self._left is not None:
            if self._left <= 0:
                return report
            self._left -= 1
        inside, late = self._gate.in_step is not None, self._gate.reads.late
        updated = not before_update or inside
        back = updated and not late and undo is not None and undo()
        last = self._gate.steps.last() if self._gate.steps.last else None
        counted = back and not inside and last is not None
        if counted:
            self._gate.steps.take_back(last)
        self.tripped(report, written=late or (updated and not back), buffers=buffers, random=random)
        if counted:
            self._gate.steps.add(last)
        return self.placed(report)

    def _keep(self, capture: Callable[[], Capture | None], report: Report) -> None:
        try:
            content = capture()
            if content is not None and not content.has_weights:
                self._why = "no weights were found: they are in no module and no optimizer, or were already freed"
            elif content is not None:
                self._healthy = content.is_healthy
                self._write(content, report)
        except OSError as error:
            self._why = error.strerror or str(error)
        except Exception as error:  # an error of firstnan must not stop a training run
            self._why = str(error) if isinstance(error, file.CapsuleError) else f"{type(error).__name__}: {error}"

    def _now(self, written: bool, buffers: list[Any] | None, random: RandomState | None) -> Capture | None:
        total, latest = self._gate.steps.total, self._handouts.latest
        if written:
            self._why = "the weights from before the step were already overwritten"
            return None
        if latest is None:
            return self._without_batch(buffers, random)
        if not self._handouts.possible(total):
            self._why = "the batch has changed since the loader returned it"
            return None
        step = self._handouts.of_this_step()
        capture = self._captured(step[0][0].buffers if buffers is None else buffers, total - latest.updates)
        for i, handouts in enumerate(step):
            for handout in handouts:
                capture.add_batch(i, handout, self._batch_of(handout.batch))
        return capture

    def _without_batch(self, buffers: list[Any] | None, random: RandomState | None) -> Capture:
        kept = buffers or []
        if self._between is not None and self._between[2] == self._gate.steps.updates:
            random, kept = self._between[0], buffers or self._between[1]
        capture = self._captured(kept, 0)
        if random is not None:
            capture.set_random(random)
        return capture

    def _captured(self, buffers: list[Any], suppressed: int, *, copies: bool = False) -> Capture:
        return Capture(self._find(), self._gate, buffers, suppressed=suppressed, copies=copies)

    def _write(self, capture: Capture, report: Report) -> None:
        manifest, tensors, self._missing = capture.within(self.wanted.limit)
        rank = f"-rank{report.rank}" if report.world_size > 1 else ""
        self.wanted.folder.mkdir(parents=True, exist_ok=True)
        path = self.wanted.folder / f"firstnan-step{capture.step:06}{rank}.capsule"
        self.path = file.write(path, {**manifest, **_report_entries(report)}, tensors)

    # After the investigation.

    def finish(self, report: Report) -> Report:
        """Writes the final report into the capsule; returns what `placed` returns."""
        if report.verdict != "nonfinite":
            return report
        if self._held:
            held = next((h for h in self._held if h.step == report.step), self._held[-1])
            self._keep(lambda: held, report)
        if report.capsule:  # written by the second run
            if self.path is not None:
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self.path = Path(report.capsule)
        report = self.placed(report)
        if self.path is not None:
            with contextlib.suppress(OSError, ValueError):  # the first version of the file stays
                old = file.CapsuleFile(self.path)
                file.write(self.path, {**old.manifest, **_report_entries(report)}, old.tensors(), replace=True)
        return report

    def placed(self, report: Report) -> Report:
        """The report with the path of the capsule, or with a note why there is none."""
        if self.path is None:
            if any(note.startswith(_NONE) for note in report.notes):
                return report  # the second run tried as well and gave its reason
            why = self._why or "the program ended before its state could be captured"
            return replace(report, notes=(*report.notes, f"{_NONE}: {why}"))
        report = replace(report, notes=tuple(note for note in report.notes if not note.startswith(_NONE)))
        if self._missing:
            limit = file.readable_size(self.wanted.limit)
            text = f"{self._missing} was left out: the capsule would exceed its {limit} limit"
            report = replace(report, notes=(*report.notes, text))
        return replace(report, capsule=str(self.path))


def _report_entries(report: Report) -> dict[str, Any]:
    """The report, the environment it was made in, and the source files it names."""
    return {"report": report.to_dict(), "environment": environment(), "sources": _sources(report)}


def _sources(report: Report) -> dict[str, str]:
    """The texts of the source files that the report names."""
    names = [step.file for step in report.path]
    if report.origin is not None and report.origin.site is not None:
        names.insert(0, report.origin.site.file)
    found = {}
    for name in dict.fromkeys(filter(None, names)):
        with contextlib.suppress(OSError, ValueError):
            if os.path.getsize(name) <= _LARGEST_SOURCE:
                found[name] = Path(name).read_text(encoding="utf-8", errors="replace")
    return found
