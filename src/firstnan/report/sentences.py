"""What a report says of a batch, its ranks, the path, a fix and the replay, in one line each."""

from __future__ import annotations

import os
from collections.abc import Sequence

from firstnan.records import Batch, Element, Feature, Origin, PathStep, RankFinding, Remedy, Report
from firstnan.records.words import came_with_numbers, cell_name, copies_nonfinite, count, kind, line_of, noticed, number
from firstnan.repair.verdict import BEYOND, last_bad_step


def batch_line(report: Report) -> str:
    """The batch, its bad samples, and the rank, as far as they are known."""
    parts = [_batch(report.batch)] if report.batch else []
    first = report.history.first_step
    if report.step is not None and 0 < first <= report.step:
        parts.append(f"step {report.step - first} of this optimizer")
    if loops := loop_words(report):
        parts.append(loops)
    if report.world_size > 1:
        parts.append(f"rank {report.rank} of {report.world_size}")
    return ", ".join(p for p in parts if p)


def loop_words(report: Report) -> str:
    """`epoch = 3, i = 17`: how far the program's loops were; only those inside one that counts as the steps are."""
    counting = [i for i, turn in enumerate(report.loops) if turn.value == report.step and not report.history.others]
    inner = report.loops[counting[-1] + 1 :] if counting else report.loops
    return ", ".join(f"{turn.variable} = {turn.value}" for turn in inner[-3:] if turn.variable != "_")


def _batch(batch: Batch) -> str:
    words = [] if batch.index is None else [f"batch {batch.index}"]
    size = "" if batch.size is None else f" of {batch.size}"
    if batch.bad_samples:
        few = _few(batch.bad_samples)
        noun = batch.unit if len(batch.bad_samples) == 1 else f"{batch.unit}s"
        many = f"{len(batch.bad_samples)}{size} {noun}: " if len(batch.bad_samples) > 8 else ""
        words.append(many + few if many else f"{noun} {few}{size}")
        if batch.elements:
            words.append(_elements(batch.elements))
        elif batch.dataset_indices:
            index = "index" if len(batch.dataset_indices) == 1 else "indices"
            words.append(f"dataset {index} {_few(batch.dataset_indices)}")
        if batch.confirmed:
            words.append(f"confirmed by {count(batch.replays, 'replay')}")
    elif batch.size is not None:
        # Only how many there are: none of them is known to be bad.
        size = count(batch.size, batch.unit)
        words = [f"{words[0]} with {size}" if words else f"batch of {size}"]
    return ", ".join(words)


def _elements(elements: tuple[Element, ...]) -> str:
    """`dataset index 77 of Tiles`; of several datasets, each with its indices."""
    places = dict.fromkeys((e.dataset, e.part) for e in elements)
    words = []
    for name, part in list(places)[:3]:
        found = tuple(e.index for e in elements if (e.dataset, e.part) == (name, part))
        index = "index" if len(found) == 1 else "indices"
        words.append(f"dataset {index} {_few(found)} of {name}" + (f" ({part})" if part else ""))
    return ", ".join(words) + (", …" if len(places) > 3 else "")


_ON_RANKS = {
    "created": "created on {}",
    "received": "received from another by {}",
    "noticed": "noticed, with unknown origin, on {}",
    "transient": "only the first time, not when replayed, on {}",
    "unknown": "nothing is known of {}",
}


def ranks_line(ranks: Sequence[RankFinding], size: int) -> str:
    """`created on rank 1; received from another by ranks 0, 2, 3`."""
    found = {what: tuple(one.rank for one in ranks if one.what == what) for what in _ON_RANKS}
    parts = [
        _ON_RANKS[what].format(f"rank{'s' if len(which) > 1 else ''} {_few(which)}")
        for what, which in found.items()
        if which
    ]
    return "; ".join(parts + ([f"{size - len(ranks)} more ranks are not listed"] if size > len(ranks) else []))


def _few(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def feature_line(feature: Feature, unit: str = "sample") -> str:
    """`sample 6: batch[0][3] = 0, other samples 0.25 … 2`; `unit` if they are not samples."""
    where = feature.member + ("" if not feature.index else str(list(feature.index)))
    what = f"{where} = {number(feature.value)}" + (" everywhere" if feature.index is None else "")
    spread = number(feature.low) + ("" if feature.low == feature.high else f" … {number(feature.high)}")
    others = f"other {unit}s" if not feature.apart else f"most other {unit}s"
    return f"{unit} {feature.sample}: {what}, {others} {spread}"


def at_expression(origin: Origin) -> str:
    """The remark beside the underlined expression: what it did."""
    node = origin.event.node if origin.event else None
    what = kind(origin.produced)
    match origin.phase:
        case "backward" if origin.event and origin.event.in_python_backward:
            return f"this produced {what}, in a custom backward"
        case "backward" if origin.edits_gradient:
            return f"{origin.op or 'this'} produced {what}, after backward and before the update"
        case "backward" if origin.gradient_hook:
            return f"{origin.op or 'this'}, in the hook {origin.gradient_hook}, produced {what}"
        case "backward" if (made := origin.came_back) is not None:
            return f"{origin.op or 'this'} produced {kind(made)}, of which backward made {what} ({node})"
        case "backward":
            return f"the derivative of this expression produced {what}" + (f" ({node})" if node else "")
        case "optimizer" if not (origin.op or origin.produced):
            return "its updates made the loss explode"
        case "optimizer":
            return f"the update produced {what}"
        case "input" if not origin.op and origin.read_at is None:
            return f"the non-finite {'buffer' if origin.role == 'buffer' else 'data'} enters the step here"
        case "parameter" if not origin.op and origin.event and origin.event.edits_weight:
            return f"this writes {what} into {origin.label}, unless {origin.label} held it before"
        case "parameter" if not origin.op:
            return f"{origin.label or 'this tensor'} already held {what} before this line ran"
        case _ if origin.event and origin.event.raised:
            return f"{origin.op or 'this'} raised an error"
        case _ if origin.library_site and origin.library_site.file.startswith("<"):
            return f"{origin.op or 'an operator'}, called inside, produced {what}"
        case _ if came_with_numbers(origin):
            return f"the numbers that {origin.op or 'this'} reads contain {what}"
        case "parameter" if copies_nonfinite(origin):
            return f"this copies {what} into {origin.label or 'a parameter'}"
        case "parameter" | "input" if origin.op and origin.produced and origin.inputs == (origin.produced,):
            return f"the tensor that `{origin.op}` reads already contains {what}"
        case _:
            return f"{origin.op or 'this'} produced {what}"


def path_line(report: Report) -> str:
    """The path from the origin to where the value was noticed, shortened in the middle."""
    origin, steps, before = report.origin, whole_path(report), ""
    home = origin.site.file if origin and origin.site else ""
    if report.verdict == "diverged":
        return ""
    words = [origin.label or "the non-finite value"] if origin and not origin.op else []
    phase = steps[0].phase if steps else ""
    keep_head, keep_tail = 3, 2
    for i, step in enumerate(steps):
        if len(steps) > keep_head + keep_tail + 1 and keep_head <= i < len(steps) - keep_tail:
            if i == keep_head:
                words.append(f"… {len(steps) - keep_head - keep_tail} more …")
            before = ""
            continue
        file = step.file or home
        if file == home and not cell_name(home):
            file = os.path.basename(home)
        where = line_of(file, step.line) if step.line is not None and file else ""
        turn = "backward of " if step.phase == "backward" and (step.phase != phase or not i) else ""
        words.append(f"{turn}{step.op}" + (f" ({where})" if where and where != before else ""))
        before, phase = where, step.phase
    if report.noticed:
        words.append(noticed(report.noticed))
    return " -> ".join(words)


def whole_path(report: Report) -> list[PathStep]:
    """The path, starting with the operator of the origin if there is one."""
    origin = report.origin
    if origin is None or not origin.op:
        return list(report.path)
    line, file = (origin.site.line, origin.site.file) if origin.site else (None, "")
    phase = "forward" if origin.edits_gradient or origin.came_back else origin.phase
    return [PathStep(origin.op, line, file, phase=phase), *report.path]


def remedy_result(remedy: Remedy, report: Report) -> str:
    """The result of trying the remedy."""
    step = "the failing step" if report.step is None else f"step {report.step}"
    if not remedy.tried:
        in_notebook = any(cell_name(edit.file) for edit in remedy.edits)
        program = "-m pytest" if report.environment.get("runner") == "pytest" else "script.py"
        how = f"; firstnan run {program} would try it" if remedy.diff and not in_notebook else ""
        return f"not tried: {remedy.note}" if remedy.note else f"not tried{how}"
    if remedy.failing_step_finite is None or report.verdict == "diverged":
        return f"tried: {remedy.note}" if remedy.note else "tried"
    if not remedy.failing_step_finite:
        return f"tried: {step} is still non-finite" + (f" ({remedy.note})" if remedy.note else "")
    if remedy.steps_finite_after is None:
        return f"tried: {step} is finite" + (f", but {remedy.note}" if remedy.note else "")
    after = remedy.steps_finite_after
    steps = {0: "", 1: ", and so is the step after it"}.get(after, f", and so are the {after} steps after it")
    end = f", to the end of the {remedy.up_to}" if remedy.up_to and after else ""
    beyond = f"{BEYOND} {last_bad_step(report) + after}" if after and not remedy.up_to else ""
    beyond = "" if BEYOND in remedy.note else beyond
    parts = (f"tried: {step} is finite{steps}{end}", remedy.note, beyond, _loss_change(remedy))
    return "; ".join(part for part in parts if part)


def _loss_change(remedy: Remedy) -> str:
    change = remedy.loss_change
    if change is None:
        return ""
    if change <= 1e-3:
        return "healthy losses unchanged" + (f" (largest relative change {change:.0e})" if change else "")
    percent = 100 * change
    text = f"{percent:.2g}" if percent < 99.5 else f"{percent:,.0f}" if percent < 1e6 else number(percent)
    return f"healthy losses change by up to {text} %"


def replay_line(report: Report) -> str:
    """How the trace was made, and whether the replay reproduced the failure."""
    if report.verdict == "diverged":
        return ""
    every_time = " every time" if report.origin else ""
    result = {
        "deterministic": "the failure was reproduced",
        "similar": "it failed in the same place, but with different numbers",
        "transient": f"the failure was not reproduced{every_time}",
        "not_replayed": "" if report.replay else "the step was not replayed",
    }[report.reproduced]
    return "; ".join(part for part in (report.replay.rstrip(".; "), result) if part)
