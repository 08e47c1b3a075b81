"""A process that cannot be forked replays its loop itself: what the loop writes is discarded, or it is not replayed."""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.engine import isolation
from firstnan.observe import write_guard
from firstnan.observe.write_guard import WriteGuard, unguarded

BAD = 3


@pytest.fixture(autouse=True)
def _cannot_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that uses CUDA, and without the files that pytest keeps open for the output of the tests."""
    monkeypatch.setattr(isolation, "unavailable", lambda: "a process that uses CUDA cannot be forked")
    written, of_pytest = write_guard._written_files, set(write_guard._written_files())
    monkeypatch.setattr(write_guard, "_written_files", lambda: [n for n in written() if n not in of_pytest])


def batches() -> list[torch.Tensor]:
    made = [torch.rand(8, 4) + 0.5 for _ in range(6)]
    made[BAD][5, 2] = -1.0
    return made


def found_by(write: Any) -> Any:
    """Trains with a loop that calls `write(step)` in its body, until the detector raises."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for step, x in enumerate(detector.batches(batches())):
            write(step)
            loss = (model(x) * x.log().sum(1, keepdim=True)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return caught.value.report


def test_each_step_is_written_once(tmp_path: Path) -> None:
    kept = (tmp_path / "kept.csv").open("w", newline="")
    rows, log = csv.writer(kept), tmp_path / "log.txt"
    (tmp_path / "runs").mkdir()

    def write(step: int) -> None:
        rows.writerow([step])
        with log.open("a") as file:
            file.write(f"{step}\n")
        torch.save({"step": torch.tensor(step)}, tmp_path / "last.pt")
        os.rename(tmp_path / "last.pt", tmp_path / f"step{step}.pt")
        shutil.rmtree(tmp_path / "runs")
        os.makedirs(tmp_path / "runs" / str(step))
        subprocess.run([sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'a').write('{step} ')"], check=True)

    report = found_by(write)
    kept.close()
    once = [str(step) for step in range(BAD + 1)]
    assert (tmp_path / "kept.csv").read_text().split() == once
    assert log.read_text().split() == once
    assert (tmp_path / "started").read_text().split() == once
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"step{step}.pt" for step in once]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [str(BAD)]
    assert (report.origin.op, report.batch.bad_samples) == ("log", (5,))
    assert any("what Python code wrote meanwhile was discarded" in note for note in report.notes)


@contextlib.contextmanager
def database(folder: Path) -> Iterator[Any]:
    connection = sqlite3.connect(folder / "metrics.db")
    connection.execute("create table steps (step integer)")

    def write(step: int) -> None:
        connection.execute("insert into steps values (?)", (step,))
        connection.commit()

    yield write
    connection.close()


@contextlib.contextmanager
def thread(folder: Path) -> Iterator[Any]:
    waiting: queue.Queue[int | None] = queue.Queue()
    with (folder / "log").open("w") as file:

        def work() -> None:
            while (step := waiting.get()) is not None:
                print(step, file=file, flush=True)

        worker = threading.Thread(target=work)
        worker.start()
        yield waiting.put
        waiting.put(None)
        worker.join()


@pytest.mark.parametrize(("kind", "why"), [(database, "a database open"), (thread, "its other threads may write")])
def test_a_loop_that_cannot_be_guarded_is_not_replayed(tmp_path: Path, kind: Any, why: str) -> None:
    written = []
    with kind(tmp_path) as write:

        def body(step: int) -> None:
            written.append(step)
            write(step)

        report = found_by(body)
    assert written == list(range(BAD + 1))
    assert report.step == BAD
    assert any(why in note and "--isolation off" in note for note in report.notes)


def test_what_can_be_guarded_is(tmp_path: Path) -> None:
    assert unguarded() == ""
    with (tmp_path / "open").open("w"):
        assert unguarded() == ""
    number = os.open(tmp_path / "by a library", os.O_WRONLY | os.O_CREAT)
    assert "only its owner may write" in unguarded()
    os.close(number)


def test_text_in_buffers_arrives_and_what_comes_after_is_in_order(tmp_path: Path) -> None:
    guard = WriteGuard(lambda code: code.co_filename == __file__)
    with (tmp_path / "text").open("w") as file:
        file.write("before ")
        guard.begin()
        file.write("meanwhile ")
        (tmp_path / "new").write_text("meanwhile")
        guard.end()
        file.write("after")
    assert (tmp_path / "text").read_text() == "before after"
    assert not (tmp_path / "new").exists()
