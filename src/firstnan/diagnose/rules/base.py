"""The list of rules, and what a rule hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firstnan.diagnose.causes import catalogue
from firstnan.diagnose.rules.failure import Failure
from firstnan.records import Cause, Phase

ANY: frozenset[Phase] = frozenset({"forward", "backward", "optimizer", "input", "parameter"})
VALUES: frozenset[Phase] = frozenset({"forward", "input", "parameter"})
"""Where an operator is called for its value, by the program itself (a Dataset and an in-place write count)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """That a rule fits: two sentences about this run, the numbers, and how sure it is."""

    why: str
    confidence: float
    evidence: tuple[str, ...] = ()
    title: str = ""
    """Replaces the rule's own title where a more exact one is known."""


Look = Callable[[Failure], Finding | None]


@dataclass(frozen=True, slots=True)
class Rule:
    slug: str
    title: str
    look: Look
    phases: frozenset[Phase]
    elsewhere: float
    """Confidence outside `phases` is multiplied by this; 0 means the rule is not asked there."""
    user_function: str = ""
    """The name of the user's function, where it is a rule of their own."""

    def apply(self, failure: Failure) -> Cause | None:
        """The cause if the rule fits, None if it does not or if it fails over an odd record."""
        weight = 1.0 if failure.phase in self.phases else self.elsewhere
        if weight and failure.event is not None and failure.event.in_python_backward:
            weight = max(weight, 0.6)  # a backward written by hand calls operators for their value, as forward does
        if not weight:
            return None
        try:
            finding = self.look(failure)
        except Exception as error:  # a rule that stumbles over an odd record must never cost the user the whole report
            return self._failed(error) if self.user_function else None
        if finding is None:
            return None
        evidence = tuple(dict.fromkeys((*finding.evidence, *failure.witness_lines(), *failure.float64_lines())))
        confidence = min(1.0, max(0.0, finding.confidence * weight))
        return Cause(self.slug, finding.title or self.title, finding.why, evidence, confidence)

    def _failed(self, error: Exception) -> Cause:
        """Says so to whoever wrote the rule; nobody is confident of it, so it is no cause."""
        return Cause(
            self.slug, self.title, f"your rule {self.user_function} raised {type(error).__name__}: {error}", (), 0.0
        )


RULES: list[Rule] = []


def rule(
    slug: str, *, title: str = "", phases: frozenset[Phase] = VALUES, elsewhere: float = 0.0
) -> Callable[[Look], Look]:
    """Registers the function below it as a rule; one slug may have several, and a more exact title than usual."""

    def register(look: Look) -> Look:
        RULES.append(Rule(slug, title or catalogue()[slug].title, look, phases, elsewhere))
        return look

    return register
