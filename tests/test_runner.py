"""The runner compared with python: the same small programs, run both ways, must behave identically."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from firstnan.observe import runner

pytestmark = pytest.mark.slow

SOURCE = Path(runner.__file__).parents[2]

# Runs its arguments under a watcher that writes down what it is told, in the file that WATCHED names.
DRIVER = """
import os, sys
from firstnan.observe import runner

class Watcher:
    def note(self, text):
        if "WATCHED" in os.environ:
            with open(os.environ["WATCHED"], "a") as file:
                print(text, file=file)
        if text.startswith(os.environ.get("BREAK", "no such")):
            raise ValueError("two\\nlines")
    def begin(self):
        self.note(f"begin {sys.argv} {'torch' in sys.modules}")
    def replays_here(self):
        return False
    def failed(self, error):
        first = error.__traceback__ and error.__traceback__.tb_frame.f_code.co_name
        self.note(f"failed {type(error).__name__} {first}")
    def end(self):
        self.note("end")
        return int(os.environ["REPLACE"]) if "REPLACE" in os.environ else None

words = sys.argv[1:]
module = words[0] == "-m"
if module:
    del words[0]
try:
    code = runner.run(runner.Program(words[0], tuple(words[1:]), module), Watcher())
except runner.ProgramError as error:
    print(f"firstnan: {error}", file=sys.stderr)
    code = error.code
runner.exit_process(code)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Case:
    """One program: its text, and how it is called."""

    text: str
    args: tuple[str, ...] = ()
    code: int = 0
    encoding: str = "utf-8"


class Both:
    """Runs a command with python and with the runner, in a directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.driver = folder / "driver" / "driver.py"
        self.driver.parent.mkdir()
        self.driver.write_text(DRIVER)
        self.watched = folder / "watched.txt"

    def write(self, name: str, text: str, encoding: str = "utf-8") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(textwrap.dedent(text).lstrip("\n").encode(encoding))

    def call(self, words: list[str], cwd: Path | None = None, **env: str) -> Ended:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.folder,
            env={**inherited, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=60,
        )
        # Where an object lies in memory differs from one run of python to the next.
        return Ended(done.returncode, *(re.sub(r"0x[0-9a-f]+", "0x", text) for text in (done.stdout, done.stderr)))

    def plain(self, *words: str, flags: tuple[str, ...] = (), cwd: Path | None = None, **env: str) -> Ended:
        return self.call([*flags, *words], cwd, **env)

    def ours(self, *words: str, flags: tuple[str, ...] = (), cwd: Path | None = None, **env: str) -> Ended:
        return self.call([*flags, str(self.driver), *words], cwd, WATCHED=str(self.watched), **env)

    def same(self, *words: str, flags: tuple[str, ...] = (), cwd: Path | None = None, **env: str) -> Ended:
        expected = self.plain(*words, flags=flags, cwd=cwd, **env)
        assert self.ours(*words, flags=flags, cwd=cwd, **env) == expected
        return expected

    def notes(self) -> list[str]:
        return self.watched.read_text().splitlines() if self.watched.exists() else []


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path)


CASES = {
    "argv": Case("import sys; print(sys.argv)", ("a b", "--json", "-h", "--", "-m", "")),
    "globals": Case(
        '''
        """The docstring."""
        import sys
        print([(k, v) for k, v in globals().items() if k != "__loader__"], type(__loader__), __loader__.path)
        print(sys.modules["__main__"].__dict__ is globals(), __builtins__ is sys.modules["builtins"], __name__)
        '''
    ),
    "path": Case("import sys; print(sys.path)"),
    "annotations": Case(
        "x: int = 3\nprint(__annotations__, __import__('typing').get_type_hints(__import__('__main__')))"
    ),
    "no future of ours": Case("def f(x: int): ...\nprint(f.__annotations__)"),
    "traceback": Case("def f():\n    1 / 0\nf()", code=1),
    "chained": Case(
        """
        try:
            try:
                1 / 0
            except ZeroDivisionError:
                raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error
        """,
        code=1,
    ),
    "group": Case(
        """
        def part(error):
            try:
                raise error
            except Exception as caught:
                return caught
        raise ExceptionGroup("many", [part(ValueError(1)), ExceptionGroup("in", [part(TypeError(2))])])
        """,
        code=1,
    ),
    "notes": Case("error = ValueError('x')\nerror.add_note('a note')\nraise error", code=1),
    "syntax error": Case("x = 1\ny = (2,\nz = = 3\n", code=1),
    "indentation error": Case("if True:\nx = 1\n", code=1),
    "syntax warning": Case("x = 1\nprint(x is 1)"),
    "import error": Case("import nothing_of_that_name", code=1),
    "recursion": Case("def f(n):\n    return f(n + 1)\nf(0)", code=1),
    "recursion that fits": Case(
        """
        def f(n):
            return n and f(n - 1)
        def fits(n):
            try:
                f(n)
            except RecursionError:
                return False
            return True
        print([n for n in range(980, 1010) if fits(n)])
        """
    ),
    "exit number": Case("import sys; sys.exit(3)", code=3),
    "exit negative": Case("import sys; sys.exit(-1)", code=255),
    "exit large": Case("import sys; sys.exit(2**70)", code=255),
    "exit 256": Case("import sys; sys.exit(256)", code=0),
    "exit true": Case("import sys; sys.exit(True)", code=1),
    "exit text": Case("import sys; sys.exit('a text')", code=1),
    "exit object": Case("raise SystemExit([1, 2])", code=1),
    "exit none": Case("import sys; sys.exit(None)", code=0),
    "exit in function": Case("def f():\n    exit(5)\nf()", code=5),
    "exit in finally": Case("try:\n    1 / 0\nfinally:\n    raise SystemExit(7)", code=7),
    "own excepthook": Case(
        "import sys\nsys.excepthook = lambda t, v, b: print('mine', t, v, b.tb_lineno, b.tb_next)\n1 / 0", code=1
    ),
    "excepthook exits": Case("import sys\nsys.excepthook = lambda *a: sys.exit(9)\nraise KeyboardInterrupt", code=9),
    "excepthook fails": Case("import sys\ndef hook(*a):\n    {}['missing']\nsys.excepthook = hook\n1 / 0", code=1),
    "excepthook missing": Case("import sys\ndel sys.excepthook\n1 / 0", code=1),
    "last value": Case(
        """
        import atexit, sys, traceback
        atexit.register(lambda: print(repr(sys.last_value), sys.last_type, traceback.format_tb(sys.last_traceback)))
        1 / 0
        """,
        code=1,
    ),
    "interrupted": Case("import atexit\natexit.register(print, 'bye')\nraise KeyboardInterrupt('now')", code=-2),
    "interrupted by a subclass": Case("class Mine(KeyboardInterrupt): ...\nraise Mine", code=1),
    "signalled": Case("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)", code=-2),
    "terminated": Case("import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)", code=-15),
    "atexit and threads": Case(
        """
        import atexit, threading, time
        class Last:
            def __del__(self):
                print("del", bool(__name__))
        last = Last()
        def late():
            time.sleep(0.2)
            print("thread", threading.main_thread().is_alive())
        atexit.register(print, "exit 1")
        atexit.register(print, "exit 2")
        threading.Thread(target=late).start()
        print("main")
        raise RuntimeError("first of all")
        """,
        code=1,
    ),
    "atexit fails": Case(
        """
        import atexit
        def bad():
            raise ValueError("at exit")
        atexit.register(print, "still")
        atexit.register(bad)
        """
    ),
    "atexit exits": Case("import atexit, sys\natexit.register(lambda: sys.exit(4))"),
    "thread fails": Case("import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start(); t.join()"),
    "thread pool": Case(
        """
        import time
        from concurrent.futures import ThreadPoolExecutor
        def work(n):
            time.sleep(0.1)
            print("work", n)
        pool = ThreadPoolExecutor(1)
        pool.submit(work, 1)
        pool.submit(work, 2)
        print("main")
        """
    ),
    "daemon": Case("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"),
    "threads and exit": Case(
        """
        import sys, threading, time
        threading.Thread(target=lambda: (time.sleep(0.1), print("late"))).start()
        sys.exit("text first")
        """,
        code=1,
    ),
    "pickle": Case(
        """
        import pickle
        class Point:
            def __init__(self, x):
                self.x = x
        print(pickle.loads(pickle.dumps(Point(3))).x, Point.__module__, Point)
        """
    ),
    "spawn": Case(
        """
        import multiprocessing, sys
        def square(x):
            return x * x, __name__, sys.argv, __spec__
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
        """,
        ("arg",),
    ),
    "fork": Case(
        """
        import multiprocessing
        def work(queue):
            queue.put(__name__)
        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(queue.get())
            child.join()
            print(child.exitcode)
        """
    ),
    "bare fork": Case(
        """
        import os, sys
        child = os.fork()
        if child == 0:
            sys.exit(6)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    ),
    "os._exit": Case("import os\nos._exit(8)", code=8),
    "broken pipe": Case(
        """
        import os, sys
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        print("nobody reads this")
        """,
        code=120,
    ),
    "stdout closed": Case("import sys\nprint('x')\nsys.stdout.close()"),
    "no stderr": Case("import sys\nsys.stderr = None\n1 / 0", code=1),
    "latin": Case("# coding: latin-1\nprint(ascii('é'))", encoding="latin-1"),
    "byte order mark": Case("print(ascii('é'))", encoding="utf-8-sig"),
    "windows lines": Case("print(1)\r\nif 1:\r\n    print('''a\r\nb''')\r\n"),
    "getsource": Case("import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))"),
    "unittest": Case(
        """
        import sys, unittest
        class T(unittest.TestCase):
            def test_one(self):
                self.assertEqual(__name__, "__main__")
        unittest.main(testRunner=unittest.TextTestRunner(stream=open("/dev/null", "w")), argv=[sys.argv[0], "T"])
        """
    ),
    "asyncio": Case("import asyncio\nasync def f():\n    raise OSError('x')\nasyncio.run(f())", code=1),
    "teardown": Case(
        """
        class Noisy:
            def __del__(self):
                print("gone")
        def f():
            noisy = Noisy()
            raise SystemExit(2)
        import atexit
        atexit.register(print, "exit")
        f()
        """,
        code=2,
    ),
    "empty": Case(""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_cannot_be_told_from_plain_python(both: Both, name: str) -> None:
    case = CASES[name]
    both.write("train.py", case.text, case.encoding)
    expected = both.plain("train.py", *case.args)
    assert expected.code == case.code  # the case does what its author thought
    assert both.ours("train.py", *case.args) == expected


def test_open_files_are_flushed_when_the_program_is_interrupted(both: Both) -> None:
    both.write("train.py", "log = open('log.txt', 'w')\nlog.write('the last words')\nraise KeyboardInterrupt")
    assert both.ours("train.py").code == -2
    assert (both.folder / "log.txt").read_text() == "the last words"


MODULE = """
    import sys
    print(sys.argv, sys.path[0], __name__, __package__, __spec__.name, __file__, __cached__)
    from pkg import helper
    if "fail" in sys.argv:
        helper.fail()
"""


@pytest.mark.parametrize("target", ["pkg.train", "pkg", "top"])
@pytest.mark.parametrize("arg", ["fine", "fail"])
def test_a_module_runs_as_with_dash_m(both: Both, target: str, arg: str) -> None:
    both.write("pkg/__init__.py", "import sys\nprint('package', sys.argv)")
    both.write("pkg/helper.py", "def fail():\n    raise ValueError('in a helper')")
    for name in ("pkg/train.py", "pkg/__main__.py", "top.py"):
        both.write(name, MODULE)
    assert both.same("-m", target, arg, "--json", "-m").code == (arg == "fail")


def test_a_module_can_spawn_and_be_interrupted(both: Both) -> None:
    both.write("pkg/__init__.py", "")
    both.write("pkg/train.py", CASES["spawn"].text + "\n        if __name__ == '__main__': raise KeyboardInterrupt")
    ended = both.same("-m", "pkg.train")
    assert ended.code == -2
    assert "__mp_main__" in ended.out


def test_an_import_error_inside_a_package_is_the_programs_own(both: Both) -> None:
    both.write("pkg/__init__.py", "import nothing_of_that_name")
    both.write("pkg/train.py", "")
    assert both.same("-m", "pkg.train").code == 1


@pytest.mark.parametrize("typed", ["app", "./app", "app/"])
@pytest.mark.parametrize("flags", [(), ("-P",)])
def test_a_directory_with_a_main_runs(both: Both, typed: str, flags: tuple[str, ...]) -> None:
    both.write(
        "app/__main__.py", "import sys, other\nprint(sys.argv, sys.path[0], __file__, __spec__.name)\nother.fail()"
    )
    both.write("app/other.py", "def fail():\n    1 / 0")
    assert both.same(typed, "x", flags=flags).code == 1


def test_a_zip_file_with_a_main_runs(both: Both) -> None:
    with zipfile.ZipFile(both.folder / "app.pyz", "w") as file:
        file.writestr("__main__.py", "import sys\nprint(sys.argv, sys.path[0], __file__)\n1 / 0")
    assert both.same("app.pyz", "x").code == 1


def test_a_compiled_file_runs(both: Both) -> None:
    both.write("train.py", "import sys\nprint(sys.argv, __file__, type(__loader__))\n1 / 0")
    both.call(["-c", "import py_compile; py_compile.compile('train.py', 'train.pyc')"])
    assert both.same("train.pyc", "x").code == 1


WHERE = "import sys\nprint(sys.argv, sys.path[0], sys.path[1:3], __file__)\n1 / 0"


@pytest.mark.parametrize("typed", ["./train.py", "../work/train.py", "deep/link.py"])
def test_paths_stay_as_typed_and_links_lead_to_the_real_directory(both: Both, typed: str) -> None:
    both.write("train.py", WHERE)
    (both.folder / "deep").mkdir()
    (both.folder / "deep" / "link.py").symlink_to(Path("..") / "train.py")
    assert str(both.folder) in both.same(typed).out


@pytest.mark.parametrize("flags", [("-P",), ("-I",), ("-O",), ("-B", "-u")])
def test_flags_of_python_keep_their_meaning(both: Both, flags: tuple[str, ...]) -> None:
    both.write("train.py", "print(__debug__)\n" + WHERE)
    # -I also hides PYTHONPATH, by which the driver finds firstnan; it is not on the plain program's path either.
    if "-I" in flags:
        both.driver.write_text(
            f"import sys; sys.path.append({str(SOURCE)!r}); import firstnan.observe.runner; del sys.path[-1]\n" + DRIVER
        )
    both.same("train.py", flags=flags)


def test_safe_path_hides_a_module_in_the_working_directory(both: Both) -> None:
    both.write("hidden.py", "")
    assert both.ours("-m", "hidden").code == 0
    assert both.ours("-m", "hidden", flags=("-P",)) == Ended(2, "", "firstnan: No module named hidden\n")


def test_safe_path_of_the_environment_is_honoured(both: Both) -> None:
    both.write("train.py", WHERE)
    assert f"'train.py'] {both.folder}" not in both.same("train.py", PYTHONSAFEPATH="1").out


@pytest.mark.parametrize("words", [("{}/train.py",), ("-m", "platform")])
def test_a_deleted_working_directory_is_no_obstacle(both: Both, words: tuple[str, ...]) -> None:
    both.write("train.py", WHERE)
    called = [word.format(both.folder) for word in words]
    script = (
        "import os, subprocess, sys, tempfile\n"
        "gone = tempfile.mkdtemp(); os.chdir(gone); os.rmdir(gone)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    expected = both.call(["-c", script, *called])
    assert both.call(["-c", script, str(both.driver), *called]) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nothing.py"], "firstnan: can't open file 'nothing.py': [Errno 2] No such file or directory"),
        (["train.py/x"], "firstnan: can't open file 'train.py/x': [Errno 20] Not a directory"),
        (["empty"], "firstnan: can't find '__main__' module in 'empty'"),
        (["-m", "nothing_of_that_name"], "firstnan: No module named nothing_of_that_name"),
        (
            ["-m", "json"],
            "firstnan: No module named json.__main__; 'json' is a package and cannot be directly executed",
        ),
    ],
)
def test_what_cannot_start_is_one_clear_line(both: Both, words: list[str], line: str) -> None:
    both.write("train.py", "")
    (both.folder / "empty").mkdir()
    assert both.ours(*words) == Ended(2, "", line + "\n")
    assert "end" not in both.notes()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_one_clear_line(both: Both) -> None:
    both.write("train.py", "")
    (both.folder / "train.py").chmod(0)
    line = "firstnan: can't open file 'train.py': [Errno 13] Permission denied\n"
    assert both.ours("train.py") == Ended(2, "", line)


def test_the_watcher_hears_of_every_stage_in_order(both: Both) -> None:
    both.write(
        "train.py",
        """
        import atexit, os, threading, time
        def note(text):
            with open(os.environ["WATCHED"], "a") as file:
                print(text, file=file)
        def late():
            time.sleep(0.2)
            note("thread")
        atexit.register(note, "atexit")
        threading.Thread(target=late).start()
        note("program")
        raise SystemExit(5)
        """,
    )
    assert both.ours("train.py", "x").code == 5
    assert both.notes() == [
        "begin ['train.py', 'x'] False",
        "program",
        "failed SystemExit <module>",
        "thread",
        "atexit",
        "end",
    ]


@pytest.mark.parametrize("text", ["", "1 / 0", "raise KeyboardInterrupt", "import sys; sys.exit('text')", "x = = 1"])
def test_the_end_may_replace_the_exit_code(both: Both, text: str) -> None:
    both.write("train.py", text)
    ended = both.ours("train.py", REPLACE="3")
    assert ended == Ended(3, both.plain("train.py").out, both.plain("train.py").err)
    assert both.notes()[-1] == "end"


@pytest.mark.parametrize("stage", ["begin", "failed", "end"])
def test_an_error_of_the_watcher_is_one_line_and_changes_nothing(both: Both, stage: str) -> None:
    both.write("train.py", "print('out')\nraise SystemExit(4)")
    ended = both.ours("train.py", BREAK=stage)
    assert ended == Ended(4, "out\n", "firstnan: internal error: ValueError: two lines\n")


def test_a_forked_child_does_not_end_the_watch(both: Both) -> None:
    both.write("train.py", CASES["bare fork"].text)
    assert both.ours("train.py", REPLACE="3") == Ended(3, "6\n", "")
    assert both.notes() == ["begin ['train.py'] False", "end"]


def test_a_report_comes_after_the_programs_output(both: Both) -> None:
    both.write("train.py", "print('last line')")
    both.driver.write_text(DRIVER.replace('self.note("end")', 'os.write(1, b"report\\n")'))
    assert both.ours("train.py").out == "last line\nreport\n"


def test_a_second_interrupt_stops_the_end(both: Both) -> None:
    both.write("train.py", "print('done')")
    both.driver.write_text(DRIVER.replace('self.note("end")', "raise KeyboardInterrupt"))
    assert both.ours("train.py") == Ended(-2, "done\n", "firstnan: interrupted\n")


def test_an_interrupt_while_threads_are_joined_is_survived(both: Both) -> None:
    both.write(
        "train.py",
        """
        import atexit, os, signal, threading, time
        def late():
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        atexit.register(print, "bye")
        threading.Thread(target=late).start()
        """,
    )
    ended = both.ours("train.py")
    plain = both.plain("train.py")
    assert (ended.code, ended.out) == (plain.code, plain.out)
    assert "runner.py" not in ended.err
    assert ended.err.splitlines()[0].startswith("Exception ignored in: <module 'threading'")
    assert ended.err.splitlines()[1:-1] == plain.err.splitlines()[1:-1]


WORKERS = """
import multiprocessing, time
from firstnan.observe import ending

def read(rows):
    try:
        rows.get()
    finally:
        open("reader.txt", "w").write("closed")

def upload():
    time.sleep(2)
    open("upload.txt", "w").write("done")

ending.IDLE = 0.3
context = multiprocessing.get_context("fork")
for target, args in ((read, (context.Queue(),)), (upload, ())):
    context.Process(target=target, args=args).start()
ending.interrupt_idle_workers()
assert not multiprocessing.active_children()
"""


@pytest.mark.slow
def test_a_worker_that_sleeps_is_not_interrupted_with_those_that_wait_for_work(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WORKERS], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"reader.txt": "closed", "upload.txt": "done"}


def test_a_program_may_have_a_module_named_like_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from firstnan.engine.program_watch import _prepare_again

    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    _prepare_again()
