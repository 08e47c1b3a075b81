"""`firstnan.rule`: causes that only the people of one project know."""

from __future__ import annotations

import re
from collections.abc import Callable

from firstnan.diagnose.rules.base import ANY, RULES, Explanation, Failure, Rule
from firstnan.records.arguments import require_callable, require_share, require_string

Reason = Callable[[Failure], str | None]


def rule(slug: str, *, title: str, confidence: float = 1.0) -> Callable[[Reason], Reason]:
    """Adds your own cause: the function below it returns why it fits a failure, or None.

    The cause with the highest `confidence` is reported first; built-in rules stay below 1.
    An error in the function disables this one rule, never the report. What it may read of the failure:
    - `op` ("log"), `phase`, `code` (your expression), `origin` (file, line, layer: `origin.site`, `origin.module`);
    - `nan` and `inf`: how many elements became non-finite; `stat("self")`: the statistics of an argument;
      `at("self")`: its value at the first bad element; `scalar("eps")`: an argument that is not a tensor;
    - `feeding()`: the operators before it, nearest first;
    - `history`, `growth`, `lr()`: the steps before.

        @firstnan.rule("gauge_reset", title="The pressure gauge was reset")
        def gauge_reset(failure):
            if failure.op == "log" and failure.origin.module.startswith("gauge"):
                return f"Gauge {failure.origin.module} reads {failure.at('self')} after a reset."
    """
    require_string("slug", slug)
    require_string("title", title)
    require_share("confidence", confidence)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        raise ValueError(f"slug must be lowercase words joined by underscores, such as log_of_zero, got {slug!r}")

    def register(reason: Reason) -> Reason:
        require_callable("the rule", reason)

        def look(failure: Failure) -> Explanation | None:
            why = reason(failure)
            if why and not isinstance(why, str):
                raise TypeError(f"a rule must return a sentence or None, got {why!r}")
            return Explanation(why, confidence, failure.input_lines()) if why else None

        # Running a notebook cell again replaces its rule.
        RULES[:] = [known for known in RULES if (known.slug, known.user_function) != (slug, reason.__qualname__)]
        RULES.append(Rule(slug, title, look, ANY, 0.0, user_function=reason.__qualname__))
        return reason

    return register
