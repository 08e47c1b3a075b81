"""The magnitudes of layers over the last steps."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterable
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import nn

from firstnan.engine.journal import Phase, Statistics


def filled(steps: int = 100, **layers: Iterable[float]) -> Statistics:
    """One row a step for each layer, `__` in a name standing for a dot; a name in capitals is backward."""
    stats = Statistics(steps)
    for name, sizes in layers.items():
        phase: Phase = "backward" if name.isupper() else "forward"
        for step, size in enumerate(sizes):
            stats.add(step, name.lower().replace("__", "."), phase, 2 * size, -size, size / 2)
    return stats


# --- rows ------------------------------------------------------------------------------------------------------


def test_a_row_has_norm_and_range() -> None:
    stats = Statistics(4)
    stats.add(3, "fc", "forward", 5.0, -4.0, 3.0)
    expected = {"layer": "fc", "phase": "forward", "step": 3, "norm": 5.0, "max_abs": 4.0, "min": -4.0, "max": 3.0}
    assert stats.dump() == [expected]


def test_only_the_last_steps_are_kept() -> None:
    stats = filled(3, a=range(10), A=range(5))
    assert [(r["phase"], r["step"]) for r in stats.dump()] == [
        ("forward", 7), ("forward", 8), ("forward", 9), ("backward", 2), ("backward", 3), ("backward", 4),
    ]  # fmt: skip


def test_calls_of_one_step_become_the_whole_of_them() -> None:
    """As if the outputs of all calls had been one tensor."""
    torch.manual_seed(0)
    calls = [torch.randn(7) * 10**k for k in range(4)]
    stats = Statistics(2)
    for step in range(2):
        for x in calls:
            stats.add(step, "rnn", "forward", x.norm().item(), x.min().item(), x.max().item())
    whole = torch.cat(calls)
    rows = stats.dump()
    assert [r["step"] for r in rows] == [0, 1]
    assert rows[1]["norm"] == pytest.approx(whole.norm().item())
    assert (rows[1]["min"], rows[1]["max"]) == (whole.min().item(), whole.max().item())
    assert rows[1]["max_abs"] == whole.abs().max().item()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("order", [0, 1])
def test_a_non_finite_call_is_not_lost_in_the_step(bad: float, order: int) -> None:
    stats = Statistics(2)
    for value in [bad, 1.0][:: -1 if order else 1]:
        stats.add(0, "a", "forward", abs(value), value, value)
    (row,) = stats.dump()
    assert not math.isfinite(row["max_abs"])
    assert not math.isfinite(row["norm"])
    for key, end in (("min", min(bad, 1.0)), ("max", max(bad, 1.0)), ("max_abs", abs(bad))):
        assert repr(row[key]) == repr(bad if math.isnan(bad) else end)


def test_both_infinities_are_infinite_and_no_nan() -> None:
    stats = Statistics(1)
    stats.add(0, "a", "forward", inf, -inf, inf)
    assert stats.dump()[0]["max_abs"] == inf


def test_select_by_text_or_glob() -> None:
    stats = filled(encoder__0__attn=[1], encoder__1__attn=[1], decoder__0__attn=[1], head=[1])

    def names(pattern: str | None) -> list[str]:
        return [row["layer"] for row in stats.select(pattern)]

    assert stats.layers() == ["encoder.0.attn", "encoder.1.attn", "decoder.0.attn", "head"]
    assert names("coder.0") == ["encoder.0.attn", "decoder.0.attn"]
    assert names("encoder.*") == ["encoder.0.attn", "encoder.1.attn"]
    assert names("*.[1-9].attn") == ["encoder.1.attn"]
    assert names("hea?") == ["head"]
    assert names("hea*d") == ["head"]
    assert names("ead") == ["head"]
    assert names("ead*") == names("HEAD") == []
    assert len(names(None)) == 4
    assert [r["layer"] for r in stats.dump(pattern="head")] == ["head"]


def test_dump_writes_json_lines_whole(tmp_path: Path) -> None:
    stats = filled(a=[1.0, nan], b=[inf])
    file = tmp_path / "stats.jsonl"
    file.write_text("old")
    rows = stats.dump(file, "a")
    assert [math.isnan(r["max_abs"]) for r in rows] == [False, True]
    read = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert [(r["layer"], r["step"], r["max_abs"], r["norm"]) for r in read] == [
        ("a", 0, 1.0, 2.0),
        ("a", 1, "nan", "nan"),
    ]
    stats.dump(str(file))
    assert '"min": "-inf"' in file.read_text().splitlines()[2]
    assert [p.name for p in tmp_path.iterdir()] == ["stats.jsonl"]
    with pytest.raises(OSError, match="No such file"):
        stats.dump(tmp_path / "missing" / "stats.jsonl")


def test_clear() -> None:
    stats = filled(a=[1, 2])
    stats.clear()
    assert (stats.dump(), stats.layers(), stats.tracks()) == ([], [], ())


def test_threads_lose_no_call() -> None:
    stats = Statistics(1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        work = [
            threading.Thread(target=lambda: [stats.add(0, "a", "forward", 1.0, 0, 1) for _ in range(2500)])
            for _ in range(4)
        ]
        for thread in work:
            thread.start()
        while any(thread.is_alive() for thread in work):
            stats.tracks(), stats.dump()
    finally:
        sys.setswitchinterval(before)
    assert stats.dump()[0]["norm"] == pytest.approx(100.0)  # the square root of 10,000 calls of norm 1


# --- tracks ----------------------------------------------------------------------------------------------------


def names_of(stats: Statistics, most: int = 6) -> list[str]:
    return [t.layer for t in stats.tracks(most)]


def test_layers_that_left_first_come_first() -> None:
    stats = filled(
        steady=[1.0] * 20,
        late=[1.0] * 15 + [10.0**k for k in range(1, 6)],
        early=[1.0] * 10 + [8.0] * 10,
        infected=[1.0] * 19 + [nan],
    )
    assert names_of(stats) == ["early", "late", "infected"]
    assert names_of(stats, 1) == ["late"]  # it grew most


def test_a_track_holds_what_was_seen() -> None:
    (track,) = filled(A=[1, 1, 1, 50, inf]).tracks()
    assert (track.layer, track.phase, track.steps) == ("a", "backward", (0, 1, 2, 3, 4))
    assert track.norm == (2, 2, 2, 100, inf)
    assert track.max_abs == (1, 1, 1, 50, inf)


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1.0],
        [nan],  # no usual size is known
        [1.0] * 9,
        [0.0] * 9,
        [1.0, 1.0, 900.0, 1.0, 1.0, 1.0],  # came back
        [1.0, 3.0, 0.5, 2.0, 1.0, 2.5, 0.7, 3.0],  # a gradient's usual ups and downs
        [9.0, 8.0, 4.0, 2.0, 1.0],  # shrank
        [inf] * 9,  # a mask, always so
        [inf, 1.0, inf, inf, nan, inf, 1.0],
        [0.0, 0.0, 1.0, 1.1, 1.2],  # a head that starts at zero
    ],
)
def test_no_track_where_nothing_grew(sizes: list[float]) -> None:
    assert filled(a=sizes).tracks() == ()


@pytest.mark.parametrize(
    "sizes",
    [
        [1.0, nan],
        [1.0, inf, inf],
        [0.0, 0.0, nan],
        [1.0, 1e3, 1e9, 1e30],
        [1.0] * 50 + [5.0],
        [1.0, nan, 1.0, 1.0, 1.0, 9.0, 99.0],  # one NaN before does not spoil the usual size
        [0.0, 0.0, 0.0, 1e-3, 1.0, 50.0],
        [1e-300, 1e-300, 1e300],
    ],
)
def test_track_where_it_grew(sizes: list[float]) -> None:
    assert names_of(filled(a=sizes)) == ["a"]


def test_infected_layers_do_not_push_out_those_that_grew() -> None:
    infected = {f"infected{i}": [1.0] * 19 + [nan] for i in range(30)}
    stats = filled(**infected, grew=[1.0] * 12 + [2.0 * 3**k for k in range(8)])
    assert names_of(stats) == ["grew", "infected0", "infected1", "infected2", "infected3", "infected4"]


def test_layers_that_rested_are_left_out() -> None:
    """A backward that has not run in the failing step is one step behind; an expert of long ago is out."""
    stats = filled(a=[1.0] * 9 + [99.0], A=[1.0] * 8 + [99.0], expert=[1.0] * 3 + [99.0])
    assert [(t.layer, t.phase) for t in stats.tracks()] == [("a", "backward"), ("a", "forward")]


def test_a_real_divergence_is_told_in_its_order() -> None:
    """A learning rate of one layer is far too high: it is that layer whose output leaves first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(
        [
            {"params": [*model[0].parameters(), *model[2].parameters()], "lr": 1e-3},
            {"params": model[4].parameters(), "lr": 3.0},
        ]
    )
    stats = Statistics(64)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    for step in range(400):
        h = x
        for name, layer in model.named_children():
            h = layer(h)
            low, high = h.aminmax()
            stats.add(step, name, "forward", h.norm().item(), low.item(), high.item())
        loss = (h - y).square().mean()
        if not torch.isfinite(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        pytest.fail("the training did not diverge")
    tracks = stats.tracks()
    assert tracks[0].layer == "4"
    assert not math.isfinite(tracks[0].max_abs[-1]) or tracks[0].max_abs[-1] > 1e15
    assert all(t.layer not in ("1", "3") for t in tracks if math.isfinite(t.max_abs[-1]))  # tanh stays below 1
