"""The world outside sees every step of the program once, whatever firstnan runs again to find its answer.

Each program runs as plain python first, which shows what it does up to its failing step, and then under firstnan, which
must do the same up to there and nothing else: no row twice, no row lost, no file, process or request of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from effects.directory_watch import DirectoryWatch
from effects.network_calls import network_calls
from effects.stage import (
    Posts,
    Reader,
    Record,
    Running,
    Stage,
    check,
    differences,
    expect,
    files,
    free_port,
    http_server,
    line_server,
    lines,
    table,
)
from firstnan.observe.ending import Stopped
from firstnan.observe.standstill import timers_stopped
from zygote import Zygote

pytest_plugins = ["zygote"]

MakeStage = Callable[[str], Stage]
Server = Callable[[], AbstractContextManager[Posts]]


@pytest.fixture
def stage(firstnan: Zygote) -> Iterator[MakeStage]:
    """Makes the stage for a program, in a folder with a short path: sockets have names of 108 characters at most."""
    with tempfile.TemporaryDirectory(prefix="fx-", ignore_cleanup_errors=True) as folder:
        yield lambda program: Stage(Path(folder), firstnan, program)


# --- files and databases ------------------------------------------------------------------------------------------


LEFT_OPEN = """
    import torch

    class Store:
        \"\"\"Writes when it is freed, as the files of many libraries do.\"\"\"
        def __init__(self):
            self.file, self.freed = open("attribute.txt", "w"), open("freed.txt", "w")
        def __del__(self):
            self.freed.write("freed ")
            self.freed.close()

    def train():
        kept = open("local.txt", "w")
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(9):
            for file in (kept, store.file, shared):
                file.write(f"{step} ")
            x = torch.rand(4, 3) + 0.1 - float(step == 5)
            optimizer.zero_grad()
            (model(x) - x.log()).square().mean().backward()
            optimizer.step()

    store, shared = Store(), open("global.txt", "w")
    train()
"""


@pytest.mark.parametrize("options", [(), ("--replay", "never")])
def test_files_that_are_left_open_are_written_when_the_program_ends(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LEFT_OPEN))
    command = [sys.executable, "-m", "firstnan", "run", "--verify", "0", *options, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    written = {path.name: path.read_text().split() for path in tmp_path.glob("*.txt")}
    rows = [str(step) for step in range(6)]
    assert written == {"attribute.txt": rows, "freed.txt": ["freed"], "global.txt": rows, "local.txt": rows}


@dataclass(frozen=True)
class Case:
    program: str
    step: int
    readers: Sequence[Reader]
    per_record: int = 1
    """How many steps a record stands for."""
    fresh: bool = False

    @property
    def last(self) -> int:
        return self.step // self.per_record


IN_FILES = [
    Case("csv_buffered.py", 17, [lines("log.csv")]),
    Case("csv_flushed.py", 11, [lines("progress.csv")]),
    Case("sqlite_journal.py", 13, [table("train.db", "select * from metrics")]),
    Case("sqlite_wal.py", 21, [table("steps.sqlite", "select * from steps")]),
    Case("clears_folder.py", 12, [files("out/step_*.pt"), lines("out/fit.txt")]),
    Case("new_folder.py", 10, [lines("runs/exp1/metrics.jsonl")]),
    Case("flock.py", 15, [lines("angles.txt")], fresh=True),
    Case("lock_file.py", 16, [lines("ratings.log")]),
    Case("log_file.py", 26, [lines("agent.log")]),
    Case("queue_process.py", 11, [lines("writer.log")]),
    Case("thread_writer.py", 16, [lines("thread.log")]),
    Case("subprocess_epoch.py", 20, [lines("uploads.txt")], per_record=5),
    Case("thread_pool_of_torch.py", 7, [lines("history.txt")]),
]


@pytest.mark.parametrize("case", IN_FILES, ids=lambda case: case.program.removesuffix(".py"))
def test_files_show_each_step_once(stage: MakeStage, case: Case) -> None:
    on = stage(case.program)
    bare = on.bare(fresh=case.fresh)
    outcome = on.run()
    wrong = [text for read in case.readers for text in differences(read(on.project), read(bare), case.last)]
    check(wrong, on.new_files(), outcome.wrong_answer(case.step), outcome.leftovers())


WITHOUT_NAMESPACES = {"csv_buffered.py", "clears_folder.py", "queue_process.py"}


@pytest.mark.parametrize(
    "case",
    [one for one in IN_FILES if one.program in WITHOUT_NAMESPACES],
    ids=lambda case: case.program.removesuffix(".py"),
)
def test_files_show_each_step_once_without_namespaces(
    stage: MakeStage, firstnan: Zygote, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "filter")  # the stage takes it from here
    test_files_show_each_step_once(stage, case)


def test_nothing_runs_again_where_that_is_forbidden(stage: MakeStage) -> None:
    """The other tests can pass: where nothing runs again, they would find nothing but the missing line."""
    on = stage("sqlite_wal.py")
    bare = on.bare()
    outcome = on.run(options=["--replay", "never", "--verify", "0"])
    read = table("steps.sqlite", "select * from steps")
    wrong = differences(read(on.project), read(bare), 21)
    check(wrong, on.new_files(), outcome.wrong_report(21, wants_line=False), outcome.leftovers())


def test_checkpoints_stay_those_of_the_unchanged_program(stage: MakeStage) -> None:
    on = stage("checkpoints.py")
    bare = on.bare()
    on.put("checkpoints/final.pt", b"of an earlier run")
    outcome = on.run()
    read, folder = files("checkpoints/step_*.pt"), on.project / "checkpoints"
    check(
        differences(read(on.project), read(bare), 8),
        expect((folder / "best.pt").read_bytes() == (bare / "checkpoints/best.pt").read_bytes(), "best.pt differs"),
        expect((folder / "final.pt").read_bytes() == b"of an earlier run", "final.pt was overwritten"),
        on.new_files(),
        outcome.wrong_answer(8),
        outcome.leftovers(),
    )


def test_a_program_that_resumes_from_its_own_checkpoint(stage: MakeStage) -> None:
    """A second run in the same folder would begin at step 14."""
    on = stage("resumes.py")
    bare = on.bare()
    outcome = on.run()
    read = lines("resumed.log")
    saved = torch.load(on.project / "state/last.pt")
    check(
        differences(read(on.project), read(bare), 20),
        expect(saved["step"] == 14, f"the checkpoint is of step {saved['step']}"),
        on.new_files(),
        outcome.wrong_answer(20),
        outcome.leftovers(),
    )


def test_a_file_mapped_into_memory(stage: MakeStage) -> None:
    """A mapping is shared with every fork: neither a mount nor another descriptor keeps a write from the file."""
    on = stage("memmap.py")
    on.put("used.dat", bytes(4 * 128))
    on.put("error.dat", bytes(4 * 128))
    bare = on.bare()
    outcome = on.run()
    assert np.fromfile(bare / "used.dat", np.int32).tolist() == [2] * 128
    used, error = np.fromfile(on.project / "used.dat", np.int32), np.fromfile(on.project / "error.dat", np.float32)
    check(
        # Steps 0 to 9, and the failing one, which counts before its loss is computed.
        expect(used.tolist() == [1] * 88 + [0] * 40, f"used: {used.tolist()}"),
        expect(bool(error[:80].all() and not error[88:].any()), f"errors: {error.tolist()}"),
        on.new_files(),
        outcome.wrong_answer(10),
        outcome.leftovers(),
    )


def test_the_event_file_of_tensorboard(stage: MakeStage) -> None:
    pytest.importorskip("tensorboard")
    on = stage("tensorboard_events.py")
    bare = on.bare()
    outcome = on.run()
    made = sorted(path.name for path in (on.project / "tb").iterdir())
    check(
        differences(_events(on.project), _events(bare), 12),
        expect(len(made) == 1, f"event files: {made}"),
        outcome.wrong_answer(12),
        outcome.leftovers(),
    )


def _events(folder: Path) -> list[Record]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        Record(event.step, (value.tag, str(value.tensor.float_val[0])))
        for path in sorted((folder / "tb").iterdir())
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


# --- the network --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "server", "step"),
    [("http_client.py", http_server, 23), ("http_urllib.py", http_server, 10), ("tcp_logger.py", line_server, 16)],
    ids=["http_client", "http_urllib", "tcp_logger"],
)
def test_a_server_hears_of_each_step_once(stage: MakeStage, program: str, server: Server, step: int) -> None:
    on = stage(program)
    with server() as bare:
        on.bare(bare.port)
    with server() as posts:
        outcome = on.run(posts.port)
    wrong = differences(posts.records, bare.records, step)
    check(wrong, on.new_files(), outcome.wrong_answer(step), outcome.leftovers())


def test_a_port_that_is_bound_at_the_start(stage: MakeStage) -> None:
    on = stage("port.py")
    bare = on.bare(free_port())
    outcome = on.run(free_port())
    read = lines("status.log")
    wrong = differences(read(on.project), read(bare), 13)
    check(wrong, on.new_files(), outcome.wrong_answer(13), outcome.leftovers())


# --- processes and threads of the program's own -------------------------------------------------------------------


def test_environments_are_asked_for_each_step_once(stage: MakeStage) -> None:
    """The program stops by itself at its failing step, step 14: all that plain python did is to be done."""
    on = stage("vector_env.py")
    bare = on.bare()
    outcome = on.run()
    wrong = []
    for number in (0, 1):
        read, count = lines(f"env{number}.log"), on.project / f"env{number}.count"
        wrong += differences(read(on.project), read(bare), 14)
        wrong += expect(len(read(on.project)) == 15, f"environment {number} was not asked 15 times")
        wrong += expect(count.exists() and count.read_text() == "15", f"environment {number} did not end as it does")
    check(wrong, on.new_files(), outcome.wrong_answer(14), outcome.leftovers())


def test_an_environment_goes_back_to_the_beginning_of_the_step(stage: MakeStage) -> None:
    """Neither the replay nor the trial of a fix runs the program from its start."""
    on = stage("rollout.py")
    bare = on.bare()
    outcome = on.run()
    read = lines("episodes.jsonl")
    wrong = differences(read(on.project), read(bare), 12) + outcome.wrong_answer(12)
    again = outcome.report["replay"] if outcome.report is not None else ""
    wrong += expect(again == "the loop's body was run again", f"replay: {again}")
    wrong += expect("the end of the loop" in outcome.stderr, f"no fix was tried at the step: {outcome.stderr}")
    check(wrong, on.new_files(), outcome.leftovers())


def test_nobody_waits_forever_for_a_program_that_was_stopped(stage: MakeStage) -> None:
    on = stage("waits_in_vain.py")
    bare = on.bare()
    outcome = on.run()
    wrong = []
    for read in (lines("thread.txt"), lines("process.txt")):
        wrong += differences(read(on.project), read(bare), 9)
        wrong += expect(len(read(on.project)) == 9, f"{len(read(on.project))} rows instead of 9")
    check(wrong, on.new_files(), outcome.wrong_answer(9), outcome.leftovers())


@pytest.mark.parametrize("how", ["thread", "pool", "fork", "spawn"])
def test_a_training_outside_the_main_thread(stage: MakeStage, how: str) -> None:
    on = stage("elsewhere.py")
    bare = on.bare(how)
    outcome = on.run(how)
    read, done = lines("steps.log"), lines("done.txt")
    if how in ("fork", "spawn"):  # another process is watched, but never ended: it may owe a result
        wrong = expect(read(on.project) == read(bare), "the other process was disturbed") + outcome.wrong_answer(8)
        fixes = outcome.report["remedies"] if outcome.report is not None else []
        wrong += expect(any(fix["failing_step_finite"] for fix in fixes), f"no fix was tried there: {fixes}")
    else:
        wrong = differences(read(on.project), read(bare), 8) + outcome.wrong_answer(8)
    if how != "pool":  # what a pool's thread raises comes out again in the main program, which ends there
        wrong += expect(len(done(on.project)) == 1, "the main program did not end as it does")
    check(wrong, on.new_files(), outcome.leftovers())


@pytest.mark.parametrize("how", ["yields", "awaits", "goes through"])
def test_a_loop_that_others_interrupt_is_not_run_from_its_start(stage: MakeStage, how: str) -> None:
    on = stage("suspended.py")
    bare = on.bare(how)
    outcome = on.run(how)
    read = lines("steps.log")
    wrong = differences(read(on.project), read(bare), 9) + outcome.wrong_answer(9)
    again = outcome.report["replay"] if outcome.report is not None else ""
    wrong += expect(again == "the loop's body was run again", f"replay: {again}")
    check(wrong, on.new_files(), outcome.leftovers())


def test_an_alarm_clock_stands_still_during_the_investigation(stage: MakeStage) -> None:
    on = stage("alarm.py")
    bare = on.bare(1000)
    outcome = on.run(1.5)
    read = lines("steps.log")
    wrong = differences(read(on.project), read(bare), 9) + outcome.wrong_answer(9)
    check(wrong, on.new_files(), outcome.leftovers())


@pytest.mark.parametrize("stopped", [False, True])
def test_an_alarm_clock_does_not_ring_while_a_stopped_program_ends(
    stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At python's end it would end the process, which has no handler any more, by a signal."""
    monkeypatch.setattr(Stopped, "process", os.getpid() if stopped else 0)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with timers_stopped():
            pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        with timers_stopped(over=True):
            pass
        assert (signal.getitimer(signal.ITIMER_REAL)[0] == 0) is stopped
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_program_that_swallows_every_exception_goes_on(stage: MakeStage) -> None:
    on = stage("swallows.py")
    read = lines("sweep.log")
    bare = read(on.bare())
    outcome = on.run()
    seen = read(on.project)
    first, second = ([record for record in seen if word in str(record.what)] for word in ("first", "second"))
    check(
        expect(second == [r for r in bare if "second" in str(r.what)], f"the healthy model: {second[8:]}"),
        expect([r.step for r in first] == list(range(30)), f"the failing model: {first}"),
        expect(first[:9] == [r for r in bare if "first" in str(r.what)][:9], f"the failing model: {first[:9]}"),
        outcome.wrong_answer(9),
        outcome.leftovers(),
    )


@pytest.mark.parametrize(("how", "bad"), [("end", 12), ("end", 19), ("finally", 12)])
def test_a_program_that_ends_with_os_exit(stage: MakeStage, how: str, bad: int) -> None:
    on = stage("os_exit.py")
    bare = on.bare(how, bad)
    outcome = on.run(how, bad)
    read = lines("exit.log")
    wrong = differences(read(on.project), read(bare), bad) + outcome.wrong_report(bad, wants_line=how == "end")
    if how == "end":  # in the other the program itself decides on the exit code
        wrong += expect(outcome.code == 3, f"exit code {outcome.code}")
    check(wrong, on.new_files(), outcome.leftovers())


# --- a detector inside the program --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "warn", "raise"])
@pytest.mark.parametrize("sink", ["csv", "sqlite", "http"])
def test_a_detector_in_the_loop(stage: MakeStage, sink: str, policy: str) -> None:
    on = stage("detector.py")
    read = {"csv": lines("rows.csv"), "sqlite": table("rows.db", "select * from rows")}.get(sink)
    with http_server() as bare_posts:
        on.bare("none", sink, "--port", bare_posts.port, fresh=sink == "csv")
    with http_server() as posts:
        outcome = on.start_plain(policy, sink, "--port", posts.port).finish()
    bare = read(on.bare_project) if read else bare_posts.records
    seen = read(on.project) if read else posts.records
    assert [record.step for record in bare] == list(range(25))
    if policy == "raise":
        wrong = differences(seen, bare, 8)
        wrong += expect("NonFiniteError" in outcome.stderr, outcome.stderr)
    else:
        wrong = expect([record.step for record in seen] == list(range(25)), f"steps: {[r.step for r in seen]}")
        wrong += expect(outcome.code == 0, outcome.stderr)
        # With "warn" the update is applied, as without a detector; with "skip" the next steps are healthy.
        same, healthy = (25, 25) if policy == "warn" else (9, 9)
        wrong += expect(seen[:same] == bare[:same], f"differs from the bare run: {seen[:same]}")
        bad = [record for record in seen[healthy:] if "nan" in str(record.what) or "inf" in str(record.what)]
        wrong += expect(not bad, f"not finite after the skip: {bad}")
    check(wrong, on.new_files(), outcome.leftovers())


# --- signals ------------------------------------------------------------------------------------------------------

FAILS_AT = 6
TESTING = "firstnan: trying"
"""The word on stderr with which the trials of fixes begin."""


def _before(run: Running, project: Path) -> None:
    begun = project / "begun.txt"
    run.wait(lambda: begun.exists() and begun.read_text().count("\n") == 4, "the fourth step")


def _replaying(run: Running, project: Path) -> None:
    """A step takes 0.15 s before its loss, so a replay and the search for samples take longer than that again."""
    begun = project / "begun.txt"
    run.wait(lambda: begun.exists() and f"\n{FAILS_AT}\n" in begun.read_text(), "the failing step")
    since = time.monotonic()
    run.wait(lambda: len(run.processes()) > 1 or time.monotonic() > since + 0.4, "the replay")
    time.sleep(0.1)


def _testing(run: Running, project: Path) -> None:
    run.wait(lambda: TESTING in run.err.read_text(), "the trials")
    run.wait(lambda: len(run.processes()) > 1, "a trial")
    time.sleep(0.3)


PHASES = {"before": _before, "replay": _replaying, "trials": _testing}
CODES = {signal.SIGINT: {-2, 130, 3}, signal.SIGTERM: {-15, 143, 3}, signal.SIGKILL: {-9}}


@pytest.mark.parametrize("batches", ["loader", "slices"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_leaves_nothing_behind(stage: MakeStage, phase: str, sent: signal.Signals, batches: str) -> None:
    if phase == "before" and batches == "slices":
        pytest.skip("nothing has run again yet: the same as with a loader")
    on = stage("slow_steps.py")
    bare = on.bare(batches, 7)
    run = on.start(batches, 27)
    PHASES[phase](run, on.project)
    assert run.process.poll() is None, f"ended before the signal\n{run.err.read_text()}"
    os.kill(run.process.pid, sent)
    outcome = run.finish(limit=60)
    wrong = _wrong_files_of_slow_steps(on, bare, interrupted=phase == "before")
    wrong += expect(outcome.code in CODES[sent], f"exit code {outcome.code}")
    if phase == "before":
        wrong += expect(outcome.code != 3, "exit code 3 before anything was found")
    elif sent is signal.SIGINT:
        wrong += outcome.wrong_report(FAILS_AT, wants_line=phase == "trials")
        wrong += expect(f"step {FAILS_AT}" in outcome.stderr, f"stderr does not tell of the step: {outcome.stderr}")
        wrong += [f"left behind: {name}" for name in outcome.left]
    check(wrong, [f"survived: {process}" for process in outcome.survivors])


def test_ctrl_c_in_a_terminal_reaches_every_process(stage: MakeStage) -> None:
    """The terminal sends it to the whole group, children included."""
    on = stage("slow_steps.py")
    bare = on.bare("loader", 7)
    run = on.start("loader", 27)
    _testing(run, on.project)
    os.killpg(run.process.pid, signal.SIGINT)
    outcome = run.finish(limit=60)
    wrong = _wrong_files_of_slow_steps(on, bare, interrupted=False)
    check(wrong, outcome.wrong_answer(FAILS_AT), outcome.leftovers())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_only_takes_note_of_a_signal(stage: MakeStage, sent: signal.Signals) -> None:
    """Ctrl-C skips the trials all the same; they would take a minute."""
    on = stage("stops_softly.py")
    run = on.start()
    _testing(run, on.project)
    began = time.monotonic()
    os.kill(run.process.pid, sent)
    outcome = run.finish(limit=60)
    wrong = expect(time.monotonic() - began < 30, "the trials went on") + outcome.wrong_answer(9)
    check(wrong, outcome.leftovers())


def _wrong_files_of_slow_steps(on: Stage, bare: Path, *, interrupted: bool) -> list[str]:
    """Up to the failing step, or to the one that was interrupted before it."""
    step = len(lines("begun.txt")(on.project)) - 1 if interrupted else FAILS_AT
    wrong = on.new_files()
    for name in ("begun.txt", "steps.csv", "saves.txt"):
        wrong += differences(lines(name)(on.project), lines(name)(bare), step, name)
    noted = (on.project / "saves.txt").read_text().split()[-1]
    saved = hashlib.md5((on.project / "last.pt").read_bytes()).hexdigest()
    return wrong + expect(saved == noted, "last.pt is not as the program left it")


# --- 500 steps, seen from outside ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [455, -1], ids=["failing", "healthy"])
def test_the_folder_sees_500_steps_once(stage: MakeStage, bad: int) -> None:
    """The kernel's own account of the folder: names created, renamed and deleted, in their order."""
    on = stage("many_steps.py")
    with http_server() as bare_posts, DirectoryWatch(on.bare_project) as bare:
        on.bare(bare_posts.port, "--bad", bad)
    with http_server() as posts, DirectoryWatch(on.project) as watch:
        outcome = on.run(posts.port, "--bad", bad)
    if bad < 0:
        wrong = expect((outcome.code, outcome.stderr) == (0, ""), f"exit code {outcome.code}, stderr: {outcome.stderr}")
        wrong += expect(watch.events == bare.events, f"{len(watch.events)} events instead of {len(bare.events)}")
        wrong += expect(posts.records == bare_posts.records, f"posts: {posts.records}")
    else:
        # A name is deleted 40 steps after it was made, and nothing is between the steps 449 and 459.
        wanted = [event for event in bare.events if event.step < bad]
        wrong = expect(watch.events == wanted, f"{len(watch.events)} events instead of {len(wanted)}")
        wrong += differences(posts.records, bare_posts.records, bad, "posts")
        wrong += outcome.wrong_answer(bad)
    wrong += _wrong_ledger(on.project, last=499 if bad < 0 else 449)
    check(wrong, on.new_files(), outcome.leftovers())


def _wrong_ledger(project: Path, last: int) -> list[str]:
    """Every file that is there is the one that the program saw when it had written it: inode, time and size."""
    entries = [json.loads(line) for line in (project / "ledger.jsonl").read_text().splitlines()]
    steps = [entry[0] for entry in entries]
    wrong = expect(steps == list(range(9, last + 1, 10)), f"ledger: {steps}")
    for _, name, *noted in entries:
        if (project / name).exists():
            seen = (project / name).stat()
            wrong += expect([seen.st_ino, seen.st_mtime_ns, seen.st_size] == noted, f"{name} was written again")
    return wrong


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("bad", [455, -1], ids=["failing", "healthy"])
def test_what_runs_again_reaches_no_network(stage: MakeStage, bad: int) -> None:
    """Only the program itself calls connect or bind on an address of the network that it shares with others."""
    on = stage("many_steps.py")
    log = on.root / "strace.txt"
    watched = "trace=connect,bind,sendto,unshare,setns,clone,clone3,fork,vfork"
    options = ["-f", "--seccomp-bpf", "--pidns-translation", "-o", str(log), "-e", watched, "-e", "signal=none"]
    with http_server() as posts:
        outcome = on.start(posts.port, "--bad", bad, prefix=["strace", *options]).finish()
    calls = network_calls(log.read_text())
    assert len(calls.of_main) >= 4, "strace saw no connect of the program itself"
    check(
        [f"outside its own network: {call}" for call in calls.of_others],
        expect(len(posts.records) == (5 if bad < 0 else 4), f"posts: {posts.records}"),
        expect(outcome.code == (0 if bad < 0 else 3), f"exit code {outcome.code}, stderr: {outcome.stderr}"),
    )
