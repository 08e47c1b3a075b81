"""No test may leave torch or the interpreter changed: what the next one sees must be what a fresh process shows."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from firstnan.observe import manifest
from firstnan.observe.compiler import compiles, was_used

_SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
torch.set_num_threads(1)  # tiny tensors; the other cores have tests of their own to run


def torch_state() -> dict[str, Any]:
    """Everything global that the detector touches, by a readable name."""
    state: dict[str, Any] = {
        "dispatch modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "our import hooks": [type(f).__name__ for f in sys.meta_path if type(f).__module__.startswith("firstnan")],
        "how compiled functions run": compiler._stance.stance if (compiler := _compiler()) else "default",
        "sys.settrace": sys.gettrace() if _is_ours(sys.gettrace()) else None,
        "sys.excepthook": sys.excepthook if _is_ours(sys.excepthook) else None,
        "environment": {name: value for name, value in os.environ.items() if name not in _SET_BY_OTHERS},
    }
    state |= {f"{owner.__name__}.{name}": vars(owner).get(name) for owner, name in manifest.REPLACED}
    replaced_for_good = (*manifest.CHANGED_SOURCES, *manifest.OWN_PROCESS, *manifest.FORKED, *manifest.RANKS)
    for place, name in {*replaced_for_good, *manifest.COMPARED, *manifest.WORKER, *manifest.GUARDED}:
        owner, _, leaf = name.rpartition(".")
        if (module := sys.modules.get(place)) is not None:  # a test may load it
            state[f"{place}.{name}"] = getattr(getattr(module, owner) if owner else module, leaf)
    return state | {name: dict(getattr(owner, name)) for owner, name in manifest.HOOKS}


def _compiler() -> Any:
    """torch's compiler where it is loaded; asking for it would load it."""
    return sys.modules.get("torch._dynamo.eval_frame")


def _is_ours(function: Any) -> bool:
    # A coverage tool or a debugger has its own trace function.
    return (getattr(function, "__module__", None) or "").startswith("firstnan")


def pytest_collection_finish() -> None:
    """The objects of pytest and of thousands of tests are out of sight of whoever visits all objects of the process.

    Programs have no such objects, and a forked child would have to copy each page of memory that it visits. Torch
    imports its compiler, and with it as many objects again, when the first optimizer is made.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    """What one test has compiled is forgotten before the next: the detector asks whether the program compiles."""
    yield
    if compiles() or was_used():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _tries_fixes_if_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector that raises tries fixes, which takes seconds: in this process only where a test is marked for it."""
    if "tries_fixes" not in request.keywords:
        monkeypatch.setattr("firstnan.api.detector._with_fixes_tried", lambda report, session: report)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a mode, a hook or a patched function behind."""
    before = torch_state()
    yield
    after = torch_state()
    left = sorted(name for name in before if before[name] != after.get(name))
    assert not left, f"left behind: {', '.join(left)}"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays run in the process itself, as where there is no isolation, and the test can watch them."""
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "off")
