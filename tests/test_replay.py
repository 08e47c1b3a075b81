"""What is kept of the batches of a step, and what is put back."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from firstnan.engine import handouts as room
from firstnan.engine.handouts import Handouts
from firstnan.tensors.models import Slot


class Source:
    """Stands where a loader's iterator would: all that is asked of it is to be one object."""


def test_batches_of_one_step_are_kept_and_those_of_the_last_one_dropped() -> None:
    replayer, source = Handouts(), Source()
    for updates, number in [(0, 1), (0, 2), (1, 3)]:
        replayer.fetched(source, torch.full((2,), float(number)), updates)
    assert [h.batch[0].item() for h in replayer.sources[source].recent] == [3.0]


def test_the_dataset_is_known_although_an_exception_has_ended_the_loop() -> None:
    dataset, replayer = TensorDataset(torch.rand(4, 2)), Handouts()
    iterator = iter(DataLoader(dataset, batch_size=2))
    handout = replayer.fetched(iterator, next(iterator), 0)
    del iterator
    assert replayer.iterator_of(handout) is None
    assert replayer.fetched_by(handout)._dataset is dataset
    del dataset
    assert replayer.fetched_by(handout) is None  # nothing of the program is kept alive


def test_a_step_without_end_does_not_keep_all_its_batches() -> None:
    replayer, source = Handouts(), Source()
    for _ in range(3 * room._MOST_BATCHES):
        replayer.fetched(source, torch.zeros(2), 0)
    assert len(replayer.sources[source].recent) <= room._MOST_BATCHES


def test_large_batches_are_kept_up_to_a_size() -> None:
    replayer, source = Handouts(), Source()
    large = torch.empty(room._MOST_BYTES // 8)  # half of what may be kept, never written: no real memory
    for _ in range(10):
        replayer.fetched(source, large, 0)
    assert len(replayer.sources[source].recent) <= 3


def test_random_numbers_and_buffers_are_as_they_were() -> None:
    norm, replayer, source = nn.BatchNorm1d(3), Handouts(), Source()
    replayer.watch_buffers([Slot(norm, name, name) for name in norm._buffers])
    replayer.fetched(source, torch.randn(4, 3), 0)
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    drawn = torch.rand(3), random.random()
    norm(torch.randn(4, 3) + 5)
    assert replayer.begin(source, 0) == 0
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]
    assert (torch.equal(torch.rand(3), drawn[0]), random.random()) == (True, drawn[1])


def test_a_batch_that_the_step_wrote_into_cannot_be_handed_out_again() -> None:
    replayer, source = Handouts(), Source()
    batch = torch.ones(3)
    replayer.fetched(source, batch, 0)
    assert replayer.possible(0)
    batch.mul_(2)
    assert not replayer.possible(0)


def test_the_sampler_tells_the_samples_of_each_batch() -> None:
    replayer = Handouts()
    iterator = iter(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    replayer.sampled(iterator, [4, 5])
    assert replayer.fetched(iterator, next(iterator), 0).indices == [4, 5]


def test_workers_that_stay_alive_count_their_batches_anew_in_every_epoch() -> None:
    replayer = Handouts()
    iterator = iter(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    for updates in range(60):  # long enough that one object serves for all batches
        if updates % 3 == 0:
            replayer.epoch_begins(iterator)
        assert replayer.fetched(iterator, [torch.zeros(2)], updates).index == updates % 3


def test_the_buffers_of_each_step_are_those_at_its_beginning() -> None:
    replayer, source, norm = Handouts(), Source(), nn.BatchNorm1d(3)
    replayer.watch_buffers([Slot(norm, name, name) for name in norm._buffers])
    for updates in range(40):
        norm.running_mean.fill_(updates)
        first = replayer.fetched(source, torch.zeros(2), updates)
        norm.running_mean.fill_(-1.0)
        second = replayer.fetched(source, torch.zeros(2), updates)  # of the same step, by gradient accumulation
        for handout in (first, second):
            kept = next(copy for slot, _, copy in handout.buffers if slot.label == "running_mean")
            assert kept.tolist() == [updates] * 3
    norm.running_mean = torch.full((3,), 7.0)  # the program may put another tensor in its place
    third = replayer.fetched(source, torch.zeros(2), 41)
    assert next(copy for slot, _, copy in third.buffers if slot.label == "running_mean").tolist() == [7.0] * 3
    norm.running_mean.data = torch.full((3,), 8.0)  # or other numbers into the same one
    fourth = replayer.fetched(source, torch.zeros(2), 42)
    assert next(copy for slot, _, copy in fourth.buffers if slot.label == "running_mean").tolist() == [8.0] * 3


def test_a_batch_that_was_written_to_is_not_handed_out_again() -> None:
    replayer, source = Handouts(), Source()
    for updates in range(30):
        batch = torch.zeros(2)
        replayer.fetched(source, batch, updates)
    assert replayer.possible(30)
    batch.add_(1)  # never before, and so not expected
    assert not replayer.possible(30)


def test_random_state_is_taken_anew_once_steps_are_seen_to_draw() -> None:
    replayer, source = Handouts(), Source()

    def step(i: int) -> room.RandomState:
        random = replayer.fetched(source, torch.zeros(2), i).random
        if i >= 20:
            torch.rand(1)
        replayer.body_ended()
        return random

    states = [step(i) for i in range(96)]
    assert states[1] == states[19]  # nobody drew
    for i in range(65, 95):
        states[i].restore()
        torch.rand(1)
        assert torch.get_rng_state().equal(states[i + 1].cpu)


def test_what_is_handed_out_step_by_step_is_what_a_replay_gives_out() -> None:
    replayer, source = Handouts(), Source()
    for updates in range(70):
        batch = (torch.full((2,), float(updates)), torch.zeros(1))
        for _ in range(updates % 3):
            batch[1].add_(1)  # the dataset's own business
        replayer.sampled(source, [updates, -updates])
        replayer.fetched(source, batch, updates)
        replayer.body_ended()
        assert replayer.possible(updates + 1)
        [[handout]] = replayer.of_this_step()
        assert handout.batch is batch
        assert (handout.index, handout.updates, handout.indices) == (updates, updates, [updates, -updates])
        if updates % 9 == 0:  # a replay leaves nothing behind for the next batch
            replayer.begin(source, updates)
            assert replayer.again(source).pristine[0].tolist() == [updates] * 2
            replayer.replaying = False
        else:
            assert handout.pristine is None


def test_several_batches_of_a_step_are_all_kept() -> None:
    replayer, source = Handouts(), Source()
    for updates in range(40):
        replayer.fetched(source, torch.zeros(1), updates)
    for i in range(3):
        replayer.fetched(source, torch.ones(1) * i, 40)
    [step] = replayer.of_this_step()
    assert [h.batch.item() for h in step] == [0, 1, 2]
