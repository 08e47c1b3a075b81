"""The HTML report in a real browser: it opens alone, draws, follows the theme and the keyboard, and runs no name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from chromium import Browser
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from firstnan.records import Histogram, History, LayerTrack, Report, StepRecord
from firstnan.report.page import render_card, render_html
from hostile_report import hostile
from report_samples import SAMPLES, divergence, forward, tried, watched

sample = pytest.mark.parametrize("make", [*SAMPLES.values(), hostile], ids=[*SAMPLES, "hostile"])
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"


def trained() -> Report:
    """A run of 300 steps that fails, with everything that can be drawn."""
    steps = tuple(StepRecord(i, 3.0 / (i + 1), 1.0 + i % 5, 0.1 / (1 + i), 9.0 + i / 50) for i in range(300))
    layers = tuple(
        LayerTrack(f"blocks.{i}", "forward", tuple(range(300)), (1.0,) * 300, tuple(1.0 + s * i for s in range(300)))
        for i in range(12)
    )
    report = tried().with_(step=299, history=History(steps, "SGD", (("lr", 0.1),), layers=layers))
    assert report.origin is not None
    read = dataclasses.replace(report.origin.inputs[0], histogram=Histogram((-1.0, 0.0, 1.0), (5, 9)), zeros=2)
    return report.with_(origin=dataclasses.replace(report.origin, inputs=(read,)))


@sample
def test_a_page_opens_without_complaints_and_without_the_network(browser: Browser, make: Callable[[], Report]) -> None:
    browser.open(render_html(make()))
    browser.wait_for("document.documentElement.dataset.ready")
    if browser.run("return !!document.querySelector('#training')"):
        browser.run("document.querySelector('#training').scrollIntoView()")
        browser.wait_for("document.querySelector('[data-drawn]')")
    assert browser.run(OVERFLOW) <= 0
    assert browser.complaints() == []
    assert browser.requests() == []


@sample
def test_a_page_fits_a_phone(browser: Browser, make: Callable[[], Report]) -> None:
    browser.open(render_html(make(), interactive=False), width=360, height=740)
    browser.wait_for("document.documentElement.dataset.ready")
    assert browser.run(OVERFLOW) <= 0
    assert browser.run("return parseFloat(getComputedStyle(document.querySelector('h1')).fontSize)") >= 20
    assert browser.complaints() == []


def test_the_name_of_a_tensor_stays_whole_on_a_phone(browser: Browser) -> None:
    report = forward()
    assert report.origin is not None
    inputs = tuple(dataclasses.replace(s, name="class_probabilities") for s in report.origin.inputs)
    named = dataclasses.replace(report.origin, inputs=inputs)
    browser.open(render_html(report.with_(origin=named), interactive=False), width=360, height=740)
    browser.wait_for("document.documentElement.dataset.ready")
    assert 0 < browser.run("return document.querySelector('.node.value b').offsetHeight") < 30


def test_curves_are_drawn_with_plotly_and_can_be_zoomed(browser: Browser) -> None:
    browser.open(render_html(trained()), height=4000)
    browser.wait_for("document.querySelectorAll('[data-drawn]').length === 4")
    assert browser.run("return document.querySelectorAll('#training .main-svg').length") >= 4
    assert browser.run("return document.querySelectorAll('#training .scatterlayer .trace').length") >= 4
    plot = "document.querySelector('#training .js-plotly-plot')"
    before = browser.run(f"return {plot}._fullLayout.xaxis.range")
    area = browser.driver.find_element(By.CSS_SELECTOR, "#training .nsewdrag")
    ActionChains(browser.driver).move_to_element_with_offset(area, -60, 0).click_and_hold().move_by_offset(
        80, 0
    ).release().perform()
    browser.wait_for(f"{plot}._fullLayout.xaxis.range[0] > {before[0] + 1}")
    assert browser.complaints() == []


def test_curves_are_drawn_without_plotly_and_without_scripts(browser: Browser) -> None:
    browser.command("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(render_html(trained(), interactive=False))
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", {"value": False})
    boxes = "[...document.querySelectorAll('#training .line')].map(line => line.getBoundingClientRect().width)"
    widths = browser.run(f"return {boxes}")
    assert len(widths) == 4
    assert min(widths) > 100
    assert browser.run("return document.querySelectorAll('#numbers rect.bar').length") == 2
    assert "firstnan[html]" in browser.run("return document.querySelector('#training .hint').textContent")
    assert browser.complaints() == []


def test_the_heat_map_tells_the_number_under_the_pointer(browser: Browser) -> None:
    browser.open(render_html(trained(), interactive=False))
    picture = browser.driver.find_element(By.CSS_SELECTOR, "#layers .map")
    browser.run("document.querySelector('#layers').scrollIntoView({behavior: 'instant'})")
    assert picture.size["height"] > 200
    ActionChains(browser.driver).move_to_element(picture).perform()
    told = browser.run("return document.querySelector('#layers output').textContent")
    assert re.fullmatch(r"blocks\.[56], step 1(48|50): \d+(\.\d+)?", told)
    rows = "[...document.querySelectorAll('#layers .names li')].map(li => li.getBoundingClientRect().top)"
    tops = browser.run(f"return {rows}")
    box = browser.run("return document.querySelector('#layers .map').getBoundingClientRect().toJSON()")
    assert abs(tops[0] - box["top"]) < 2  # names stand beside their rows
    assert abs(tops[-1] + 20 - box["bottom"]) < 2


def test_names_stand_beside_the_rows_of_a_map_of_few_layers(browser: Browser) -> None:
    report = trained()
    few = dataclasses.replace(report.history, layers=report.history.layers[:3])
    browser.open(render_html(report.with_(history=few), interactive=False))
    names, picture = (
        browser.run(f"return document.querySelector('#layers {one}').getBoundingClientRect().toJSON()")
        for one in (".names", ".map")
    )
    assert abs(names["top"] - picture["top"]) < 2
    assert abs(names["bottom"] - picture["bottom"]) < 2


def test_the_theme_follows_the_system_and_the_button(browser: Browser) -> None:
    color = "return getComputedStyle(document.body).backgroundColor"
    html = render_html(divergence())
    browser.open(html, scheme="light")
    browser.run("localStorage.clear()")
    light = browser.run(color)
    browser.open(html, scheme="dark")
    dark = browser.run(color)
    assert light != dark
    browser.driver.find_element(By.ID, "theme").click()
    assert browser.run(color) == light
    browser.driver.refresh()
    assert browser.run(color) == light  # the choice is kept
    browser.driver.find_element(By.TAG_NAME, "body").send_keys("t")
    assert browser.run(color) == dark
    browser.run("localStorage.clear()")


def test_text_can_be_read_in_both_themes(browser: Browser) -> None:
    """Every text has a contrast of at least 4.5 to its background, as accessibility guidelines ask for."""
    script = """
    const parse = color => (color.match(/[\\d.]+/g) || []).map(Number);
    const light = color => {
      const [r, g, b] = color.map(v => v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
      return .2126 * r + .7152 * g + .0722 * b;
    };
    const behind = element => {
      const layers = [];
      for (let e = element; e; e = e.parentElement) {
        const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor);
        if (a > 0) layers.push([[r, g, b], a]);
        if (a === 1) break;
      }
      const over = (base, [color, a]) => base.map((v, i) => color[i] * a + v * (1 - a));
      return layers.reverse().reduce(over, [255, 255, 255]);
    };
    const low = [];
    for (const e of document.querySelectorAll('main *')) {
      const texts = [...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
      if (e.closest('svg') || !texts) continue;
      const a = light(parse(getComputedStyle(e).color).slice(0, 3)), b = light(behind(e));
      const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
      if (ratio < 4.5) low.push(`${e.tagName}.${e.className} ${ratio.toFixed(2)} ${e.textContent.trim().slice(0, 30)}`);
    }
    return low;"""
    for scheme in ("light", "dark"):
        for report in (trained(), watched()):
            browser.open(render_html(report, interactive=False), scheme=scheme)
            assert browser.run(script) == [], scheme


def test_keys_move_between_sections_and_focus_is_visible(browser: Browser) -> None:
    browser.open(render_html(trained(), interactive=False), height=600)
    here = "return document.activeElement.id"
    body = browser.driver.find_element(By.TAG_NAME, "body")
    body.send_keys("j")
    assert browser.run(here) == "source"
    browser.driver.switch_to.active_element.send_keys("jj")
    assert browser.run(here) == "path"
    browser.wait_for("Math.abs(document.querySelector('#path').getBoundingClientRect().top) < 120")
    browser.driver.switch_to.active_element.send_keys("k")
    assert browser.run(here) == "numbers"
    assert browser.run("return document.querySelectorAll('nav a[aria-current]').length") == 1
    browser.open(render_html(trained(), interactive=False))
    browser.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.wait_for("document.activeElement.getBoundingClientRect().top >= 0")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.run("return location.hash") == "#verdict"
    for _ in range(4):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        style = "const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth"
        assert browser.run(style) == "solid2px"


def test_names_run_nothing(browser: Browser) -> None:
    for html in (render_html(hostile()), f"<!DOCTYPE html><body>{render_card(hostile())}</body>"):
        browser.open(html)
        if browser.run("return !!document.querySelector('#training')"):
            browser.run("document.querySelector('#training').scrollIntoView()")
            browser.wait_for("document.querySelector('[data-drawn]')")
            for element in browser.driver.find_elements(By.CSS_SELECTOR, "main section")[:20]:
                ActionChains(browser.driver).move_to_element(element).perform()
        assert browser.run("return window.hacked === undefined")
        outside = "[...document.images].filter(i => !i.src.startsWith('data:'))"
        assert browser.run(f"return {outside}.length") == 0
        assert browser.run("return getComputedStyle(document.body).display") == "block"
        assert browser.complaints() == []
        assert browser.requests() == []


def test_the_report_is_copied_as_markdown(browser: Browser) -> None:
    browser.open(render_html(forward(), interactive=False))
    browser.command("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    browser.driver.find_element(By.ID, "copy-markdown").click()
    browser.wait_for("document.querySelector('#said').textContent === 'Copied'")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, error => done(`${error}`))"
    text = browser.driver.execute_async_script(read)
    assert text.startswith("### firstnan: NaN created in forward")
