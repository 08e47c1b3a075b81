"""The failing step, played again by the loop itself: once under the tracer, then with samples replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from firstnan.engine.handouts import Replayer, ReplayError
from firstnan.engine.microscope import Microscope
from firstnan.engine.recovery import Recovery
from firstnan.engine.samples.search import Sift, begin_search
from firstnan.gate.gate import Gate
from firstnan.observe.muted_output import MutedOutput
from firstnan.records import Report
from firstnan.records.errors import NonFiniteError
from firstnan.tensors.batches import Handout, copy_batch
from firstnan.tracing.compare import Difference, first_difference


class Replays:
    """Puts the state back before each of them, and knows which updates are to be kept out."""

    def __init__(self, replayer: Replayer, recovery: Recovery, gate: Gate, microscope: Microscope) -> None:
        self.replayer, self.recovery, self.gate, self.microscope = replayer, recovery, gate, microscope
        self.sift: Sift | None = None
        """The search for bad samples, while it goes on."""
        self.difference: Difference | None = None
        """Between two traces of the step, where it did not fail again."""
        self._updates = self._to_suppress = 0
        self._more_to_come = False

    def suppresses(self) -> bool:
        """Whether the update that the loop wants to make is one too many."""
        if self._more_to_come:
            # A loop that counts its batches counts these too, and updates its weights too early.
            return True
        if self._to_suppress > 0:
            self._to_suppress -= 1
            return True
        return self.sift is not None and self.sift.decided

    def prepare(self, source: Any) -> list[Handout]:
        """Everything as it was when the step began; the batches it was given. ReplayError where they are gone."""
        if self.sift is None:
            self._updates = self.gate.steps.total
        self._to_suppress = self.replayer.begin(source, self._updates)
        self.recovery.put_back_schedules()
        self.gate.reads.forget()
        self.microscope.drop_gradients()
        handouts = []
        with contextlib.suppress(ReplayError):
            while True:
                handouts.append(self.replayer.again(source))
        return handouts

    def traced(self, handouts: list[Handout]) -> Iterator[Any]:
        self.microscope.start(in_step=True)
        for handout in self._counted(handouts):
            with self.microscope.unseen():
                batch = handout.batch if self.sift is None else copy_batch(handout.pristine)
            if self.microscope.running:
                self.microscope.mark_batch(batch, sys._getframe())
            yield batch
            if self.sift is not None and self.sift.decided:
                return

    def searches(self, report: Report) -> bool:
        """Begins the search for bad samples; False where there is none to begin."""
        self.microscope.stop()
        with contextlib.suppress(Exception):  # the search is our idea: what goes wrong with it is no news to the loop
            self.sift = begin_search(report, self.replayer)
        return self.sift is not None

    def sifted(self, source: Any) -> Iterator[Any]:
        """The batches of the step again and again, with samples replaced; what the loop prints is hidden."""
        sift, quiet = self.sift, MutedOutput()
        quiet.begin()
        try:
            while sift is not None and sift.goes_on():
                for handout in self._counted(self.prepare(source)):
                    yield sift.batch(handout)
            if sift is not None and not sift.repeated:
                yield from self._compared(source, sift)
        except Exception:
            return
        finally:
            quiet.end()

    def _compared(self, source: Any, sift: Sift) -> Iterator[Any]:
        """The same batches once more under the tracer, to see which operator differs."""
        assert self.microscope.tracer is not None
        first, sift.finite = self.microscope.tracer.raws, None
        yield from self.traced(self.prepare(source))
        self.microscope.stop()
        self.difference = first_difference(first, self.microscope.tracer.raws)

    def _counted(self, handouts: list[Handout]) -> Iterator[Handout]:
        for i, handout in enumerate(handouts):
            self._more_to_come = i + 1 < len(handouts)
            yield handout
        self._more_to_come = False

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """A function that raises while samples are replaced has failed; nobody else needs to know."""
        try:
            yield
        except NonFiniteError:
            raise
        except Exception:
            if self.sift is None:
                raise
            self.sift.failed()
