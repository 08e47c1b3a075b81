"""The bad samples of a batch: the search itself, batches of every shape, and loops that are played again."""

from __future__ import annotations

import ast
import math
import random
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from firstnan import NaNDetector, NonFiniteError, find_bad_samples
from firstnan.engine.samples.cut import CutError, Maker, cut
from firstnan.engine.samples.search import (
    MOST,
    NO_SINGLE,
    ONLY_WITH_OTHERS,
    SEVERAL,
    TOGETHER,
    WHOEVER,
    Replaced,
    SearchResult,
    search,
)
from firstnan.engine.samples.variables import Variables
from firstnan.engine.turn import Turn
from firstnan.records import Batch, Report
from firstnan.tensors.state import sample_count
from zygote import Zygote

pytestmark = pytest.mark.slow

pytest_plugins = ["zygote"]


# --- the search ---------------------------------------------------------------------------------------------------


def found(size: int, fails: Callable[[list[int]], bool], suspects: Sequence[int] = (), others: int = 0) -> SearchResult:
    """What the search finds where `fails` judges a batch, given as the samples that stand in its places."""
    asking = search(size, suspects, others)
    question: Replaced = next(asking)
    while True:
        try:
            question = asking.send(not fails([question.get(i, i) for i in range(size)]))
        except StopIteration as stop:
            answer: SearchResult = stop.value
            return answer


def most_for_one(size: int) -> int:
    """The most replays for one bad sample, about twice what is needed; more if no sample can replace all others."""
    return 2 * math.ceil(math.log2(size)) + 4


def holding(*bad: int) -> Callable[[list[int]], bool]:
    return lambda batch: any(b in batch for b in bad)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16, 33, 64, 500])
def test_one_bad_sample_is_found_and_confirmed_within_the_bound(size: int) -> None:
    for bad in range(size) if size < 100 else (0, 1, 250, 499):
        for suspects in ((), (bad,), ((bad + 1) % size,)):
            answer = found(size, holding(bad), suspects)
            assert answer.bad == (bad,), suspects
            assert answer.confirmed
            assert answer.repeated
            assert answer.replays <= most_for_one(size)


def test_a_suspect_takes_four_replays() -> None:
    assert found(256, holding(77), [77]).replays == 4


@pytest.mark.parametrize("bad", [(3, 9), (4, 11, 18), (0, 1), (2, 3, 4, 5, 6), (22, 23)])
def test_several_bad_samples(bad: tuple[int, ...]) -> None:
    for suspects in ((), bad, bad[:1], (10,)):
        answer = found(24, holding(*bad), suspects)
        assert answer.bad == bad, suspects
        assert answer.confirmed
        assert answer.replays <= MOST


@pytest.mark.parametrize(("size", "bad"), [(32, range(12, 22)), (64, range(40, 52)), (32, range(1, 31, 3))])
def test_many_bad_samples_are_found_within_the_bound(size: int, bad: range) -> None:
    answer = found(size, holding(*bad))
    assert answer.bad == tuple(bad)
    assert answer.confirmed


def test_an_innocent_suspect_is_let_go() -> None:
    assert found(16, holding(5), [5, 6, 9]).bad == (5,)


def test_samples_that_fail_only_together() -> None:
    answer = found(16, lambda batch: 3 in batch and 12 in batch, [3, 12])
    assert answer.bad == (3, 12)
    assert answer.confirmed
    assert answer.note == TOGETHER


@pytest.mark.parametrize("bad", [(3, 12), (1, 2), (14, 15), (2, 7, 9), (1, 4, 8, 13)])
@pytest.mark.parametrize("equal", [False, True])
def test_samples_that_fail_only_together_are_found(bad: tuple[int, ...], equal: bool) -> None:
    """Where a batch of copies fails too, samples of the batch before stand in."""
    answer = found(16, lambda batch: set(bad) <= set(batch) or (equal and len(set(batch)) < 16), others=16 * equal)
    assert (answer.bad, answer.confirmed, answer.note) == (bad, True, TOGETHER)
    assert answer.replays <= 4 * most_for_one(16)


def test_many_samples_that_fail_only_together() -> None:
    answer = found(16, lambda batch: len(set(batch)) > 8)
    assert (answer.bad, answer.confirmed, answer.note) == (None, False, SEVERAL)


def test_whatever_stands_in_the_batch() -> None:
    answer = found(64, lambda batch: True)
    assert (answer.bad, answer.note) == (None, NO_SINGLE)
    assert answer.replays <= most_for_one(64) + 1
    # A place that is bad by chance: the samples that stand there are not to blame.
    answer = found(64, lambda batch: True, [7])
    assert (answer.bad, answer.confirmed, answer.note) == (None, False, WHOEVER)


def minds_equals(bad: int) -> Callable[[list[int]], bool]:
    """Of a loss that is undefined for a batch of equal samples as well, and wherever the first two are missing."""
    return lambda batch: bad in batch or len(set(batch)) == 1 or not {0, 1} & set(batch)


@pytest.mark.parametrize("size", [4, 7, 24, 64, 500])
def test_no_sample_can_stand_in_for_all_others(size: int) -> None:
    for bad in range(2, size) if size < 100 else (2, 250, 499):
        for suspects in ((), (bad,), ((bad + 1) % size,)):
            answer = found(size, minds_equals(bad), suspects)
            assert (answer.bad, answer.confirmed) == ((bad,), True), suspects
            assert answer.replays <= 2 * most_for_one(size)


def test_a_sample_is_not_confirmed_where_another_one_has_its_share() -> None:
    answer = found(16, lambda batch: len(set(batch)) == 1 or (3 in batch and 12 in batch))
    assert answer.bad in ((3,), (12,))
    assert not answer.confirmed
    assert answer.note == ONLY_WITH_OTHERS


@pytest.mark.parametrize("has_label", range(4, 8))
def test_a_batch_that_lacks_what_one_sample_of_another_batch_has(has_label: int) -> None:
    for suspects in ((), (3,)):
        answer = found(4, lambda batch: has_label not in batch, suspects, others=4)
        assert (answer.bad, answer.confirmed) == (None, False)


def test_a_sample_is_confirmed_with_the_samples_of_another_batch() -> None:
    # Undefined wherever two samples are equal.
    answer = found(4, lambda batch: 2 in batch or len(set(batch)) < 4, others=4)
    assert (answer.bad, answer.confirmed) == ((2,), True)


def test_the_first_stand_ins_may_be_bad_themselves() -> None:
    for bad in ((0, 32), (0, 32, 63), (0, 31, 32, 40)):
        answer = found(64, holding(*bad))
        assert (answer.bad, answer.confirmed) == (bad, True)


def test_most_of_the_batch_is_no_sample() -> None:
    answer = found(12, holding(*range(3, 12)))
    assert answer.bad is None
    assert not answer.confirmed


@pytest.mark.parametrize("size", [16, 32, 500])
def test_a_batch_that_is_bad_as_a_whole_is_soon_known(size: int) -> None:
    answer = found(size, lambda batch: min(batch) < size, others=size)
    assert (answer.bad, answer.confirmed) == (None, False)
    assert answer.note == "no single sample is responsible: all 6 samples that were tried alone fail"
    assert answer.replays < 48


def test_the_search_is_bounded() -> None:
    answer = found(1000, holding(*range(0, 1000, 10)), range(0, 1000, 100))
    assert answer.replays == MOST
    assert not answer.confirmed
    assert "64 replays" in answer.note


def test_a_batch_that_does_not_fail_again() -> None:
    answer = found(8, lambda batch: False, [2])
    assert answer.repeated is False
    assert answer.replays == 1


def test_a_batch_of_one() -> None:
    assert found(1, lambda batch: True) == SearchResult(None, replays=1, repeated=True)


def test_answers_that_contradict_each_other_end_the_search() -> None:
    dice = random.Random(0)
    for _ in range(300):
        size = dice.randrange(1, 40)
        suspects = dice.sample(range(size), dice.randrange(0, size + 1))
        answer = found(size, lambda batch: dice.random() < 0.5, suspects)
        assert answer.replays <= MOST


# --- batches ------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Parts:
    x: Tensor
    names: list[str]


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (X, lambda b: b[:, 0]),
        ((X, Y), lambda b: b[0][:, 0] + 0 * b[1]),
        ([X, Y], lambda b: b[1] * 2.0),
        ({"a": {"x": X}, "scale": 3, "none": None}, lambda b: b["a"]["x"][:, 0]),
        (Pair(X, Y), lambda b: b.y * 2.0),
        (Parts(X, list("abcdef")), lambda b: torch.tensor([2.0 * "abcdef".index(n) for n in b.names])),
        ((X.t().contiguous()[:, :, None], Y), lambda b: b[0][0, :, 0]),  # time first
        ([X[:, :1].repeat(1, 5).t(), Y], lambda b: b[0][0]),
        ([(x, i) for i, x in enumerate(X)], lambda b: torch.stack([x for x, _ in b])[:, 0]),
        ((X, [torch.full((n + 1,), 2.0 * n) for n in range(6)]), lambda b: torch.stack([t[0] for t in b[1]])),
        ((X, [{"box": torch.full((n, 4), 2.0 * n)} for n in range(6)]), lambda b: b[0][:, 0]),
        ((X, X.numpy()), lambda b: torch.from_numpy(b[1])[:, 0]),
        (list("abcdef"), lambda b: torch.tensor([2.0 * "abcdef".index(n) for n in b])),
        ((torch.nn.Linear(2, 2), X, torch.tensor(0.5)), lambda b: b[1][:, 0]),
    ],
)
def test_a_batch_is_cut_and_put_together_again(batch: Any, read: Callable[[Any], Tensor]) -> None:
    pieces = cut(batch)
    assert pieces.size == 6
    assert read(pieces.replaced({})).tolist() == [0, 2, 4, 6, 8, 10]
    changed = pieces.replaced({0: 3, 5: 1})
    assert type(changed) is type(batch)
    assert read(changed).tolist() == [6, 2, 4, 6, 8, 2]
    assert read(batch).tolist() == [0, 2, 4, 6, 8, 10]


def test_what_is_handed_out_may_be_written_to() -> None:
    pieces = cut((X, Y))
    pieces.replaced({})[0].zero_()
    assert pieces.replaced({})[0][5, 1] == 11


class Graph:
    def __init__(self) -> None:
        self.x, self.edge_index = torch.zeros(6, 3), torch.zeros(2, 9)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ((X, torch.zeros(2, 17, dtype=torch.long)), "batch[1]"),  # edges of a graph
        ({"text": torch.zeros(40), "offsets": Y}, "batch['text']"),  # bags, one after the other
        (Graph(), "Graph"),
        ((X, X.to_sparse()), "batch[1]"),
        ((X, [1, 2, torch.zeros(9)]), "batch[1][2]"),
        ("text", "nothing in it has samples"),
    ],
)
def test_a_batch_that_cannot_be_cut_says_which_member_it_is(batch: Any, name: str) -> None:
    with pytest.raises(CutError) as caught:
        cut(batch, list(range(6)))
    assert name in str(caught.value)


def test_the_sampler_knows_the_size_where_the_shapes_do_not() -> None:
    assert cut((torch.zeros(6, 4, 3), torch.zeros(4, 3)), [8, 1, 2, 5]).size == 4
    assert cut((torch.zeros(8, 3),), [8, 1, 2, 5]).size == 8  # two views of each
    assert cut((torch.zeros(3, 3),), [8, 1, 2, 5]).size == 3  # one was left out
    with pytest.raises(CutError):
        cut((torch.zeros(9, 3),), [8, 1, 2, 5])  # nodes or tokens, as many as each happens to have


def test_rows_are_samples_only_if_the_sampler_may_have_chosen_them() -> None:
    nodes, owners, targets = torch.zeros(9, 3), torch.zeros(9), torch.zeros(4)
    assert sample_count((nodes, owners, targets), [8, 1, 2, 5]) == 4
    assert sample_count((nodes, owners, targets), None) == 9
    assert sample_count((torch.zeros(6, 4, 3), targets), [8, 1, 2, 5]) == 4  # time first
    assert sample_count((torch.zeros(8, 3), torch.zeros(8)), [8, 1, 2, 5]) == 8
    assert sample_count([torch.zeros(8, 3)] * 4, [8, 1, 2, 5]) == 4
    assert sample_count((nodes, owners), [8, 1, 2, 5]) == 4
    assert sample_count((torch.zeros(3, 2), torch.zeros(3)), [8, 1, 2, 5]) == 3  # one was left out
    with pytest.raises(CutError):
        cut((nodes, owners), [8, 1, 2, 5])
    assert sample_count((torch.zeros(3, 2), torch.zeros(3)), [None] * 4) == 3  # the end of a stream


def test_features_are_what_the_other_samples_do_not_have() -> None:
    torch.manual_seed(0)
    x = torch.rand(8, 5) + 1
    x[3, 2], x[6, 1], y = 900.0, float("nan"), torch.ones(8, 3)
    y[:, 1] = torch.arange(8) + 2
    y[6] = 0
    first, second, third = cut((x, y)).features([3, 6])
    assert (first.sample, first.member, first.index, first.value) == (3, "batch[0]", (2,), 900.0)
    assert 1 <= first.low < first.high <= 2
    assert (second.sample, second.index) == (6, (1,))
    assert second.value != second.value
    assert (third.member, third.index, third.value, third.low, third.high) == ("batch[1]", None, 0.0, 1.0, 9.0)
    assert cut((x[[0, 1, 2, 4, 5, 7]],)).features([2]) == ()


# --- what they are in the data set ------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """Sequences of different lengths, drawn at random where `chance`."""

    def __init__(self, chance: bool = False) -> None:
        self.chance, self.fetched = chance, 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.fetched += 1
        torch.rand(1)
        x = torch.randn(1 + i * 7 % 5, 3, generator=None if self.chance else torch.Generator().manual_seed(i))
        return {"x": x, "tokens": list(range(i, i + 3)), "weight": i / 7, "label": i % 2, "name": f"text {i}"}


def padded(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "x": pad_sequence([item["x"] for item in items], batch_first=True),
        "length": torch.tensor([len(item["x"]) for item in items]),
        "tokens": torch.tensor([item["tokens"] for item in items]),
        "weight": torch.tensor([item["weight"] for item in items]),
        "label": torch.tensor([item["label"] for item in items]),
        "name": [item["name"] for item in items],
    }


def longest_first(items: list[dict[str, Any]]) -> dict[str, Any]:
    return padded(sorted(items, key=lambda item: -len(item["x"])))


def without_short_ones(items: list[dict[str, Any]]) -> dict[str, Any]:
    return padded([item for item in items if len(item["x"]) > 2])


def cut_off(items: list[dict[str, Any]]) -> dict[str, Any]:
    return padded([item | {"x": item["x"][:2]} for item in reversed(items)])


def in_lists(items: list[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(zip(*((item["x"], item["weight"], item["name"]) for item in reversed(items)), strict=True))


@pytest.mark.parametrize("collate", [padded, longest_first, without_short_ones, cut_off])
def test_a_sample_is_found_in_the_data_set_though_the_batch_was_sorted(collate: Any) -> None:
    dataset, chosen = Texts(), [3, 14, 7, 11, 2, 19, 5]
    batch = collate([dataset[i] for i in chosen])
    pieces = cut(batch, chosen)
    names, before = batch["name"], torch.get_rng_state()
    for at, name in enumerate(names):
        assert Maker(dataset, collate).in_dataset([at], pieces, chosen) == (int(name[5:]),)
    assert torch.equal(torch.get_rng_state(), before)


def joined(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """As for a CTC loss: the longest first, the labels of all samples one after the other."""
    items = sorted(items, key=lambda item: -len(item[0]))
    lengths, counts = (torch.tensor([len(item[part]) for item in items]) for part in (0, 1))
    return pad_sequence([x for x, _ in items], batch_first=True), lengths, torch.cat([y for _, y in items]), counts


def test_samples_that_are_joined_in_one_tensor_are_cut_by_their_lengths() -> None:
    dataset = {i: (torch.full((n, 2), float(i)), torch.arange(i, i + n % 3 + 1)) for i, n in enumerate([2, 5, 4, 3, 6])}
    chosen = [0, 1, 2, 3, 4]
    pieces = cut(joined([dataset[i] for i in chosen]), chosen)
    longest_first = [4, 1, 2, 3, 0]
    for at, i in enumerate(longest_first):
        assert [part.tolist() for part in pieces.joined(at)] == [dataset[i][1].tolist()]
        assert Maker(dataset, joined).in_dataset([at], pieces, chosen) == (i,)
    x, lengths, labels, counts = pieces.replaced({3: 0, 4: 1})  # sorted by length again
    now = [4, 4, 1, 1, 2]
    assert (x[:, 0, 0].tolist(), lengths.tolist()) == (now, [6, 6, 5, 5, 4])
    assert counts.tolist() == [len(dataset[i][1]) for i in now]
    assert torch.equal(labels, torch.cat([dataset[i][1] for i in now]))


def test_samples_in_lists_are_found_in_the_data_set() -> None:
    dataset, chosen = [(torch.rand(n + 1, 2), n / 7) for n in range(8)], [3, 1, 7, 6, 2]
    batch = tuple(zip(*(dataset[i] for i in sorted(chosen)), strict=True))
    assert Maker(dataset, in_lists).in_dataset([0, 4], cut(batch, chosen), chosen) == (1, 7)


def test_the_index_of_an_element_that_becomes_two_rows() -> None:
    """Preference pairs: all chosen texts come first, then all rejected ones, padded to the longest."""
    pairs = [{"chosen": [5, i, 7, 7], "rejected": [5, i, 8, 8][: 2 + i % 2]} for i in range(9)]

    def both(elements: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        texts = [e["chosen"] for e in elements] + [e["rejected"] for e in elements]
        rows = [torch.tensor(text) for text in texts]
        return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}

    chosen = [4, 1, 7]
    pieces = cut(both([pairs[i] for i in chosen]), chosen)
    assert pieces.size == 6
    assert Maker(pairs, both).in_dataset([1, 5], pieces, chosen) == (1, 7)


def by_chance(items: list[dict[str, Any]]) -> Tensor:
    """Sorted by numbers that are random."""
    return torch.stack([item["x"].sum() for item in sorted(items, key=lambda item: float(item["x"].sum()))])


def in_order(items: list[dict[str, Any]]) -> Tensor:
    return pad_sequence([item["x"] for item in items], batch_first=True)


@pytest.mark.parametrize("collate", [longest_first, in_order, padded])
def test_elements_with_random_noise_are_found_where_they_are_put_again(collate: Any) -> None:
    noisy, chosen = Texts(chance=True), [3, 14, 7, 11, 2]
    items = [noisy[i] for i in chosen]
    pieces = cut(collate(items), chosen)
    names = pieces.batch["name"] if isinstance(pieces.batch, dict) else [item["name"] for item in items]
    before = torch.get_rng_state()
    for at, name in enumerate(names):
        assert Maker(noisy, collate).in_dataset([at], pieces, chosen) == (int(name[5:]),)
    assert torch.equal(torch.get_rng_state(), before)


def test_where_it_does_not_show_no_element_is_named() -> None:
    chosen = [3, 14, 7, 11, 2]
    fresh = Texts(chance=True)
    pieces = cut(by_chance([fresh[i] for i in chosen]), chosen)
    assert Maker(fresh, by_chance).in_dataset([1], pieces, chosen) is None
    twins = [torch.ones(2)] * 20
    assert Maker(twins, torch.stack).in_dataset([1], cut(torch.ones(5, 2), chosen), chosen) is None
    assert Maker({}, torch.stack).in_dataset([1], pieces, chosen) is None  # KeyError
    assert Maker(None, None).in_dataset([1], pieces, chosen) is None
    assert Maker(Texts(), default_collate).in_dataset([1], pieces, [None] * 5) is None


def test_what_torch_put_together_is_not_fetched_again() -> None:
    dataset = Texts()
    assert Maker(dataset, default_collate).in_dataset([1, 3], cut(torch.ones(4, 2)), [8, 5, 2, 9]) == (5, 9)
    assert dataset.fetched == 0


# --- a step of one's own ------------------------------------------------------------------------------------------


def test_a_returned_loss() -> None:
    x = torch.rand(16, 3) + 0.1
    x[11, 1] = 0.0
    answer = find_bad_samples(lambda batch: batch.log().mean(), x)
    assert isinstance(answer, Batch)
    assert (answer.size, answer.bad_samples, answer.confirmed) == (16, (11,), True)
    assert answer.replays <= most_for_one(16)
    assert (answer.features[0].index, answer.features[0].value) == ((1,), 0.0)


def test_gradients_that_are_bad_below_a_finite_loss() -> None:
    x = torch.rand(12, 3) + 0.1
    x[4] = 0
    weight = torch.ones(3, requires_grad=True)
    answer = find_bad_samples(lambda batch: (batch * weight).square().sum(1).sqrt().mean(), x)
    assert answer.bad_samples == (4,)
    assert weight.grad is None


def test_a_step_with_its_own_backward_and_update_leaves_everything_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    x, calls = torch.rand(20, 3), 0
    random_before = torch.get_rng_state()

    def step(batch: dict[str, Tensor]) -> None:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(batch["x"]) / batch["weight"][:, None]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    weight = torch.ones(20)
    weight[[2, 17]] = 0
    answer = find_bad_samples(step, {"x": x, "weight": weight})
    assert answer.bad_samples == (2, 17)
    assert answer.confirmed
    assert answer.replays == calls
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(optimizer.state.values(), moments, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), random_before)


def test_a_step_that_minds_the_value_itself() -> None:
    x = torch.rand(9, 2)
    x[8, 0] = float("inf")

    def step(batch: Tensor) -> float:
        loss = batch.mean()
        if not torch.isfinite(loss):
            raise ValueError("bad loss")
        return loss.item()

    assert find_bad_samples(step, x).bad_samples == (8,)


def test_a_search_leaves_schedules_and_rates_as_they_were() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x = torch.ones(8, 2)
    x[3] = -1.0
    rates = []

    def step(batch: Tensor) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        (batch.log() * weight).sum().backward()
        optimizer.step()
        schedule.step()

    before = schedule.state_dict()
    assert find_bad_samples(step, x).bad_samples == (3,)
    assert set(rates) == {1.0}
    assert (schedule.state_dict(), optimizer.param_groups[0]["lr"]) == (before, 1.0)


def test_no_sample_to_blame() -> None:
    weight = torch.full((2,), float("nan"), requires_grad=True)
    answer = find_bad_samples(lambda batch: (batch * weight).sum(), torch.rand(8, 2))
    assert (answer.bad_samples, answer.note) == (None, NO_SINGLE)
    healthy = find_bad_samples(lambda batch: batch.sum(), torch.rand(8, 2))
    assert (healthy.bad_samples, healthy.replays) == (None, 1)
    assert "finite" in healthy.note
    uncut = find_bad_samples(lambda batch: batch[0].sum(), (torch.rand(8, 2), torch.rand(3, 5)))
    assert "cannot be split into samples" in uncut.note


def test_a_mistake_in_the_step_is_not_hidden() -> None:
    with pytest.raises(TypeError):
        find_bad_samples(lambda: None, torch.rand(4))  # type: ignore[arg-type, misc]


# --- a detector's loop --------------------------------------------------------------------------------------------


def batches(bad: int, count: int = 5, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    made = [(torch.rand(size, 3) + 0.1, torch.rand(size, 1)) for _ in range(count)]
    made[-2][0][bad, 1] = 0.0
    return made


def train(step: Callable[[Any], None], data: list[Any], model: nn.Module, optimizer: Any, by_step: bool) -> Report:
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        if by_step:
            for batch in data:
                detector.step(step, batch)
        else:
            for batch in detector.batches(data):
                step(batch)
    return caught.value.report


@pytest.mark.parametrize("by_step", [False, True])
def test_the_detector_confirms_the_sample_and_leaves_the_weights(
    by_step: bool, capfd: pytest.CaptureFixture[str], in_process: None
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    states: list[Tensor] = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        states.append(model[0].weight.detach().clone())
        print("a step")
        optimizer.zero_grad()
        # Rows are mixed before the value is born: only replays can tell which sample it is.
        loss = (model(x) - y).pow(2).mean() + x.flip(0).log().mean()
        loss.backward()
        optimizer.step()

    report = train(step, batches(13), model, optimizer, by_step)
    assert report.batch is not None
    assert (report.batch.bad_samples, report.batch.confirmed) == ((13,), True)
    assert report.batch.replays <= most_for_one(16)
    assert len(states) == 4 + 1 + report.batch.replays
    assert all(torch.equal(s, states[3]) for s in states[3:])
    assert torch.equal(model[0].weight, states[3])
    assert report.reproduced == "deterministic"
    # The failing step is seen when it happens; what its replays print is hidden.
    assert capfd.readouterr().out.count("a step") == 4


@pytest.mark.parametrize("by_step", [False, True])
def test_a_body_that_raises_while_samples_are_replaced(by_step: bool, in_process: None) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    calls = 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise ValueError("enough")
        optimizer.zero_grad()
        (model(batch[0]).mean() + batch[0].log().mean()).backward()
        optimizer.step()

    report = train(step, batches(13), model, optimizer, by_step)
    assert report.batch is not None
    assert report.batch.bad_samples == (13,)
    assert not report.batch.confirmed
    assert report.batch.note.endswith("with samples replaced, the program raised ValueError: enough")


def test_a_loop_that_is_left_while_samples_are_replaced(in_process: None) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, (x, _) in enumerate(detector.batches(batches(13))):
            if i == 6:
                break
            optimizer.zero_grad()
            (model(x).mean() + x.log().mean()).backward()
            optimizer.step()
    batch = caught.value.report.batch
    assert batch is not None
    assert (batch.bad_samples, batch.confirmed) == ((13,), False)
    assert "ended early: with samples replaced, the program left its loop" in batch.note


def test_where_training_goes_on_nothing_is_searched(in_process: None) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    calls = 0
    with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
        for x, _ in detector.batches(batches(13)):
            calls += 1
            optimizer.zero_grad()
            (model(x).mean() + x.log().mean()).backward()
            optimizer.step()
    assert calls == 6
    report = detector.report
    assert report is not None
    assert report.batch is not None
    assert (report.batch.bad_samples, report.batch.confirmed) == ((13,), False)


# --- whole programs -----------------------------------------------------------------------------------------------

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(4)

class Data(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, i):
        x = torch.randn(5, generator=torch.Generator().manual_seed(i)).abs() + 0.1
        if i in BAD:
            x[2] = 0.0
        return {"x": x, "y": x.sum(), "name": f"sample {i}"}

model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), 1e-3)
"""
LOOP = """
for epoch in range(2):
    for i, batch in enumerate(DataLoader(Data(), 12, shuffle=True, num_workers=WORKERS)):
        x = batch["x"][torch.randperm(12)]
        loss = (model(x).squeeze(1) - x.log().sum(1).flip(0)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("step", i, flush=True)
print("the end")
"""


def program(folder: Path, loop: str = LOOP, bad: str = "(41,)", workers: int = 0) -> Path:
    path = folder / "train.py"
    path.write_text(f"BAD, WORKERS = {bad}, {workers}\n{HEAD}{loop}")
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_a_program_is_told_its_sample_and_where_it_is_in_the_data_set(
    firstnan: Zygote, tmp_path: Path, workers: int
) -> None:
    result = firstnan(["run", program(tmp_path, workers=workers)], cwd=tmp_path)
    batch = result.found["batch"]
    assert batch["confirmed"], batch
    assert batch["dataset_indices"] == [41]
    assert len(batch["bad_samples"]) == 1
    assert batch["replays"] <= most_for_one(12)
    feature = batch["features"][0]
    assert (feature["member"], feature["index"], feature["value"]) == ("batch['x']", [2], 0.0)
    assert result.found["reproduced"] == "deterministic"
    # Nothing that the replays printed is seen.
    steps = result.stdout.splitlines()
    assert steps == [f"step {i}" for i in range(len(steps))]
    assert f"sample {batch['bad_samples'][0]} of 12, dataset index 41, confirmed by" in result.stderr


def test_several_bad_samples_of_a_program(firstnan: Zygote, tmp_path: Path) -> None:
    batch = firstnan(["run", program(tmp_path, bad="range(0, 96, 3)")], cwd=tmp_path).found["batch"]
    assert batch["confirmed"]
    assert len(batch["bad_samples"]) > 1
    assert all(i % 3 == 0 for i in batch["dataset_indices"])


ACCUMULATING = """
for i, batch in enumerate(DataLoader(Data(), 12)):
    x = batch["x"][torch.randperm(12)]
    loss = (model(x).squeeze(1) - AGAINST.flip(0)).pow(2).mean() / 3
    loss.backward()
    if (i + 1) % 3 == 0:
        opt.step()
        opt.zero_grad()
"""


@pytest.mark.parametrize("against", ["x.log().sum(1)", "(x - x.detach() * 1.5).abs().sqrt().sum(1)"])
@pytest.mark.parametrize("bad", [41, 50, 61])
def test_a_step_of_several_batches(firstnan: Zygote, tmp_path: Path, against: str, bad: int) -> None:
    """A bad loss is seen at once, bad gradients not before the update: any batch of the step may be the one."""
    loop = ACCUMULATING.replace("AGAINST", against)
    if "sqrt" in against:
        loop = loop.replace('x = batch["x"]', 'x = model[0].bias.sum() * 0 + batch["x"]')
    result = firstnan(["run", program(tmp_path, loop, bad=f"({bad},)")], cwd=tmp_path)
    batch = result.found["batch"]
    assert (batch["index"], batch["bad_samples"], batch["dataset_indices"]) == (bad // 12, [bad % 12], [bad])
    assert batch["confirmed"]


def test_two_loaders_at_once(firstnan: Zygote, tmp_path: Path) -> None:
    loop = """
torch.set_num_threads(1)
clean = DataLoader([torch.rand(5) for _ in range(96)], 8)
for batch, other in zip(DataLoader(Data(), 8), clean):
    x = batch["x"]
    loss = (model(x) - x.log().sum(1, keepdim=True).flip(0)).pow(2).mean() + model(other).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    batch = firstnan(["run", program(tmp_path, loop)], cwd=tmp_path).found["batch"]
    assert (batch["index"], batch["bad_samples"], batch["confirmed"]) == (5, [1], True)


def test_a_loop_that_counts_is_searched_turn_by_turn(firstnan: Zygote, tmp_path: Path) -> None:
    stopping = LOOP.replace(
        "        opt.zero_grad()\n", "        assert i < 9, 'too many steps'\n        opt.zero_grad()\n"
    )
    result = firstnan(["run", program(tmp_path, stopping, bad="range(0, 96, 2)")], cwd=tmp_path)
    assert result.origin["op"] == "log"
    assert "Traceback" not in result.stderr
    batch = result.found["batch"]
    assert (batch["confirmed"], batch["dataset_indices"]) == (True, [i for i in batch["dataset_indices"] if i % 2 == 0])


GRAPHS = """
def joined(items):
    sizes = [2 + len(item["name"]) % 3 for item in items]
    nodes = torch.cat([item["x"].repeat(n, 1) for item, n in zip(items, sizes)])
    return nodes, torch.arange(12).repeat_interleave(torch.tensor(sizes)), torch.stack([i["y"] for i in items])

for nodes, owner, y in DataLoader(Data(), 12, collate_fn=joined):
    out = torch.zeros(12, 1).index_add(0, owner, model(nodes) + NODES.sum(1, keepdim=True))
    loss = (out.squeeze(1) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("nodes", ["nodes.log()", "(nodes + 0 * model[0].bias[0]).sqrt()"], ids=["forward", "backward"])
def test_graphs_in_one_batch_are_put_together_again(firstnan: Zygote, tmp_path: Path, nodes: str) -> None:
    """The nodes of graphs are no samples; with another graph in its place the step is finite."""
    batch = firstnan(["run", program(tmp_path, GRAPHS.replace("NODES", nodes))], cwd=tmp_path).found["batch"]
    assert (batch["size"], batch["bad_samples"], batch["confirmed"]) == (12, [5], True)
    assert batch["dataset_indices"] == [12 * batch["index"] + 5]


def test_an_empty_element_is_found_by_its_place() -> None:
    texts = [torch.arange(1, n + 1) for n in (3, 0, 2, 3)]

    def padded_left(items: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence([item.flip(0) for item in items], batch_first=True).flip(1)

    def sorted_by_length(items: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(sorted(items, key=len, reverse=True), batch_first=True)

    chosen = [3, 1, 0, 2]
    for collate, found in ((padded_left, (1,)), (sorted_by_length, None)):
        batch = collate([texts[i] for i in chosen])
        (bad,) = [i for i, row in enumerate(batch) if not row.any()]
        assert Maker(texts, collate).in_dataset([bad], cut(batch, chosen), chosen) == found


def test_a_batch_is_put_together_only_from_the_same_elements() -> None:
    def packed(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(items)

    lengths = [torch.rand(n, 3) for n in (2, 4, 1)]
    batch = packed(lengths)
    again = Maker(lengths, packed).collated(batch, [0, 1, 2])
    assert again is not None
    assert torch.equal(again.replaced({1: 2}), packed([lengths[0], lengths[2], lengths[2]]))
    assert list(again.members()) == []  # three columns are not three samples
    random = [(lambda n=n: torch.rand(n, 3)) for n in (2, 4, 1)]
    assert Maker(random, lambda items: packed([item() for item in items])).collated(batch, [0, 1, 2]) is None
    assert Maker(lengths, packed).collated(batch, [0, 1, 7]) is None
    assert Maker(lengths, packed).collated(batch, None) is None


BY_HAND = """
for step in range(6):
    nodes = torch.rand(GIVEN, 5) + 0.1
    if step == 4:
        nodes[7, 2] = 0.0
    out = model(nodes.log()) if step else model(nodes)
    loss = torch.zeros(ROWS, 1).index_add(0, torch.arange(GIVEN) % ROWS, out).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(("rows", "bad"), [(29, [7]), (58, [7]), (5, None)], ids=["each", "several of each", "other"])
def test_without_a_loader_rows_are_samples_if_the_loss_is_made_of_them(
    firstnan: Zygote, tmp_path: Path, rows: int, bad: list[int] | None
) -> None:
    loop = BY_HAND.replace("GIVEN", "29").replace("ROWS", str(rows))
    found = firstnan(["run", program(tmp_path, loop)], cwd=tmp_path).found
    assert found["step"] == 4
    assert (found["batch"] or {}).get("bad_samples") == bad


OF_ONE = """
for step in range(6):
    x = torch.rand(1 if step == 4 else 3, 5)
    losses = [model(row[None]) if EACH else None for row in x]
    out = torch.cat(losses) if EACH else model(x)
    loss = ((out - x.mean(1, keepdim=True)) / x[:, 0].std()).pow(2).mean() if step == 4 else out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_batch_of_one_without_a_loader(firstnan: Zygote, tmp_path: Path) -> None:
    found = firstnan(["run", program(tmp_path, OF_ONE.replace("EACH", "False"))], cwd=tmp_path).found
    assert (found["batch"]["size"], found["batch"]["bad_samples"]) == (1, [0])


def test_a_model_that_is_called_for_each_sample(firstnan: Zygote, tmp_path: Path) -> None:
    loop = (
        OF_ONE.replace("EACH", "True").replace("1 if step == 4 else 3", "3").replace("x[:, 0].std()", "x[:1, 0].std()")
    )
    assert firstnan(["run", program(tmp_path, loop)], cwd=tmp_path).found["batch"] is None


SORTED = """
def sorted_by_y(items):
    items = sorted(items, key=lambda item: item["y"])
    return torch.stack([item["x"] for item in items]), torch.stack([item["y"] for item in items])

for x, y in DataLoader(Data(), 12, shuffle=True, collate_fn=sorted_by_y):
    if (y.diff() < 0).any():
        raise RuntimeError("the batch must be sorted")
    loss = (model(x).squeeze(1) - x.log().sum(1)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_program_that_sorts_its_batches(firstnan: Zygote, tmp_path: Path) -> None:
    batch = firstnan(["run", program(tmp_path, SORTED)], cwd=tmp_path).found["batch"]
    assert batch["dataset_indices"] == [41]
    assert "with samples replaced, the program raised RuntimeError: the batch must be sorted" in batch["note"]


def test_lists_of_numbers_and_texts_hold_samples_too() -> None:
    """`len(baskets)` in the head of a loop reads no basket."""
    loop = ast.parse("for b in range(0, len(baskets), 2):\n    step(baskets[b : b + 2], rates[b].shape)\n").body[0]
    assert isinstance(loop, ast.For)
    names = {"b": 2, "baskets": [[1, 2], [3], [4, 4], [5]], "rates": [0.1, 0.2], "step": print}
    turn = Turn("train.py", loop, 2, compile("", "train.py", "exec"), names)
    assert turn.selected().keys() == {"baskets", "rates"}
    variables = Variables(turn, 0, None, lambda t: True)
    assert variables.plain_lists() == {"baskets": [[4, 4], [5]]}
    assert not variables.lists()
