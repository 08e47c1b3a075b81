"""Sentences and characters of a report."""

from __future__ import annotations

import os
import unicodedata

from firstnan.records import Batch, Feature, Origin, PathStep, Remedy, Report
from firstnan.records.words import count, kind, noticed, number, short_path


def batch_line(report: Report) -> str:
    """The batch, its bad samples, and the rank, as far as they are known."""
    parts = [_batch(report.batch)] if report.batch else []
    if report.world_size > 1:
        parts.append(f"rank {report.rank} of {report.world_size}")
    return ", ".join(p for p in parts if p)


def _batch(batch: Batch) -> str:
    words = [] if batch.index is None else [f"batch {batch.index}"]
    size = "" if batch.size is None else f" of {batch.size}"
    if batch.bad_samples:
        few = _few(batch.bad_samples)
        many = f"{len(batch.bad_samples)}{size} samples: " if len(batch.bad_samples) > 8 else ""
        noun = "sample" if len(batch.bad_samples) == 1 else "samples"
        words.append(many + few if many else f"{noun} {few}{size}")
        if batch.dataset_indices:
            index = "index" if len(batch.dataset_indices) == 1 else "indices"
            words.append(f"dataset {index} {_few(batch.dataset_indices)}")
        if batch.confirmed:
            words.append(f"confirmed by {count(batch.replays, 'replay')}")
    elif batch.size is not None:
        words.append(count(batch.size, "sample"))
    return ", ".join(words)


def _few(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def feature_line(feature: Feature) -> str:
    """`sample 6: batch[0][3] = 0, other samples 0.25 … 2`."""
    where = feature.member + ("" if not feature.index else str(list(feature.index)))
    what = f"{where} = {number(feature.value)}" + (" everywhere" if feature.index is None else "")
    spread = number(feature.low) + ("" if feature.low == feature.high else f" … {number(feature.high)}")
    return f"sample {feature.sample}: {what}, other samples {spread}"


def at_expression(origin: Origin) -> str:
    """The remark beside the underlined expression: what it did."""
    node = origin.event.node if origin.event else None
    what = kind(origin.produced)
    match origin.phase:
        case "backward" if origin.event and origin.event.in_python_backward:
            return f"this produced {what}, in a custom backward"
        case "backward":
            return f"the derivative of this expression produced {what}" + (f" ({node})" if node else "")
        case "optimizer":
            return f"the update produced {what}"
        case "input" if not origin.op:
            return f"the non-finite {'buffer' if origin.role == 'buffer' else 'data'} enters the step here"
        case "parameter" if not origin.op:
            return f"{origin.label or 'this tensor'} already held {what} before this line ran"
        case _:
            return f"{origin.op or 'this'} produced {what}"


def path_line(report: Report) -> str:
    """The path from the origin to where the value was noticed, shortened in the middle."""
    origin, steps, before = report.origin, _whole_path(report), ""
    home = origin.site.file if origin and origin.site else ""
    words = [origin.label or "the non-finite value"] if origin and not origin.op else []
    phase = steps[0].phase if steps else ""
    keep_head, keep_tail = 3, 2
    for i, step in enumerate(steps):
        if len(steps) > keep_head + keep_tail + 1 and keep_head <= i < len(steps) - keep_tail:
            if i == keep_head:
                words.append(f"… {len(steps) - keep_head - keep_tail} more …")
            before = ""
            continue
        file = os.path.basename(home) if step.file in ("", home) else short_path(step.file)
        where = f"{file}:{step.line}" if step.line is not None and file else ""
        turn = "backward of " if step.phase == "backward" and (step.phase != phase or not i) else ""
        words.append(f"{turn}{step.op}" + (f" ({where})" if where and where != before else ""))
        before, phase = where, step.phase
    if report.noticed:
        words.append(noticed(report.noticed))
    return " -> ".join(words)


def _whole_path(report: Report) -> list[PathStep]:
    """The path, starting with the operator of the origin if there is one."""
    origin = report.origin
    if origin is None or not origin.op:
        return list(report.path)
    line, file = (origin.site.line, origin.site.file) if origin.site else (None, "")
    return [PathStep(origin.op, line, file, phase=origin.phase), *report.path]


def remedy_result(remedy: Remedy, report: Report) -> str:
    """The result of trying the remedy."""
    step = "the failing step" if report.step is None else f"step {report.step}"
    if not remedy.tried:
        how = "; firstnan run script.py would try it" if remedy.diff else ""
        return f"not tried: {remedy.note}" if remedy.note else f"not tried{how}"
    if remedy.failing_step_finite is None:
        return f"tried: {remedy.note}" if remedy.note else "tried"
    if not remedy.failing_step_finite:
        return f"tried: {step} is still not finite" + (f" ({remedy.note})" if remedy.note else "")
    if remedy.steps_finite_after is None:
        return f"tried: {step} is finite" + (f", but {remedy.note}" if remedy.note else "")
    after = remedy.steps_finite_after
    steps = {0: "", 1: ", and so is the step after it"}.get(after, f", and so are the {after} steps after it")
    return "; ".join(part for part in (f"tried: {step} is finite{steps}", remedy.note, _loss_change(remedy)) if part)


def _loss_change(remedy: Remedy) -> str:
    change = remedy.loss_change
    if change is None:
        return ""
    if change <= 1e-3:
        return "healthy losses unchanged" + (f" (largest relative change {change:.0e})" if change else "")
    return f"healthy losses change by up to {100 * change:.2g} %"


def replay_line(report: Report) -> str:
    """How the trace was made, and whether the replay reproduced the failure."""
    every_time = " every time" if report.origin else ""
    result = {
        "deterministic": "the failure was reproduced",
        "transient": f"the failure was not reproduced{every_time}",
        "not_replayed": "" if report.replay else "the step was not replayed",
    }[report.reproduced]
    return "; ".join(part for part in (report.replay.rstrip(".; "), result) if part)


_GLYPHS = "…│•▁▂▃▄▅▆▇█"
_TO_ASCII = str.maketrans({"…": "...", "│": "|", "•": "*", "→": "->", "×": "x", "–": "-", "—": "-", "“": '"', "”": '"'})
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Charset:
    """Turns any text into text that is safe to print in `encoding`: it cannot move the cursor or change colors."""

    def __init__(self, encoding: str = "utf-8") -> None:
        try:
            _GLYPHS.encode(encoding)
        except UnicodeEncodeError:
            self.plain = True
        except LookupError:  # an encoding that Python does not know
            self.plain, encoding = True, "ascii"
        else:
            self.plain = False
        self._encoding = encoding
        self.bar = "|" if self.plain else "│"
        self.bullet = "*" if self.plain else "•"
        self.ellipsis = "..." if self.plain else "…"
        self.spark = "_.-:=+*#" if self.plain else "▁▂▃▄▅▆▇█"

    def show(self, text: str) -> str:
        """`text` with unprintable characters escaped."""
        if text.isascii() and text.isprintable():
            return text
        if self.plain:
            text = text.translate(_TO_ASCII)
        text = "".join(_escape(c) if _unsafe(c) else c for c in text)
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def prose(self, text: str, limit: int = 700) -> str:
        """`text` on one line, without runs of spaces, cut at `limit`."""
        return self.cut(self.show(" ".join(text[: 4 * limit].split())), limit)

    def cut(self, text: str, limit: int) -> str:
        return text if len(text) <= limit else text[: max(0, limit - len(self.ellipsis))].rstrip() + self.ellipsis


def _unsafe(char: str) -> bool:
    """Control characters (escape sequences too), lone surrogates, line separators, and marks that reorder text."""
    return char in _BIDI or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
