"""The sentences of a report: each function turns records into one short piece of text, for every renderer alike."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from firstnan.records import (
    Batch,
    Feature,
    NaNEvent,
    Noticed,
    Origin,
    PathStep,
    Remedy,
    Report,
    Site,
    TensorStat,
    plain,
)

GROWTH = frozenset(
    ("divergence_lr", "exploding_gradient", "overflow", "exp_overflow", "low_precision_overflow", "optimizer_overflow")
)
"""Causes where what happened in the steps before is part of the story."""

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_NOTICED = {"gradient": "the gradient of", "parameter": "parameter", "buffer": "buffer", "output": "the output of"}
_WRAPPERS = ("torch/_compile.py", "torch/_tensor.py", "torch/_ops.py", "torch/utils/_contextlib.py")
"""Library files that only wrap what the user called."""
_RESULTS = ("result", "output", "out")


def number(value: float) -> str:
    """A number as short as it can be without lying about its size."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def short_path(path: str) -> str:
    """A file's name as a reader knows it: below the current directory, or below site-packages."""
    for base in ("site-packages", "dist-packages"):
        _, found, tail = path.rpartition(f"{os.sep}{base}{os.sep}")
        if found:
            return tail
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the current directory is gone
        return path


def place(site: Site) -> str:
    return f"{short_path(site.file)}:{site.line}"


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def kind(stat: TensorStat | None) -> str:
    """What the tensor holds that it should not: `NaN`, `Inf`, `-Inf` or several of them."""
    if stat is None or not stat.bad:
        return "a non-finite value"
    names = [name for name, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def headline(report: Report) -> str:
    """What became non-finite first, when and where; the first line of every report."""
    if report.verdict == "clean":
        until = "" if report.step is None else f" up to step {report.step}"
        return f"clean, no NaN or Inf was found{until}"
    step = "" if report.step is None else f", step {report.step}"
    origin = report.origin
    if origin is None:
        where = f" in {noticed(report.noticed)}" if report.noticed else ""
        return f"a non-finite value{where}{step}; where it was born is not known"
    at = f", at {place(origin.site)}" if origin.site else ""
    return f"{kind(origin.produced)} {_birth(origin)}{step}{at}{_layer(origin)}"


def _birth(origin: Origin) -> str:
    label = origin.label or (origin.produced.name if origin.produced and not origin.op else "")
    match origin.phase:
        case "optimizer":
            return "born in the optimizer's update" + (f" of {origin.label}" if origin.label else "")
        case "input":
            where = "a buffer" if origin.role == "buffer" else "the data"
            return f"{'born in' if origin.op else 'came in with'} {where}" + (f" ({label})" if label else "")
        case "parameter":
            kept = origin.role if origin.role in ("buffer", "state") else "parameter"
            return f"{'born' if origin.op else 'was already'} in {kept} {label}".rstrip()
        case phase:
            return f"born in {phase}"


def _layer(origin: Origin) -> str:
    if not origin.module:
        return ""
    return f" in {origin.module}" + (f" ({origin.module_type})" if origin.module_type else "")


def noticed(what: Noticed) -> str:
    """Where it was seen first: `the loss`, `the gradient of fc.weight`."""
    if not what.name or what.name == what.what:
        return f"the {what.what or 'step'}"
    return f"{_NOTICED.get(what.what, what.what)} {what.name}"


def batch_line(report: Report) -> str:
    """The batch, its guilty samples, and the process, where they are known."""
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
            words.append(f"in the data set {_few(batch.dataset_indices)}")
        if batch.confirmed:
            words.append(f"confirmed by {count(batch.replays, 'replay')}")
    elif batch.size is not None:
        words.append(count(batch.size, "sample"))
    return ", ".join(words)


def _few(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def feature_line(feature: Feature) -> str:
    """`sample 6: batch[0][3] = 0, the others 0.25 … 2`."""
    where = feature.member + ("" if not feature.index else str(list(feature.index)))
    what = f"{where} = {number(feature.value)}" + (" throughout" if feature.index is None else "")
    spread = number(feature.low) + ("" if feature.low == feature.high else f" … {number(feature.high)}")
    return f"sample {feature.sample}: {what}, the others {spread}"


def at_expression(origin: Origin) -> str:
    """What the underlined expression did."""
    node = origin.event.node if origin.event else None
    what = kind(origin.produced)
    match origin.phase:
        case "backward" if origin.event and origin.event.in_python_backward:
            return f"this made {what}, in a backward written by hand"
        case "backward":
            return f"the derivative of this expression made {what}" + (f" ({node})" if node else "")
        case "optimizer":
            return f"the update made {what}"
        case "input" if not origin.op:
            return f"the bad {'buffer' if origin.role == 'buffer' else 'data'} enters the step here"
        case "parameter" if not origin.op:
            return f"{origin.label or 'it'} was {what} before this line ran"
        case _:
            return f"{origin.op or 'this'} made {what}"


def library_site(origin: Origin) -> Site | None:
    """The library code that the user's line led into; for a derivative, that of the forward line."""
    event = origin.event
    if origin.phase == "backward" and not (event and event.in_python_backward):
        event = origin.forward_event  # below a backward operator lies only the engine
    site = event.library_site if event else None
    return None if site is None or site.file.replace(os.sep, "/").endswith(_WRAPPERS) else site


def dtype(name: str) -> str:
    """`f32` for `torch.float32`."""
    name = name.removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _DTYPES.get(letters, letters) + name[len(letters) :] if len(letters) < len(name) else name


def tensor_cells(stat: TensorStat, arrow: str = "") -> tuple[str, str, str, str]:
    """One tensor as (name, shape, dtype, values)."""
    return (arrow + stat.name, str(list(stat.shape)), dtype(stat.dtype), _values(stat))


def _values(stat: TensorStat) -> str:
    spread = _spread(stat)
    if stat.bad:
        return _bad(stat) + (f"   the rest {spread}" if spread else "")
    if not stat.numel:
        return "no elements"
    words = [spread] if spread else []
    if (stat.zeros or stat.negative) and stat.min != stat.max:
        words.append(f"zeros {stat.zeros}  negative {stat.negative}")
    if stat.smallest and stat.smallest < 1e-6:
        words.append(f"smallest {number(stat.smallest)}")
    if stat.binary and stat.min != stat.max:
        words.append("only 0 and 1")
    return "   ".join(words)


def _spread(stat: TensorStat) -> str:
    if stat.min is None or stat.max is None:
        return ""
    if stat.min == stat.max:
        return number(stat.min) if stat.numel - stat.bad == 1 else f"all {number(stat.min)}"
    return f"{number(stat.min)} … {number(stat.max)}"


def _bad(stat: TensorStat) -> str:
    if stat.numel == 1:
        return kind(stat)
    kinds = [f"{name} {n}" for name, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n]
    first = f", first at {list(stat.first_index)}" if stat.first_index and stat.bad < stat.numel else ""
    if stat.bad == stat.numel and len(kinds) == 1:
        return f"{kind(stat)}, all {stat.numel}"
    return f"{', '.join(kinds)} of {stat.numel}{first}"


def witness_line(origin: Origin) -> str:
    """The values at the first bad element: `at [6, 3]: self = -0.499 -> nan`."""
    pairs = list(origin.event.witness[:8]) if origin.event else []
    if not pairs:
        return ""
    produced = origin.produced
    results = (*_RESULTS, produced.name) if produced else _RESULTS
    result = f" -> {number(pairs.pop()[1])}" if pairs[-1][0] in results else ""
    at = f"at {list(produced.first_index)}: " if produced and produced.first_index else ""
    read = ", ".join(f"{name} = {number(value)}" for name, value in pairs)
    return f"{at}{read}{result}"


def scalars_line(origin: Origin) -> str:
    """The operator's arguments that are no tensors: `with dim = -1, eps = 1e-05`."""
    pairs = [(n, v) for n, v in origin.event.scalars if v is not None][:6] if origin.event else []
    return "with " + ", ".join(f"{name} = {setting(value)}" for name, value in pairs) if pairs else ""


def setting(value: Any) -> str:
    """An argument's value, the same for a fresh report and for a loaded one."""
    value = plain(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ", ".join(setting(v) for v in value[:8]) + (", …]" if len(value) > 8 else "]")
    return str(value)[:60]


def path_line(report: Report) -> str:
    """The way from the origin to where it was noticed, shortened in the middle."""
    origin, steps, before = report.origin, _whole_path(report), ""
    home = origin.site.file if origin and origin.site else ""
    words = [origin.label or "the bad value"] if origin and not origin.op else []
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
    """The path with the operator of the origin, if it is one, at its head."""
    origin = report.origin
    if origin is None or not origin.op:
        return list(report.path)
    line, file = (origin.site.line, origin.site.file) if origin.site else (None, "")
    return [PathStep(origin.op, line, file, phase=origin.phase), *report.path]


def remedy_result(remedy: Remedy, report: Report) -> str:
    """What trying the remedy showed."""
    step = "the failing step" if report.step is None else f"step {report.step}"
    if not remedy.tried:
        how = "; firstnan run script.py tries it" if remedy.diff else ""
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
    """How the trace was made and whether the replay matched."""
    result = {
        "deterministic": "it happened again, in the same way",
        "transient": "it did not happen again" if report.origin is None else "it did not happen every time",
        "not_replayed": "" if report.replay else "the step was not replayed",
    }[report.reproduced]
    return "; ".join(part for part in (report.replay.rstrip(".; "), result) if part)


def history_head(report: Report) -> str:
    """`steps 0 to 11, SGD, lr 10, momentum 0.9`."""
    history = report.history
    words = [f"steps {history.steps[0].step} to {history.steps[-1].step}", history.optimizer]
    words += [
        f"{name} {setting(value)}" for name, value in history.settings[:4] if value is not None and value is not False
    ]
    return ", ".join(w for w in words if w)


def history_rows(report: Report, most: int = 40) -> list[tuple[str, list[float], str]]:
    """(name, values, `first -> last`) of what is known of the steps before, where it belongs to the story."""
    steps = report.history.steps[-most:]
    if len(steps) < 3 or report.cause is None or report.cause.slug not in GROWTH:
        return []
    rows = []
    for name, key in (("loss", "loss"), ("grad norm", "grad_norm"), ("param norm", "param_norm"), ("lr", "lr")):
        values = [v for v in (getattr(step, key) for step in steps) if v is not None]
        if len(values) >= 3 and _grew(values):
            rows.append((name, values, growth(values)))
    return rows


def first_bad_layer(report: Report) -> str:
    """The first layer that read or wrote a non-finite value in the failing step, where layers were watched."""
    events = [e for e in report.events if e.kind == "nonfinite" and e.layer and e.what in ("input", "output")]
    return next((f"first bad: {_layer_event(e)}" for e in events if e.step == report.step), "")


def _layer_event(event: NaNEvent) -> str:
    """`encoder.1 (Linear), output[0], NaN 3 of 512, first at [0, 2]`."""
    stat = event.tensor
    inside = stat.name if stat and stat.name.startswith(("[", ".")) else ""
    of_gradient = "gradient of its " if event.phase == "backward" else ""
    words = [event.layer + (f" ({event.layer_type})" if event.layer_type else "")]
    words += [f"call {event.call}"] if event.call else []
    words += [f"{of_gradient}{event.what}{inside}", _bad(stat) if stat and stat.bad else kind(stat)]
    return ", ".join(words)


def _grew(values: Sequence[float]) -> bool:
    """Whether there is a change worth drawing: at least twofold."""
    sizes = [abs(v) for v in values if math.isfinite(v)]
    return bool(sizes) and max(sizes) >= 2 * min(sizes) > 0


def growth(values: Sequence[float]) -> str:
    """First, last finite, and last value, each once."""
    finite = [v for v in values if math.isfinite(v)]
    marks = [*finite[:1], *finite[1:][-1:]] + ([] if math.isfinite(values[-1]) else [values[-1]])
    return " -> ".join(number(v) for v in marks)


def sparkline(values: Sequence[float], levels: str) -> str:
    """One character a value, from the lowest to the highest of `levels`; by magnitude where they span decades."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 100:
        values = [math.log10(v) if math.isfinite(v) else v for v in values]
        finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # Halved first: the distance between two huge numbers of opposite sign is itself beyond float's range.
    span = high / 2 - low / 2
    marks = []
    for v in values:
        share = (v / 2 - low / 2) / span if span > 0 and math.isfinite(v) else 0.0
        marks.append(levels[min(int(share * len(levels)), len(levels) - 1)] if math.isfinite(v) else "!")
    return "".join(marks)
