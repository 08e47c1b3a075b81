"""The browser that the tests of the page share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, started

sys.path.insert(0, str(Path(__file__).parents[1]))  # report_samples and hostile_report


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as driver:
        yield Browser(driver, tmp_path_factory.mktemp("pages"))
