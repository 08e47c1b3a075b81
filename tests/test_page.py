"""The report as a page, as a card in a notebook, and what both draw."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from firstnan.records import (
    Batch,
    Forecast,
    Histogram,
    History,
    LayerSpan,
    LayerTrack,
    LossRecord,
    PathStep,
    Preview,
    RankFinding,
    Report,
    SampleValues,
    Site,
    StepRecord,
)
from firstnan.records.words import headline
from firstnan.report import charts, write
from firstnan.report.page import diff, pieces, render_card, render_html, source
from firstnan.report.series import heat_maps, reduced, series_of
from hostile_report import NAMES, hostile
from report_samples import SAMPLES, divergence, forward, tried

sample = pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES.keys())
VOID = {"meta", "img", "br", "link", "input", "hr", "path", "line", "rect", "circle"}


class Page(HTMLParser):
    """What a page consists of: elements, attributes, texts; that every element is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts = "", list[str]()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text += f"{data} "

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, found in self.elements for key, value in found.items() if key == name]


def page(report: Report) -> Page:
    return Page(render_html(report, interactive=False))


@sample
def test_a_page_is_complete_and_asks_for_nothing(make: Callable[[], Report]) -> None:
    report = make()
    found = page(report)
    assert headline(report) in " ".join(found.text.split())
    assert not [address for address in found.attributes("src") if not address.startswith("data:")]
    assert not [address for address in found.attributes("href") if not address.startswith("#")]
    # The policy would block an element's own style, and a handler in an attribute.
    assert not found.attributes("style")
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    ids = found.attributes("id")
    assert len(ids) == len(set(ids))


@sample
def test_a_card_is_complete(make: Callable[[], Report]) -> None:
    report = make()
    found = Page(report._repr_html_())
    assert headline(report) in " ".join(found.text.split())
    assert "script" not in [tag for tag, _ in found.elements]
    assert not found.attributes("id")  # there may be several in a notebook
    style = re.search(r"<style>(.*)</style>", render_card(report), re.DOTALL)
    assert style is not None
    rules = [rule for rule in re.findall(r"([^{}]+)\{", style[1]) for rule in rule.split(",")]
    assert all(rule.strip().startswith(".firstnan-card") for rule in rules)


def test_scripts_and_styles_are_allowed_by_their_digests_alone() -> None:
    html = render_html(forward(), interactive=False)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert "default-src &#39;none&#39;" in policy[1]
    assert "unsafe" not in policy[1]
    for tag in ("style", "script"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy[1]


def test_plotly_is_packed_into_the_page_if_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from firstnan.report import page as module

    (tmp_path / "package_data").mkdir()
    (tmp_path / "package_data" / "plotly.min.js").write_text("window.Plotly = {};")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "plotly" else None)
    module._plotly.cache_clear()
    try:
        html = render_html(divergence())
        packed = re.search(r'id="plotly">([^<]+)<', html)
        assert packed is not None
        assert zlib.decompress(base64.b64decode(packed[1]), 31) == b"window.Plotly = {};"
        assert "pip install" not in html
        assert 'id="plotly"' not in render_html(forward())  # it has no curve to zoom into
        monkeypatch.setattr(module, "LARGEST_PAGE", 1000)
        assert 'id="plotly"' not in render_html(divergence())
        spec.submodule_search_locations = [str(tmp_path / "missing")]
        module._plotly.cache_clear()
        assert "firstnan[html]" in render_html(divergence())
    finally:
        module._plotly.cache_clear()


def test_hostile_names_are_text() -> None:
    for found in (page(hostile()), Page(render_card(hostile()))):
        assert not [tag for tag, _ in found.elements if tag in ("iframe", "object", "b onclick")]
        assert not [value for value in found.attributes("src") if not value.startswith("data:image/png")]
        assert "onerror" not in [key for _, attributes in found.elements for key in attributes]
    html = render_html(hostile(), interactive=False)
    assert html.count("<script") == html.count("</script>") == 3
    assert "\u202e" not in page(hostile()).text
    assert len(html) < 400_000
    for script in page(hostile()).scripts[:2]:
        json.loads(script, parse_constant=pytest.fail)
        assert "<" not in script


def test_what_a_page_tells_of_a_whole_report() -> None:
    report = tried().with_(
        batch=Batch(
            11, 16, (6,), True, (150,),
            values=(
                SampleValues(6, "batch[0]", (1, 2, 2), (0.0, 1.0, nan), Preview(2, 2, 1, "AAAAAA==")),
                SampleValues(6, "batch[1]", (), (3.0,)),
            ),
        ),
        ranks=(RankFinding(0, "received", 11), RankFinding(1, "created", 11, "train.py:10")),
        history=History(tuple(StepRecord(i, 1.0 / (i + 1), 2.0, 0.1) for i in range(12)), "SGD", (("lr", 0.1),)),
        capsule="capsules/a.firstnan",
    )  # fmt: skip
    report = report.with_(
        remedies=(dataclasses.replace(report.remedies[0], losses=(LossRecord(11, 0.1), LossRecord(12, 0.05))),)
    )
    found = page(report)
    text = " ".join(found.text.split())
    for part in ("dataset index 150", "received from another by rank 0", "as it is with this change", "a.firstnan",
                 "tried: step 11 is finite, and so are the 20 steps", "Constant: gradient norm 2, learning rate 0.1",
                 "SGD"):  # fmt: skip
        assert part in text
    values = re.findall(r'class="values">(.*?)…?</p>', _bare(report))
    assert [" ".join(v.split()) for v in values] == ["0 1 nan", "3"]
    sections = {"verdict", "source", "numbers", "path", "training", "samples", "fixes", "ranks", "run"}
    assert sections <= set(found.attributes("id"))


def _bare(report: Report) -> str:
    return re.sub(r"</?span[^>]*>", "", render_html(report, interactive=False))


def test_the_path_is_grouped_by_layers_and_shortened() -> None:
    steps = [PathStep(f"op{i}", i + 1, "train.py", module=f"layer{i // 2}") for i in range(100)]
    text = " ".join(page(forward().with_(path=tuple(steps))).text.split())
    assert "71 more" in text
    assert "layer0 op0 train.py:1 op1 train.py:2 layer1" in text
    assert "op99" in text
    assert "op50" not in text
    deep = [
        PathStep("add", 1, "train.py", module="encoder_of_the_vision_language_model_and_its_blocks." + n) for n in "01"
    ]
    text = page(forward().with_(path=tuple(deep))).text
    assert "and_its_blocks.0" in text
    assert "and_its_blocks.1" in text


# --- source and diffs --------------------------------------------------------------------------------------------


def test_source_is_marked_and_cut_around_the_mark() -> None:
    line = "    y = " + "a + " * 3000 + "torch.log(x)" + " + b" * 3000
    start = line.index("torch.log")
    (shown,) = source(Site("nowhere.py", 3, start, 3, start + 12, code="torch.log(x)", source=(line,), source_line=3))
    assert "".join(p.text for p in shown.pieces if p.marked) == "torch.log(x)"
    assert sum(len(p.text) for p in shown.pieces) <= 242


def test_a_change_in_a_line_that_goes_on_for_pages_is_shown() -> None:
    long = "x + " * 1500
    old, new = f"    loss = {long}log(p) + {long}0", f"    loss = {long}log(p + 1e-6) + {long}0"
    head, before, removed, added = diff(f"--- a/t.py\n+++ b/t.py\n@@ -1,2 +1,2 @@\n     y = 1\n-{old}\n+{new}\n")
    assert head.head.endswith("t.py:2")
    assert (before.sign, removed.sign, added.sign) == (" ", "-", "+")
    assert "log(p) + x" in "".join(p.text for p in removed.pieces)
    assert "".join(p.text for p in added.pieces if p.marked) == " + 1e-6"
    assert len("".join(p.text for p in added.pieces)) < 300


def test_only_a_page_with_a_fix_promises_one() -> None:
    assert "Source and fix" in page(forward()).text
    assert "Source and fix" not in page(forward().with_(remedies=())).text


def test_tokens_have_styles() -> None:
    found = {(p.text, p.style) for p in pieces("    return f(1.5e-3, 'a # b')  # why") if p.style}
    assert found == {
        ("return", "keyword"),
        ("f", "call"),
        ("1.5e-3", "number"),
        ("'a # b'", "string"),
        ("# why", "comment"),
    }


def test_what_a_change_replaces_is_marked() -> None:
    lines = diff("--- a/t.py\n+++ b/t.py\n@@ -1,3 +1,3 @@\n a\n-x = log(p)\n+x = log(p.clamp_min(1e-12))\n b\n")
    marked = {line.sign: "".join(p.text for p in line.pieces if p.marked) for line in lines if line.sign.strip()}
    assert marked == {"-": "", "+": ".clamp_min(1e-12)"}
    assert lines[0].head == "t.py:2"


# --- series and drawings -------------------------------------------------------------------------------------------


def test_every_series_of_a_history_is_found() -> None:
    data = {
        "steps": [{"step": i, "loss": 1.0 + i, "grad_norm": "nan" if i == 2 else 2.0, "lr": None} for i in range(3)],
        "settings": {"lr": 0.1},
        "coarse": {"steps": [0, 100], "update_norm": [1.0, 2.0]},
        "series": [{"name": "scale", "steps": [1, 2, 3], "values": [1, "inf", 4]}],
        "tails": {"entropy": [[1, 2.0], [2, 3.0]]},
        "forecast": {"loss": {"steps": [2.5, 4], "values": [4.0, 5.0]}, "message": "soon"},
        "layers": [{"layer": "a", "steps": [1, 2], "max_abs": [1, 2]}],
        "made_at": {"line": 3, "column": 4},
    }
    history: Any = dataclasses.make_dataclass("History", list(data))(**data)  # as later versions may record it
    found = {s.name: s for s in series_of(Report("nonfinite", step=5, history=history))}
    assert list(found) == ["loss", "grad_norm", "entropy", "scale", "update_norm"]
    assert found["loss"].forecast == ((2.5, 4.0),)  # no further than a third of the steps
    assert found["scale"].values == (1.0, inf, 4.0)
    assert found["update_norm"].steps == (0.0, 100.0)


def test_forecasts_are_drawn_and_listed() -> None:
    """As a history tells them that keeps steps of long ago in spans, and warns of what will overflow."""
    rows = [{"step": i, "loss": 2.0**i} for i in range(60, 100)]
    earlier = [{"step": i, "steps": 20, "loss": 2.0**i, "loss_max": 3.0**i} for i in range(0, 60, 20)]
    expected = {"name": "", "kind": "float32", "limit": 3.4e38, "now": 2.0**80, "since_step": 80, "low": 40, "high": 60}
    forecast = [
        {"what": "loss", **expected, "in_steps": 48, "withdrawn": None},
        {"what": "gradient", **expected, "in_steps": 9, "withdrawn": 85},
        {"what": "layer", **expected, "in_steps": "soon"},
    ]
    headroom = [{"op": "exp", "file": "train.py", "line": 7, "code": "x.exp()", "value": 88.0, "limit": 88.7}]
    data = {"steps": rows, "earlier": earlier, "forecast": forecast, "headroom": headroom, "layers": (), "settings": (),
            "others": (), "optimizer": "SGD", "made_at": None, "stepped_at": None, "name": ""}  # fmt: skip
    history: Any = dataclasses.make_dataclass("History", list(data))(**data)
    report = Report("nonfinite", step=99, history=history)
    (loss,) = series_of(report)
    assert loss.steps[0] == 0
    first, last = loss.forecast[0], loss.forecast[-1]
    assert first == (80.0, pytest.approx(2.0**80))
    assert 2.0**100 < last[1] <= 3.4e38
    assert last[0] <= 99 * 1.3
    assert 'class="forecast ahead"' in charts.curve(loss, 99)


def test_the_commands_name_the_file_of_the_report(tmp_path: Path) -> None:
    saved = tmp_path / "run 7.json"
    assert f"firstnan fix &#39;{saved}&#39; --apply" in render_html(tried(), interactive=False, saved=str(saved))
    assert "firstnan fix" not in render_html(tried(), interactive=False)  # there is none
    write(divergence(), tmp_path / "page.html", saved=saved)
    assert "report.json" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("trip", "anchor"), [(1, "start"), (98, "end")])
def test_the_failing_step_is_named_inside_the_picture(trip: int, anchor: str) -> None:
    svg = charts.curves([("one", [(float(i), 1.0) for i in range(100)])], "loss", trip=trip)
    assert re.search(rf'class="trip-label"[^>]*text-anchor="{anchor}"', svg)


def test_numbers_on_an_axis_are_short() -> None:
    values = [0.0, 0.5, 1234.5, 1e4, 25000.0, 1e5, 3e-5]
    assert [charts.tick(v) for v in values] == ["0", "0.5", "1234", "10000", "25000", "1e5", "3e-5"]


def test_forecasts_are_sentences() -> None:
    soon = Forecast("layer", "decoder.ffn.2", "float16", 65504.0, 1200.0, 40, 25, 70, 80)
    page = render_html(Report("nonfinite", step=99, forecast=(soon, dataclasses.replace(soon, withdrawn=90))))
    told = "step 80: decoder.ffn.2 reaches the limit of float16 in about 40 steps (25 to 70): it is 1.2e+03"
    assert page.count(told) == 2
    assert "keeps growing; withdrawn in step 90" in page


def test_long_series_keep_their_extremes_and_their_last_point() -> None:
    points = [(float(i), float(i % 7)) for i in range(100_000)]
    points[4321], points[5000] = (4321.0, 1e9), (5000.0, nan)
    kept = reduced(points)
    assert len(kept) <= 810
    assert (4321.0, 1e9) in kept
    assert kept[-1] == points[-1]
    assert [s for s, v in kept if v != v] == [5000.0]
    assert [s for s, _ in kept] == sorted(s for s, _ in kept)


def test_a_heat_map_keeps_what_is_not_finite() -> None:
    steps = tuple(range(1000))
    values = tuple(nan if i == 503 else 1.0 + i % 3 for i in steps)
    tracks = tuple(LayerTrack(f"layer{i}", "forward", steps, values, values) for i in range(3))
    (heat,) = heat_maps(History(layers=tracks))
    assert len(heat.steps) <= 160
    assert len(heat.values) == 3
    assert sum(v != v for v in heat.values[0] if v is not None) == 1
    picture, low, high = charts.heat_picture(heat)
    assert (low, high) == (2.0, 3.0) or (low, high) == (3.0, 3.0)
    assert picture.startswith("data:image/png;base64,")


def test_the_columns_of_a_heat_map_have_as_many_steps_each() -> None:
    steps = (*range(16), *range(16, 257, 16))
    values = tuple(float(i + 1) for i in steps)
    (heat,) = heat_maps(History(layers=(LayerTrack("fc", "forward", steps, values, values),)))
    assert heat.steps == tuple(range(0, 257, 16))
    assert heat.values == ((16.0, *(float(i + 1) for i in range(16, 257, 16))),)


def test_a_span_of_steps_fills_all_its_columns() -> None:
    track = LayerTrack("fc", "forward", (1000, 1010), (1.0, 1.0), (1.0, 2.0), earlier=(LayerSpan(0, 1000, 5.0),))
    (heat,) = heat_maps(History(layers=(track,)))
    assert heat.values[0][:-2] == (5.0,) * (len(heat.steps) - 2)
    assert None not in heat.values[0]


def test_a_preview_is_a_png_and_a_wrong_one_is_nothing() -> None:
    pixels = bytes(range(12))
    made = charts.picture(Preview(2, 2, 3, base64.b64encode(pixels).decode()))
    content = base64.b64decode(made.partition(",")[2])
    assert content.startswith(b"\x89PNG")
    data = content[content.index(b"IDAT") + 4 : content.index(b"IEND") - 8]
    assert zlib.decompress(data) == b"\0" + pixels[:6] + b"\0" + pixels[6:]
    for wrong in (Preview(2, 2, 3, "AAAA"), Preview(2, 2, 2, ""), Preview(0, 0, 1, ""), Preview(1, 1, 1, "%"),
                  Preview(10**9, 10**9, 4, "AAAA")):  # fmt: skip
        assert charts.picture(wrong) == ""


@pytest.mark.parametrize(
    ("values", "crosses"),
    [((1.0, 2.0, nan), 1), ((1e-300, 1e300, inf), 1), ((-1.7e308, 1.7e308), 0), ((0.0, 0.0), 0), ((5e-324, 1e-323), 0)],
)
def test_curves_are_drawn_inside_the_frame(values: tuple[float, ...], crosses: int) -> None:
    svg = charts.curves([("one", list(enumerate(values)))], "a <b>", trip=1)
    assert svg.count('class="cross"') == crosses
    assert "a &lt;b&gt;" in svg
    assert "nan" not in svg
    assert "inf" not in svg
    for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", svg):
        assert 0 <= float(x) <= charts.WIDTH
        assert 0 <= float(y) <= charts.HEIGHT


def test_the_bin_of_zero_is_marked_only_if_there_are_zeros() -> None:
    histogram = Histogram((-1.0, 0.0, 1.0), (3, 9))
    assert "bar zero" in charts.bars(histogram, "x", zeros=True)
    assert "bar zero" not in charts.bars(histogram, "x")
    assert "9 from 0 to 1" in charts.bars(histogram, "x")
    assert charts.bars(Histogram((0.0,), ()), "x") == ""


def test_a_report_of_a_long_run_and_500_layers_is_a_small_page() -> None:
    steps = tuple(StepRecord(i, 1.0 / (i + 1), 1.0 + i % 13, 0.1 - i * 1e-7, 3.0) for i in range(20_000))
    every = tuple(range(0, 20_000, 50))
    layers = tuple(
        LayerTrack(f"blocks.{i}.attention.projection", "forward", every, (1.0,) * len(every), tuple(map(float, every)))
        for i in range(500)
    )
    html = render_html(forward().with_(history=History(steps, "SGD", layers=layers)), interactive=False)
    assert len(html) < 2_000_000


def test_letters_of_any_language_are_shown() -> None:
    assert NAMES["emoji"] in page(hostile()).text
