"""Keeps the failing step of a run in a capsule: when it trips, and again when all is known of it."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from firstnan.capsule import Wanted, file
from firstnan.capsule.capture import Capture
from firstnan.capsule.training_objects import Living
from firstnan.engine.conclude import environment
from firstnan.engine.handouts import Replayer
from firstnan.gate.gate import Gate
from firstnan.records import Report
from firstnan.tensors.randomness import RandomState

_LARGEST_SOURCE = 1 << 20
_NONE = "no capsule was written"


class Keeper:
    """Writes capsules where they are wanted; what goes wrong is said, never raised."""

    def __init__(
        self,
        wanted: Wanted,
        gate: Gate,
        replayer: Replayer,
        find: Callable[[], Living],
        batch_of: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.wanted = wanted
        self.path: Path | None = None
        """The capsule of the last failure."""
        self._gate, self._replayer, self._find, self._batch_of = gate, replayer, find, batch_of
        self._why = self._missing = ""
        self._healthy = True
        self._held: deque[Capture] = deque(maxlen=2)
        self._between: tuple[RandomState, list[Any], int] | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is a capsule of the step in which it began: in a later one the weights are bad already."""
        return self.path is not None and self._healthy

    # While the program is healthy.

    def step_ended(self) -> None:
        """Without a batch from a loader a step begins where the last one ended."""
        if self._replayer.latest is None:
            self._between = (RandomState.now(), self._replayer.copied_buffers(), self._gate.steps.updates)
        self._hold(with_random=True)

    def backward_begins(self) -> None:
        """Without a loader this is where the very first step is noticed."""
        if self._replayer.latest is None and not self._held and not self._gate.trained:
            self._hold()

    def handed_out(self) -> None:
        if self._holds and not self._held[-1].manifest["batches"]:
            self._held.pop()  # the program may have changed its weights since the last step ended
        self._hold()
        latest = self._replayer.latest
        if latest is not None and self._holds:
            at = next(i for i, step in enumerate(self._replayer.of_this_step()) if step[-1] is latest)
            self._held[-1].add_batch(at, latest, self._batch_of(latest.batch))

    @property
    def _holds(self) -> bool:
        """Whether the step under way was copied already."""
        return bool(self._held) and self._held[-1].turn == self._gate.steps.updates

    def _hold(self, *, with_random: bool = False) -> None:
        """Copies the state before a step that is known to fail, or the one before it: it may turn out to be that."""
        wanted, steps = self.wanted.step, self._gate.steps
        if wanted is None or steps.current < wanted - 1 or self._holds:
            return
        self._held.append(self._captured([], 0, copies=True))
        if with_random:
            self._held[-1].set_random(RandomState.now())

    # When it fails.

    def tripped(
        self, report: Report, *, written: bool, buffers: list[Any] | None = None, random: RandomState | None = None
    ) -> None:
        """Something is not finite; `written` where the step's update is in the weights already.

        `buffers` and `random` as they were before the step, where that is not known from the batches.
        """
        self.path, self._why, self._missing = None, "", ""
        if self.wanted.step is None:
            self._keep(lambda: self._now(written, buffers, random), report)

    def _keep(self, capture: Callable[[], Capture | None], report: Report) -> None:
        try:
            content = capture()
            if content is not None and not content.has_weights:
                self._why = "the weights are in no module and no optimizer, or the program had let go of them"
            elif content is not None:
                self._healthy = content.is_healthy
                self._write(content, report)
        except OSError as error:
            self._why = error.strerror or str(error)
        except Exception as error:  # ours, and no reason to stop a training run
            self._why = str(error) if isinstance(error, file.CapsuleError) else f"{type(error).__name__}: {error}"

    def _now(self, written: bool, buffers: list[Any] | None, random: RandomState | None) -> Capture | None:
        total, latest = self._gate.steps.total, self._replayer.latest
        if written:
            self._why = "the weights of before the step are gone"
            return None
        if latest is None:
            return self._without_batch(buffers, random)
        if not self._replayer.possible(total):
            self._why = "its batch is no longer what it was when it was handed out"
            return None
        step = self._replayer.of_this_step()
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
        manifest, parts, self._missing = capture.within(self.wanted.limit)
        rank = f"-rank{report.rank}" if report.world_size > 1 else ""
        self.wanted.folder.mkdir(parents=True, exist_ok=True)
        path = self.wanted.folder / f"firstnan-step{capture.step:06}{rank}.capsule"
        self.path = file.write(path, {**manifest, **_told(report)}, parts)

    # When all is known.

    def finish(self, report: Report) -> Report:
        """Writes the final report into the capsule; returns it as `placed` does."""
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
            with contextlib.suppress(OSError, file.CapsuleError):  # what is there has the state, and what was known
                opened = file.Opened(self.path)
                file.write(self.path, {**opened.manifest, **_told(report)}, opened.parts(), replace=True)
        return report

    def placed(self, report: Report) -> Report:
        """The report with the place of the capsule, or why there is none."""
        if self.path is None:
            if any(note.startswith(_NONE) for note in report.notes):
                return report  # the second run has tried too, and says why
            why = self._why or "the program ended before its state could be kept"
            return replace(report, notes=(*report.notes, f"{_NONE}: {why}"))
        report = replace(report, notes=tuple(note for note in report.notes if not note.startswith(_NONE)))
        if self._missing:
            limit = file.readable_size(self.wanted.limit)
            text = f"the capsule is without {self._missing}: with it it would be over the limit of {limit}"
            report = replace(report, notes=(*report.notes, text))
        return replace(report, capsule=str(self.path))


def _told(report: Report) -> dict[str, Any]:
    """The report, where it was made, and the sources that it names."""
    return {"report": report.to_dict(), "environment": environment(), "sources": _sources(report)}


def _sources(report: Report) -> dict[str, str]:
    """The texts of the user's files that the report names."""
    names = [step.file for step in report.path]
    if report.origin is not None and report.origin.site is not None:
        names.insert(0, report.origin.site.file)
    found = {}
    for name in dict.fromkeys(filter(None, names)):
        with contextlib.suppress(OSError, ValueError):
            if os.path.getsize(name) <= _LARGEST_SOURCE:
                found[name] = Path(name).read_text(encoding="utf-8", errors="replace")
    return found
