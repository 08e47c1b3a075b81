"""How large the HTML report of a very long run is, and how soon a browser has opened it.

    .venv-browser/bin/python benchmarks/page.py

`make test-browser` makes that environment. The report has 100,000 steps and 500 layers, each with 2,000 recorded steps.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "browser")]

from chromium import started  # noqa: E402  # found only now

from firstnan.records import History, LayerTrack, Report, StepRecord  # noqa: E402
from firstnan.report.page import render_html  # noqa: E402
from report_samples import tried  # noqa: E402

STEPS, LAYERS, RECORDED = 100_000, 500, 2_000


def long_run() -> Report:
    def wave(i: int, size: float) -> float:
        return size * (1.5 + math.sin(i * 0.37) + math.sin(i * 0.0011))

    steps = tuple(StepRecord(i, wave(i, 1.0), wave(i, 30.0), 1e-3 / (1 + i / 1e4), wave(i, 5.0)) for i in range(STEPS))
    every = tuple(range(0, STEPS, STEPS // RECORDED))
    layers = tuple(
        LayerTrack(f"encoder.layers.{n}.attention.out", "forward", every, norms, norms)
        for n in range(LAYERS)
        for norms in [tuple(wave(i, 1.0 + n) for i in every)]
    )
    return tried().with_(step=STEPS - 1, history=History(steps, "AdamW", (("lr", 1e-3),), layers=layers))


def opened(page: Path) -> tuple[float, float]:
    """Seconds until the page is there, and until the first curve is interactive."""
    with tempfile.TemporaryDirectory() as profile, started(Path(profile)) as driver:
        driver.get("about:blank")
        began = time.perf_counter()
        driver.get(page.as_uri())
        assert driver.execute_script("return document.documentElement.dataset.ready") == "true"
        there = time.perf_counter() - began
        driver.execute_script("document.querySelector('#training').scrollIntoView({behavior: 'instant'})")
        while not driver.execute_script("return !!document.querySelector('[data-drawn]')"):
            time.sleep(0.01)
        return there, time.perf_counter() - began


def main() -> None:
    report = long_run()
    began = time.perf_counter()
    html = render_html(report)
    print(f"rendered in {time.perf_counter() - began:.1f} s, {len(html.encode()) / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        page.write_text(html, encoding="utf-8")
        for _ in range(3):
            there, drawn = opened(page)
            print(f"opened in {there:.2f} s, curves interactive after {drawn:.2f} s")


if __name__ == "__main__":
    main()
