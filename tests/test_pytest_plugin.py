"""The pytest plugin: marker, option and fixture; a test that finds nothing is left alone."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

TESTS = """
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def fit(zero):
    torch.manual_seed(0)
    y = torch.rand(32) + 0.1
    y[19] = 0.0 if zero else 1.0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, t in DataLoader(TensorDataset(torch.randn(32, 4), y), batch_size=8):
        loss = (model(x).squeeze(1) * t.log()).mean()  # line 13
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.firstnan
def test_marked():
    fit(zero=True)


@pytest.mark.firstnan
def test_healthy():
    fit(zero=False)


def test_other():
    fit(zero=True)


def test_fixture(firstnan):
    with pytest.raises(ArithmeticError):
        fit(zero=True)
    assert firstnan.report.step == 2
    assert firstnan.report.origin.site.line == 13


def test_last():
    assert torch.autograd.backward.__module__ == "torch.autograd"  # nothing is left of us
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_training=TESTS)
    known = {one.name for one in entry_points(group="pytest11")}
    loaded = () if "firstnan" in known else ("-p", "firstnan.integrations.pytest")
    return pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-s", *loaded, *options)


def test_a_marked_test_fails_with_the_report(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--strict-markers")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *NonFiniteError: firstnan: -Inf created in forward, step 2, at test_training.py:13",
            "E *batch 2, sample 3 of 8, dataset index 19, confirmed by * replays",
            "E *cause *Logarithm of zero*",
            "E *not tried; firstnan run -m pytest would try it",
        ]
    )


def test_the_option_watches_every_test(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--firstnan", "-k", "marked or other or healthy")
    result.assert_outcomes(passed=1, failed=2, deselected=2)


def test_arguments_of_the_marker_are_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.firstnan(on_nonfinite='skip')\ndef test_x(): pass\n")
    known = {one.name for one in entry_points(group="pytest11")}
    result = pytester.runpytest(*(() if "firstnan" in known else ("-p", "firstnan.integrations.pytest")))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*@pytest.mark.firstnan takes no arguments*"])
