"""Functions replaced in torch by several watchers, and hooks that are not copied or saved with a model."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstnan.observe.patches import Hook, Patches, as_written


class Library:
    """Stands for torch: a class whose functions are replaced."""

    @staticmethod
    def fixed(x: int) -> int:
        return x

    def method(self, x: int) -> int:
        """Says what it does."""
        return x


class Derived(Library):
    """Has the method by inheritance only."""


def adding(n: int) -> Callable[[Any], Callable[..., Any]]:
    """Writes down that it was there, outermost last."""

    def make(original: Any) -> Callable[..., Any]:
        def added(self: Any, x: tuple[int, ...]) -> Any:
            return (*original(self, x), n)

        return added

    return make


@pytest.fixture
def library() -> type[Library]:
    return type("Fresh", (), {"method": lambda self, x: x, "fixed": Library.__dict__["fixed"]})


def test_what_is_put_around_a_function_comes_off_again(library: Any) -> None:
    original = library.method
    patches = Patches()
    patches.put(library, "method", adding(1))
    assert library().method(()) == (1,)
    patches.remove()
    assert library.method is original
    patches.remove()
    assert library.method is original


def test_a_scripted_function_runs_as_it_was_written() -> None:
    """Compiled, all of its operators have one backward in common."""

    def logarithm(x: Tensor) -> Tensor:
        return x.exp().log()

    scripted, patches = torch.jit.script(logarithm), Patches()
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        scripted(x)
    compiled = scripted(x).grad_fn.name()
    as_written(patches)
    try:
        assert scripted(x).grad_fn.name() == "LogBackward0" != compiled
    finally:
        patches.remove()
    assert scripted(x).grad_fn.name() == compiled


def test_the_replacement_looks_like_the_original() -> None:
    patches = Patches()
    patches.put(Library, "method", adding(1))
    try:
        assert Library.method.__name__ == "method"
        assert Library.method.__doc__ == "Says what it does."
    finally:
        patches.remove()


def test_a_static_method_comes_back_as_one(library: Any) -> None:
    stored = vars(library)["fixed"]
    patches = Patches()
    patches.put(library, "fixed", lambda original: lambda x: original(x) + 1)
    assert library.fixed(3) == 4
    patches.remove()
    assert vars(library)["fixed"] is stored
    assert library.fixed(3) == 3


def test_an_inherited_method_is_not_left_on_the_class() -> None:
    patches = Patches()
    patches.put(Derived, "method", adding(1))
    assert Derived().method(()) == (1,)  # type: ignore[arg-type]
    assert Library().method(()) == ()  # type: ignore[arg-type]
    patches.remove()
    assert "method" not in vars(Derived)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_watchers_come_and_go_in_any_order(library: Any, order: tuple[int, ...]) -> None:
    original = library.method
    watchers = [Patches() for _ in range(3)]
    for i, watcher in enumerate(watchers):
        watcher.put(library, "method", adding(i))
    assert library().method(()) == (0, 1, 2)
    there = [0, 1, 2]
    for i in order:
        watchers[i].remove()
        there.remove(i)
        assert library().method(()) == tuple(there)
    assert library.method is original


def test_a_watcher_that_comes_while_another_is_there(library: Any) -> None:
    original = library.method
    first, second = Patches(), Patches()
    first.put(library, "method", adding(1))
    second.put(library, "method", adding(2))
    first.remove()
    first.put(library, "method", adding(3))
    assert library().method(()) == (2, 3)
    second.remove()
    first.remove()
    assert library.method is original


def test_someone_elses_patch_on_top_is_not_taken_off(library: Any) -> None:
    patches = Patches()
    patches.put(library, "method", adding(1))
    ours = library.method
    library.method = theirs = lambda self, x: (*ours(self, x), "theirs")
    patches.remove()
    assert library.method is theirs
    # Another watcher goes around theirs, and leaves it there.
    second = Patches()
    second.put(library, "method", adding(2))
    assert library().method(())[-2:] == ("theirs", 2)
    second.remove()
    assert library.method is theirs


def test_someone_elses_patch_that_is_taken_off_first(library: Any) -> None:
    original = library.method
    patches = Patches()
    patches.put(library, "method", adding(1))
    ours = library.method
    library.method = lambda self, x: ours(self, x)
    library.method = ours
    patches.remove()
    assert library.method is original


def test_someone_elses_patch_taken_off_after_ours(library: Any) -> None:
    """They put back what they found, which is ours; the next watcher that leaves takes it along."""
    original = library.method
    patches = Patches()
    patches.put(library, "method", adding(1))
    ours = library.method
    library.method = lambda self, x: ours(self, x)
    patches.remove()
    library.method = ours
    second = Patches()
    second.put(library, "method", adding(2))
    second.remove()
    assert library.method is original


def test_many_threads_patch_one_function(library: Any) -> None:
    original, errors = library.method, []

    def come_and_go() -> None:
        try:
            for i in range(200):
                patches = Patches()
                patches.put(library, "method", adding(i))
                assert i in library().method(())
                patches.remove()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert library.method is original


# Hooks on the user's own objects.


def test_a_hook_acts() -> None:
    assert Hook(lambda *args: args)(1, 2) == (1, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copied_hook_does_nothing(copied: Callable[[Hook], Any]) -> None:
    acted: list[Any] = []
    twin = copied(Hook(lambda *args: acted.append(args)))
    assert twin(1, (2,), {"three": 3}) is None
    assert twin(1, 2, 3, 4) is None
    assert not acted


def test_a_pickled_hook_is_read_without_firstnan() -> None:
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(1, 2, 3)); assert 'firstnan' not in sys.modules"
    hook = pickle.dumps(Hook(print))
    done = subprocess.run([sys.executable, "-I", "-c", script], input=hook, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"None\n"), done.stderr
