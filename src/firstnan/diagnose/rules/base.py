"""The list of rules, and what a rule returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firstnan.diagnose.causes import catalogue, link_to
from firstnan.diagnose.rules.failure import Failure
from firstnan.records import Cause, Phase

ANY: frozenset[Phase] = frozenset({"forward", "backward", "optimizer", "input", "parameter"})
VALUES: frozenset[Phase] = frozenset({"forward", "input", "parameter"})
"""Where the program itself calls an operator for its value (in a Dataset or for an in-place write too)."""
ELSEWHERE = 0.3
"""The weight of many of these rules in other phases, where torch or the optimizer calls the operator."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that fits: what happened in this run, the numbers, and how sure the rule is."""

    why: str
    confidence: float
    evidence: tuple[str, ...] = ()


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
    """The name of the user's function, if it is a user's rule."""

    def apply(self, failure: Failure) -> Cause | None:
        """The cause if the rule fits; None if it does not, or if it raises on an odd record."""
        weight = 1.0 if failure.phase in self.phases else self.elsewhere
        if weight and failure.event is not None and failure.event.in_python_backward:
            weight = max(weight, 0.6)  # a backward written by hand calls operators for their value, as forward does
        if not weight:
            return None
        try:
            finding = self.look(failure)
        except Exception as error:  # a rule that raises on an odd record must never cost the user the whole report
            return self._failed(error) if self.user_function else None
        if finding is None:
            return None
        evidence = tuple(dict.fromkeys((*finding.evidence, *failure.witness_lines(), *failure.float64_lines())))
        confidence = min(1.0, max(0.0, finding.confidence * weight))
        return Cause(self.slug, self.title, finding.why, evidence, confidence, link_to(self.slug))

    def _failed(self, error: Exception) -> Cause:
        """Tells the author of the rule; its confidence is 0, so it is not reported as a cause."""
        why = f"your rule {self.user_function} raised {type(error).__name__}: {error}"
        return Cause(self.slug, self.title, why, (), 0.0)


RULES: list[Rule] = []


def rule(
    slug: str, *, title: str = "", phases: frozenset[Phase] = VALUES, elsewhere: float = 0.0
) -> Callable[[Look], Look]:
    """Registers the function below it as a rule; a slug may have several rules, each with its own title."""

    def register(look: Look) -> Look:
        RULES.append(Rule(slug, title or catalogue()[slug].title, look, phases, elsewhere))
        return look

    return register
