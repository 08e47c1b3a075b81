"""The report: JSON in and out, and files."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from firstnan.records import NaNEvent, Report
from firstnan.records.codec import ReportError
from firstnan.records.files import load
from firstnan.report import render_text, write
from report_samples import SAMPLES, backward, clean, divergence, forward, input_, optimizer, watched

sample = pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES.keys())


def plain(report: Report, **options: Any) -> str:
    return render_text(report, **{"width": 100, **options})


# --- JSON ------------------------------------------------------------------------------------------------------


@sample
def test_a_loaded_report_reads_the_same(make: Callable[[], Report], tmp_path: Path) -> None:
    report, file = make(), tmp_path / "r.json"
    write(report, file)
    loaded = load(file)
    assert plain(loaded) == plain(report)
    assert loaded.to_dict() == report.to_dict() == json.loads(file.read_text())
    assert Report.from_dict(report.to_dict()).to_dict() == report.to_dict()


def test_documented_form() -> None:
    data = forward().to_dict()
    assert (data["format"], data["version"], data["verdict"], data["step"]) == ("firstnan-report", 1, "nonfinite", 11)
    assert {"index": 11, "size": 16, "bad_samples": [6]}.items() <= data["batch"].items()
    assert {"confirmed", "dataset_indices", "features", "replays", "note"} <= data["batch"].keys()
    origin = data["origin"]
    expected = {
        "phase": "forward", "op": "log", "aten": "aten.log.default", "backward_node": None, "file": "nowhere/train.py",
        "line": 10, "column": 15, "end_column": 34, "function": "forward", "code": "torch.log(x + 1e-3)",
        "module": "encoder.norm", "module_type": "LayerNorm",
    }  # fmt: skip
    assert {key: origin[key] for key in expected} == expected
    produced = {"nan": 1, "posinf": 0, "neginf": 0, "of": 128, "first_index": [6, 3]}
    assert produced.items() <= origin["produced"].items()
    read = {
        "name": "self", "shape": [16, 8], "dtype": "float32", "min": -0.499, "max": 1.0, "zeros": 0, "negative": 1,
        "nan": 0, "inf": 0,
    }  # fmt: skip
    assert read.items() <= origin["inputs"][0].items()
    assert {"slug", "title", "why", "evidence"} <= data["cause"].keys()
    assert data["cause"]["link"] == "docs/causes/log_of_negative.md"
    assert {"title", "diff", "tried", "failing_step_finite", "steps_finite_after"} <= data["remedies"][0].keys()
    assert data["path"][0]["op"] == "mul"
    assert data["path"][0]["line"] == 12
    assert data["noticed"]["what"] == "loss"
    assert data["reproduced"] == "deterministic"
    assert data["environment"] == {"torch": "2.13.0"}
    assert (data["rank"], data["world_size"]) == (0, 1)
    assert data["events"] == []
    assert isinstance(data["history"], dict)


def test_non_finite_numbers_are_strings() -> None:
    assert forward().to_dict()["origin"]["witness"][1] == {"name": "result", "value": "nan"}
    assert divergence().to_dict()["history"]["steps"][-1]["loss"] == "inf"
    assert Report.from_dict(divergence().to_dict()).history.steps[-1].loss == inf
    json.dumps(divergence().to_dict(), allow_nan=False)


def test_documented_example_loads() -> None:
    """The short form of the documentation, without any of the added fields."""
    report = Report.from_dict(
        {
            "format": "firstnan-report", "version": 1, "verdict": "nonfinite", "step": 11,
            "batch": {"index": 11, "size": 16, "bad_samples": [6]},
            "origin": {
                "phase": "forward", "op": "log", "aten": "aten.log.default", "backward_node": None, "file": "t.py",
                "line": 10, "column": 10, "end_column": 27, "function": "forward", "code": "torch.log(x + 1e-3)",
                "module": "encoder.norm", "module_type": "LayerNorm",
                "produced": {"nan": 1, "posinf": 0, "neginf": 0, "of": 128, "first_index": [6, 3]},
                "inputs": [{"name": "self", "shape": [2], "dtype": "float32", "min": -0.5, "max": 1.0, "inf": 1}],
            },
            "cause": {"slug": "log_of_negative", "title": "t", "why": "w", "evidence": ["e"]},
            "remedies": [], "path": [{"op": "mul", "line": 12}], "noticed": {"what": "gradient", "name": "f.0.weight"},
            "reproduced": "deterministic", "events": [], "history": {}, "a_field_of_tomorrow": [1],
        }
    )  # fmt: skip
    assert report.origin
    assert report.origin.produced
    assert report.origin.produced.numel == 128
    assert report.origin.inputs[0].inf == 1
    text = plain(report)
    assert "log (t.py:10) -> mul (t.py:12) -> the gradient of f.0.weight" in text
    assert "10 │ torch.log(x + 1e-3)\n" in text


def test_events_and_tracks_come_back_exactly() -> None:
    report = watched()
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    loaded = Report.from_dict(data)
    # As text, since a NaN is not equal to itself.
    assert repr(list(map(dataclasses.asdict, loaded.events))) == repr(list(map(dataclasses.asdict, report.events)))
    assert repr(loaded.history.layers) == repr(report.history.layers)
    for event in report.events:
        again = NaNEvent.from_dict(json.loads(json.dumps(event.to_dict(), allow_nan=False)))
        assert repr(dataclasses.asdict(again)) == repr(dataclasses.asdict(event))


def test_documented_form_of_an_event() -> None:
    data = watched().events[-1].to_dict()
    assert set(data) == {field.name for field in dataclasses.fields(NaNEvent)}
    assert (data["kind"], data["phase"], data["what"], data["grad_norm"]) == ("nonfinite", "backward", "output", "nan")
    tensor = data["tensor"]
    assert (tensor["min"], tensor["max"], tensor["neginf"], tensor["inf"]) == ("-inf", "nan", 2, 2)
    with pytest.raises(ReportError, match=r"event\.call must be 0 or more, got -1"):
        NaNEvent.from_dict({**data, "call": -1})
    with pytest.raises(ReportError, match="event must be an object, got a list"):
        NaNEvent.from_dict([])  # type: ignore[arg-type]


def changed(**changes: Any) -> dict[str, Any]:
    return {**forward().to_dict(), **changes}


BROKEN: dict[str, tuple[Any, str]] = {
    "list": ([], "the report must be an object, got a list"),
    "nothing": (None, "the report is missing"),
    "no format": ({}, "not a firstnan report"),
    "other format": (changed(format="pyinstrument"), "not a firstnan report"),
    "no version": (changed(version=None), "version is missing"),
    "newer": (changed(version=2), "written by a newer firstnan"),
    "version type": (changed(version="1"), "version must be an integer, got '1'"),
    "bool is no number": (changed(step=True), "step must be an integer, got True"),
    "huge": (changed(step=10**400), "step is too large: the limit is 9223372036854775807"),
    "negative count": (changed(rank=-1), "rank must be 0 or more, got -1"),
    "verdict": (changed(verdict="maybe"), "verdict must be one of nonfinite, diverged, clean, got 'maybe'"),
    "origin type": (changed(origin=[1]), "origin must be an object, got a list"),
    "no phase": (changed(origin={"op": "log"}), "origin.phase is missing"),
    "phase": (changed(origin={"phase": {}, "op": "log"}), "origin.phase must be one of"),
    "nested": (changed(cause={"slug": 3}), "cause.slug must be a string, got 3"),
    "in a list": (
        changed(path=[{"op": "mul", "line": 1}, {"op": "mul", "line": 1.5}]),
        "path[1].line must be an integer, got 1.5",
    ),
    "float too large": (changed(history={"steps": [{"loss": 10**400}]}), "history.steps[0].loss is too large"),
    "keys": (changed(environment={1: 2}), "each key of environment must be a string, got 1"),
    "object": (changed(environment={"a": object()}), "environment must be a JSON value, got object"),
    "event": (changed(events=[3]), "events[0] must be an object, got 3"),
    "event kind": (changed(events=[{"kind": "crash"}]), "events[0].kind must be one of nonfinite, spike, explosion"),
    "event what": (changed(events=[{"kind": "spike", "what": "x"}]), "events[0].what must be one of input, output"),
    "layers": (changed(history={"layers": [{"phase": "optimizer"}]}), "history.layers[0].phase must be one of forw"),
    "magnitude": (changed(history={"layers": [{"norm": [1, "x"]}]}), "history.layers[0].norm[1] must be a number"),
    "lengths": (
        changed(history={"layers": [{"layer": "fc", "phase": "forward", "norm": [1]}]}),
        "history.layers[0]: steps, norm and max_abs must have the same length",
    ),
    "dims": (
        changed(origin={"phase": "forward", "op": "x", "produced": {"shape": [1] * 65}}),
        "origin.produced.shape has 65 dimensions: the limit is 64",
    ),
    "flag": (changed(remedies=[{"title": "a", "tried": "yes"}]), "remedies[0].tried must be true or false, got 'yes'"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_reports_say_what_is_wrong(data: Any, message: str) -> None:
    with pytest.raises(ReportError) as caught:
        Report.from_dict(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "python": (b"import torch\n", "not JSON"),
    "binary": (b"\x80\x02\xff\xfe", "not JSON"),
    "half": (json.dumps(forward().to_dict()).encode()[:500], "not JSON"),
    "deep": (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "deep values": (json.dumps(changed(environment={"a": nested(200)})).encode(), "environment is nested too deeply"),
    "digits": (b'{"step": ' + b"9" * 5000 + b"}", "not JSON"),
    "NaN": (b'{"format": NaN}', 'NaN must be written as the string "nan"'),
    "Infinity": (b'{"format": -Infinity}', '-Infinity must be written as the string "-inf"'),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES.keys())
def test_broken_files_say_what_is_wrong(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(ReportError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"), [("none.json", "No such file"), (".", "directory"), ("a\0b", "null byte")]
)
def test_files_that_cannot_be_read(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=message):
        load(f"{tmp_path}/{name}")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(keys):
        yield value, key
        yield from places(item)


NASTY: list[Any] = [
    None, True, -1, 0, 3, 2**63, -(2**63), 10**400, 1e308, -0.0, 5e-324, inf, -inf, nan, "", "nan", "-inf", "x" * 3000,
    "\x1b[2J\x9b1m", "\ud800", "\u202e[bold]\n\t\0", "日本語" * 40, [], {}, [[]], [None], {"a": {}}, [1] * 70,
    nested(3000), {1: 2}, (1, 2), object(), b"x", "/dev/zero", "/dev/stdin", [0, 2**62], ["\n"], "clean", "backward",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_fuzz_mutations_are_refused_or_rendered(seed: int) -> None:
    """Whatever one value of a report is replaced with: a ReportError, or a report that shows and saves again."""
    rng = random.Random(seed)
    messages: list[str] = []
    rendered = 0
    for _ in range(100):
        data = rng.choice([forward, backward, optimizer, input_, divergence, watched])().to_dict()
        for container, key in rng.sample(list(places(data)), rng.choice([1, 1, 2, 5])):
            alike = [v for v in NASTY if type(v) is type(container[key])]  # the type right, the value not
            container[key] = rng.choice(alike if alike and rng.random() < 0.8 else NASTY)
        try:
            report = Report.from_dict(data)
        except ReportError as error:
            messages.append(str(error))
            continue
        rendered += 1
        text = plain(report, ascii=rng.random() < 0.5, width=rng.choice([1, 60, 100]), saved="\x1b]0;x\x07")
        text.encode("utf-8")
        assert not set(text) & set("\x00\x07\x1b\x9b\u202e\r")
        json.dumps(report.to_dict(), allow_nan=False)
        assert plain(Report.from_dict(report.to_dict())) == plain(report)
    assert all(len(message.splitlines()) == 1 for message in messages)
    assert min(len(messages), rendered) > 20


# --- files -----------------------------------------------------------------------------------------------------


def test_write_by_extension(tmp_path: Path) -> None:
    write(forward(), tmp_path / "r.TXT")
    assert (tmp_path / "r.TXT").read_text(encoding="utf-8") == plain(forward())
    write(forward(), tmp_path / "report", extension=".json")
    assert load(tmp_path / "report").step == 11
    with pytest.raises(ReportError, match=r"r\.pdf: the extension of a report must be \.json, \.txt, \.html or \.md"):
        write(forward(), tmp_path / "r.pdf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.TXT", "report"]


def test_write_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.json"
    write(clean(), file)
    before = file.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write(forward(), file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    write(forward(), file)
    assert load(file).step == 11


def test_write_to_odd_places(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write(clean(), tmp_path / "missing" / "r.json")
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    write(clean(), link)
    assert link.is_symlink()
    assert load(real).verdict == "clean"
    write(clean(), "/dev/null", extension=".json")
    assert not Path("/dev/null").is_file()


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write(clean(), tmp_path / "r.json")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "plain").stat().st_mode
