"""The callback of Lightning, a detector around `fit`, `firstnan run`, and Fabric; training breaks for real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import line_of
from torch.utils.data import DataLoader, Dataset, TensorDataset

from firstnan import NaNDetector, NonFiniteError, Report

L = pytest.importorskip("lightning")
from firstnan.integrations.lightning import FirstNaN  # noqa: E402

HERE = Path(__file__)


class Regression(L.LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        error = (self.net(x).squeeze(1) - y) ** 2
        return (error / y).mean()  # born: loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(zero: int | None = 41, length: int = 64) -> DataLoader[Any]:
    torch.manual_seed(0)
    x, y = torch.randn(length, 4), torch.rand(length) + 0.5
    if zero is not None:
        y[zero] = 0.0
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(tmp_path: Path, *callbacks: Any, **options: Any) -> Any:
    usual = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path}
    return L.Trainer(callbacks=list(callbacks), **{**usual, **quiet, **options})


def check(report: Report | None, step: int = 5, batch: int = 5) -> None:
    assert report is not None
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: loss"), step)
    assert report.cause is not None
    assert report.cause.slug == "div_by_zero"
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (batch, (1,), (41,))
    assert report.batch.confirmed


@pytest.mark.parametrize("manual", [False, True])
def test_fit_ends_with_the_report(tmp_path: Path, manual: bool) -> None:
    callback, model = FirstNaN(), Regression(manual)
    fit = trainer(tmp_path, callback)
    with pytest.raises(NonFiniteError) as error:
        fit.fit(model, loader())
    check(error.value.report)
    assert callback.report is error.value.report
    assert fit.interrupted
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Adversarial(L.LightningModule):
    """A GAN that switches off one half while it trains the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        fake = self.generator(torch.randn(len(batch), 2))
        self.toggle_optimizer(of_generator)
        self.update(of_generator, -self.critic(fake).mean())
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_critic)
        real = torch.log(batch.square().sum(1))  # born: critic
        self.update(of_critic, (self.critic(fake.detach()).squeeze(1) - self.critic(batch).squeeze(1) * real).mean())
        self.untoggle_optimizer(of_critic)

    def update(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(half.parameters()) for half in (self.generator, self.critic)]


def test_a_half_that_is_switched_off_is_on_again_in_the_replay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    x[41] = 0.0
    with pytest.raises(NonFiniteError) as error:
        trainer(tmp_path, FirstNaN()).fit(Adversarial(), DataLoader(x, batch_size=8))
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: critic"), 5)
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (5, (1,), (41,))


def test_a_loader_without_length_is_fetched_ahead(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(loader().dataset)  # type: ignore[call-overload]

    with pytest.raises(NonFiniteError) as error:
        trainer(tmp_path, FirstNaN()).fit(Regression(), DataLoader(Stream(), batch_size=8))
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: loss"), 5)
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples) == (5, (1,))


def test_worker_processes_are_asked_before_training_begins(tmp_path: Path) -> None:
    """Lightning has them fetch the first batches before it calls `on_train_start`."""
    order = torch.Generator().manual_seed(0)
    data = DataLoader(loader().dataset, batch_size=8, num_workers=2, shuffle=True, generator=order)
    with pytest.raises(NonFiniteError) as error:
        trainer(tmp_path, FirstNaN()).fit(Regression(), data)
    assert error.value.report.batch is not None
    assert error.value.report.batch.dataset_indices == (41,)


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"precision": "bf16-mixed"}]
)
def test_accumulation_clipping_and_precision(tmp_path: Path, options: Any) -> None:
    with pytest.raises(NonFiniteError) as error:
        trainer(tmp_path, FirstNaN(), **options).fit(Regression(), loader())
    check(error.value.report, step=2 if "accumulate_grad_batches" in options else 5)


class Roots(Regression):
    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return ((self.net(x).squeeze(1) - y) ** 2 * y).sqrt().mean()  # born: derivative


@pytest.mark.parametrize("way", ["callback", "detector"])
def test_of_accumulated_batches_the_one_with_the_bad_gradient_is_named(tmp_path: Path, way: str) -> None:
    model = Roots()
    fit = trainer(tmp_path, *([FirstNaN()] if way == "callback" else []), accumulate_grad_batches=4)
    around = NaNDetector(model) if way == "detector" else contextlib.nullcontext()
    with pytest.raises(NonFiniteError) as error, around:
        fit.fit(model, loader())
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: derivative"), 1)
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (5, (1,), (41,))
    assert report.batch.confirmed


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_training_goes_on_without_the_bad_step(tmp_path: Path, policy: str) -> None:
    callback, model = FirstNaN(on_nonfinite=policy, snapshot_every=2), Regression()
    fit = trainer(tmp_path, callback)
    fit.fit(model, loader())
    assert fit.state.finished
    assert callback.detector is not None
    counts = callback.detector.summary()
    assert counts["skipped" if policy == "skip" else "rolled_back"] == 2  # once an epoch
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_healthy_training_is_the_same_with_the_callback(tmp_path: Path) -> None:
    def weights(*callbacks: Any) -> list[torch.Tensor]:
        L.seed_everything(1)
        model = Regression()
        trainer(tmp_path, *callbacks).fit(model, loader(zero=None))
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, weights(), weights(FirstNaN(layers=True))))


def test_a_detector_around_fit_finds_the_line(tmp_path: Path) -> None:
    model = Regression()
    with pytest.raises(NonFiniteError) as error, NaNDetector(model):
        trainer(tmp_path).fit(model, loader())
    check(error.value.report)


def test_bad_data_is_found_in_the_dataset(tmp_path: Path) -> None:
    class Ratios(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> Any:
            x = torch.full((4,), float(i - 41))
            return x / x, torch.tensor(1.0)  # born: dataset

    with pytest.raises(NonFiniteError) as error:
        trainer(tmp_path, FirstNaN()).fit(Regression(), DataLoader(Ratios(), batch_size=8))
    origin = error.value.report.origin
    assert origin is not None
    assert origin.site is not None
    assert origin.site.line == line_of(HERE, "born: dataset")


def test_what_is_noticed_goes_to_the_logger_which_is_closed(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    callback = FirstNaN(on_nonfinite="skip")
    trainer(tmp_path, callback, logger=logger, log_every_n_steps=1).fit(Regression(), loader())
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "firstnan/skipped" in text
    with pytest.raises(NonFiniteError):
        trainer(tmp_path, FirstNaN(), logger=(failed := CSVLogger(tmp_path, version=7)), log_every_n_steps=1).fit(
            Regression(), loader()
        )
    assert "loss" in (Path(failed.log_dir) / "metrics.csv").read_text()


def test_a_detector_that_is_taken_away_stops_nothing(tmp_path: Path) -> None:
    class TakesAway(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            callback.detector.detach()  # type: ignore[union-attr]

    callback = FirstNaN()
    fit = trainer(tmp_path, callback, TakesAway())
    fit.fit(Regression(), loader())
    assert fit.state.finished
    assert callback.report is None


def test_a_wrong_option_is_an_error_at_once() -> None:
    with pytest.raises(TypeError):
        FirstNaN(on_nonfinit="skip")
    with pytest.raises(ValueError, match="on_nonfinite"):
        FirstNaN(on_nonfinite="stop")


def test_the_older_package_has_its_own_callbacks(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    callback = FirstNaN()
    assert isinstance(callback, pl.Callback)
    assert isinstance(callback, L.Callback)

    class Older(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return Regression.loss(self, batch)  # type: ignore[arg-type]

        configure_optimizers = Regression.configure_optimizers

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    with pytest.raises(NonFiniteError) as error:
        pl.Trainer(callbacks=[callback], accelerator="cpu", enable_model_summary=False, **options).fit(
            Older(), loader()
        )
    check(error.value.report)


def test_fabric(tmp_path: Path) -> None:
    fabric = L.Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(net := torch.nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.01))
    with pytest.raises(NonFiniteError) as error, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(fabric.setup_dataloaders(loader())):
            optimizer.zero_grad()
            loss = ((model(x).squeeze(1) - y) ** 2 / y).mean()  # born: fabric
            fabric.backward(loss)
            optimizer.step()
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: fabric"), 5)
    assert report.batch is not None
    assert (report.batch.bad_samples, report.batch.dataset_indices, report.batch.confirmed) == ((1,), (41,), True)


PROGRAM = """\
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return ((self.layer(x).squeeze(1) - y) ** 2 / y).mean()  # born

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.rand(64) + 0.5
y[41] = 0.0
trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False)
trainer.fit(Net(), DataLoader(TensorDataset(x, y), batch_size=8))
"""


def test_the_command_replays_the_closure(run: Callable[..., Any]) -> None:
    ended = run(PROGRAM)
    assert ended.code == 3, ended.stderr
    assert "running the program again" not in ended.stderr
    report = ended.report
    assert (report.origin.site.line, report.step) == (line_of(PROGRAM, "born"), 5)
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (5, (1,), (41,))


TWO = """\
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        (x,), (z, weights) = batch["plain"], batch["weighted"]
        return self.layer(x).square().mean() + (self.layer(z).squeeze(-1).abs() / weights).mean()  # born

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


torch.manual_seed(0)
weights = torch.rand(48) + 0.2
weights[21] = 0.0
weighted = DataLoader(TensorDataset(torch.randn(48, 3), weights), batch_size=4)
plain = DataLoader(TensorDataset(torch.randn(48, 3)), batch_size=4, shuffle=True)
trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), {"weighted": weighted, "plain": plain})
"""


def test_of_two_loaders_no_index_of_the_wrong_one_is_named(run: Callable[..., Any]) -> None:
    """Which of their batches a row belongs to is not known where the search could not tell."""
    report = run(TWO).report
    assert (report.origin.site.line, report.step) == (line_of(TWO, "born"), 5)
    assert report.batch.dataset_indices in (None, (21,))


RANKS = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.layer(x).squeeze(1) - y.log()).square().mean()  # born

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = torch.randn(48, 4), torch.rand(48) + 0.5
    y[41] = 0.0
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    ranks = dict(accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer = L.Trainer(max_epochs=2, **ranks, **quiet)
    data = torch.utils.data.Subset(TensorDataset(x, y), range(trainer.global_rank * 24, trainer.global_rank * 24 + 24))
    trainer.fit(Net(), DataLoader(data, batch_size=4))
"""


def test_ranks_that_the_trainer_starts_itself_are_watched(run: Callable[..., Any], tmp_path: Path) -> None:
    """Near the end of an epoch, where the trainer's loop does not ask for enough batches to search for samples."""
    ended = run(RANKS)
    found = ended.report
    assert (ended.code, found.rank, found.world_size, found.step) == (3, 1, 2, 4)
    assert found.origin.site.line == line_of(tmp_path / "train.py", "born")
    assert (found.cause.slug, found.batch.bad_samples, found.batch.confirmed) == ("log_of_zero", (1,), True)
