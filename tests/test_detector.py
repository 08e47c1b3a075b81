"""The detector in the training loops that people write: what it finds, where, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector, NonFiniteError, Report
from loops import Rooted, batches, birthplace, differences, randomness, seeded, state_of, with_bad_target

pytestmark = pytest.mark.slow


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loader_of(given: list[tuple[Tensor, Tensor]], **options: Any) -> DataLoader[Any]:
    xs, ys = zip(*given, strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=len(xs[0]), **options)


def train(detector: NaNDetector, model: nn.Module, optimizer: torch.optim.Optimizer, given: Any) -> list[float]:
    losses = []
    for x, y in detector.batches(given):
        optimizer.zero_grad()
        loss = (model(x) * y.log()).mean()  # born: loss code
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def found(model: nn.Module, optimizer: Any, given: Any) -> Report:
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        train(detector, model, optimizer, given)
    assert detector.report is caught.value.report
    return caught.value.report


# Loops through `batches`.


def test_a_nan_of_the_loss_code_is_found_in_its_line() -> None:
    model = seeded()
    report = found(model, sgd(model), with_bad_target(batches(), 3))
    assert birthplace(report) == "loss code"
    assert (report.step, report.noticed.what, report.reproduced) == (3, "loss", "deterministic")
    assert (report.batch.index, report.batch.size) == (3, 4)
    assert report.cause.slug == "log_of_negative"


def test_a_weight_that_the_loop_itself_edits_before_the_model_is_called() -> None:
    model = seeded()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, (x, y) in detector.batches(enumerate(batches())):
            with torch.no_grad():
                model.last.weight.mul_(1 / torch.tensor(3.0 - i))  # born: edit of a weight
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    report = caught.value.report
    assert birthplace(report) == "edit of a weight"
    assert (report.step, report.origin.phase, report.origin.op) == (3, "parameter", "reciprocal")
    assert report.cause.slug == "div_by_zero"


def test_gradients_that_were_bad_before_the_step_are_not_blamed_on_the_loss_code() -> None:
    """`python -c` has no source to run again: only the model's calls are replayed."""
    program = """if True:
        import torch
        from firstnan import NaNDetector
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.weight.grad = torch.full_like(model.weight, torch.inf)
        with NaNDetector(model, optimizer):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    told = " ".join(done.stderr.split())
    assert "replay only the model's calls were replayed" in told
    assert "or it was in the gradients before this step" in told
    assert "so the value originated after them" not in told


def test_an_update_with_the_gradients_of_a_caught_failure_is_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = sgd(model)
    given = [x for x, _ in batches()]
    given[2][0] = 0
    kept = []
    with NaNDetector(model, optimizer) as detector:
        for x in detector.batches(given):
            try:
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()  # not reached by a step that fails
            except NonFiniteError:
                kept.append(model.scale.weight.detach().clone())
    assert len(kept) == 1
    assert model.scale.weight.isfinite().all()
    assert detector.summary()["steps"] == 4
    assert [r.message for r in caplog.records if "not made" in r.message] == [
        "firstnan: step 3: the update is not made: its gradients include those of the step that failed; "
        "optimizer.zero_grad() clears them"
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_with_and_without_workers(workers: int) -> None:
    model = seeded()
    report = found(model, sgd(model), loader_of(with_bad_target(batches(), 2), num_workers=workers))
    assert birthplace(report) == "loss code"
    assert (report.step, report.batch.index) == (2, 2)


@pytest.mark.parametrize("kind", [list, tuple, iter, "generator", "map"])
def test_anything_that_can_be_iterated_is_a_loader(kind: Any) -> None:
    given: Any = with_bad_target(batches(), 1)
    shapes = {"generator": (b for b in given), "map": map(tuple, given)}
    model = seeded()
    report = found(model, sgd(model), shapes[kind] if isinstance(kind, str) else kind(given))
    assert birthplace(report) == "loss code"
    assert (report.step, report.batch.index) == (1, 1)


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.inner(x))  # born: model


def test_a_nan_of_the_model_is_found_in_its_line_and_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Logs())
    report = found(model, sgd(model), batches(2))
    assert birthplace(report) == "model"
    assert report.origin.module == "1"
    assert report.step == 0


def test_a_gradient_that_breaks_in_backward_only() -> None:
    torch.manual_seed(0)
    model = Rooted()
    given = batches(4)
    given[2] = (torch.zeros_like(given[2][0]), given[2][1])
    before: list[Tensor] = []
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, _ in detector.batches(given):
            optimizer.zero_grad()
            before.append(model.scale.weight.detach().clone())
            model(x).mean().backward()
            optimizer.step()
    report = caught.value.report
    assert birthplace(report) == "derivative in the model"
    assert (report.step, report.noticed.what, report.noticed.name) == (2, "gradient", "scale.weight")
    assert torch.equal(model.scale.weight, before[-1])


@pytest.mark.parametrize("bad", [4, 5])
def test_gradients_that_are_accumulated_over_several_batches(bad: int) -> None:
    model = seeded()
    optimizer = sgd(model)
    parts = 0
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(with_bad_target(batches(9), bad)):
            loss = (model(x) * y.log()).mean()  # born: one part
            loss.backward()
            parts += 1
            if parts % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    report = caught.value.report
    assert birthplace(report) == "one part"
    assert (report.step, report.batch.index) == (1, bad)


def test_weights_of_a_model_that_is_not_watched_are_not_data() -> None:
    """As those of the reference model in preference training."""
    model, reference = seeded(), seeded().requires_grad_(False)
    optimizer, given = sgd(model), batches(5)
    given[3][0][:] = 0.5
    reference.register_parameter("offset", torch.nn.Parameter(torch.tensor([0.0, torch.nan]), requires_grad=False))
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, _ in detector.batches(given):
            optimizer.zero_grad()
            (model(x) - reference(x) - reference.offset[int(x.min() == x.max())]).square().mean().backward()
            optimizer.step()
    report = caught.value.report
    assert report.cause is not None
    assert report.origin is not None
    assert (report.step, report.cause.slug, report.origin.phase) == (3, "nan_parameter", "parameter")
    assert report.origin.label.startswith("offset")
    assert "earlier step" not in report.cause.why


@pytest.mark.parametrize("shape", [(4, 6), (6, 6)])
def test_a_bad_weight_is_shown_as_it_is_stored(shape: tuple[int, int]) -> None:
    """A Linear reads its transposed weight."""
    model = torch.nn.Sequential(torch.nn.Linear(*shape), torch.nn.Linear(shape[1], 1))
    with torch.no_grad():
        model[0].weight[5, 2] = torch.nan
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError, match="is not recorded here") as caught, NaNDetector(model, optimizer):
        model(torch.ones(3, shape[0])).mean().backward()
        optimizer.step()
    origin = caught.value.report.origin
    assert origin is not None
    assert origin.produced is not None
    assert (origin.produced.shape, origin.produced.first_index) == (shape[::-1], (5, 2))


def test_who_wrote_a_bad_buffer_is_said_to_be_unknown() -> None:
    model = torch.nn.BatchNorm1d(2)
    model.running_var.fill_(torch.nan)  # type: ignore[union-attr]
    model.eval()
    with pytest.raises(NonFiniteError, match="what wrote running_var is not recorded here"), NaNDetector(model):
        model(torch.ones(3, 2)).mean().backward()


def test_bad_data_is_counted_in_the_batch_not_in_a_view_of_it() -> None:
    """A recurrent layer reads its batch transposed."""
    model = torch.nn.GRU(1, 3, batch_first=True)
    optimizer, given = sgd(model), [torch.ones(4, 7, 1) for _ in range(3)]
    given[2][1, 3] = -torch.inf
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches(given):
            optimizer.zero_grad()
            model(x)[0].mean().backward()
            optimizer.step()
    cause = caught.value.report.cause
    assert cause is not None
    assert "(batch) contains -Inf in 1 of 28 elements (first at [1, 3, 0])" in cause.why


def test_batches_that_a_loader_has_prepared_before_anybody_looked() -> None:
    model = seeded()
    optimizer, data = sgd(model), torch.cat([x for x, _ in batches(12)])
    rows = torch.utils.data.TensorDataset(data, torch.arange(len(data)))
    iterator = iter(torch.utils.data.DataLoader(rows, batch_size=len(data) // 12, shuffle=True, num_workers=1))
    next(iterator)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer):
        for done, (x, number) in enumerate(iterator):
            chosen = number.tolist()
            optimizer.zero_grad()
            (model(x) * torch.tensor(float(done < 5)).log()).mean().backward()
            optimizer.step()
    batch = caught.value.report.batch
    assert batch is not None
    assert batch.index == 6
    assert batch.dataset_indices is None or batch.dataset_indices == tuple(chosen[i] for i in batch.bad_samples or ())


def test_accumulation_by_the_number_of_the_batch() -> None:
    """The replayed batches are counted by the loop too, so that its updates come at other batches."""
    model = seeded()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, (x, y) in enumerate(detector.batches(with_bad_target(batches(12), 6))):
            loss = (model(x) * y.log()).mean()  # born: one part of four
            loss.backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    report = caught.value.report
    assert birthplace(report) == "one part of four"
    assert (report.step, report.batch.index, report.reproduced) == (1, 6, "deterministic")


def test_batches_that_the_loop_writes_into() -> None:
    model = seeded()
    optimizer = sgd(model)
    given = [(x, -y if i == 5 else y) for i, (x, y) in enumerate(batches(8))]
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(given):
            optimizer.zero_grad()
            y.mul_(2).sub_(0.5)
            loss = (model(x) * y.log()).mean()  # born: written batch
            loss.backward()
            optimizer.step()
    report = caught.value.report
    assert birthplace(report) == "written batch"
    assert report.reproduced == "deterministic"
    # Handed out as it was, not as the loop had left it: twice and half off once only.
    assert report.origin.inputs[0].min == pytest.approx(float((given[5][1]).min()))


def test_the_replay_draws_the_same_random_numbers(in_process: None) -> None:
    """Which samples are bad depends on the mask alone."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = sgd(model, 0.0)
    masks: list[list[int]] = []
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.ones(16, 2)] * 400):
            optimizer.zero_grad()
            kept = nn.functional.dropout(x, 0.5)
            masks.append(torch.nonzero((kept == 0).all(1)).flatten().tolist())
            bad = (kept.sum(1) - 0.5).log() if len(masks[-1]) == 1 else kept.sum(1)  # born: mask
            (bad.mean() + model(torch.cat([x, x], 1)).mean()).backward()
            optimizer.step()
    report = caught.value.report
    assert birthplace(report) == "mask"
    assert masks[-1] == masks[-2]
    assert list(report.origin.event.bad_rows) == masks[-1]
    assert report.batch.bad_samples is None  # others in these places fail as well


def test_several_epochs_count_on() -> None:
    model = seeded()
    optimizer = sgd(model)
    good, bad = batches(4), with_bad_target(batches(4), 2)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for epoch in range(3):
            train(detector, model, optimizer, bad if epoch == 2 else good)
    report = caught.value.report
    assert (report.step, report.batch.index) == (10, 2)
    event = report.events[0]
    assert (event.kind, event.step, event.epoch, event.batch, event.what) == ("nonfinite", 10, 2, 2, "loss")
    assert detector.summary()["steps"] == 10


def test_one_batches_object_may_be_passed_over_again() -> None:
    model = seeded()
    optimizer = sgd(model)
    with NaNDetector(model, optimizer) as detector:
        handed_out = detector.batches(loader_of(batches(3)))
        assert len(handed_out) == 3
        assert sum(1 for _ in range(2) for _ in handed_out) == 6
        with pytest.raises(TypeError, match="has no len"):
            len(detector.batches(iter(())))


def test_a_single_tensor_and_a_dict_as_batch() -> None:
    model = seeded()
    optimizer = sgd(model)
    given = [{"x": x, "y": y} for x, y in with_bad_target(batches(3), 1)]
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for batch in detector.batches(given):
            optimizer.zero_grad()
            (model(batch["x"]) * batch["y"].log()).mean().backward()  # born: dict
            optimizer.step()
    assert birthplace(caught.value.report) == "dict"


def test_bad_data_is_blamed_on_the_line_that_takes_it() -> None:
    model = seeded()
    optimizer = sgd(model)
    given = batches(4)
    given[1][0][2, 3] = float("nan")
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(given):  # born: data
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    report = caught.value.report
    assert report.origin.phase == "input"
    assert birthplace(report) == "data"
    assert list(report.batch.bad_samples) == [2]


# Two optimizers.


def test_two_networks_that_take_turns() -> None:
    torch.manual_seed(0)
    makes, judges = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = sgd(judges), sgd(makes)
    updates = 0
    with (
        pytest.raises(NonFiniteError) as caught,
        NaNDetector({"G": makes, "D": judges}, [first, second]) as detector,
    ):
        for i, (x, y) in enumerate(detector.batches(batches(6))):
            first.zero_grad()
            (judges(makes(x).detach()) - y).square().mean().backward()
            before = judges.weight.detach().clone()
            first.step()
            updates += not torch.equal(before, judges.weight)
            second.zero_grad()
            score = judges(makes(x)).abs() + 1
            (score - (2e3 if i >= 3 else 0)).log().mean().backward()  # born: generator
            second.step()
    report = caught.value.report
    assert birthplace(report) == "generator"
    assert report.step == 3
    assert report.origin.phase == "forward"
    # The discriminator's update of the failing step is in the weights already and is not made twice.
    assert updates == 4


def test_two_optimizers_on_one_loss() -> None:
    model = seeded()
    pair = [sgd(model.first), torch.optim.Adam([*model.norm.parameters(), *model.last.parameters()])]
    before: dict[str, Tensor] = {}
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, pair) as detector:
        for x, y in detector.batches(with_bad_target(batches(5), 3)):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            for optimizer in pair:
                optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()  # born: shared loss
            for optimizer in pair:
                optimizer.step()
    assert birthplace(caught.value.report) == "shared loss"
    assert caught.value.report.step == 3
    assert not differences(before, dict(model.named_parameters()))


# Other ways to write a loop.


def test_a_step_that_is_a_function() -> None:
    model = seeded()
    optimizer = sgd(model)

    def one_step(x: Tensor, *, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = (model(x) * y.log()).mean()  # born: function
        loss.backward()
        optimizer.step()
        return loss.item()

    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, y in with_bad_target(batches(4), 2):
            result = detector.step(one_step, x, y=y)
            assert isinstance(result, float)
    report = caught.value.report
    assert birthplace(report) == "function"
    assert (report.step, report.batch.index, report.batch.size) == (2, 2, 4)


def test_a_plain_loop_says_that_the_loss_was_outside(in_process: None) -> None:
    model = seeded()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer):
        for x, y in with_bad_target(batches(4), 2):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    report = caught.value.report
    assert report.step == 2
    assert any("the loss code" in note and "detector.batches" in note for note in report.notes)
    assert any("originated after them, in the loss code" in note for note in report.notes)


def test_a_plain_loop_still_sees_into_the_model(in_process: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Logs())
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer):
        for x, _ in batches(2):
            model(x).mean().backward()
            optimizer.step()
    report = caught.value.report
    assert birthplace(report) == "model"
    assert any("loss code was outside" in note for note in report.notes)


def test_a_plain_loop_still_sees_the_derivatives_of_the_model() -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer):
        for x in (torch.ones(4, 4), torch.zeros(4, 4)):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    assert birthplace(caught.value.report) == "derivative in the model"
    assert caught.value.report.step == 1


def test_a_closure() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    before: list[Tensor] = []
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(with_bad_target(batches(4), 2)):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = (model(x) - y.log()).square().mean()  # born: closure
                loss.backward()
                return loss

            before.append(model.weight.detach().clone())
            optimizer.step(closure)
    report = caught.value.report
    assert birthplace(report) == "closure"
    assert report.step == 2
    assert torch.equal(model.weight, before[-1])


@pytest.mark.parametrize("through", [True, False])
def test_updates_by_hand(through: bool, in_process: None) -> None:
    torch.manual_seed(0)
    model = Rooted()
    given = [torch.ones(4, 4), torch.ones(4, 4), torch.zeros(4, 4)]
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model) as detector:
        for x in detector.batches(given) if through else given:
            model(x).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
    assert birthplace(caught.value.report) == "derivative in the model"
    assert caught.value.report.step == 2


# Values that the update itself makes.


@pytest.mark.parametrize("through", [True, False])
def test_adam_without_eps(through: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    given = [torch.tensor([[1.0, 1.0, 1.0, 0.0]])]
    before = model.weight.detach().clone()
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches(given) if through else given:
            model(x).mean().backward()
            optimizer.step()
    report = caught.value.report
    assert (report.origin.phase, report.step) == ("optimizer", 0)
    assert report.noticed.what == "parameter"
    assert torch.equal(model.weight, before)


def test_an_infinite_learning_rate() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, (x, _) in enumerate(detector.batches(batches(5))):
            if i == 3:
                optimizer.param_groups[0]["lr"] = float("inf")
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    report = caught.value.report
    assert (report.origin.phase, report.step) == ("optimizer", 3)
    assert all(p.isfinite().all() for p in model.parameters())


# What is no business of the detector's.


def test_a_nan_in_an_evaluation_between_the_steps_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded()
    optimizer = sgd(model)
    with NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(batches(4)):
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                assert model(torch.full_like(x, float("nan"))).isnan().all()
            model.train()
    assert detector.report is None
    assert detector.summary() == {
        "steps": 4, "nonfinite": 0, "skipped": 0, "rolled_back": 0, "clipped": 0, "warnings": 0,
        "events": 0, "events_dropped": 0,
    }  # fmt: skip
    assert not caplog.records


def test_the_loss_of_another_model_is_none_of_its_business() -> None:
    ours, theirs = seeded(), seeded(seed=5)
    optimizer = sgd(ours)
    with NaNDetector(ours, optimizer) as detector:
        for x, y in detector.batches(batches(3)):
            (theirs(x) * (-y).log()).mean().backward()
            optimizer.zero_grad()
            (ours(x) * y.log()).mean().backward()
            optimizer.step()
    assert detector.report is None


def test_leaving_the_loop_early_is_no_failure() -> None:
    model = seeded()
    optimizer = sgd(model)
    with NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(batches(5)):
            (model(x) * y.log()).mean().backward()
            optimizer.step()
            break
    assert detector.report is None
    assert detector.summary()["steps"] == 1


def test_leaving_the_loop_at_the_bad_step_is_one() -> None:
    model = seeded()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(with_bad_target(batches(5), 1)):
            loss = (model(x) * y.log()).mean()
            loss.backward()
            optimizer.step()
            if loss.isnan():
                break
    assert caught.value.report.step == 1
    assert detector.report is caught.value.report


def test_an_exception_of_the_program_is_given_a_note() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Logs())
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="loss is nan") as caught, NaNDetector(model, optimizer) as detector:
        for x, _ in detector.batches(batches(2)):
            loss = model(x).mean()
            if loss.isnan():
                raise RuntimeError("loss is nan")
    assert birthplace(detector.report) == "model"
    assert "log" in caught.value.__notes__[0]


def test_a_loop_that_goes_through_the_detector_is_not_told_to(in_process: None) -> None:
    model = seeded()
    with pytest.raises(RuntimeError, match="nan"), NaNDetector(model, sgd(model)) as detector:
        for x, y in detector.batches(with_bad_target(batches(2), 1)):
            loss = (model(x) * y.log()).mean()
            if loss.isnan():
                raise RuntimeError("nan")
    assert any("in the loss code" in note for note in detector.report.notes)
    assert not any("detector.batches" in note for note in detector.report.notes)


def test_what_was_not_looked_at_is_not_blamed(in_process: None) -> None:
    """Left before it could be played again, with a derivative of the model that broke."""
    torch.manual_seed(0)
    model = Rooted()
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.zeros(4, 4)]):
            model(x).mean().backward()
            optimizer.step()
            break
    assert caught.value.report.noticed.what == "gradient"
    assert not any("originated" in note for note in caught.value.report.notes)
    notes = caught.value.report.notes
    assert any("the gradients that reached them in backward were not kept" in note for note in notes)


def test_an_exception_without_bad_values_is_left_alone() -> None:
    model = seeded()
    with pytest.raises(KeyError) as caught, NaNDetector(model, sgd(model)) as detector:
        for _ in detector.batches(batches(2)):
            raise KeyError("x")
    assert not hasattr(caught.value, "__notes__")
    assert detector.report is None


def test_an_exception_in_the_replay_keeps_what_is_known(in_process: None) -> None:
    model = seeded()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="seen") as caught, NaNDetector(model, optimizer) as detector:
        seen = set()
        for x, y in detector.batches(with_bad_target(batches(4), 2)):
            if id(x) in seen:
                raise ValueError("seen")
            seen.add(id(x))
            optimizer.zero_grad()
            (model(x) * y.log()).mean().backward()
            optimizer.step()
    assert detector.report.step == 2
    assert detector.report.noticed.what == "loss"
    assert "loss" in caught.value.__notes__[0]


# Healthy training.


def healthy(policy: str | None, through: str, workers: int) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    model = seeded(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses: list[float] = []

    def one_step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = (model(x) - y + torch.rand_like(y) * 0.1).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    def loop(detector: NaNDetector | None) -> None:
        given = loader_of(batches(10), shuffle=True, num_workers=workers)
        for _ in range(2):
            for x, y in detector.batches(given) if detector is not None and through == "batches" else given:
                if detector is not None and through == "step":
                    detector.step(one_step, x, y)
                else:
                    one_step(x, y)

    if policy is None:
        loop(None)
    else:
        with NaNDetector(model, optimizer, on_nonfinite=policy, snapshot_every=3) as detector:  # type: ignore[arg-type]
            loop(detector)
        assert detector.summary()["steps"] == 20
    return losses, state_of(model, optimizer, schedule), randomness()


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
@pytest.mark.parametrize("policy", ["raise", "warn", "skip", "rollback"])
def test_healthy_training_is_the_same_to_the_last_bit(policy: str, through: str) -> None:
    expected, got = healthy(None, through, 0), healthy(policy, through, 0)
    assert got[0] == expected[0]
    assert not differences(expected[1], got[1])
    assert not differences(expected[2], got[2])


def test_healthy_training_with_workers_is_the_same_to_the_last_bit() -> None:
    expected, got = healthy(None, "batches", 2), healthy("raise", "batches", 2)
    assert got[0] == expected[0]
    assert not differences(expected[1], got[1])
    assert not differences(expected[2], got[2])


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((3,), TypeError, "model must be a torch.nn.Module, got 3"),
        (([],), ValueError, "model must hold at least one torch.nn.Module, got none"),
        (({"a": 3},), TypeError, r"model\[a\] must be a torch.nn.Module, got 3"),
        ((nn.Linear(1, 1), "adam"), TypeError, "optimizer must be a torch.optim.Optimizer, got .adam."),
        ((nn.Linear(1, 1), nn.Linear(1, 1)), TypeError, "optimizer must be a torch.optim.Optimizer, got Linear"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        NaNDetector(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_nonfinite": "ignore"}, "must be one of raise, warn, skip, rollback, got 'ignore'"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip' needs an optimizer"),
        ({"on_nonfinite": "rollback"}, "on_nonfinite='rollback' needs an optimizer"),
        ({"guard": "loud"}, "guard must be 'warn', 'clip' or 'off', got 'loud'"),
        ({"max_grad_norm": 0}, "max_grad_norm must be a positive, finite number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a positive, finite number"),
        ({"streak": -1}, "streak must be at least 0, got -1"),
        ({"snapshot_every": 0}, "snapshot_every must be at least 1, got 0"),
        ({"max_events": -1}, "max_events must be at least 0, got -1"),
        ({"stats": -1}, "stats must be at least 0, got -1"),
        ({"guard": "off", "max_grad_norm": 1.0}, r"max_grad_norm needs guard='warn' or 'clip' \(got guard='off'\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NaNDetector(nn.Linear(1, 1), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_grad_norm": "1"}, "max_grad_norm must be a positive number, got '1'"),
        ({"streak": None}, "streak must be an integer, got None"),
        ({"snapshot_every": 2.5}, "snapshot_every must be an integer, got 2.5"),
        ({"max_events": "all"}, "max_events must be an integer, got 'all'"),
        ({"stats": True}, "stats must be an integer, got True"),
        ({"layers": "yes"}, "layers must be True or False, got 'yes'"),
        ({"trackable": "Linear"}, "trackable must be callable, got 'Linear'"),
        ({"on_event": "print"}, "on_event must be callable, got 'print'"),
        ({"skip": 3}, "skip must hold types, names or globs, got 3"),
        ({"skip": ["last", nn.Linear, None]}, "skip must hold types, names or globs, got None"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        NaNDetector(nn.Linear(1, 1), **options)


def test_a_detector_that_is_not_attached_says_so() -> None:
    detector = NaNDetector(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="not attached"):
        next(iter(detector.batches([1])))
    with pytest.raises(RuntimeError, match="not attached"):
        detector.step(print)
    assert detector.report is None
    assert set(detector.summary().values()) == {0}


def test_a_model_that_is_fed_by_another_ones_graph(caplog: pytest.LogCaptureFixture, in_process: None) -> None:
    makes, judges = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    optimizer = sgd(judges)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(judges, optimizer):
        for scale in (1.0, 1.0, -1.0):
            optimizer.zero_grad()
            (judges(makes(torch.ones(2, 4))) * scale).log().mean().backward()
            optimizer.step()
    assert "internal error" not in caplog.text
    assert caught.value.report.step == 2
    assert caught.value.report.replay == "only the model's calls were replayed"
    assert "originated after them, in the loss code" in caught.value.report.notes[0]


def test_growth_is_told_where_the_failing_operator_was_not_seen(in_process: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer, guard="off"):
        for _ in range(200):
            optimizer.zero_grad()
            error = model(x) - y
            (error * error).mean().backward()  # overflows here, outside the model
            optimizer.step()
    report = caught.value.report
    assert report.origin is None
    assert report.cause is not None
    assert report.cause.slug == "divergence_lr"


def test_an_error_of_our_own_is_told_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, optimizer) as detector:
        assert detector._session is not None
        monkeypatch.setattr(detector._session.gate, "backward_begins", lambda roots: 1 / 0)
        for x in detector.batches([torch.ones(1, 2)] * 3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    told = [r.message for r in caplog.records if "internal error: ZeroDivisionError" in r.message]
    assert len(told) == 1


@pytest.mark.parametrize(("whose", "words"), [("another's", 1), ("a part", 0), ("of a frozen model", 0)])
def test_an_optimizer_that_trains_nothing_of_the_model(whose: str, words: int, caplog: Any) -> None:
    model, other = seeded(), seeded()
    given = {"another's": other, "a part": model.last, "of a frozen model": other}[whose]
    if whose == "of a frozen model":  # it is its input that is trained
        model.requires_grad_(False)
    with NaNDetector(model, torch.optim.SGD(given.parameters(), 0.1)):
        pass
    assert len([r for r in caplog.records if "holds none of this model's parameters" in r.message]) == words


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


@pytest.mark.parametrize("last", [True, False])
def test_a_guard_is_not_put_around_the_call_of_the_whole_model(last: bool) -> None:
    """The line of a layer in a Sequential is the call of that; its result is not what the next layer reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Logarithm(), *([] if last else [nn.Linear(4, 1)]))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.rand(2, 4)] * 3):
            output = model(x)
            optimizer.zero_grad()
            output.sum().backward()
            optimizer.step()
    remedies = caught.value.report.remedies
    assert remedies
    assert not any("model(x)" in remedy.diff for remedy in remedies)


def test_a_loss_trains_layers_that_were_added_after_attaching() -> None:
    torch.manual_seed(0)
    model, late = nn.Sequential(nn.Identity()), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(late.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        model.add_module("log", Logarithm())
        model.add_module("late", late)
        for x in detector.batches([torch.rand(2, 4) + 0.1, -torch.ones(2, 4)]):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report = caught.value.report
    assert report.noticed is not None
    assert (report.noticed.what, report.origin.phase, report.origin.module) == ("loss", "forward", "log")


@pytest.mark.parametrize(("eps", "slug"), [(1e-8, "nan_parameter"), (0.0, "optimizer_eps")])
def test_a_weight_that_no_step_reads_was_bad_before_unless_the_update_may_have_made_it(eps: float, slug: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight[3] = float("nan") if eps else 1.0  # no batch has this word
    optimizer = torch.optim.AdamW(model.parameters(), eps=eps)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer):
        model(torch.tensor([0, 1])).square().mean().backward()
        optimizer.step()
    report = caught.value.report
    assert report.noticed is not None
    assert (report.noticed.what, report.noticed.name) == ("parameter", "0.weight")
    assert report.cause is not None
    assert report.cause.slug == slug
    assert ("No update made it" in report.cause.why) is (report.reproduced == "not_replayed") is bool(eps)
    assert not any("loss code" in note for note in report.notes)


def test_an_infinity_that_only_backward_uses_is_not_called_a_derivative() -> None:
    """tanh hides it from the loss, and the gradient of the weights is 0 * inf."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.tensor([[1.0, 2.0], [0.0, 1.0]])]):
            features = torch.log(x)
            torch.tanh(model(features)).sum().backward()
            optimizer.step()
    report = caught.value.report
    assert report.cause is not None
    assert report.cause.slug == "log_of_zero"
    assert "log produced -Inf, of which backward made NaN (AddmmBackward0)" in str(caught.value)
    assert "log (test_detector.py" in str(caught.value).split("\npath")[1]
    assert "backward of log" not in str(caught.value)


class HandingOn:
    """A loader around one of torch, as Fabric and accelerate have: it fetches ahead, and copies or moves batches."""

    def __init__(self, loader: Any, *, ahead: bool, copies: bool) -> None:
        self._loader, self._ahead, self._copies = loader, ahead, copies

    def __iter__(self) -> Any:
        waiting: list[Any] = []
        for batch in self._loader:
            waiting.append([t.clone() for t in batch] if self._copies else batch)
            if len(waiting) > self._ahead:
                yield waiting.pop(0)
        yield from waiting


def with_one_bad_target() -> TensorDataset:
    x, y = (torch.cat(tensors) for tensors in zip(*batches(12), strict=True))
    y[29] = -1.0
    return TensorDataset(x, y)


@pytest.mark.parametrize(("ahead", "copies"), [(False, False), (True, True)])
def test_the_dataset_index_is_known_through_a_loader_that_only_hands_batches_on(ahead: bool, copies: bool) -> None:
    model = seeded()
    data = with_one_bad_target()
    batch = found(model, sgd(model), HandingOn(DataLoader(data, 8, shuffle=True), ahead=ahead, copies=copies)).batch
    assert batch is not None
    assert batch.dataset_indices == (29,)


def test_a_batch_made_of_two_loaders_has_no_dataset_index() -> None:
    model = seeded()
    halves = (DataLoader(TensorDataset(t), 8, shuffle=True) for t in with_one_bad_target().tensors)
    batch = found(model, sgd(model), ((x, y) for (x,), (y,) in zip(*halves, strict=True))).batch
    assert batch is not None
    assert batch.dataset_indices is None


def test_the_arguments_of_a_step_function_have_their_names() -> None:
    model = seeded()
    optimizer = sgd(model)

    def train_step(images: Tensor, targets: Tensor, *, weight: Tensor) -> None:
        optimizer.zero_grad()
        ((model(images) - targets).square() * weight).mean().backward()
        optimizer.step()

    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, (x, y) in enumerate(batches(size=3)):  # as many samples as a call has parts
            x[1, 2] = torch.nan if i == 2 else x[1, 2]
            detector.step(train_step, x, y, weight=torch.ones_like(y))
    report = caught.value.report
    assert (report.step, report.origin.phase, report.origin.label) == (2, "input", "images")
    assert report.batch.bad_samples == (1,)
    assert (report.batch.features[0].member, report.batch.features[0].index) == ("images", (2,))
    assert {one.member for one in report.batch.values} == {"images", "targets", "weight"}
    assert not any("detector.step" in edit.new for remedy in report.remedies for edit in remedy.edits)


def test_the_only_argument_of_a_step_function_is_the_batch() -> None:
    model = seeded()
    optimizer = sgd(model)

    def train_step(pair: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        (model(pair[0]) * pair[1].log()).mean().backward()
        optimizer.step()

    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, (x, y) in enumerate(batches()):
            y[3] = 0 if i == 1 else y[3]
            detector.step(train_step, (x, y))
    report = caught.value.report
    assert report.batch.bad_samples == (3,)
    assert report.batch.features[0].member == "batch[1]"


def test_a_detector_that_a_callback_attaches_ends_as_a_block_does() -> None:
    """Otherwise the patches of torch stay, which the fixture of all tests would find."""
    model = seeded()
    detector = NaNDetector(model, sgd(model)).attach()
    detector.__exit__(None, None, None)
    with detector:
        pass
