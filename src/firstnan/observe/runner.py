"""Runs a program as `python` would, with its imports watched, its output muted or its sources replaced where asked."""

from __future__ import annotations

import _io
import atexit
import contextlib
import gc
import io
import linecache
import os
import signal
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NoReturn, Protocol, TextIO

INTERRUPTED = -int(signal.SIGINT)
"""What `run` returns for a program ended by KeyboardInterrupt: python then dies by the signal, without an exit code."""


@dataclass(frozen=True)
class Program:
    """What to run: a script, a directory or zip file with a `__main__.py`, or (`module`) a module by name."""

    target: str
    args: tuple[str, ...]
    module: bool = False


class Watcher(Protocol):
    """Called before and after the program; its errors never reach the program."""

    def begin(self) -> None:
        """Runs right before the program's first line, with `sys.argv`, `sys.path` and `__main__` already set for it."""

    def replays_here(self) -> bool:
        """Whether this process is a child in which a failure of the program is replayed."""

    def failed(self, error: BaseException) -> None:
        """Runs when the program has ended with `error` (or SystemExit, KeyboardInterrupt), before that is printed."""

    def end(self) -> int | None:
        """Runs after the program's threads and exit handlers; a returned number replaces the exit code.

        Thread pools can no longer be used here, nor workers that `multiprocessing` cleans up.
        """


class ProgramError(Exception):
    """The program cannot be started; the message is one line."""

    code = 2


def run(program: Program, watcher: Watcher) -> int:
    """Runs `program` to its end, prints what python would print, and returns the exit code for `exit_process`."""
    process = os.getpid()
    launch = _prepare(program)
    _guarded(watcher.begin)
    error = _execute(launch)
    if error is not None:
        error.__traceback__ = _without_our_frames(error.__traceback__)
        _raise_if_never_started(program, error)
    # A child of a bare os.fork() gets here too: it ends without a report, which is the parent's job.
    watched = os.getpid() == process
    if error is not None and (watched or watcher.replays_here()):
        _guarded(watcher.failed, error)
    ending: Any = sys.modules.get("firstnan.observe.ending")  # once the program was stopped
    stopped = watched and ending is not None and ending.Stopped.is_here()
    if stopped and ending.Stopped.released_main and type(error) is KeyboardInterrupt:
        error = None
    code = 0 if error is None else _report_error(error)
    del error  # python has released it too by the time threads and exit handlers run
    left = stopped and _guarded(ending.threads_wait_in_vain)
    if not left:
        _wait_for_threads()
    if stopped:
        _guarded(ending.interrupt_idle_workers)
    atexit._run_exitfuncs()
    _flush(sys.stdout)
    if watched:
        replaced = _guarded(watcher.end)
        code = code if replaced is None else replaced
        _flush_open_files()
    if left:  # python would wait for these threads once more
        _flush(sys.stderr)
        os._exit(code)
    return code


def exit_process(code: int) -> NoReturn:
    """Ends the process with what `run` returned; call it from the main thread, outside any `try`."""
    if code == INTERRUPTED:
        # After an uncaught KeyboardInterrupt python ends by SIGINT, once everything is torn down and open files are
        # flushed. So we raise one; its traceback was printed already.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    sys.exit(code)


# --- before the program -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launch:
    """A program ready to run: from `source` for a script file, otherwise runpy finds `name`."""

    main: ModuleType
    name: str
    source: bytes | None = None
    is_module: bool = False


def _prepare(program: Program) -> _Launch:
    """Sets `sys.argv`, `sys.path` and `__main__` for the program, or raises ProgramError with nothing changed."""
    if program.module:
        launch = _Launch(_new_main(), program.target, is_module=True)
        # argv[0] is "-m" while runpy imports the parent packages, then it becomes the module's path.
        _set_up("-m", program.args, launch.main, _directory_of_module(), always=False)
        return launch
    path = _absolute(program.target)
    if _is_importable(path):
        launch = _Launch(_new_main(), "__main__")
        _set_up(program.target, program.args, launch.main, path, always=True)
        return launch
    try:
        with io.open_code(path) as file:  # as `import` opens it, so both see the same text
            source = file.read()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = f"[Errno {error.errno}] {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ProgramError(f"can't open file {program.target!r}: {reason}") from None
    launch = _Launch(_new_main(path), path, source)
    _set_up(program.target, program.args, launch.main, _directory_of_script(program.target), always=False)
    return launch


def _set_up(argv0: str, args: tuple[str, ...], main: ModuleType, path0: str | None, *, always: bool) -> None:
    """Sets `sys.argv`, `__main__` and the first entry of `sys.path` for the program (pymain_run_python).

    `always`: a directory or zip file that is run is added even in safe mode (-P, -I, PYTHONSAFEPATH).
    """
    sys.argv = [argv0, *args]
    sys.modules["__main__"] = main
    if not sys.flags.safe_path and sys.path:
        del sys.path[0]  # firstnan's own: the directory of its script, or of `python -m firstnan`
    if path0 is not None and (always or not sys.flags.safe_path):
        sys.path.insert(0, path0)


def _new_main(path: str | None = None) -> ModuleType:
    """A `__main__` as the interpreter makes it (add_main_module, and pymain_run_file if there is a `path`)."""
    main = ModuleType("__main__")
    names = vars(main)
    model = vars(sys.modules["__main__"])  # which of these names exist depends on the python version
    if "__annotations__" in model:
        names["__annotations__"] = {}
    names["__builtins__"] = sys.modules["builtins"]
    if path is None:
        return main
    loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    names["__loader__"] = loader("__main__", path)
    names["__file__"] = path
    if "__cached__" in model:
        names["__cached__"] = None
    return main


def _absolute(target: str) -> str:
    """`target` joined to the working directory, otherwise as typed (config_run_filename_abspath)."""
    try:
        return os.path.join(os.getcwd(), target)
    except OSError:  # the working directory was deleted
        return target


def _directory_of_script(target: str) -> str:
    """The folder of the script, with links resolved (_PyPathConfig_ComputeSysPath0)."""
    try:
        return os.path.dirname(os.path.realpath(target))
    except OSError:
        return os.path.dirname(target)


def _directory_of_module() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _is_importable(path: str) -> bool:
    """Whether `path` is a directory or zip file, whose `__main__` is run (pymain_get_importer)."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except (ImportError, ValueError):
            continue
        return True
    return False


# --- the program --------------------------------------------------------------------------------------------------


def _execute(launch: _Launch) -> BaseException | None:
    """Runs the program's code and returns the exception that ended it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _depth())  # so recursion goes exactly as deep as without us
    try:
        if launch.source is None:
            import runpy  # python's own -m uses it too; its frames are part of python's tracebacks

            runpy._run_module_as_main(launch.name, launch.is_module)  # type: ignore[attr-defined] # private, stable
        else:
            exec(_compiled(launch.source, launch.name), vars(launch.main))
    except BaseException as error:
        return error
    return None


def _depth() -> int:
    """The number of frames below the program's first frame."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += 1
        frame = frame.f_back
    return depth + (sys.version_info < (3, 12))  # before 3.12 `exec` itself counted as well


def _compiled(source: bytes, path: str) -> CodeType:
    if path.endswith(".pyc"):
        code = SourcelessFileLoader("__main__", path).get_code("__main__")
        assert code is not None
        return code
    # From bytes, so python detects the encoding (a cookie, a byte order mark) by itself.
    return compile(source, path, "exec", dont_inherit=True)


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == run.__code__.co_filename:
        traceback = traceback.tb_next
    return traceback


def _raise_if_never_started(program: Program, error: BaseException) -> None:
    """Raises ProgramError if runpy found nothing to run; it then raises SystemExit from its own `_Error`."""
    reason = error.__context__
    if isinstance(error, SystemExit) and type(reason).__module__ == "runpy" and type(reason).__name__ == "_Error":
        text = str(reason) if program.module else f"can't find '__main__' module in {program.target!r}"
        raise ProgramError(text) from None


# --- after the program --------------------------------------------------------------------------------------------


def _report_error(error: BaseException) -> int:
    """Prints `error` as python does and returns the exit code (_PyErr_PrintEx)."""
    if isinstance(error, SystemExit):
        return _exit_code(error)
    code = INTERRUPTED if type(error) is KeyboardInterrupt else 1
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _write_error("sys.excepthook is missing\n")
        _display(error)
        return code
    second = _call_hook(hook, error)
    if isinstance(second, SystemExit):
        return _exit_code(second)
    if second is not None:
        _write_error("Error in sys.excepthook:\n")
        _display(second)
        _write_error("\nOriginal exception was:\n")
        _display(error)
    return code


def _call_hook(hook: Any, error: BaseException) -> BaseException | None:
    """Calls the program's own `sys.excepthook` and returns what it raises."""
    try:
        hook(type(error), error, error.__traceback__)
    except BaseException as second:
        second.__traceback__ = _without_our_frames(second.__traceback__)
        return second
    return None


def _flush_open_files() -> None:
    """Files that the program has left open are written, as at python's end, even if something still holds them then."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for file in [one for one in gc.get_objects() if type(one) in kinds]:
        with contextlib.suppress(Exception):  # closed, without the buffer below it, or only for reading
            file.flush()


def _exit_code(error: SystemExit) -> int:
    """The code passed to `sys.exit`; anything that is not a number is printed and gives 1 (_Py_HandleSystemExit)."""
    code: object = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        # A C int, of which the system keeps the last eight bits; a number too large for C becomes -1.
        number = int(code) if -sys.maxsize - 1 <= code <= sys.maxsize else -1
        return number & (0xFF if os.name == "posix" else 0xFFFFFFFF)
    try:
        text = str(code)
    except Exception:  # python prints an empty line then
        text = ""
    _write_error(text)
    _write_error("\n")
    return 1


def _display(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def _wait_for_threads() -> None:
    """Joins the program's threads and shuts down its thread pools (wait_for_thread_shutdown)."""
    threading = sys.modules.get("threading")
    if threading is None:
        return
    try:
        threading._shutdown()
    except BaseException as error:  # Ctrl-C while waiting: python prints it and goes on
        error.__traceback__ = _without_our_frames(error.__traceback__)
        _write_error(f"Exception ignored in: {threading!r}\n")
        _display(error)


def _flush(stream: TextIO | None) -> None:
    """Flushes, so a report comes after everything the program wrote; if it fails, python itself reports that later."""
    try:
        if stream is not None:
            stream.flush()
    except Exception:
        return


def _write_error(text: str) -> None:
    """Writes to stderr, ignoring errors: the program may have closed or replaced it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        return


def _guarded(method: Any, *args: Any) -> Any:
    """Calls a method of the watcher; an error in it is printed as one line on stderr."""
    try:
        return method(*args)
    except KeyboardInterrupt:
        _write_error("firstnan: interrupted\n")
        return INTERRUPTED
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _write_error(f"firstnan: internal error: {text}\n")
        return None


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` right after the module is imported, or now if it already is; returns a function that cancels this."""
    finder = _Finder(name, act)
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, finder)
    return finder.cancel


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.act)
        return spec


class _Loader(Loader):
    """The module's own loader, followed by `act`; the module does not refer to this wrapper afterwards."""

    def __init__(self, own: Loader, act: Callable[[], None]) -> None:
        self.own, self.act = own, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        self.act()


class MutedOutput:
    """Redirects stdout and stderr to /dev/null and back, both the file descriptors and `sys.stdout`, `sys.stderr`."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._files: list[tuple[int, int]] = []
        self._devnull: Any = None

    def begin(self) -> None:
        if self._streams:
            return
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._flush()
        # Not closed afterwards: objects that the program creates meanwhile may refer to it.
        self._devnull = open(os.devnull, "w")  # noqa: SIM115
        for name in self._streams:
            setattr(sys, name, self._devnull)
        for number in (1, 2):
            with contextlib.suppress(OSError):  # a closed descriptor stays closed
                self._files.append((number, os.dup(number)))
                os.dup2(self._devnull.fileno(), number)

    def end(self) -> None:
        self._flush()
        for name, stream in self._streams.items():
            if getattr(sys, name) is self._devnull:
                setattr(sys, name, stream)
        for number, kept in self._files:
            os.dup2(kept, number)
            os.close(kept)
        self._streams, self._files = {}, []

    def _flush(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(Exception):  # the program may have replaced it with anything
                stream.flush()


def overlay_sources(contents: dict[str, bytes]) -> None:
    """From now on, running or importing one of these files (by its real path) uses this content instead.

    Scripts, modules and `-m` all open their source with `io.open_code`. Without a modification time the loader neither
    uses nor writes a compiled file. This cannot be undone: the process exists only for this.
    """
    original: Callable[[str], Any] = io.open_code
    path_stats = SourceFileLoader.path_stats

    def open_code(path: str) -> Any:
        content = contents.get(os.path.realpath(path))
        if content is None:
            return original(path)
        # Tracebacks and `inspect` show this text too: linecache never re-reads an entry without a modification time.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        lines = io.TextIOWrapper(io.BytesIO(content), encoding).readlines()
        linecache.cache[os.fspath(path)] = (len(content), None, lines, os.fspath(path))
        return io.BytesIO(content)

    def stats(loader: SourceFileLoader, path: Any) -> Any:
        if os.path.realpath(path) in contents:
            raise OSError("the source is overlaid: it has no modification time")
        return path_stats(loader, path)

    io.open_code = _io.open_code = open_code
    SourceFileLoader.path_stats = stats  # type: ignore[method-assign, assignment]
    tell_spawned(_Overlay(contents))


class _Overlay:
    """Sent to a spawned process with its first data; unpickling it there installs the same overlay."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def __reduce__(self) -> Any:
        return overlay_sources, (self.contents,)


def tell_spawned(thing: Any) -> None:
    """Sends it to every process that `multiprocessing` spawns from now on, and unpickles it there first."""

    def follow() -> None:
        spawn = sys.modules["multiprocessing.spawn"]
        original = spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            return {**original(name), f"firstnan {type(thing).__name__}": thing}

        spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]

    when_imported("multiprocessing.spawn", follow)


def before_leaving(act: Callable[[int], int]) -> None:
    """Has `act` called with the exit code before `os._exit` ends this process at once; it returns the code to use."""
    leave, process = os._exit, os.getpid()

    def _exit(status: int) -> NoReturn:
        leave(act(status) if os.getpid() == process else status)

    os._exit = _exit


def retrieve_from_tasks(error: BaseException) -> None:
    """The error has ended a task of asyncio, and the program: the task need not complain that nobody asks for it."""
    tasks: Any = sys.modules.get("asyncio.tasks")
    known: Any = getattr(tasks, "_all_tasks", ()) or getattr(tasks, "_scheduled_tasks", ())
    for task in list(known):
        with contextlib.suppress(Exception):
            if task.done() and not task.cancelled() and task._exception is error:
                task.exception()


def before_starting(act: Callable[[list[str], Mapping[str, str]], tuple[list[str], dict[str, str]] | None]) -> None:
    """Has `act` called with the words of each command that this process starts by `subprocess`, and its environment.

    It returns the words to use instead and what to add to the environment, or None.
    """

    def follow() -> None:
        popen: Any = sys.modules["subprocess"].Popen
        start, process = popen._execute_child, os.getpid()
        env_at = start.__code__.co_varnames.index("env") - 2

        def _execute_child(self: Any, args: Any, *others: Any) -> Any:
            words = args.split() if isinstance(args, str) else args  # a string is a command of the shell
            if os.getpid() == process and isinstance(words, list | tuple):
                env = os.environ if others[env_at] is None else others[env_at]
                instead = act([word for word in words if isinstance(word, str)], env)
                if instead is not None and not isinstance(args, str):
                    args, more = instead
                    others = (*others[:env_at], {**env, **more}, *others[env_at + 1 :])
            return start(self, args, *others)

        popen._execute_child = _execute_child

    when_imported("subprocess", follow)


def before_replacing(act: Callable[[str, list[str]], list[str]]) -> None:
    """Has `act` called with the program by which this process replaces itself, and its words; it returns them."""
    replace, process = os.execve, os.getpid()
    replace_plain = os.execv

    def words(path: Any, argv: Any) -> Any:
        argv = list(argv)
        is_text = all(isinstance(word, str) for word in argv)
        return act(os.fsdecode(path), argv) if os.getpid() == process and is_text else argv

    def execve(path: Any, argv: Any, env: Any) -> NoReturn:
        replace(path, words(path, argv), env)

    def execv(path: Any, argv: Any) -> NoReturn:
        replace_plain(path, words(path, argv))

    os.execve, os.execv = execve, execv
