"""The report: one screen of text."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from firstnan.records import (
    Batch,
    History,
    LayerTrack,
    LoopTurn,
    Noticed,
    OpEvent,
    Origin,
    PathStep,
    Remedy,
    Report,
    Site,
    TensorStat,
)
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import headline
from firstnan.report import nonfinite_error, print_text, render_text
from firstnan.report.sentences import at_expression, batch_line, path_line
from firstnan.report.source_excerpt import shown
from firstnan.report.text import short_dtype, sparkline, tensor_facts
from report_samples import SAMPLES, backward, clean, divergence, forward, input_, optimizer, watched

GOLDENS = Path(__file__).parent / "goldens"
ANSI = re.compile(r"\x1b\[[0-9;]*m")

sample = pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES.keys())


def plain(report: Report, **options: Any) -> str:
    return render_text(report, **{"width": 100, **options})


def wrapping(lines: list[str]) -> list[str]:
    """All lines but those of a diff, which are copied as they are."""
    return [line for line in lines if not re.match(r" {10}[-+ ] ", line)]


def compare(name: str, text: str) -> None:
    """Compares with tests/goldens/NAME.txt; FIRSTNAN_UPDATE_GOLDENS=1 writes it instead."""
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("FIRSTNAN_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


# --- goldens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_text_is_the_golden(name: str) -> None:
    compare(name, plain(SAMPLES[name](), saved="nan.json"))


def test_ascii_is_the_golden() -> None:
    text = plain(divergence(), ascii=True)
    assert text.isascii()
    compare("divergence_ascii", text)


def test_narrow_is_the_golden() -> None:
    text = plain(forward(), width=60)
    assert max(map(len, text.splitlines())) <= 60
    compare("forward_narrow", text)


@sample
def test_one_screen(make: Callable[[], Report]) -> None:
    lines = plain(make(), saved="nan.json").splitlines()
    assert len(lines) <= 40
    assert max(map(cell_len, wrapping(lines))) <= 100
    assert all(line == line.rstrip() for line in lines)


# --- text ------------------------------------------------------------------------------------------------------


@sample
def test_color_changes_nothing_but_color(make: Callable[[], Report]) -> None:
    colored = plain(make(), color=True)
    assert ANSI.search(colored)
    without = "\n".join(line.rstrip() for line in ANSI.sub("", colored).splitlines()) + "\n"
    assert without == plain(make())


def test_markup_of_the_user_is_shown_as_it_is() -> None:
    assert "bad data [bold]not markup[/bold]  [nan_input]" in plain(input_())
    hostile = clean().with_(notes=("[red]x[/red] [/] :smile: [link=file:///etc]y[/link]",))
    assert "[red]x[/red] [/] :smile: [link=file:///etc]y[/link]" in plain(hostile)


def test_environment_does_not_color_or_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(forward())
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "50", "TERM": "dumb", "JPY_PARENT_PID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert plain(forward()) == expected
    assert max(map(len, wrapping(render_text(forward()).splitlines()))) <= 50
    monkeypatch.setenv("COLUMNS", "500")
    assert render_text(forward()) == expected


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "utf-8"])
def test_print_survives_any_encoding(encoding: str) -> None:
    raw = io.BytesIO()
    site = Site("größe.py", 3, 8, 3, 22, "f", "log(größe, 日本)", ("größe = log(größe, 日本)",), 3)
    report = divergence().with_(origin=Origin("forward", "log", "aten.log.default", site=site))
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    print_text(report, stream, saved="r.json")
    text = raw.getvalue().decode(encoding)
    assert ("│" in text) == ("▁" in text) == (encoding == "utf-8")
    assert ("größe.py:3" in text) == (encoding != "ascii")
    assert ("日本" in text) == (encoding == "utf-8")
    assert "\x1b" not in text


def test_print_to_a_terminal_is_colored_and_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import pty
    import struct
    import termios

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 70, 0, 0))
    with open(theirs, "w", encoding="utf-8") as terminal:
        print_text(clean().with_(notes=("word " * 40,)), terminal)
        seen = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "\x1b[" in seen
    widths = [len(line.rstrip()) for line in ANSI.sub("", seen).splitlines()]
    assert 60 < max(widths) <= 70


def optional_fields(record: Any) -> Iterator[Any]:
    """The record with each field that has a default, one at a time, put back to it."""
    for field in dataclasses.fields(record):
        if field.default is not dataclasses.MISSING:
            yield dataclasses.replace(record, **{field.name: field.default})


@pytest.mark.parametrize("make", [forward, backward, optimizer, input_, divergence, watched])
def test_any_field_may_be_missing(make: Callable[[], Report]) -> None:
    report = make()
    assert report.origin is not None
    assert report.origin.site is not None
    for other in optional_fields(report):
        assert plain(other).startswith("firstnan: ")
    for origin in optional_fields(report.origin):
        assert plain(report.with_(origin=origin)).startswith("firstnan: ")
    for site in optional_fields(report.origin.site):
        text = plain(report.with_(origin=dataclasses.replace(report.origin, site=site)))
        assert f"train.py:{site.line}" in text.splitlines()[0]


def test_an_error_shows_its_text_or_at_least_the_headline() -> None:
    assert str(nonfinite_error(forward())) == plain(forward()).rstrip()
    assert str(NonFiniteError(forward())) == plain(forward()).splitlines()[0]
    unrenderable = forward().with_(notes=(3,))
    error = nonfinite_error(unrenderable)
    assert error.report is unrenderable
    assert str(error) == str(NonFiniteError(forward()))


# --- the source excerpt ----------------------------------------------------------------------------------------


def underlined(report: Report, **options: Any) -> list[str]:
    """What is above the carets, by screen columns, line by line."""
    lines = plain(report, **options).splitlines()
    found = []
    for above, below in itertools.pairwise(lines):
        match = re.match(r"^ +[│|] ( *)(\^+)", below)
        if match:
            start, end = match.span(2)
            column, text = 0, ""
            for char in above:
                if start <= column < end:
                    text += char
                column += cell_len(char)
            found.append(text)
    return found


def at(site: Site) -> Report:
    return Report("nonfinite", origin=Origin("forward", "log", "aten.log.default", site=site))


def test_underline_under_tabs_and_wide_characters() -> None:
    line = '\tif x:\ty = f("日本語\\u0301") + log(größe) # é'
    start = line.index("log(")
    site = Site("t.py", 7, start, 7, start + 10, "f", "log(größe)", (line,), 7)
    assert underlined(at(site)) == ["log(größe)"]
    assert underlined(at(site), ascii=True) == [r"log(gr\xf6\xdfe)"]


def test_underline_of_several_lines() -> None:
    source = ("y = (a", "     + log(", "         x", "     ) + 3)")
    site = Site("t.py", 8, 7, 10, 6, "f", "log( x )", source, 7)
    assert underlined(at(site)) == ["log(", "x", ")"]


def test_a_long_statement_is_shortened_around_the_expression() -> None:
    source = ("y = f(", *(f"    argument_{i}=g({i})," for i in range(40)), ")")
    site = Site("t.py", 130, 16, 130, 21, "f", "g(29)", source, 100)
    text = plain(at(site))
    assert underlined(at(site)) == ["g(29)"]
    assert "100 │ y = f(\n    … │\n  129 │" in text
    assert "131 │" in text
    assert len(text.splitlines()) <= 16


def test_a_long_expression_is_shortened_in_the_middle() -> None:
    source = ("y = f(", *(f"    a{i}," for i in range(40)), ")")
    site = Site("t.py", 100, 4, 141, 1, "f", "", source, 100)
    assert underlined(at(site)) == ["f(", "a0,", ")"]


@pytest.mark.parametrize("lead", [0, 60, 300, 9000])
@pytest.mark.parametrize("options", [{}, {"ascii": True}, {"width": 50}])
def test_a_wide_line_is_cut_around_the_expression(lead: int, options: dict[str, Any]) -> None:
    line = "a" * lead + " log(x + 1) " + "b" * 400
    site = Site("t.py", 1, lead + 1, 1, lead + 11, "f", "log(x + 1)", (line,), 1)
    assert underlined(at(site), **options) == ["log(x + 1)"]
    assert max(map(cell_len, plain(at(site), **options).splitlines())) <= options.get("width", 100)


def test_an_expression_wider_than_the_screen() -> None:
    line = "y = " + "log(" * 100 + "x" + ")" * 100
    site = Site("t.py", 1, 4, 1, len(line), "f", "", (line,), 1)
    (shown,) = underlined(at(site))
    assert shown.startswith("log(log(")
    assert max(map(len, plain(at(site)).splitlines())) <= 100


@pytest.mark.parametrize(("column", "marked"), [(None, "y = log(x)"), (999, "y = log(x)"), (-5, "y = l"), (8, "l")])
def test_columns_that_do_not_fit(column: int | None, marked: str) -> None:
    site = Site("t.py", 3, column, 3, 9, "f", "", ("    y = log(x)",), 3)
    assert underlined(at(site)) == [marked]


def test_context_comes_from_the_file_while_it_matches(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    file.write_text("import torch\n\n\ndef f(x):\n    # the log\n    return torch.log(x)\n\n\nf(0)\n", encoding="utf-8")
    site = Site(str(file), 6, 11, 6, 23, "f", "torch.log(x)", ("    return torch.log(x)",), 6)
    text = plain(at(site))
    assert "4 │ def f(x):\n  5 │     # the log\n  6 │     return torch.log(x)\n" in text
    assert underlined(at(site)) == ["torch.log(x)"]
    file.write_text("import torch\n" * 20, encoding="utf-8")
    assert "import torch" not in plain(at(site))
    assert underlined(at(site)) == ["torch.log(x)"]


def test_a_line_beyond_what_was_recorded(tmp_path: Path) -> None:
    """The record of a very long statement may end before the guilty line; the file or the expression is shown."""
    file = tmp_path / "t.py"
    file.write_text("y = f(\n" + "    0,\n" * 20 + "    log(x),\n)\n", encoding="utf-8")
    site = Site(str(file), 22, 4, 22, 10, "f", "log(x)", ("y = f(", *["    0,"] * 7), 1)
    assert "22 │     log(x),\n" in plain(at(site))
    assert underlined(at(site)) == ["log(x)"]
    file.unlink()
    assert underlined(at(site)) == ["log(x)"]


# --- words -----------------------------------------------------------------------------------------------------


def stat(**fields: Any) -> str:
    return "   ".join(tensor_facts(TensorStat(**{"name": "x", "shape": (4, 2), "dtype": "torch.float32", **fields})))


def test_one_tensor_one_line() -> None:
    assert stat(min=-0.4991234, max=12345.0, zeros=2) == "-0.4991 … 12345   zeros 2  negative 0"
    assert stat(min=0.0, max=0.0, zeros=8) == "all 0"
    assert stat(min=1e-30, max=1.0, smallest=1e-30) == "1e-30 … 1   smallest 1e-30"
    assert stat(min=0.0, max=1.0, zeros=3, binary=True) == "0 … 1   zeros 3  negative 0   only 0 and 1"
    assert stat(shape=(), min=0.0, max=0.0, zeros=1, binary=True) == "0"
    assert stat(min=1.0, max=1.0, binary=True) == "all 1"
    assert stat(shape=(0, 2)) == "no elements"
    assert stat(nan=8, first_index=(0, 0)) == "NaN, all 8"
    assert stat(nan=1, neginf=2, min=0.5, max=2.0, first_index=(1, 0)) == (
        "NaN 1, -Inf 2 of 8, first at [1, 0]   the rest 0.5 … 2"
    )
    assert stat(shape=(), posinf=1, first_index=()) == "Inf"
    names = ["torch.float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "uint8", "int64", ""]
    assert [short_dtype(n) for n in names] == ["f32", "bf16", "float8_e4m3fn", "bool", "c64", "u8", "i64", ""]


def test_path_is_shortened_in_the_middle() -> None:
    def path(n: int) -> str:
        steps = tuple(PathStep(f"op{i}", i, "t.py") for i in range(2, 2 + n))
        site = Site("t.py", 1)
        origin = Origin("forward", "log", "aten.log.default", site=site)
        return path_line(Report("nonfinite", origin=origin, path=steps, noticed=Noticed("gradient", "w")))

    assert path(0) == "log (t.py:1) -> the gradient of w"
    assert path(5).count("->") == 6
    assert "more" not in path(5)
    assert path(20) == (
        "log (t.py:1) -> op2 (t.py:2) -> op3 (t.py:3) -> … 16 more … -> op20 (t.py:20) -> op21 (t.py:21)"
        " -> the gradient of w"
    )


def test_path_shows_where_backward_begins() -> None:
    steps = (PathStep("mul", 2, "t.py"), PathStep("where", 3, "t.py", phase="backward"), PathStep("exp", 3, "lib.py"))
    origin = Origin("forward", "exp", "aten.exp.default", site=Site("t.py", 1))
    line = path_line(Report("nonfinite", origin=origin, path=steps))
    assert line == "exp (t.py:1) -> mul (t.py:2) -> backward of where (t.py:3) -> exp (lib.py:3)"


def test_sparkline() -> None:
    levels = "01234567"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], levels) == levels
    assert sparkline([1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7], levels) == levels  # by magnitude
    assert sparkline([-1.7e308, 1.7e308, nan, inf], levels) == "07!!"
    assert sparkline([3, 3, 3], levels) == "000"
    assert sparkline([nan], levels) == "!"


def test_history_only_if_the_cause_is_growth() -> None:
    report = divergence()
    assert "history" in plain(report)
    assert report.cause is not None
    other = dataclasses.replace(report.cause, slug="log_of_zero")
    assert "history" not in plain(report.with_(cause=other))
    short = dataclasses.replace(report.history, steps=report.history.steps[:2])
    assert "history" not in plain(report.with_(history=short))


def test_history_leaves_out_what_did_not_grow() -> None:
    report = divergence()
    steps = tuple(dataclasses.replace(s, param_norm=4.8 + s.step / 100) for s in report.history.steps)
    text = plain(report.with_(history=dataclasses.replace(report.history, steps=steps)))
    assert "grad norm" in text
    assert "param norm" not in text
    assert "  lr " not in text


def layer_lines(report: Report) -> list[str]:
    _, found, rest = plain(report).partition("\nlayers    ")
    return (rest.split("\n\n")[0]).split("\n          ") if found else []


def test_layers_name_the_first_bad_one_of_the_failing_step() -> None:
    report = watched()
    assert layer_lines(report)[0] == (
        "first bad: encoder.1 (Linear), call 2, output['hidden'], NaN 3 of 512, first at [0, 2]"
    )
    assert "first bad" not in plain(report.with_(step=12))
    later = report.with_(events=report.events[-1:])
    assert layer_lines(later)[0] == "first bad: head, gradient of its output, -Inf, all 2"
    blank = dataclasses.replace(report.events[-1], tensor=None, phase="forward", what="input")
    assert layer_lines(report.with_(events=(blank,)))[0] == "first bad: head, input, a non-finite value"


def test_layers_show_how_they_grew() -> None:
    report = watched().with_(events=())
    first, second = layer_lines(report)
    assert first.split() == ["….11.self_attention.out_proj", "backward", "▁▁▂█", "0.25", "->", "2.5e+09"]
    assert second.split() == ["encoder.1", "forward", "▁▁█!", "0.25", "->", "31", "->", "inf"]
    assert first.index("backward") == second.index("forward")
    assert layer_lines(report.with_(history=History(layers=(LayerTrack("a", "forward"),)))) == []


def test_many_long_tracks_stay_on_the_screen() -> None:
    sizes = tuple(1.2345e-3 * 1.5**i for i in range(200))
    tracks = tuple(LayerTrack("block." * i + "x", "backward", tuple(range(200)), sizes, sizes) for i in range(50))
    lines = layer_lines(watched().with_(history=History(layers=tracks), events=()))
    assert len(lines) == 6
    assert all(len(line) <= 90 and "▁" in line for line in lines)


def test_nothing_is_shown_twice() -> None:
    report = forward()
    assert report.cause is not None
    twice = ("self [16, 8] float32 in [-0.499, 1], 1 negative", "at [6, 3]: self = -0.499 -> nan", "self is odd")
    text = plain(report.with_(cause=dataclasses.replace(report.cause, evidence=twice)))
    assert text.count("[16, 8]") == 2  # what was read and what was made
    assert text.count("at [6, 3]: self = -0.499 -> nan") == 1
    assert "self is odd" in text


def test_wrappers_of_torch_are_not_shown() -> None:
    def header(file: str) -> str:
        report = optimizer()
        assert report.origin is not None
        assert report.origin.event is not None
        event = dataclasses.replace(report.origin.event, library_site=Site(file, 54, function="inner"))
        return plain(report.with_(origin=dataclasses.replace(report.origin, event=event)))

    assert "inside torch/nn/functional.py:54 (inner)" in header("/x/site-packages/torch/nn/functional.py")
    assert "inside" not in header("/x/site-packages/torch/_compile.py")


def test_a_tensor_from_outside_is_shown_once() -> None:
    bad = TensorStat("weight", (2,), "float32", nan=2, first_index=(0,))
    origin = Origin("parameter", "", "", inputs=(bad,), produced=bad, role="parameter", label="fc.weight")
    text = plain(Report("nonfinite", origin=origin, noticed=Noticed("loss")))
    assert text.count("NaN, all 2") == 1
    assert "->" in text
    assert "-> weight" not in text


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, firstnan.report, report_samples\n"
        "for make in report_samples.SAMPLES.values():\n"
        "    report = make()\n"
        "    assert firstnan.report.render_text(report)\n"
        "    assert type(report).from_dict(report.to_dict())\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent / "src"), str(here)])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths}, timeout=60)


# --- diffs -----------------------------------------------------------------------------------------------------


def test_a_diff_is_shown_by_place_with_little_around_it() -> None:
    diff = (
        "--- a//home/me/train.py\t2026\n+++ b//home/me/train.py\n@@ -7,6 +7,6 @@\n one\n two\n \tthree\r\n"
        "-\told\r\n+\tnew\r\n\n four\n\\ No newline at end of file\n"
    )
    assert shown(diff) == [
        ("", "/home/me/train.py:10"),
        (" ", "three"),
        ("-", "old"),
        ("+", "new"),
    ]


@pytest.mark.parametrize("diff", ["", "\n", "no diff", "@@", "--- a", "@@ -x +y @@\n", "--- \n+++ \n@@ -1 +1 @@\n"])
def test_text_that_is_not_a_diff_shows_nothing(diff: str) -> None:
    assert shown(diff) == []


def test_a_diff_without_a_place_is_shown() -> None:
    assert shown("-eps=0\n+eps=1e-8") == [("-", "eps=0"), ("+", "eps=1e-8")]


def test_a_buffer_is_not_called_data() -> None:
    made = Origin("input", "div", "aten.div", produced=TensorStat("result", (2,), "float32", nan=1), label="weight")
    for origin, says in (
        (made, "NaN created in the data (weight)"),
        (dataclasses.replace(made, role="buffer"), "a buffer"),
    ):
        assert says in headline(Report("nonfinite", 3, origin=origin))
    came = dataclasses.replace(made, op="", aten="", role="buffer")
    assert "NaN came in with a buffer (weight)" in headline(Report("nonfinite", 3, origin=came))
    assert at_expression(came) == "the non-finite buffer enters the step here"


def test_numbers_that_only_enter_torch_were_not_created_there() -> None:
    site = Site("train.py", 25, function="<module>")
    result = TensorStat("result", (5,), "float32", nan=1)
    came = Origin("input", "tensor", "aten.lift_fresh.default", site=site, produced=result, read_at=site)
    assert "NaN came in with the data, step 7, at train.py:25" in headline(Report("nonfinite", 7, origin=came))


def test_a_checkpoint_that_is_copied_into_the_weights_did_not_create_the_value() -> None:
    read, made = (TensorStat(name, (5,), "float32", nan=1) for name in ("src", "result"))
    site = Site("train.py", 9, function="<module>")
    came = Origin(
        "parameter", "copy", "aten.copy_.default", site=site, inputs=(read,), produced=made, label="fc.weight"
    )
    assert headline(Report("nonfinite", 0, origin=came)) == "NaN copied into parameter fc.weight, step 0, at train.py:9"
    assert at_expression(came) == "this copies NaN into fc.weight"
    assert "created" in headline(Report("nonfinite", 0, origin=dataclasses.replace(came, inputs=())))


def test_what_bad_samples_hold_was_created_in_the_data() -> None:
    site = Site("data.py", 25, function="__getitem__")
    result = TensorStat("result", (5,), "float32", nan=1)
    made = Origin("input", "div", "aten.div", site=site, produced=result, read_at=Site("train.py", 3))
    report = Report("nonfinite", 7, Batch(18, 16, (11,)), origin=made)
    assert headline(report) == "NaN created in the data, step 7, at data.py:25"
    assert "created before the step" in headline(dataclasses.replace(report, batch=None))


# --- words that were read wrongly ------------------------------------------------------------------------------


def test_a_diff_line_is_never_wrapped_and_its_file_is_quoted() -> None:
    long = "x = " + " + ".join(f"value_{i}" for i in range(60))
    diff = f"--- a/t.py\n+++ b/t.py\n@@ -1,1 +1,1 @@\n-{long}\n+{long} + 1\n"
    fix = Remedy("t", why="w", diff=diff, tried=True, failing_step_finite=True, steps_finite_after=3)
    text = plain(dataclasses.replace(forward(), remedies=(fix,)), saved="my runs/out file.json")
    assert f"          + {long} + 1\n" in text
    assert "firstnan fix 'my runs/out file.json' --apply" in text


def test_the_size_of_a_batch_does_not_read_as_its_bad_samples() -> None:
    assert batch_line(dataclasses.replace(forward(), batch=Batch(size=16))) == "batch of 16 samples"
    assert batch_line(dataclasses.replace(forward(), batch=Batch(26, 8))) == "batch 26 with 8 samples"
    later = dataclasses.replace(forward(), step=69, batch=Batch(9, 8), history=History(first_step=40))
    assert batch_line(later) == "batch 9 with 8 samples, step 29 of this optimizer"


@pytest.mark.parametrize(("step", "line"), [(7, "epoch = 2, it = 5, micro = 3"), (5, "micro = 3"), (3, ""),
    (2, "it = 5, micro = 3")])  # fmt: skip
def test_loops_inside_the_one_that_counts_steps_are_told(step: int, line: str) -> None:
    loops = tuple(LoopTurn("a.py", 1, name, value) for name, value in (("epoch", 2), ("it", 5), ("micro", 3)))
    assert batch_line(Report("nonfinite", step=step, loops=loops)) == line


def test_an_operator_that_raised_produced_nothing() -> None:
    raised = OpEvent(0, "cholesky", "aten.linalg_cholesky_ex.default", "forward", 3, raised="not positive-definite")
    origin = Origin("forward", "cholesky", raised.aten, raised, site=Site("a.py", 3))
    assert (
        headline(Report("nonfinite", step=3, origin=origin)) == "cholesky raised an error in forward, step 3, at a.py:3"
    )
    assert at_expression(origin) == "cholesky raised an error"


def test_numbers_from_outside_were_not_produced_by_what_reads_them() -> None:
    bad = TensorStat("result", (2,), "float32", nan=2)
    event = OpEvent(0, "from_numpy", "aten.lift_fresh.default", "forward", 0, outputs=(bad,), born=2)
    origin = Origin("input", "from_numpy", event.aten, event, site=Site("a.py", 1), produced=bad)
    assert at_expression(origin) == "the numbers that from_numpy reads contain NaN"
    loaded = OpEvent(0, "to", "aten._to_copy.default", "forward", 0, outputs=(bad,))
    origin = Origin("parameter", "to", loaded.aten, loaded, site=Site("a.py", 1), inputs=(bad,), produced=bad)
    assert at_expression(origin) == "the tensor that `to` reads already contains NaN"
    assert headline(Report("nonfinite", step=0, origin=origin)) == "NaN was already in parameter, step 0, at a.py:1"


def test_a_hook_that_gets_the_gradients_is_named() -> None:
    hook = Site("/venv/torch/distributed/default_hooks.py", 71, function="_compress_hook")
    event = OpEvent(3, "to", "aten._to_copy.default", "backward", 5, node="torch::autograd::AccumulateGrad")
    origin = Origin("backward", "to", "aten._to_copy.default", event=dataclasses.replace(event, library_site=hook))
    assert (origin.library_site, origin.gradient_hook) == (hook, "_compress_hook")
    assert at_expression(origin) == "to, in the hook _compress_hook, produced a non-finite value"
    other = dataclasses.replace(event, library_site=hook, node="MulBackward0")
    derivative = dataclasses.replace(origin, event=other)
    assert (derivative.library_site, derivative.gradient_hook) == (None, "")


def test_a_numbered_layer_is_quoted() -> None:
    origin = Origin("forward", "log", "", site=Site("a.py", 1), module="0", module_type="QConv")
    assert headline(Report("nonfinite", step=1, origin=origin)).endswith(' in "0" (QConv)')


def test_a_change_that_makes_the_failing_step_finite_is_shown_although_a_later_one_fails() -> None:
    diff = "--- a/t.py\n+++ b/t.py\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    fix = Remedy("t", diff=diff, tried=True, failing_step_finite=True, note="training diverges (step 48)")
    text = plain(dataclasses.replace(forward(), remedies=(fix, fix)))
    assert text.count("          + b\n") == 1
    assert "tried: step 11 is finite, but training diverges (step 48)" in text
    assert "t  (tried: step 11 is finite, but training diverges)" in text  # how far it diverges is said once


def test_a_number_is_shown_once() -> None:
    report = forward()
    assert report.origin is not None
    assert report.origin.produced is not None
    assert report.cause is not None
    single = dataclasses.replace(report.origin.produced, first_index=())
    cause = dataclasses.replace(report.cause, evidence=("at the first bad element: self = -0.499 -> nan",))
    origin = dataclasses.replace(report.origin, produced=single)
    text = render_text(dataclasses.replace(report, origin=origin, cause=cause))
    assert text.count("self = -0.499 -> nan") == 1


def test_two_kinds_were_already_there() -> None:
    both = TensorStat("w", (2,), "float32", posinf=1, neginf=1)
    for stat, words in ((both, "Inf and -Inf were"), (dataclasses.replace(both, neginf=0), "Inf was")):
        report = dataclasses.replace(forward(), origin=Origin("parameter", "", "", produced=stat, label="w"), step=3)
        assert headline(report) == f"{words} already in parameter w, step 3"
