"""`firstnan.rule`: a cause that only the people of one project know."""

from __future__ import annotations

import re
from collections.abc import Callable

from firstnan.diagnose.rules.base import ANY, RULES, Finding, Rule
from firstnan.diagnose.rules.failure import Failure

Reason = Callable[[Failure], str | None]


def rule(slug: str, *, title: str, confidence: float = 1.0) -> Callable[[Reason], Reason]:
    """Adds a cause of your own: the function below it says why it fits a failure, or returns None.

    The cause with the highest `confidence` is reported first; those that come with firstnan stay below 1.
    An error in the function costs this one rule, never the report. What it may read of the failure:
    - `op` ("log"), `phase`, `code` (your expression), `origin` (file, line, layer: `origin.site`, `origin.module`);
    - `nan` and `inf`: how many were made; `stat("self")`: what an argument held; `at("self")`: what it held at the
      first bad element; `scalar("eps")`: an argument that is no tensor;
    - `feeding()`: the operators before it, nearest first;
    - `history`, `growth`, `lr()`: the steps before.

        @firstnan.rule("gauge_reset", title="The pressure gauge was reset")
        def gauge_reset(failure):
            if failure.op == "log" and failure.origin.module.startswith("gauge"):
                return f"Gauge {failure.origin.module} reads {failure.at('self')} after a reset."
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        raise ValueError(f"a slug is written like log_of_zero, not {slug!r}")

    def register(reason: Reason) -> Reason:
        def look(failure: Failure) -> Finding | None:
            why = reason(failure)
            return Finding(str(why), confidence, failure.input_lines()) if why else None

        # A notebook cell that is run again replaces its rule.
        RULES[:] = [known for known in RULES if (known.slug, known.user_function) != (slug, reason.__qualname__)]
        RULES.append(Rule(slug, title, look, ANY, 0.0, user_function=reason.__qualname__))
        return reason

    return register
