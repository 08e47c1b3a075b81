"""Report -> JSON values and back; what is read is checked field by field, so a loaded report can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast, get_args, get_type_hints

from firstnan.diagnose.causes import catalogue
from firstnan.records import (
    FORMAT,
    VERSION,
    Batch,
    Cause,
    Edit,
    Feature,
    History,
    InFloat64,
    LayerTrack,
    NaNEvent,
    Noticed,
    OpEvent,
    Origin,
    PathStep,
    Phase,
    Remedy,
    Report,
    Role,
    Site,
    StepRecord,
    TensorStat,
    dumps,
    plain,
)
from firstnan.report.fields import Fields, ReportError, json_value, names_and_values
from firstnan.report.words import library_site

REPRODUCED = ("deterministic", "transient", "not_replayed")
_CHOICES = {
    name: tuple(a for part in (hint, *get_args(hint)) for a in get_args(part) if isinstance(a, str))
    for name, hint in get_type_hints(NaNEvent).items()
}
"""What an event's fields may say, where its record names them (`Literal`, or one of them or None)."""


def render(report: Report) -> str:
    """The report as the text of a JSON file."""
    return dumps(to_dict(report)) + "\n"


def parse(text: str | bytes) -> Report:
    """The report in the text of a JSON file; ReportError says what is wrong with it."""
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ReportError("not a firstnan report: nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, or a number with thousands of digits
        raise ReportError(f"not JSON: {str(error).splitlines()[0]}") from None
    return from_dict(data)


def _no_constant(name: str) -> Any:
    raise ReportError(f'not a firstnan report: {name} stands where the string "{name.lower()}" is expected')


# --- writing ---------------------------------------------------------------------------------------------------


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain JSON values, in the documented form."""
    origin, cause, batch, noticed = report.origin, report.cause, report.batch, report.noticed
    data = {
        "format": FORMAT,
        "version": VERSION,
        "verdict": report.verdict,
        "step": report.step,
        "batch": batch,
        "origin": origin and _origin_dict(origin),
        "cause": cause and _cause_dict(cause),
        "other_causes": [_cause_dict(c) for c in report.other_causes],
        "remedies": report.remedies,
        "path": report.path,
        "noticed": noticed,
        "reproduced": report.reproduced,
        "replay": report.replay,
        "events": [event_to_dict(e) for e in report.events],
        "history": {
            "optimizer": report.history.optimizer,
            "settings": dict(report.history.settings),
            "steps": report.history.steps,
            "layers": report.history.layers,
            **{name: site and _site_dict(site) for name, site in _places(report.history).items()},
        },
        "rank": report.rank,
        "world_size": report.world_size,
        "environment": report.environment,
        "notes": report.notes,
        "capsule": report.capsule,
    }
    return cast(dict[str, Any], plain(data))


def _origin_dict(origin: Origin) -> dict[str, Any]:
    site, event, library = origin.site, origin.event, library_site(origin)
    where = _site_dict(site) if site else dict.fromkeys(("file", "line", "column", "end_column", "function", "code"))
    return {
        "phase": origin.phase,
        "op": origin.op,
        "aten": origin.aten,
        "backward_node": event and event.node,
        **where,
        "module": origin.module,
        "module_type": origin.module_type,
        "produced": origin.produced and {**_stat_dict(origin.produced), "of": origin.produced.numel},
        "inputs": [_stat_dict(s) for s in origin.inputs],
        "role": origin.role,
        "label": origin.label,
        "step": origin.step,
        # Of the event only what a reader needs; the whole trace stays with the process that made it.
        "witness": [{"name": n, "value": v} for n, v in event.witness] if event else [],
        "scalars": [{"name": n, "value": v} for n, v in event.scalars] if event else [],
        "library": _site_dict(library) if library else None,
        "raised": event and event.raised,
        "in_python_backward": bool(event and event.in_python_backward),
        "in_float64": event and event.in_float64,
    }


def _places(history: History) -> dict[str, Site | None]:
    return {"made_at": history.made_at, "stepped_at": history.stepped_at, "backward_at": history.backward_at}


def _site_dict(site: Site) -> dict[str, Any]:
    return {
        "file": site.file,
        "line": site.line,
        "column": site.column,
        "end_line": site.end_line,
        "end_column": site.end_column,
        "function": site.function,
        "code": site.code,
        "source": site.source,
        "source_line": site.source_line,
    }


def _stat_dict(stat: TensorStat) -> dict[str, Any]:
    return {
        "name": stat.name,
        "shape": stat.shape,
        "dtype": stat.dtype,
        "min": stat.min,
        "max": stat.max,
        "smallest": stat.smallest,
        "zeros": stat.zeros,
        "negative": stat.negative,
        "nan": stat.nan,
        "inf": stat.inf,
        "posinf": stat.posinf,
        "neginf": stat.neginf,
        "first_index": stat.first_index,
        "binary": stat.binary,
    }


def event_to_dict(event: NaNEvent) -> dict[str, Any]:
    """The event as plain JSON values; the keys are its attributes."""
    return cast(dict[str, Any], plain({**asdict(event), "tensor": event.tensor and _stat_dict(event.tensor)}))


def _cause_dict(cause: Cause) -> dict[str, Any]:
    return {
        "slug": cause.slug,
        "title": cause.title,
        "why": cause.why,
        "evidence": cause.evidence,
        "confidence": cause.confidence,
        "link": entry.link if (entry := catalogue().get(cause.slug)) else None,
    }


# --- reading ---------------------------------------------------------------------------------------------------


def from_dict(data: Mapping[str, Any]) -> Report:
    """The report that `to_dict` wrote; ReportError where the data is anything else."""
    top = Fields(data, "")
    if data.get("format") != FORMAT:
        raise ReportError(f'not a firstnan report: its "format" is not "{FORMAT}"')
    version = top.integer("version")
    if version is None or version < 1:
        raise ReportError("not a firstnan report: version is missing or below 1")
    if version > VERSION:
        raise ReportError(
            f"written by a newer firstnan (version {version}, this one reads {VERSION}): upgrade firstnan"
        )
    return Report(
        verdict=cast(Any, top.choice("verdict", ("nonfinite", "clean"))),
        step=top.integer("step"),
        batch=top.made("batch", _batch),
        origin=top.made("origin", _origin),
        cause=top.made("cause", _cause),
        other_causes=tuple(_cause(c) for c in top.children("other_causes")),
        remedies=tuple(_remedy(r) for r in top.children("remedies")),
        path=tuple(_path_step(p) for p in top.children("path")),
        noticed=top.made("noticed", lambda f: Noticed(f.text("what"), f.text("name"))),
        reproduced=cast(Any, top.choice("reproduced", REPRODUCED, "not_replayed")),
        replay=top.text("replay"),
        events=tuple(_noticed_event(e) for e in top.children("events")),
        history=top.made("history", _history) or History(),
        rank=top.count("rank"),
        world_size=top.count("world_size", 1),
        environment=top.mapping("environment"),
        notes=top.texts("notes"),
        capsule=top.text("capsule"),
    )


def event_from_dict(data: Mapping[str, Any]) -> NaNEvent:
    """The event that `event_to_dict` wrote; ReportError where the data is anything else."""
    return _noticed_event(Fields(data, "event"))


def _noticed_event(f: Fields) -> NaNEvent:
    return NaNEvent(
        kind=cast(Any, f.choice("kind", _CHOICES["kind"])),
        message=f.text("message"),
        step=f.integer("step"),
        batch=f.integer("batch"),
        epoch=f.integer("epoch"),
        phase=cast(Any, f.choice("phase", _CHOICES["phase"], "") or None),
        what=cast(Any, f.choice("what", _CHOICES["what"], "") or None),
        layer=f.text("layer"),
        paths=f.texts("paths"),
        layer_type=f.text("layer_type"),
        call=f.count("call"),
        tensor=f.made("tensor", _stat),
        grad_norm=f.real("grad_norm"),
        thread=f.text("thread"),
        rank=f.count("rank"),
        time=f.real("time") or 0.0,
    )


def _batch(f: Fields) -> Batch:
    return Batch(
        index=f.integer("index"),
        size=f.integer("size"),
        bad_samples=f.indices("bad_samples"),
        confirmed=bool(f.flag("confirmed")),
        dataset_indices=f.indices("dataset_indices"),
        features=tuple(_feature(c) for c in f.children("features")),
        replays=f.count("replays"),
        note=f.text("note"),
    )


def _feature(f: Fields) -> Feature:
    low, high = f.number("low"), f.number("high")
    return Feature(f.count("sample"), f.text("member"), f.indices("index"), f.number("value"), low, high)


def _origin(f: Fields) -> Origin:
    phase = cast(Phase, f.choice("phase", get_args(Phase)))
    op, aten, step = f.text("op", required=True), f.text("aten"), f.count("step")
    role = f.choice("role", get_args(Role), "") or None
    event = _event(f, op, aten, phase, step)
    forward = None
    if phase == "backward" and event and event.library_site and not event.in_python_backward:
        forward = OpEvent(0, op, aten, "forward", step, library_site=event.library_site)
    return Origin(
        phase=phase,
        op=op,
        aten=aten,
        event=event,
        forward_event=forward,
        site=_site(f),
        module=f.text("module"),
        module_type=f.text("module_type"),
        inputs=tuple(_stat(s) for s in f.children("inputs")),
        produced=f.made("produced", _stat),
        role=cast("Role | None", role),
        label=f.text("label"),
        step=step,
    )


def _event(f: Fields, op: str, aten: str, phase: Phase, step: int) -> OpEvent | None:
    """As much of the origin's event as the report keeps; None where it keeps nothing of it."""
    event = OpEvent(
        index=0,
        op=op,
        aten=aten,
        phase=cast(Any, phase if phase in ("backward", "optimizer") else "forward"),
        step=step,
        scalars=tuple((n, json_value(v, w)) for n, v, w in names_and_values(f, "scalars")),
        library_site=f.made("library", _site),
        node=f.text("backward_node") or None,
        witness=tuple((n, Fields({"value": v}, w).number("value")) for n, v, w in names_and_values(f, "witness")),
        raised=f.text("raised") or None,
        in_python_backward=f.flag("in_python_backward") or False,
        in_float64=cast(Any, f.choice("in_float64", get_args(InFloat64), "") or None),
    )
    nothing = OpEvent(0, op, aten, event.phase, step)
    return None if event == nothing else event


def _site(f: Fields) -> Site | None:
    file, line = f.text("file"), f.integer("line")
    if not file or line is None:
        return None
    return Site(
        file=file,
        line=line,
        column=f.integer("column"),
        end_line=f.integer("end_line"),
        end_column=f.integer("end_column"),
        function=f.text("function"),
        code=f.text("code"),
        source=f.texts("source"),
        source_line=f.integer("source_line"),
    )


def _stat(f: Fields) -> TensorStat:
    shape = f.indices("shape")
    if shape is None:  # the short form names only how many elements there are
        shape = (f.count("of"),)
    nan, posinf, neginf = f.count("nan"), f.count("posinf"), f.count("neginf")
    return TensorStat(
        name=f.text("name"),
        shape=shape,
        dtype=f.text("dtype"),
        min=f.real("min"),
        max=f.real("max"),
        smallest=f.real("smallest"),
        zeros=f.count("zeros"),
        negative=f.count("negative"),
        nan=nan,
        posinf=posinf or max(0, f.count("inf") - neginf),
        neginf=neginf,
        first_index=f.indices("first_index"),
        binary=f.flag("binary") or False,
    )


def _cause(f: Fields) -> Cause:
    confidence = f.real("confidence")
    return Cause(
        slug=f.text("slug", required=True),
        title=f.text("title"),
        why=f.text("why"),
        evidence=f.texts("evidence"),
        confidence=0.5 if confidence is None else confidence,
    )


def _remedy(f: Fields) -> Remedy:
    return Remedy(
        title=f.text("title"),
        diff=f.text("diff"),
        why=f.text("why"),
        kind=cast(Any, f.choice("kind", ("code", "setting", "data"), "code")),
        tried=f.flag("tried") or False,
        failing_step_finite=f.flag("failing_step_finite"),
        steps_finite_after=f.integer("steps_finite_after"),
        loss_change=f.real("loss_change"),
        note=f.text("note"),
        edits=tuple(_edit(e) for e in f.children("edits")),
    )


def _edit(f: Fields) -> Edit:
    start, end = (f.count("line"), f.count("column")), (f.count("end_line"), f.count("end_column"))
    return Edit(f.text("file", required=True), *start, *end, f.text("old"), f.text("new"))


def _path_step(f: Fields) -> PathStep:
    return PathStep(
        op=f.text("op", required=True),
        line=f.integer("line"),
        file=f.text("file"),
        code=f.text("code"),
        module=f.text("module"),
        phase=f.text("phase") or "forward",
        library=f.text("library"),
    )


def _history(f: Fields) -> History:
    return History(
        steps=tuple(
            StepRecord(s.count("step"), s.real("loss"), s.real("grad_norm"), s.real("lr"), s.real("param_norm"))
            for s in f.children("steps")
        ),
        optimizer=f.text("optimizer"),
        settings=tuple(f.mapping("settings").items()),
        layers=tuple(_track(t) for t in f.children("layers")),
        made_at=f.made("made_at", _site),
        stepped_at=f.made("stepped_at", _site),
        backward_at=f.made("backward_at", _site),
    )


def _track(f: Fields) -> LayerTrack:
    steps, norm, max_abs = f.indices("steps") or (), f.numbers("norm"), f.numbers("max_abs")
    if not len(steps) == len(norm) == len(max_abs):
        raise f.error("steps, norm and max_abs differ in length")
    phase = cast(Any, f.choice("phase", ("forward", "backward")))
    return LayerTrack(f.text("layer"), phase, steps, norm, max_abs)
