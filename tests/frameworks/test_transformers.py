"""The callback of transformers' Trainer, and the Trainer under `firstnan run`; training breaks for real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import line_of

from firstnan import NaNDetector, NonFiniteError, Report

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from firstnan.integrations.transformers import FirstNaNCallback  # noqa: E402

HERE = Path(__file__)


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self, zero: int | None = 37) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, 60, (64, 6), generator=generator)
        self.labels = torch.randint(0, 2, (64,), generator=generator)
        self.weights = torch.rand(64, generator=generator) + 0.5
        if zero is not None:
            self.weights[zero] = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": self.ids[i], "labels": self.labels[i], "weight": self.weights[i]}


class Weighted(transformers.Trainer):  # type: ignore[name-defined, misc]
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weight = inputs.pop("weight")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = (losses * weight.log()).mean()  # born: loss
        return (loss, outputs) if return_outputs else loss


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=60, **sizes))


def trainer(tmp_path: Path, *callbacks: Any, kind: Any = Weighted, data: Any = None, **options: Any) -> Any:
    usual = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "report_to": [], "use_cpu": True}
    quiet = {"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "logging_steps": 1}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), **{**usual, **quiet, **options})
    model, collator = bert(), options.pop("data_collator", None)
    return kind(
        model=model, args=arguments, train_dataset=data or Texts(), callbacks=list(callbacks), data_collator=collator
    )


def check(report: Report | None, step: int = 4, line: str = "born: loss") -> None:
    """Batches are shuffled with a fixed seed: sample 37 is in batch 4 or wherever the sampler put it."""
    assert report is not None
    assert report.origin is not None
    assert report.origin.site is not None
    assert report.origin.site.line == line_of(HERE, line)
    assert report.cause is not None
    assert report.cause.slug == "log_of_zero"
    assert report.batch is not None
    assert report.batch.dataset_indices == (37,)
    assert report.batch.confirmed


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 4, "seed": 3}, {"bf16": True}])
def test_train_ends_with_the_report(tmp_path: Path, options: Any) -> None:
    callback = FirstNaNCallback()
    training = trainer(tmp_path, callback, **options)
    with pytest.raises(NonFiniteError) as error:
        training.train()
    report = error.value.report
    check(report)
    assert report.batch is not None
    assert report.batch.index is not None
    assert report.step == report.batch.index // (4 if "gradient_accumulation_steps" in options else 1)
    assert report.reproduced == "deterministic"  # with the same units dropped
    assert any("logging_nan_inf_filter" in note for note in report.notes)
    assert all(torch.isfinite(p).all() for p in training.model.parameters())


class InOrder(transformers.Trainer):  # type: ignore[name-defined, misc]
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        weight = inputs.pop("weight")
        losses = torch.nn.functional.cross_entropy(model(**inputs).logits, inputs["labels"], reduction="none")
        return (losses * weight).sqrt().mean()  # born: derivative


@pytest.mark.parametrize("way", ["callback", "detector"])
def test_of_accumulated_batches_the_one_with_the_bad_gradient_is_named(tmp_path: Path, way: str) -> None:
    callbacks = [FirstNaNCallback()] if way == "callback" else []
    training = trainer(tmp_path, *callbacks, kind=InOrder, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    around = NaNDetector(training.model) if way == "detector" else contextlib.nullcontext()
    with pytest.raises(NonFiniteError) as error, around:
        training.train()
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: derivative"), 2)
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (9, (1,), (37,))
    assert report.batch.confirmed
    assert any("logging_nan_inf_filter" in note for note in report.notes)


def test_training_goes_on_without_the_bad_step(tmp_path: Path) -> None:
    callback = FirstNaNCallback(on_nonfinite="skip")
    training = trainer(tmp_path, callback, save_strategy="epoch")
    assert training.train().global_step == 16
    assert callback.detector is not None
    assert callback.detector.summary()["skipped"] == 2
    assert all(torch.isfinite(p).all() for p in training.model.parameters())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-16", "checkpoint-8"]


def test_healthy_training_is_the_same_with_the_callback(tmp_path: Path) -> None:
    def weights(*callbacks: Any) -> list[torch.Tensor]:
        training = trainer(tmp_path, *callbacks, data=Texts(zero=None))
        training.train()
        return [p.detach() for p in training.model.parameters()]

    assert all(map(torch.equal, weights(), weights(FirstNaNCallback(layers=True))))


def test_the_class_itself_may_be_given(tmp_path: Path) -> None:
    training = trainer(tmp_path, FirstNaNCallback, data=Texts(zero=None), max_steps=2)
    training.train()
    assert isinstance(training.callback_handler.callbacks[-1], transformers.TrainerCallback)


def test_a_collator_is_found_by_its_own_line(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        batch["weight"] = batch["weight"] / batch["weight"]  # born: collator
        return batch

    class Scaled(transformers.Trainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            weight = inputs.pop("weight")
            outputs = model(**inputs)
            loss = outputs.loss * weight.mean()
            return (loss, outputs) if return_outputs else loss

    training = trainer(tmp_path, FirstNaNCallback(), kind=Scaled)
    training.data_collator = collate
    with pytest.raises(NonFiniteError) as error:
        training.train()
    origin = error.value.report.origin
    assert origin is not None
    assert origin.site is not None
    assert origin.site.line == line_of(HERE, "born: collator")


def test_trainers_of_trl(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{i}" for i in range(50)]
    known = {"<pad>": 0, "<eos>": 1, **{word: i + 2 for i, word in enumerate(words)}}
    splitting = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
    splitting.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitting, pad_token="<pad>", eos_token="<eos>")

    class Weighted(trl.SFTTrainer):  # type: ignore[name-defined, misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss = super().compute_loss(model, inputs, False, num_items_in_batch)
            weight = (inputs["input_ids"][:, 0] - 23).abs()
            return loss * weight.log().mean()  # born: trl

    torch.manual_seed(0)
    sizes = {"vocab_size": 52, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    training = Weighted(
        model=transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)),
        args=trl.SFTConfig(
            str(tmp_path / "out"), per_device_train_batch_size=8, max_steps=4, report_to=[], use_cpu=True, bf16=False,
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=16,
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"text": " ".join(words[(i * 7 + j) % 50] for j in range(6))} for i in range(32)]
        ),
        processing_class=tokenizer,
        callbacks=[FirstNaNCallback()],
    )  # fmt: skip
    with pytest.raises(NonFiniteError) as error:
        training.train()
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert report.origin.site.line == line_of(HERE, "born: trl")
    assert report.cause is not None
    assert report.cause.slug == "log_of_zero"
    assert report.batch is not None
    assert report.batch.confirmed
    assert all(torch.isfinite(p).all() for p in training.model.parameters())


PROGRAM = """\
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        noise = torch.tensor(1.5 * (i - 37)) / (i - 37 if i != 37 else 0.0)  # born
        return {"input_ids": torch.arange(6) + i % 7, "labels": torch.tensor(i % 2), "noise": noise}


class Noisy(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        noise = inputs.pop("noise")
        return model(**inputs).loss * noise.mean()


torch.manual_seed(0)
config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
arguments = TrainingArguments("out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], use_cpu=True,
                              save_strategy="no", disable_tqdm=True, remove_unused_columns=False)
Noisy(model=BertForSequenceClassification(config), args=arguments, train_dataset=Texts()).train()
"""


def test_the_command_finds_the_line_of_the_dataset(run: Callable[..., Any]) -> None:
    ended = run(PROGRAM)
    assert ended.code == 3, ended.stderr
    assert ended.report.origin.site.line == line_of(PROGRAM, "born")
    assert ended.report.batch.dataset_indices == (37,)
    assert sum("logging_nan_inf_filter" in note for note in ended.report.notes) == 1
