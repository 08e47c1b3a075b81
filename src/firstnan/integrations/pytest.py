"""The pytest plugin: a test marked `firstnan`, or every test with `--firstnan`, fails at the first NaN or Inf.

pytest loads this file wherever firstnan is installed, so nothing heavy is imported before a test is watched.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from firstnan.records import Report

_MARK = "firstnan: fail this test at the first NaN or Inf in its training, with the report as the message"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("firstnan")
    group.addoption("--firstnan", action="store_true", help="fail every test at the first NaN or Inf in its training")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


class Watched:
    """What the fixture gives to a test that is watched."""

    def __init__(self) -> None:
        self.watch: Any = None

    @property
    def report(self) -> Report | None:
        """The report of a failure that the test has caught itself."""
        return self.watch.session.report if self.watch is not None else None


@pytest.fixture(name="firstnan")
def _firstnan() -> Watched:
    """Watches the test, as the marker does."""
    return Watched()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    given, marker = getattr(item, "funcargs", {}).get("firstnan"), item.get_closest_marker("firstnan")
    if marker is not None and (marker.args or marker.kwargs):
        pytest.fail("@pytest.mark.firstnan takes no arguments", pytrace=False)
    asked = item.config.getoption("--firstnan") or marker is not None
    if not asked and not isinstance(given, Watched):
        return (yield)
    from firstnan.engine.investigation import strip_our_frames
    from firstnan.engine.program_watch import raising

    try:
        with raising((str(item.path.parent),)) as watch:
            if isinstance(given, Watched):
                given.watch = watch
            return (yield)
    except ArithmeticError as error:
        strip_our_frames(error)
        raise
