"""A headless Chromium that opens pages and knows what they have asked for; torch is not needed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


@contextmanager
def started(profile: Path) -> Iterator[WebDriver]:
    """A browser with this folder as its profile, which must be empty."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        driver.set_page_load_timeout(30)
        yield driver
    finally:
        driver.quit()


class Browser:
    """Opens pages, and knows what they have asked for and complained of."""

    def __init__(self, driver: WebDriver, folder: Path) -> None:
        self.driver, self._folder, self._pages = driver, folder, 0

    def open(self, html: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self._pages += 1
        file = self._folder / f"page{self._pages}.html"
        file.write_text(html, encoding="utf-8")
        self.resize(width, height)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.command("Emulation.setEmulatedMedia", media)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(file.as_uri())

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)  # type: ignore[attr-defined]

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait_for(self, condition: str) -> None:
        """Until this expression is true in the page."""
        WebDriverWait(self.driver, 60, 0.05).until(lambda _: self.run(f"return !!({condition})"))

    def complaints(self) -> list[str]:
        """What the console says, whatever its level."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Whatever the page has asked for besides itself and what it holds."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        pages = [url for url in asked if url.startswith("file:") and "/page" in url]
        assert len(pages) == 1
        return [url for url in asked if url not in pages and not url.startswith(("data:", "blob:"))]
