"""`firstnan.rule`: a cause that only the people of one project know."""

from __future__ import annotations

import re
from collections.abc import Callable

from firstnan.diagnose.rules.base import ANY, RULES, Finding, Rule
from firstnan.diagnose.rules.scene import Scene

Reason = Callable[[Scene], str | None]


def rule(slug: str, *, title: str, confidence: float = 1.0) -> Callable[[Reason], Reason]:
    """Adds a cause of your own: the function below it says why it fits a failure, or returns None.

    The cause with the highest `confidence` is reported first; those that come with firstnan stay below 1.
    An error in the function costs this one rule, never the report. What it may read of the scene:
    - `op` ("log"), `phase`, `code` (your expression), `origin` (file, line, layer: `origin.site`, `origin.module`);
    - `nan` and `inf`: how many were made; `stat("self")`: what an argument held; `at("self")`: what it held at the
      first bad element; `scalar("eps")`: an argument that is no tensor;
    - `feeding()`: the operators before it, nearest first;
    - `history`, `growth`, `lr()`: the steps before.

        @firstnan.rule("gauge_reset", title="The pressure gauge was reset")
        def gauge_reset(scene):
            if scene.op == "log" and scene.origin.module.startswith("gauge"):
                return f"Gauge {scene.origin.module} reads {scene.at('self')} after a reset."
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        raise ValueError(f"a slug is written like log_of_zero, not {slug!r}")

    def register(reason: Reason) -> Reason:
        def look(scene: Scene) -> Finding | None:
            why = reason(scene)
            return Finding(str(why), confidence, scene.input_lines()) if why else None

        # A notebook cell that is run again replaces its rule.
        RULES[:] = [known for known in RULES if (known.slug, known.own) != (slug, reason.__qualname__)]
        RULES.append(Rule(slug, title, look, ANY, 0.0, own=reason.__qualname__))
        return reason

    return register
