"""A report in which every name tries to be something else: markup, script, an enormous line."""

from __future__ import annotations

from math import inf, nan
from typing import Any

from firstnan.records import (
    Batch,
    Cause,
    Element,
    Feature,
    Histogram,
    History,
    LayerTrack,
    LoopTurn,
    NaNEvent,
    Noticed,
    Origin,
    PathStep,
    RankFinding,
    Remedy,
    Report,
    SampleValues,
    Site,
    StepRecord,
    TensorStat,
)

NAMES = {
    "script": "</script><script>window.hacked=1</script>",
    "image": "<img src=x onerror=window.hacked=2>",
    "quote": "\"' onmouseover='window.hacked=3' \" <b>",
    "style": "</style><style>*{display:none}</style>",
    "comment": "<!-- <script>",
    "emoji": "schicht_🔥_层",
    "moves": "abc\u202edef\x1b[31m\u2028x",
    "template": "{{ 7 * 7 }}{% for %}",
    "long": "x" * 10_000,
    "markdown": "[a](javascript:window.hacked=4) **b** | c\n# d",
}


def hostile() -> Report:
    """Every text of the report is one of these names, or all of them."""
    every, names = " ".join(v for k, v in NAMES.items() if k != "long"), list(NAMES.values())
    line = "    y = " + "f(" * 3 + NAMES["script"] + NAMES["image"] + "z" * 10_000
    site = Site(f"{NAMES['image']}.py", 3, 8, 3, 60, NAMES["script"], every, (line,), 3)
    stat = TensorStat(NAMES["image"], (2, 3), NAMES["script"], -inf, nan, nan=3, first_index=(0, 1))
    counted = TensorStat(
        NAMES["emoji"], (2,), "float32", 0.0, 1.0, zeros=1, histogram=Histogram((0.0, 0.5, 1.0), (1, 1))
    )
    change = f"--- a/{site.file}\n+++ b/{site.file}\n@@ -3 +3 @@\n-{line}\n+{every}\n"
    settings: tuple[tuple[str, Any], ...] = ((NAMES["script"], NAMES["image"]),)
    return Report(
        "nonfinite",
        step=3,
        batch=Batch(
            3, 2, (1,), True, (7,), (Feature(1, NAMES["image"], (0,), nan, -inf, inf),), 3, every,
            (Element(NAMES["script"], 3, NAMES["image"]),), NAMES["quote"],
            (SampleValues(1, NAMES["script"], (3,), (nan, inf, 1.0)),),
        ),
        origin=Origin(
            "forward", NAMES["script"], NAMES["image"], None, None, site, NAMES["image"], NAMES["quote"],
            (counted, *(TensorStat(name, (1,), "f") for name in names)), stat, label=NAMES["style"], read_at=site,
        ),
        cause=Cause(NAMES["image"], NAMES["script"], f"`{NAMES['image']}` {every}", tuple(names)),
        other_causes=(Cause(NAMES["style"], NAMES["script"], ""),),
        remedies=tuple(Remedy(name, change, True, True, 2, every, note=NAMES["comment"]) for name in names[:4]),
        path=tuple(PathStep(name, 3, name, name, name) for name in names),
        noticed=Noticed("gradient", NAMES["script"]),
        events=tuple(NaNEvent("nonfinite", name, 3, layer=name, what="output", tensor=stat) for name in names),
        history=History(
            tuple(StepRecord(i, 2.0**i if i < 5 else nan, 1.0, 0.1) for i in range(6)), NAMES["script"], settings,
            name=NAMES["image"],
            layers=tuple(LayerTrack(name, "forward", (0, 1, 2), (1.0, 2.0, nan), (1.0, 20.0, inf)) for name in names),
        ),
        world_size=2,
        ranks=(RankFinding(0, "created", 3, NAMES["image"]), RankFinding(1, "received")),
        environment={NAMES["script"]: NAMES["image"], "nested": {"a": [1, 2, {"b": NAMES["quote"]}]}},
        notes=tuple(names),
        capsule=NAMES["image"],
        replay=every,
        loops=(LoopTurn(NAMES["script"], 3, NAMES["image"], 7),),
    )  # fmt: skip
