"""A forked or started child can change nothing outside itself, and goes with its parent."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from firstnan.engine import isolation, second_run
from firstnan.engine.isolation import Channel, IsolationError, Started
from firstnan.engine.second_run import Start
from firstnan.observe import forked, manifest
from firstnan.observe.forked import NotContinued, end_thread_pools, keep_indices
from firstnan.observe.runner import Program
from firstnan.repair.verdict import Reach

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no isolation elsewhere")


@pytest.fixture(params=["root", "user"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; as root, and as a user without rights, who needs a namespace of his own."""
    monkeypatch.setenv("FIRSTNAN_ISOLATION", request.param)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_child(act: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `act` returns in a forked child; an error there is raised here."""
    child = isolation.fork()
    assert child is not None, isolation.unavailable()
    if isinstance(child, Channel):
        try:
            child.send(("returned", act()))
        except BaseException as error:
            child.send(("raised", f"{type(error).__name__}: {error}"))
        child.leave()
    try:
        messages = list(child.receive(seconds))
    finally:
        child.end()
    assert messages, "the child said nothing"
    kind, value = messages[-1]
    assert kind == "returned", value
    return value


def test_files_that_a_child_writes_are_gone_with_it(place: Path) -> None:
    (place / "kept").mkdir()
    (place / "kept" / "old.txt").write_text("old")

    def change() -> list[str]:
        Path("new.txt").write_text("new")
        Path("kept/old.txt").write_text("changed")
        torch.save({"a": 1}, "kept/state.pt")  # written by C++
        os.rename("kept/old.txt", "moved.txt")
        shutil.rmtree("kept")
        os.makedirs("kept/again")
        return sorted(os.listdir()) + os.listdir("kept")

    assert in_child(change) == ["kept", "moved.txt", "new.txt", "again"]
    assert os.listdir(place) == ["kept"]
    assert (place / "kept" / "old.txt").read_text() == "old"
    assert os.listdir(place / "kept") == ["old.txt"]


def test_an_open_file_is_written_once_by_each(place: Path) -> None:
    with open("log.csv", "w") as log:
        log.write("before\n")
        log.flush()
        log.write("pending\n")

        def write() -> int:
            log.write("child\n")
            log.flush()
            return log.tell()

        assert in_child(write) == len("before\npending\nchild\n")
        log.write("parent\n")
    assert Path("log.csv").read_text() == "before\npending\nparent\n"


def test_reading_moves_nobody_elses_position(place: Path) -> None:
    Path("data.txt").write_text("0123456789")
    number = os.open("data.txt", os.O_RDONLY)
    os.read(number, 3)
    assert in_child(lambda: os.read(number, 3)) == b"345"
    assert os.read(number, 3) == b"345"
    os.close(number)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_an_open_database(place: Path, mode: str) -> None:
    with contextlib.closing(sqlite3.connect("runs.db")) as database:
        database.execute(f"pragma journal_mode={mode}")
        database.execute("create table steps (n)")
        database.execute("insert into steps values (1)")
        database.commit()

        def insert() -> list[Any]:
            database.execute("insert into steps values (2)")
            database.commit()
            return database.execute("select n from steps").fetchall()

        assert in_child(insert) == [(1,), (2,)]
        assert database.execute("select n from steps").fetchall() == [(1,)]


def test_shared_memory_is_the_childs_own(place: Path) -> None:
    mapped = numpy.memmap("numbers.dat", dtype="float32", mode="w+", shape=(10,))
    mapped[:] = 1
    shared = torch.zeros(10).share_memory_()

    def fill() -> float:
        mapped[:] = 5
        mapped.flush()
        shared.fill_(3)
        return float(mapped.sum()) + float(shared.sum())

    assert in_child(fill) == 80.0
    assert (float(mapped.sum()), float(shared.sum())) == (10.0, 0.0)
    assert numpy.fromfile("numbers.dat", dtype="float32").sum() == 10.0


def test_pipes_and_sockets_lead_nowhere(place: Path) -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()

    def talk() -> tuple[bytes, bytes]:
        with contextlib.suppress(OSError):
            ours.send(b"child")
        with contextlib.suppress(OSError):
            os.write(writing, b"child")
        return ours.recv(5), os.read(reading, 5)

    theirs.send(b"hello")
    os.write(writing, b"hello")
    assert in_child(talk) == (b"", b"")
    assert (ours.recv(5), os.read(reading, 5)) == (b"hello", b"hello")


def test_what_goes_nowhere_is_taken_as_if_it_arrived(place: Path) -> None:
    """However much it is: the program would otherwise meet an error, or wait, that it does not have outside."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()

    def talk() -> int:
        for _ in range(50):
            ours.sendall(bytes(100_000))
        return sum(os.write(writing, bytes(100_000)) for _ in range(50))

    assert in_child(talk) == 5_000_000
    theirs.setblocking(False)
    os.set_blocking(reading, False)
    for read in (lambda: theirs.recv(5), lambda: os.read(reading, 5)):
        with pytest.raises(BlockingIOError):
            read()


def test_nothing_outside_is_reached_and_ports_are_free(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> tuple[bytes, bool]:
            with socket.create_server(("127.0.0.1", port)):
                pass
            with pytest.raises(ConnectionError):
                socket.create_connection(("127.0.0.1", port), timeout=2)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/log", data=b"1") as answer:
                return answer.read(), True

        assert in_child(serve) == (b"{}", True)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_file_that_cannot_be_copied_is_not_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(isolation, "_private_copy", full)
    with open("log.csv", "w") as log:
        log.write("before\n")
        log.flush()
        in_child(lambda: os.write(log.fileno(), b"child\n"))
    assert Path("log.csv").read_text() == "before\n"


def test_a_socket_in_the_file_system_is_not_reached(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("server.sock")
        server.listen()

        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect("server.sock")
                except OSError as error:
                    return type(error).__name__
            return "connected"

        assert in_child(connect) == "ConnectionRefusedError"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More than the tests usually have: with one there is no pool of threads that a fork could lose."""
    if not end_thread_pools():
        pytest.skip("the OpenMP of this torch cannot end its threads, so a child has one")
    monkeypatch.setattr(isolation, "_IDLE", 3.0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_random_numbers_and_threads_are_those_of_the_parent(place: Path, two_threads: None) -> None:
    random.seed(3)
    x = torch.randn(600, 600)
    expected = (x @ x).sum()  # starts the threads that compute

    def draw() -> tuple[float, float, bool, int]:
        return random.random(), float(torch.rand(1)), bool((x @ x).sum() == expected), torch.get_num_threads()

    first, second = in_child(draw), in_child(draw)
    assert first == second
    assert first[2:] == (True, torch.get_num_threads())
    assert first[:2] == (random.random(), float(torch.rand(1)))


def test_nobody_waits_for_threads_that_are_gone(place: Path) -> None:
    waiting: queue.Queue[int] = queue.Queue(maxsize=2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def work() -> tuple[int, int]:
            for i in range(5):
                waiting.put(i)
            waiting.join()
            time.sleep(60)
            return waiting.qsize(), pool.submit(lambda: 7).result(timeout=5)

        began = time.monotonic()
        assert in_child(work) == (2, 7)
        assert time.monotonic() - began < 10


def test_a_queue_is_emptied_by_nobody_though_a_pool_has_threads_again(place: Path) -> None:
    waiting: queue.Queue[int] = queue.Queue(maxsize=2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def work() -> tuple[int, list[int]]:
            pool.submit(lambda: 7).result()
            for i in range(5):
                waiting.put(i)
            new: queue.Queue[int] = queue.Queue(maxsize=1)
            threading.Thread(target=lambda: [new.put(i) for i in range(4)], daemon=True).start()
            return waiting.qsize(), [new.get() for _ in range(4)]

        assert in_child(work) == (2, [0, 1, 2, 3])


@pytest.mark.parametrize("pool_is_busy", [False, True])
def test_what_a_thread_of_the_parent_would_give_ends_a_wait_at_once(
    place: Path, pool_is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_PATIENCE", 0.2)
    items: queue.Queue[int] = queue.Queue()
    event, result = threading.Event(), Future[int]()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def work() -> list[str]:
            if pool_is_busy:
                pool.submit(int).result()
            told = []
            for wait in (items.get, event.wait, result.result):
                with contextlib.suppress(TimeoutError):
                    wait()
                    told.append(str(wait))
            return told

        assert in_child(work) == []


def test_worker_processes_stay_with_the_parent(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child computes the batches that they have fetched ahead, and those after them."""
    choose = _BaseDataLoaderIter._next_index

    def chosen(self: Any) -> Any:
        indices = choose(self)
        keep_indices(self, indices)
        return indices

    monkeypatch.setattr(_BaseDataLoaderIter, "_next_index", chosen)
    data = TensorDataset(torch.arange(40.0))
    batches = iter(DataLoader(data, batch_size=4, num_workers=2))
    first = next(batches)[0].tolist()

    def rest() -> tuple[list[float], int]:
        following = [x for (batch,) in batches for x in batch.tolist()]
        return following, sum(1 for _ in DataLoader(data, batch_size=4, num_workers=2))

    following, all_of_them = in_child(rest)
    assert first + following == list(range(40))
    assert all_of_them == 10
    assert first + [x for (batch,) in batches for x in batch.tolist()] == list(range(40))


def test_batches_that_only_the_workers_know_are_not_made_up(place: Path) -> None:
    batches = iter(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=2))
    next(batches)

    def rest() -> str:
        try:
            next(batches)
        except NotContinued as reason:
            return str(reason)
        return ""

    assert in_child(rest) == "which batches its worker processes have prepared is not known"


def test_processes_of_the_child_end_with_it(place: Path) -> None:
    def start() -> int:
        subprocess.Popen(["sleep", "1000"])
        return os.getpid()

    before = set(processes("sleep"))
    in_child(start)
    time.sleep(0.2)
    assert set(processes("sleep")) == before


def test_a_child_finds_its_processes_in_proc(place: Path) -> None:
    def find() -> bool:
        process = subprocess.Popen(["sleep", "1000"])
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())

    assert in_child(find)


def test_a_child_that_waits_for_nothing_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_IDLE", 1.0)
    child = isolation.fork()
    if isinstance(child, Channel):
        signal.pause()
    assert child is not None
    began = time.monotonic()
    assert list(child.receive(60.0)) == []
    assert child.stuck
    child.end()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_dies_with_its_parent(tmp_path: Path, sent: signal.Signals) -> None:
    code = (
        "import sys, time\nfrom firstnan.engine import isolation\nchild = isolation.fork()\n"
        "if isinstance(child, isolation.Channel):\n    while True: sum(range(10000))\n"
        "print('forked', flush=True)\nlist(child.receive(1000))\n"
    )
    mark = f"firstnan-test-{os.getpid()}-{sent}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MARK": mark}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"forked\n"
        assert len(list(marked(mark))) == 3  # the parent, the child, and the process that made its namespaces
        parent.send_signal(sent)
        parent.wait(timeout=10)
        until = time.monotonic() + 10
        while list(marked(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not list(marked(mark))


def test_a_started_program_is_apart_but_for_what_is_shared(place: Path) -> None:
    (place / "shared").mkdir()
    code = (
        "import os, sys; open('mine.txt', 'w'); open('shared/out.txt', 'w').write('x'); "
        "os.write(int(sys.argv[1]), os.getcwd().encode())"
    )
    with open("answer", "w+b") as answer:
        words = [sys.executable, "-c", code, str(answer.fileno())]
        child = Started(words, dict(os.environ), str(place), keep=answer.fileno(), shared=[str(place / "shared")])
        assert child.wait(30.0)
        child.end()
        answer.seek(0)
        assert answer.read().decode() == str(place)
    assert sorted(os.listdir(place)) == ["answer", "shared"]
    assert (place / "shared" / "out.txt").read_text() == "x"


def test_a_started_program_does_not_see_what_was_created_since(place: Path) -> None:
    (place / "data").mkdir()
    (place / "data" / "old.txt").touch()
    since = (place / "data" / "old.txt").stat().st_mtime + 0.02
    time.sleep(0.1)
    (place / "data" / "last.pt").touch()
    (place / "data" / "old.txt").write_text("changed")
    (place / "shared").mkdir()
    (place / "runs" / "1").mkdir(parents=True)
    code = "import os, sys; os.write(int(sys.argv[1]), ' '.join(sorted(os.listdir() + os.listdir('data'))).encode())"
    with open("/dev/shm/answer", "w+b") as answer:
        os.unlink("/dev/shm/answer")
        words = [sys.executable, "-c", code, str(answer.fileno())]
        child = Started(
            words,
            dict(os.environ),
            str(place),
            keep=answer.fileno(),
            shared=[str(place / "shared")],
            without_new=([str(place)], since),
        )
        assert child.wait(30.0)
        child.end()
        answer.seek(0)
        assert answer.read().decode() == "data old.txt shared"
    assert sorted(os.listdir(place / "data")) == ["last.pt", "old.txt"]
    assert sorted(os.listdir(place)) == ["data", "runs", "shared"]


def test_nothing_is_hidden_where_the_files_are_the_users_own(place: Path) -> None:
    (place / "new.txt").touch()
    isolation._hide_new({str(place): place.stat().st_dev}, 0.0, ())
    assert (place / "new.txt").exists()


def test_a_started_program_reads_the_same_file_as_standard_input(place: Path) -> None:
    (place / "rows.txt").write_text("taken before; first; second")
    code = "import os, sys; os.write(int(sys.argv[1]), sys.stdin.buffer.read())"
    usual = os.dup(0)
    try:
        with open("answer", "w+b") as answer, open("rows.txt", "rb") as rows:
            os.dup2(rows.fileno(), 0)
            os.lseek(0, 14, os.SEEK_SET)
            start = Start()
            os.read(0, 6)  # by the program itself
            words = [sys.executable, "-c", code, str(answer.fileno())]
            child = Started(words, {}, str(place), keep=answer.fileno(), reads_from=start.reads_from)
            assert child.wait(30.0)
            child.end()
            answer.seek(0)
            assert answer.read() == b"first; second"
            assert os.read(0, 99) == b" second"
    finally:
        os.dup2(usual, 0)
        os.close(usual)


def test_what_a_program_lacks_without_its_new_files_is_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have downloaded its data, which it cannot do again."""
    start, hidden = Start(), list[bool]()

    def run_once(program: Any, order: Any, seconds: float, isolated: bool, *started: Any) -> tuple[Any, bool]:
        hidden.append(start._hides_new)
        return {"passed": 0, "error": "URLError"} if start._hides_new else {"passed": 9}, True

    monkeypatch.setattr(start, "_run_once", run_once)
    for _ in range(2):
        data, _ = start.try_out(Program("train.py", ()), {}, step=3, reach=Reach(9), seconds=1.0)
        assert data == {"passed": 9}
    assert hidden == [True, False, False]


def test_a_program_is_said_to_run_only_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **settings: Any) -> None:
        raise IsolationError("FIRSTNAN_ISOLATION=filter")

    monkeypatch.setattr(second_run, "Started", refused)
    said: list[str] = []
    with pytest.raises(IsolationError):
        Start().run_again(
            Program("train.py", ()), step=3, what="step", seconds=1.0, started=lambda: said.append("runs again")
        )
    assert not said


def test_what_a_child_waits_for_a_processor_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], [7.0]
    monkeypatch.setattr(isolation.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(isolation, "kept_waiting", lambda process: waited[0])
    monkeypatch.setattr(isolation, "_with_children", lambda process: [process])
    left = isolation.TimeLeft(1, 20.0)
    over = []
    for passed, kept in ((19.0, 0.0), (21.0, 0.0), (60.0, 45.0), (60.0, 39.0), (81.0, 80.0)):
        now[0], waited[0] = 100.0 + passed, 7.0 + kept
        over.append(left.is_over())
    assert over == [False, True, False, True, True]  # at last, whoever is to blame


def test_what_was_read_of_a_pipe_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, (reading, writing) = os.dup(0), os.pipe()
    try:
        os.write(writing, b"lr=0.1\n")
        os.dup2(reading, 0)
        start = Start()
        lost = [start.has_lost_input(), os.read(0, 99) and start.has_lost_input()]
    finally:
        os.dup2(kept, 0)
        for number in (kept, reading, writing):
            os.close(number)
    assert lost == [False, True]


def test_a_program_that_cannot_be_started_says_why(place: Path) -> None:
    with open("answer", "w+b") as answer, pytest.raises(IsolationError, match="No such file"):
        Started([str(place / "missing")], {}, str(place), keep=answer.fileno())


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "off")
    assert isolation.unavailable() == "FIRSTNAN_ISOLATION=off"
    assert isolation.fork() is None
    monkeypatch.delenv("FIRSTNAN_ISOLATION")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isolation.unavailable() == "there is no isolation on darwin"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert isolation.unavailable() == "a process that uses CUDA cannot be forked"


def test_a_system_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_because", [])

    def refuse(*args: Any) -> None:
        raise IsolationError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(isolation, "change_nothing", refuse)
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "filter")
    assert isolation.fork() is None
    assert "unshare: Operation not permitted" in isolation.unavailable()


@pytest.mark.parametrize("kind", ["user", "filter"])
def test_a_child_replaces_what_the_manifest_names(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTNAN_ISOLATION", kind)
    names = {(module, name) for module, name in (*manifest.FORKED, *manifest.FILTERED)}
    modules = [importlib.import_module(one) for one in sorted({module for module, _ in names})]

    def all_of_them() -> dict[tuple[str, str], Any]:
        found = {}
        for module in modules:
            for name, value in vars(module).items():
                if module is threading and name.startswith("_"):
                    continue  # Python's own, made anew in a forked process
                found[module.__name__, name] = value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    found |= {(module.__name__, f"{name}.{inner}"): one for inner, one in vars(value).items()}
        return found

    before = all_of_them()
    changed = in_child(lambda: [name for name, value in all_of_them().items() if before.get(name) is not value])
    assert set(changed) == (names if kind == "filter" else set(manifest.FORKED))


# --- without namespaces ---------------------------------------------------------------------------------------------


@pytest.fixture
def filtered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a system that allows no namespaces."""
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "filter")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_filtered_child_changes_no_file_and_goes_on(filtered: Path) -> None:
    (filtered / "kept").mkdir()
    (filtered / "kept" / "old.txt").write_text("old")

    def change() -> tuple[str, list[str]]:
        Path("new.txt").write_text("new")
        torch.save({"a": 1}, "kept/state.pt")
        os.makedirs("runs/7", exist_ok=True)
        os.rename("kept/old.txt", "moved.txt")
        shutil.rmtree("kept", ignore_errors=True)
        with open("kept/old.txt", "r+") as file:
            return file.read(), sorted(os.listdir())

    assert in_child(change) == ("old", ["kept"])
    assert os.listdir(filtered) == ["kept"]
    assert (filtered / "kept" / "old.txt").read_text() == "old"
    assert os.listdir(filtered / "kept") == ["old.txt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_files_beside_a_mounted_folder_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may not cover the folder that holds both; the child gets a copy of the file."""
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "user")
    (tmp_path / "mounted").mkdir()
    log = tmp_path / "log.txt"
    log.write_text("old ")
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "mounted"], check=False).returncode:
        pytest.skip("mounts are not allowed here")

    def write() -> str:
        with open(log, "a") as file:
            file.write("new")
        return log.read_text()

    try:
        assert in_child(write) == "old new"
        assert log.read_text() == "old "
    finally:
        subprocess.run(["umount", "-l", tmp_path / "mounted"], check=True)


def test_a_filtered_child_mounts_nothing(filtered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the system's view: root would mount there, and that would stay."""

    def mount(*args: Any) -> None:
        raise AssertionError("mounted")

    monkeypatch.setattr(isolation, "_mount", mount)
    assert in_child(lambda: 7) == 7


def _errors_of_isolation() -> list[bool]:
    found = []
    for act in (
        lambda: os.waitpid(os.fork() or os._exit(0), 0),
        lambda: subprocess.check_call(["true"]),
        lambda: os.chdir(os.mkdir("new") or "new"),
    ):
        try:
            act()
            found.append(False)
        except OSError as error:
            found.append(isolation.is_of_isolation(error))
    return found


def test_what_a_filtered_child_is_refused_is_no_error_of_the_program(filtered: Path) -> None:
    assert in_child(_errors_of_isolation) == [True] * 3


def test_a_missing_file_is_an_error_of_the_program(place: Path) -> None:
    def missing() -> bool:
        try:
            os.chdir("missing")
        except OSError as error:
            return isolation.is_of_isolation(error)
        return True

    assert in_child(_errors_of_isolation) == [False] * 3
    assert in_child(missing) is False


def test_a_filtered_child_reaches_nobody(filtered: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:

        def reach() -> list[str]:
            attempts: list[Callable[[], object]] = [
                lambda: socket.socket(),
                lambda: os.kill(other.pid, signal.SIGKILL),
                lambda: subprocess.run(["true"]),
                lambda: os.fork(),
                lambda: sqlite3.connect("new.db").execute("create table a (b)"),
            ]
            failed = []
            for attempt in attempts:
                try:
                    attempt()
                except (OSError, sqlite3.Error) as error:
                    failed.append(type(error).__name__)
            return failed

        found = in_child(reach)
        alive = other.poll() is None
        other.kill()
    assert found == ["PermissionError", "PermissionError", "BlockingIOError", "BlockingIOError", "OperationalError"]
    assert alive
    assert os.listdir(filtered) == []


def test_a_filtered_child_computes_and_loads_as_the_parent_does(filtered: Path, two_threads: None) -> None:
    x = torch.randn(600, 600)
    expected = (x @ x).sum()
    data = TensorDataset(torch.arange(40.0))

    def work() -> tuple[bool, int, int]:
        count = sum(1 for _ in DataLoader(data, batch_size=4, num_workers=2))
        return bool((x @ x).sum() == expected), torch.get_num_threads(), count

    assert in_child(work) == (True, 2, 10)
    with pytest.raises(IsolationError), open("answer", "w+b") as answer:
        Started([sys.executable, "-c", ""], {}, str(filtered), keep=answer.fileno())


def processes(name: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                yield int(entry.name)


def marked(mark: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name)


def test_ctrl_c_during_a_fork_arrives() -> None:
    """Python ignores what functions raise that run around a fork, such as those of `logging`."""
    sent: list[int] = []

    def interrupt() -> None:
        if not sent:
            sent.append(os.getpid())
            os.kill(os.getpid(), signal.SIGINT)

    os.register_at_fork(before=interrupt)
    with pytest.raises(KeyboardInterrupt):
        isolation.fork()
    assert in_child(lambda: signal.getsignal(signal.SIGINT) == signal.SIG_IGN)


def test_other_http_clients_are_answered_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """urllib3, and so `requests`, connects in its own way."""

    class Own(http.client.HTTPConnection):
        def connect(self) -> None:
            raise OSError("no network")

    own = ModuleType("urllib3.connection")
    own.__dict__.update(HTTPConnection=Own, HTTPSConnection=Own)
    monkeypatch.setitem(sys.modules, "urllib3.connection", own)

    def ask() -> list[bool]:
        client, missing = Own("localhost"), []
        for _ in range(2):
            client.request("POST", "/", b"1")
            answer = json.loads(client.getresponse().read())
            try:
                answer["id"]
            except KeyError as error:
                missing.append(isolation.is_of_isolation(error))
        return missing

    assert in_child(ask) == [True, True]
    assert not isolation.is_of_isolation(KeyError("id"))
