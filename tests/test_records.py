"""The records: one codec for all of them, and the words that several rooms share."""

from __future__ import annotations

import dataclasses
import json
import random
import typing
from dataclasses import MISSING, dataclass
from math import inf, nan
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from firstnan import records
from firstnan.records import Cause, LayerTrack, Origin, Remedy, Report, TensorStat
from firstnan.records.codec import ReportError, decode, encode, prepare
from firstnan.records.words import number

RECORDS: list[type[Any]] = [
    value
    for name, value in vars(records).items()
    if dataclasses.is_dataclass(value) and value.__module__ == "firstnan.records" and not name.startswith("_")
    if value is not records.Trace  # stays in the process
]
every_record = pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)

TEXTS = ["", "log", "train.py", "größe\n\x1b[1m", "\ud800", "nan", "x" * 300]
FLOATS = [0.0, -0.0, 1.5, -3e38, 5e-324, inf, -inf, nan]


def some(hint: Any, rng: random.Random) -> Any:
    """A random value of a type."""
    kind, options = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return some(rng.choice(options), rng)
    if hint is type(None):
        return None
    if kind is Literal:
        return rng.choice(options)
    if kind is tuple and options[1:] == (...,):
        return tuple(some(options[0], rng) for _ in range(rng.choice([0, 1, 3])))
    if kind is tuple:
        return tuple(some(option, rng) for option in options)
    if kind is dict:
        return {f"key {i}": some(options[1], rng) for i in range(rng.choice([0, 1, 3]))}
    if dataclasses.is_dataclass(hint):
        return some_record(typing.cast("type[Any]", hint), rng)
    simple = {str: TEXTS, float: FLOATS, int: [0, 1, 7, 2**63 - 1], bool: [False, True]}
    return rng.choice(simple[hint]) if hint is not Any else rng.choice([None, True, -3, 0.5, "a", [1, [2]], {"b": {}}])


def some_record(cls: type[Any], rng: random.Random) -> Any:
    hints = get_type_hints(cls)
    values = {f.name: some(hints[f.name], rng) for f in dataclasses.fields(cls)}
    if cls is LayerTrack:
        values["norm"] = values["max_abs"] = tuple(map(float, values["steps"]))
        values["zeros"] = values["subnormal"] = tuple(map(float, values["share_steps"]))
    if cls is TensorStat:  # its JSON has their sum
        values["posinf"], values["neginf"] = values["posinf"] % 1000, values["neginf"] % 1000
    if cls is records.Histogram:
        values["edges"] = tuple(map(float, range(len(values["counts"]) + 1)))
    if cls in (records.History, records.OptimizerHistory):
        values["settings"] = tuple({name: (name, value) for name, value in values["settings"]}.values())
    return cls(**values)


def through_json(record: Any) -> Any:
    return decode(type(record), json.loads(json.dumps(encode(record), allow_nan=False)), "at")


def without_event(value: Any) -> Any:
    """The value with every origin in it as a report keeps it: its events, and what arrived, stay with the process."""
    if isinstance(value, Origin):
        return dataclasses.replace(value, event=None, forward_event=None, arrived=None)
    return value.with_(origin=without_event(value.origin)) if isinstance(value, Report) else value


def all_of(record: Any) -> str:
    """Everything in a record, as text: a NaN is not equal to itself."""
    return repr(dataclasses.asdict(record))


@every_record
def test_a_record_comes_back_as_it_was(cls: type[Any]) -> None:
    rng = random.Random(cls.__name__)
    for _ in range(60):
        record = some_record(cls, rng)
        again = through_json(record)
        assert all_of(without_event(again)) == all_of(without_event(record))
        assert encode(again) == encode(record)


def test_of_an_event_a_report_keeps_what_a_reader_needs() -> None:
    rng, kept = random.Random(0), 0
    for _ in range(200):
        origin = some_record(Origin, rng)
        event, again = origin.event, through_json(origin)
        assert again.library_site == origin.library_site
        if event is not None and again.event is not None:
            for name in ("witness", "scalars", "node", "raised", "in_python_backward", "in_float64"):
                assert repr(getattr(again.event, name)) == repr(getattr(event, name))
            kept += 1
    assert kept > 50


HOSTILE: list[Any] = [
    None, True, -1, 3, 2**63, -(2**63), 10**5000, 1e308, inf, nan, "", "nan", "x" * 3000, "\n\x1b[2J", "\ud800", [], {},
    [[]], [None], [-1], [1] * 70, ["\n"], {"a": {}}, {1: 2}, {"\n": object()}, (1, 2), object(), b"x", [object()],
    [{"name": "\n", "value": 10**5000}], [{"name": 1}], [{}], [[1, 2]], {"file": "\n", "line": "1"}, "backward",
]  # fmt: skip


WHOLE = (
    "at: steps, norm and max_abs",
    "at: share_steps, zeros",
    "at: a histogram",
    "at.line is missing",
    "not a firstnan report: ",
    "written by a newer firstnan",
)
"""Errors about a whole record, or about a place in source whose file alone was given."""


@every_record
def test_a_hostile_value_in_any_field_is_refused_in_one_line_that_names_it(cls: type[Any]) -> None:
    rng = random.Random(cls.__name__)
    refused = 0
    for key in encode(some_record(cls, rng)):
        data = encode(some_record(cls, rng))
        for value in HOSTILE:
            try:
                record = decode(cls, {**data, key: value}, "at")
            except ReportError as error:
                refused += 1
                message = str(error)
                assert len(message) < 200
                assert message.isprintable()
                assert message.startswith((f"at.{key}", f"each key of at.{key}", *WHOLE))
            else:
                assert encode(through_json(record)) == encode(record)
    assert refused > len(HOSTILE) // 2


@every_record
@pytest.mark.parametrize("value", [None, 3, "text", [], [{}], True], ids=repr)
def test_a_record_is_an_object(cls: type[Any], value: Any) -> None:
    with pytest.raises(ReportError, match=r"^at (is missing|must be an object, got )"):
        decode(cls, value, "at")


SHORT_FORM = ("name", "shape", "dtype")


@every_record
def test_what_has_no_default_must_be_there(cls: type[Any]) -> None:
    hints = get_type_hints(cls)
    record = LayerTrack("fc", "forward") if cls is LayerTrack else some_record(cls, random.Random(cls.__name__))
    full = encode(record)
    for field in dataclasses.fields(cls):
        if field.name not in full:
            continue
        optional = type(None) in get_args(hints[field.name])
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        for data in ({k: v for k, v in full.items() if k != field.name}, {**full, field.name: None}):
            if not optional and not has_default and not (cls is TensorStat and field.name in SHORT_FORM):
                with pytest.raises(ReportError, match=rf"^at\.{field.name} is missing$"):
                    decode(cls, data, "at")
            elif field.default is not MISSING and field.name != "posinf":
                assert getattr(decode(cls, data, "at"), field.name) == field.default
            else:
                decode(cls, data, "at")


@dataclass(frozen=True, slots=True)
class Span:
    file: str
    lines: tuple[int, int]
    text: str = ""


@dataclass(frozen=True, slots=True)
class LargerRemedy(Remedy):
    """A remedy of a later version."""

    spans: tuple[Span, ...] = ()
    owners: dict[str, tuple[Span, ...]] = dataclasses.field(default_factory=dict)


def test_new_fields_and_records_need_no_code() -> None:
    span = Span("train.py", (3, 4), "x = 1\n")
    remedy = LargerRemedy("clamp", diff="-a\n+b", spans=(span, Span("b.py", (0, 0))), owners={"me": (span,)})
    assert through_json(remedy) == remedy
    assert decode(LargerRemedy, encode(Remedy("clamp", tried=True))) == LargerRemedy("clamp", tried=True)
    assert decode(Remedy, encode(remedy)) == Remedy("clamp", diff="-a\n+b")
    data = encode(remedy)
    for wrong, message in (
        ([{"file": "a.py"}], r"^at\.spans\[0\]\.lines is missing$"),
        ([{"file": "a.py", "lines": [1]}], r"^at\.spans\[0\]\.lines must have 2 elements, got 1$"),
        ([{"file": "a.py", "lines": [1, -1]}], r"^at\.spans\[0\]\.lines\[1\] must be 0 or more, got -1$"),
    ):
        with pytest.raises(ReportError, match=message):
            decode(LargerRemedy, {**data, "spans": wrong}, "at")
    with pytest.raises(ReportError, match=r"^at\.owners\[0\]\.file is missing$"):
        decode(LargerRemedy, {**data, "owners": {"\n": [{}]}}, "at")


@dataclass(frozen=True, slots=True)
class Unreadable:
    values: tuple[bytes, ...] = ()


def test_a_type_that_cannot_be_read_is_refused_before_anything_is_read() -> None:
    prepare(LargerRemedy)
    with pytest.raises(TypeError, match="a record cannot have a field of type <class 'bytes'>"):
        prepare(tuple[Unreadable, ...] | None)


def test_what_a_record_refuses_is_told_with_its_place() -> None:
    with pytest.raises(ValueError, match="the same length"):
        LayerTrack("fc", "forward", (1,))
    track = {"layer": "fc", "phase": "forward", "steps": [1]}
    with pytest.raises(ReportError, match=r"^at: steps, norm and max_abs must have the same length$"):
        decode(LayerTrack, track, "at")


def test_the_short_form_of_a_tensor() -> None:
    assert decode(TensorStat, {"of": 128, "nan": 1, "inf": 3, "neginf": 1}, "at") == TensorStat(
        "", (128,), "", nan=1, posinf=2, neginf=1
    )
    with pytest.raises(ReportError, match=r"^at\.of must be an integer, got 'many'$"):
        decode(TensorStat, {"of": "many"}, "at")


def test_integers_become_floats_where_the_record_has_floats() -> None:
    cause = decode(Cause, {"slug": "a", "title": "", "why": "", "confidence": 1})
    assert isinstance(cause.confidence, float)


def test_numbers_for_people() -> None:
    values = [0.0, -0.0, 3.0, 65504.0, 999999.0, 1e6, 0.1234567, 12345.678, 1e-30, nan, inf, -inf, None]
    assert [number(v) for v in values] == (
        ["0", "0", "3", "65504", "999999", "1e+06", "0.1235", "1.235e+04", "1e-30", "nan", "inf", "-inf", "?"]
    )
