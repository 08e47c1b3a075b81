"""Where the JSON of a record is not simply its fields: the one table of exceptions to the codec."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from firstnan.records.codec import FORMS, Form, ReportError, decode, decode_value, encode, field_at, prepare
from firstnan.records.report import History, InFloat64, NaNEvent, OpEvent, Origin, Report, Site, TensorStat

FORMAT = "firstnan-report"
VERSION = 1
MOST_DIMS = 64
"""As many as torch itself allows."""


# --- Report: its format and version come first -------------------------------------------------------------------


def _write_version(report: Report) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION}


def _check_version(data: dict[str, Any], where: str) -> None:
    if data.get("format") != FORMAT:
        raise ReportError(f'not a firstnan report: "format" must be "{FORMAT}"')
    version = decode_value(int, data.get("version"), field_at(where, "version"))
    if version < 1:
        raise ReportError("not a firstnan report: version must be 1 or more, got 0")
    if version > VERSION:
        raise ReportError(
            f"written by a newer firstnan (report version {version}, this one reads {VERSION}): upgrade firstnan"
        )


# --- TensorStat: the sum of both infinities, and a short form without a shape ------------------------------------


def _write_infinities(stat: TensorStat) -> dict[str, Any]:
    return {"inf": stat.inf}


def _check_dims(data: dict[str, Any], where: str) -> None:
    for name in ("shape", "first_index"):
        if isinstance(dims := data.get(name), list) and len(dims) > MOST_DIMS:
            raise ReportError(f"{where}.{name} has {len(dims)} dimensions: the limit is {MOST_DIMS}")


def _read_short_form(data: dict[str, Any], where: str, values: dict[str, Any]) -> dict[str, Any]:
    """The short form has `of`, the number of elements, for the shape, and `inf` for `posinf` and `neginf`."""

    def count(name: str) -> int:
        return decode_value(int | None, data.get(name), f"{where}.{name}") or 0

    found: dict[str, Any] = {"name": "", "dtype": ""}
    if "shape" not in values:
        found["shape"] = (count("of"),)
    if "posinf" not in values:
        found["posinf"] = max(0, count("inf") - values.get("neginf", 0))
    return found


# --- History: the optimizer's settings as an object --------------------------------------------------------------


def _write_settings(history: History) -> dict[str, Any]:
    return {"settings": encode(dict(history.settings))}


def _read_settings(data: dict[str, Any], where: str, values: dict[str, Any]) -> dict[str, Any]:
    settings = decode_value(dict[str, Any] | None, data.get("settings"), f"{where}.settings")
    return {"settings": tuple((settings or {}).items())}


# --- Origin: its place in source flattened, and of its event only what a reader needs ----------------------------
# The whole trace, `arrived` included, stays with the process that made it.

_NO_PLACE = dict.fromkeys(("file", "line", "column", "end_column", "function", "code"))


@dataclass(frozen=True, slots=True)
class _Argument:
    """A (name, value) pair as an object."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Number:
    name: str
    value: float


def _write_origin(origin: Origin) -> dict[str, Any]:
    event, produced = origin.event or OpEvent(0, "", "", "forward", 0), origin.produced
    return {
        "backward_node": event.node,
        **(encode(origin.site) if origin.site else _NO_PLACE),
        "produced": produced and {**encode(produced), "of": produced.numel},
        "witness": encode([_Argument(*pair) for pair in event.witness]),
        "scalars": encode([_Argument(*pair) for pair in event.scalars]),
        "library": encode(origin.library_site),
        "raised": event.raised,
        "in_python_backward": event.in_python_backward,
        "in_float64": event.in_float64,
    }


def _read_origin(data: dict[str, Any], where: str, values: dict[str, Any]) -> dict[str, Any]:
    def part(name: str, hint: Any) -> Any:
        return decode_value(hint, data.get(name), f"{where}.{name}")

    phase = values.get("phase")
    running: Any = phase if phase in ("backward", "optimizer") else "forward"
    blank = OpEvent(0, values.get("op", ""), values.get("aten", ""), running, values.get("step", 0))
    event = replace(
        blank,
        node=part("backward_node", str | None),
        witness=tuple((one.name, one.value) for one in part("witness", tuple[_Number, ...] | None) or ()),
        scalars=tuple((one.name, one.value) for one in part("scalars", tuple[_Argument, ...] | None) or ()),
        library_site=part("library", Site | None),
        raised=part("raised", str | None),
        in_python_backward=bool(part("in_python_backward", bool | None)),
        in_float64=part("in_float64", InFloat64 | None),
    )
    forward = None
    if phase == "backward" and event.library_site and not event.in_python_backward:
        forward = replace(blank, phase="forward", library_site=event.library_site)
    return {
        "event": None if event == blank else event,
        "forward_event": forward,
        "site": None if data.get("file") is None else decode(Site, data, where),
    }


FORMS.update(
    {
        Report: Form(first=("format", "version"), write=_write_version, check=_check_version),
        TensorStat: Form(
            first=("name", "shape", "dtype", "min", "max", "smallest", "zeros", "negative", "nan", "inf"),
            write=_write_infinities,
            check=_check_dims,
            read=_read_short_form,
        ),
        History: Form(own=("settings",), first=("optimizer", "settings"), write=_write_settings, read=_read_settings),
        Origin: Form(
            own=("event", "forward_event", "site", "arrived"),
            first=(
                *("phase", "op", "aten", "backward_node"),
                *(field.name for field in fields(Site)),
                *("module", "module_type", "produced"),
            ),
            write=_write_origin,
            read=_read_origin,
        ),
    }
)
for _record in (Report, NaNEvent, _Argument, _Number):
    prepare(_record)
