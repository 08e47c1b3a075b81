"""Attached, nothing of the user's changes; detached, nothing is left: alone, together, nested and from many threads."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import torch_state
from firstnan import NaNDetector, NonFiniteError
from firstnan.engine.handouts import Handouts
from firstnan.engine.microscope import Microscope
from firstnan.gate.gate import Gate
from firstnan.observe.sites import Ownership
from loops import Net, batches, birthplace, differences, seeded, state_of, with_bad_target

pytestmark = pytest.mark.slow


def setup(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    model = seeded(seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that could have been left on them and in torch: attributes, hooks, methods, functions."""
    seen: dict[str, Any] = dict(torch_state())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            seen[f"{path}.{name}"] = list(value.items()) if isinstance(value, dict) else value
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups"):
            seen[f"optimizer.{name}"] = list(value.items()) if isinstance(value, dict) else value
    for name, p in model.named_parameters():
        seen[f"{name} hooks"] = (p._backward_hooks, p.__dict__.copy())
    return seen


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if not _same(before.get(name, ...), after.get(name, ...))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (not isinstance(one, Tensor) and bool(one == other))


def train(detector: NaNDetector | None, model: nn.Module, optimizer: Any, given: Any) -> None:
    for x, y in given if detector is None else detector.batches(given):
        optimizer.zero_grad()
        (model(x) * y.log()).mean().backward()  # born: training
        optimizer.step()


def ends_well(model: nn.Module, optimizer: Any) -> None:
    with NaNDetector(model, optimizer) as detector:
        train(detector, model, optimizer, batches(2))


def ends_plain(model: nn.Module, optimizer: Any) -> None:
    with NaNDetector(model, optimizer):
        train(None, model, optimizer, batches(2))


def raises(model: nn.Module, optimizer: Any) -> None:
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        train(detector, model, optimizer, with_bad_target(batches(3), 1))


def raises_plain(model: nn.Module, optimizer: Any) -> None:
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer):
        train(None, model, optimizer, with_bad_target(batches(3), 1))


def is_interrupted(model: nn.Module, optimizer: Any) -> None:
    with pytest.raises(KeyboardInterrupt), NaNDetector(model, optimizer) as detector:
        for _ in detector.batches(batches(3)):
            raise KeyboardInterrupt


def is_interrupted_in_the_replay(model: nn.Module, optimizer: Any) -> None:
    times = 0
    with pytest.raises(KeyboardInterrupt), NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(with_bad_target(batches(3), 0)):
            times += 1
            if times == 2:
                raise KeyboardInterrupt
            (model(x) * y.log()).mean().backward()


def skips(model: nn.Module, optimizer: Any) -> None:
    with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
        train(detector, model, optimizer, with_bad_target(batches(3), 1, 2))


def rolls_back(model: nn.Module, optimizer: Any) -> None:
    with NaNDetector(model, optimizer, on_nonfinite="rollback") as detector:
        train(detector, model, optimizer, with_bad_target(batches(3), 1, 2))


ENDS = [ends_well, ends_plain, raises, raises_plain, is_interrupted, is_interrupted_in_the_replay, skips, rolls_back]


@pytest.mark.parametrize("run", ENDS, ids=lambda f: f.__name__)
def test_nothing_is_left_behind(run: Callable[[Any, Any], None], in_process: None) -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)
    run(model, optimizer)
    assert not left_behind(before, everything(model, optimizer))


def test_the_comparison_would_see_what_is_left() -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)
    with NaNDetector(model, optimizer):
        left = left_behind(before, everything(model, optimizer))
    assert {"torch.autograd.backward", "._forward_pre_hooks", "optimizer._optimizer_step_pre_hooks"} <= set(left)


def test_attach_and_detach_by_hand_and_more_than_once() -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)
    detector = NaNDetector(model, optimizer)
    detector.detach()
    assert detector.attach() is detector.attach()
    train(detector, model, optimizer, batches(2))
    assert len(model._forward_pre_hooks) == 1
    detector.detach()
    detector.detach()
    assert not left_behind(before, everything(model, optimizer))
    assert detector.summary()["steps"] == 2
    with detector, pytest.raises(NonFiniteError):
        train(detector, model, optimizer, with_bad_target(batches(2), 1))
    assert not left_behind(before, everything(model, optimizer))
    assert (detector.summary()["steps"], detector.report.step) == (3, 3)


def test_a_block_inside_a_block_of_the_same_detector_does_not_end_the_outer_one() -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)
    with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
        with detector:
            train(detector, model, optimizer, batches())
        assert "attached" in repr(detector)
        train(detector, model, optimizer, with_bad_target(batches(), 2))
    assert (detector.summary()["steps"], detector.summary()["skipped"]) == (11, 1)
    assert "attached" not in repr(detector)
    assert not left_behind(before, everything(model, optimizer))
    with pytest.raises(KeyError), detector, detector:
        raise KeyError
    assert "attached" not in repr(detector)


def test_used_again_a_detector_goes_on_counting(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = setup()
    detector = NaNDetector(model, optimizer, on_nonfinite="skip")
    for n, data in enumerate((with_bad_target(batches(3), 1), with_bad_target(batches(3), 1), batches(3))):
        caplog.clear()
        with detector:
            train(detector, model, optimizer, data)
        bad = min(n + 1, 2)
        summary = detector.summary()
        assert (summary["steps"], summary["skipped"], summary["nonfinite"]) == (3 * n + 3 - bad, bad, bad)
        assert [e.kind for e in detector.events].count("nonfinite") == bad
        assert bool(caplog.records) is (n < 2)  # what was counted is told where something is new


def test_training_goes_on_unwatched_after_detach() -> None:
    model, optimizer = setup()
    with NaNDetector(model, optimizer) as detector:
        handed_out = iter(detector.batches(batches(4)))
        next(handed_out)
    train(None, model, optimizer, with_bad_target(batches(2), 1))
    assert model.last.weight.isnan().any()
    assert detector.report is None
    assert len(list(handed_out)) == 3  # a loop that is left and taken up again gets the rest of its batches


def test_an_attach_that_fails_leaves_nothing() -> None:
    class Refuses(torch.optim.SGD):
        def register_step_pre_hook(self, hook: Any) -> Any:
            raise RuntimeError("no hooks here")

    model, optimizer = setup()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="no hooks here"):
        NaNDetector(model, [optimizer, Refuses(model.parameters(), 0.1)]).attach()
    assert not left_behind(before, everything(model, optimizer))


# Several detectors.


def test_two_detectors_on_two_models() -> None:
    (one, first), (two, second) = setup(0), setup(1)
    with NaNDetector(one, first) as a, NaNDetector(two, second, on_nonfinite="skip") as b:
        train(a, one, first, batches(3))
        train(b, two, second, with_bad_target(batches(3), 1))
        train(a, one, first, batches(3))
    assert (a.summary()["steps"], a.summary()["nonfinite"]) == (6, 0)
    assert (b.summary()["steps"], b.summary()["skipped"]) == (2, 1)
    assert birthplace(b.report) == "training"


@pytest.mark.parametrize("inner_first", [True, False])
def test_two_detectors_on_one_model(inner_first: bool) -> None:
    """Only one has the step played again; the other one holds still, and the update is made once."""
    model, optimizer = setup()
    before = everything(model, optimizer)
    a, b = NaNDetector(model, optimizer).attach(), NaNDetector(model, optimizer).attach()
    handing = b if inner_first else a
    with pytest.raises(NonFiniteError) as caught:
        train(handing, model, optimizer, with_bad_target(batches(4), 2))
    (a if inner_first else b).detach()
    handing.detach()
    assert caught.value.report.step == 2
    assert not left_behind(before, everything(model, optimizer))
    expected, other = setup()
    train(None, expected, other, batches(2))
    assert not differences(dict(expected.named_parameters()), dict(model.named_parameters()))


def test_two_detectors_on_one_model_stay_out_of_healthy_training() -> None:
    (model, optimizer), (expected, other) = setup(), setup()
    with NaNDetector(model, optimizer) as a, NaNDetector(model, optimizer, on_nonfinite="skip") as b:
        train(a, model, optimizer, b.batches(batches(5)))
    train(None, expected, other, batches(5))
    assert not differences(state_of(expected, other), state_of(model, optimizer))
    assert a.summary()["steps"] == b.summary()["steps"] == 5


def test_two_detectors_of_which_one_skips() -> None:
    """The step is skipped before the other one could trip on it: whatever it was told to do."""
    (model, optimizer), (expected, other) = setup(), setup()
    given = batches(5)
    with (
        NaNDetector(model, optimizer, on_nonfinite="warn") as a,
        NaNDetector(model, optimizer, on_nonfinite="skip") as b,
    ):
        train(b, model, optimizer, with_bad_target(given, 2))
    train(None, expected, other, given[:2] + given[3:])
    assert (b.summary()["steps"], b.summary()["skipped"]) == (4, 1)
    assert (a.summary()["steps"], a.summary()["nonfinite"]) == (4, 0)
    assert not differences(state_of(expected, other), state_of(model, optimizer))


def test_nested_loops_with_a_detector_each() -> None:
    (outer, first), (inner, second) = setup(0), setup(1)
    with NaNDetector(outer, first) as a:
        for x, y in a.batches(batches(2)):
            with NaNDetector(inner, second, on_nonfinite="skip") as b:
                train(b, inner, second, with_bad_target(batches(3), 1))
            assert b.summary()["skipped"] == 1
            first.zero_grad()
            (outer(x) * y.log()).mean().backward()
            first.step()
    assert a.summary()["steps"] == 2
    assert a.report is None


def test_a_detector_on_a_part_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model[1], optimizer) as detector:
        train(detector, model, optimizer, with_bad_target(batches(4), 2))
    assert caught.value.report.step == 2
    assert birthplace(caught.value.report) == "training"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_detectors_may_leave_in_any_order(order: tuple[int, ...]) -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)
    detectors = [NaNDetector(model, optimizer).attach() for _ in range(3)]
    for i in order:
        train(None, model, optimizer, batches(1))
        detectors[i].detach()
    assert not left_behind(before, everything(model, optimizer))
    assert sorted(d.summary()["steps"] for d in detectors) == [1, 2, 3]


def test_someone_else_patches_backward_in_between(monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    model, optimizer = setup()
    original, calls = torch.autograd.backward, []
    detector = NaNDetector(model, optimizer).attach()
    ours = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs  # type: ignore[assignment]
    try:
        train(detector, model, optimizer, batches(1))
        detector.detach()
        assert torch.autograd.backward is theirs
        with NaNDetector(model, optimizer) as second, pytest.raises(NonFiniteError):
            train(second, model, optimizer, with_bad_target(batches(2), 1))
        assert torch.autograd.backward is theirs
        train(None, model, optimizer, with_bad_target(batches(1), 0))
        assert detector.report is None
    finally:
        torch.autograd.backward = original  # type: ignore[assignment]
    assert len(calls) >= 4


# Copies and files.


def test_a_copy_of_an_attached_model_is_free() -> None:
    model, optimizer = setup()
    with NaNDetector(model, optimizer) as detector:
        twin = copy.deepcopy(model)
        other = torch.optim.SGD(twin.parameters(), 0.1)
        twin_optimizer = copy.deepcopy(optimizer)
        train(None, twin, other, with_bad_target(batches(3), 1))
        twin_optimizer.step()
        assert twin.last.weight.isnan().any()
        train(detector, model, optimizer, batches(2))
    assert detector.report is None
    assert detector.summary()["steps"] == 2
    twin(batches(1)[0][0])  # after detach too


def test_a_saved_model_is_read_without_firstnan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    file = io.BytesIO()
    with NaNDetector(model, torch.optim.SGD(model.parameters(), 0.1)):
        torch.save(model, file)
        x = torch.ones(1, 4)
        expected = model(x).detach().tolist()
    script = (
        "import sys, io, torch\n"
        "class Blocked:\n"
        "    def find_spec(self, name, *args):\n"
        "        assert not name.startswith('firstnan'), name\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)\n"
        "print(model(torch.ones(1, 4)).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=file.getvalue(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == str(expected)


def test_an_argument_that_wants_no_questions_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Touchy:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def keys(self) -> Any:
            return ["x"]

        def items(self) -> Any:
            raise OSError("the file is closed")

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, given: Touchy) -> Tensor:
            out: Tensor = self.inner(given.x)
            return out

    model = Takes()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for through in (True, False):
        with NaNDetector(model, optimizer) as detector:
            given = [Touchy(torch.rand(2, 4)) for _ in range(3)]
            for batch in detector.batches(given) if through else given:
                model(batch).mean().backward()
                optimizer.step()
        assert detector.summary()["steps"] == 3
    assert [r.getMessage() for r in caplog.records if "the file is closed" not in r.getMessage()] == []


# Threads.


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("grad", [True, False])
def test_inference_with_a_nan_in_another_thread_is_no_trip(grad: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    stop, calls, errors = threading.Event(), [], []

    def infer() -> None:
        try:
            while not stop.is_set():
                with torch.set_grad_enabled(grad):
                    calls.append(model(torch.full((2, 4), float("nan"))).isnan().all().item())
        except Exception as error:
            errors.append(error)

    with NaNDetector(model, optimizer) as detector:
        thread = in_thread(infer)
        for through in (False, True):
            train(detector if through else None, model, optimizer, batches(40))
        stop.set()
        thread.join(10)
    assert not errors
    assert all(calls)
    assert calls
    assert detector.report is None
    assert detector.summary()["steps"] == 80


def test_inference_in_another_thread_is_not_blamed_for_a_trip(in_process: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer):
        for x, y in with_bad_target(batches(3), 1):
            loss = (model(x) * y.log()).mean()
            in_thread(lambda: model(torch.full((2, 4), float("nan")))).join(10)
            loss.backward()
            optimizer.step()
    report = caught.value.report
    assert report.origin is None
    assert any("originated after them, in the loss code" in note for note in report.notes)


def test_another_thread_that_trains_another_model_is_not_heard() -> None:
    (model, optimizer), (theirs, other) = setup(0), setup(1)
    with NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(batches(3)):
            in_thread(lambda: train(None, theirs, other, with_bad_target(batches(2), 1))).join(10)
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    assert theirs.last.weight.isnan().any()
    assert detector.report is None
    assert detector.summary()["steps"] == 3


def test_two_threads_train_two_models_with_a_detector_each() -> None:
    def run(seed: int) -> tuple[Any, dict[str, Any]]:
        model, optimizer = models[seed]
        with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
            train(detector, model, optimizer, with_bad_target(batches(12, seed=seed), 3 + seed, 7))
        return detector, state_of(model, optimizer)

    models = [setup(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    for seed, (detector, state) in enumerate(results):
        assert birthplace(detector.report) == "training"
        assert (detector.summary()["steps"], detector.summary()["skipped"]) == (10, 2)
        expected, optimizer = setup(seed)
        given = [b for i, b in enumerate(batches(12, seed=seed)) if i not in (3 + seed, 7)]
        train(None, expected, optimizer, given)
        assert not differences(state_of(expected, optimizer), state)


def test_many_threads_attach_and_detach_at_once() -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)

    def come_and_go(seed: int) -> int:
        own, its = models[seed]
        for _ in range(10):
            with NaNDetector(own, its) as detector:
                train(detector, own, its, batches(2))
            NaNDetector(model, optimizer).attach().detach()
        return detector.summary()["steps"]

    models = [setup(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(come_and_go, range(8))) == [2] * 8
    assert not left_behind(before, everything(model, optimizer))


def test_one_detector_may_be_attached_from_many_threads() -> None:
    model, optimizer = setup()
    before = everything(model, optimizer)
    detector = NaNDetector(model, optimizer)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: detector.attach(), range(32)))
        assert len(model._forward_pre_hooks) == 1
        list(pool.map(lambda _: detector.detach(), range(32)))
    assert not left_behind(before, everything(model, optimizer))


def test_compiled_functions_run_compiled_again_when_the_last_one_is_done() -> None:
    """Two failures may be looked at in two threads, and end in any order."""
    from torch._dynamo import eval_frame

    # Nothing is gated here.
    first, second = (Microscope(Ownership(()), Gate(), Handouts()) for _ in range(2))
    first.start(in_step=False)
    second.start(in_step=False)
    second.tracer.stop()  # type: ignore[union-attr]
    first.stop()
    assert eval_frame._stance.stance == "force_eager"
    second.stop()
    second.stop()
    assert eval_frame._stance.stance == "default"


# --- optimizers that come and go ----------------------------------------------------------------------------------


def test_an_optimizer_that_replaces_another_is_watched_and_nothing_keeps_the_old_one() -> None:
    model = nn.Linear(4, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    old = weakref.ref(optimizer)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, x in detector.batches(enumerate(torch.rand(9, 3, 4))):
            if i in (2, 4):
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            loss = (model(x) * (0.0 if i == 7 else 1.0)).abs().sum().log()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = caught.value.report
    assert report.cause is not None
    assert report.batch is not None
    assert (report.step, report.batch.index, report.cause.slug) == (7, 7, "log_of_zero")
    del caught
    assert old() is None


def test_an_optimizer_beside_which_others_are_made_for_a_while_stays_watched() -> None:
    model = nn.Linear(4, 1)
    outer = torch.optim.SGD(model.parameters(), lr=0.01)
    detector = NaNDetector(model, outer, on_nonfinite="skip")
    for _ in range(2):
        with detector:
            for x in torch.rand(3, 3, 4):
                inner = torch.optim.SGD(model.parameters(), lr=0.01)
                for optimizer, scale in ((inner, 1.0), (outer, torch.inf)):
                    optimizer.zero_grad()
                    (model(x).sum() * scale).backward()
                    optimizer.step()
    assert detector.summary()["skipped"] == 6
    assert all(bool(p.isfinite().all()) for p in model.parameters())
