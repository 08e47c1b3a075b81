"""The command `firstnan`: parses the arguments and calls the code that does the work."""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from firstnan import __version__
from firstnan.cli import startup
from firstnan.observe import runner

if TYPE_CHECKING:
    from firstnan.capsule import Wanted
    from firstnan.engine.step_log import StepLog

# Import nothing heavy here: `run` starts before the user's program has imported torch, and `show` never needs it.

_FILES = ("--json", "-o", "--output", "--csv", "--capsule")
_VALUED = [
    "--json", "-o", "--output", "--csv", "--replay", "--verify", "--isolation",
    "--capsule", "--capsule-limit", "--check-replicas", "--annotate",
]  # fmt: skip
_OUTPUT = "write the report; the extension selects the format: .html, .md, .txt or .json"


class UsageError(Exception):
    """The command line is wrong; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; a wrong command line prints one line to stderr and returns 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _command(words)
    except (UsageError, runner.ProgramError) as error:
        print(f"firstnan: {error}", file=sys.stderr)
        return 2
    if code == runner.INTERRUPTED:
        runner.exit_process(code)
    return code


def _command(words: list[str]) -> int:
    if not words:
        raise UsageError(f"no command given, expected one of {', '.join(_COMMANDS)} (see firstnan --help)")
    name, rest = words[0], words[1:]
    if name in _COMMANDS:
        return _COMMANDS[name](rest)
    if name.startswith("-"):
        _main_parser().parse_args(words)  # prints the help or the version and exits, or raises UsageError
    hint = f"; to run a program: firstnan run {name}" if os.path.exists(name) else " (see firstnan --help)"
    raise UsageError(f"unknown command {name!r}{hint}")


# --- the commands -------------------------------------------------------------------------------------------------


def _run(words: list[str]) -> int:
    options, program = _split_options(words)
    parsed = _run_parser().parse_args(options)
    if not program:
        what = "module" if parsed.module else "script"
        taken = f" ({options[-1]!r} is the value of {options[-2]})" if options[-2:-1] and options[-2] in _VALUED else ""
        raise UsageError(f"no {what} given{taken}: firstnan run [options] {'-m ' * parsed.module}{what} [arguments]")
    given = _with_absolute_paths([word for word in options if word != "-m"])

    def watched(words: list[str]) -> list[str] | None:
        command = startup.Command.of(words[1:])
        return [words[0], *command.watched_with(given)] if command is not None else None

    return _investigate(parsed, runner.Program(program[0], tuple(program[1:]), module=parsed.module), watched, given)


def _investigate(
    parsed: argparse.Namespace,
    program: runner.Program,
    watched: Callable[[list[str]], list[str] | None] = lambda words: None,
    given: Sequence[str] = (),
) -> int:
    # Absolute paths, since the program may change its working directory.
    json, output = _writable(parsed.json), _writable(_known_format(parsed.output))
    from firstnan.engine.investigation import Investigation, Options

    launches = startup.is_launcher(program.target, module=program.module)
    if launches:
        startup.follow(program.target, given)
    fix = _writable(str((json or output or Path("firstnan")).with_suffix(".patch"))) if parsed.fix else None
    options = Options(
        json=json,
        output=output,
        trace=parsed.trace,
        replay=parsed.replay,
        program=program,
        verify=parsed.verify,
        fix=fix,
        capsule=_capsule_request(parsed),
        restart=parsed.replayed_capsule,
        annotate=parsed.annotate is not None,
        isolation=parsed.isolation == "auto" and os.environ.get("FIRSTNAN_ISOLATION") != "off",
        check_replicas=parsed.check_replicas,
        if_trained=parsed.if_trained or launches,
        launches=launches,
        logs=_csv_log(parsed.csv),
        live=parsed.live and _is_first_rank(),
        watched=watched,
    )
    return runner.run(program, Investigation(options))


def _replay(words: list[str]) -> int:
    options, rest = _split_options(words)
    more, program = _split_options(rest[1:])
    parsed = _replay_parser().parse_args(options + more)
    if not rest or not program:
        missing = "script" if rest else "capsule"
        raise UsageError(f"no {missing} given: firstnan replay [options] CAPSULE script.py [arguments]")
    from firstnan.capsule.content import load
    from firstnan.capsule.file import CapsuleError

    try:
        parsed.replayed_capsule = load(rest[0])
    except CapsuleError as error:
        raise UsageError(str(error)) from None
    return _investigate(parsed, runner.Program(program[0], tuple(program[1:]), module=parsed.module))


def _show(words: list[str]) -> int:
    parsed = _show_parser().parse_args(words)
    output = _writable(_known_format(parsed.output))
    if parsed.open and output is not None and output.suffix.lower() != ".html":
        raise UsageError(f"--open needs an .html file, got {parsed.output!r}")
    from firstnan.records.codec import ReportError
    from firstnan.records.files import load
    from firstnan.report import github_annotation, print_text, write

    try:
        report = load(parsed.report)
    except ReportError as error:
        raise UsageError(str(error)) from None
    if parsed.open and output is None:
        import tempfile

        output = Path(tempfile.mkdtemp(prefix="firstnan-"), parsed.report.stem + ".html")
    if output is not None:
        try:
            write(report, output, saved=parsed.report)
        except OSError as error:
            raise UsageError(f"can't write {str(output)!r}: {error.strerror}") from None
    with _broken_pipe_ignored():
        if output is None and parsed.annotate is None:
            print_text(report, sys.stdout)
        if parsed.annotate is not None:
            print(github_annotation(report), end="", flush=True)
    if parsed.open and output is not None:
        _open(output)
    return 0


def _open(page: Path) -> None:
    """Shows a page in the browser, or says where it is."""
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        print(f"firstnan: no browser was found to open {page}", file=sys.stderr)


def _fix(words: list[str]) -> int:
    parsed = _fix_parser().parse_args(words)
    if not os.path.isdir(parsed.root):
        raise UsageError(f"--root must be a folder, got {parsed.root!r}")
    from firstnan.cli.fix import apply, show
    from firstnan.records.codec import ReportError
    from firstnan.records.files import load
    from firstnan.repair.patch import PatchError, choose

    try:
        report = load(parsed.report)
        with _broken_pipe_ignored():
            show(report, parsed.number, sys.stdout, parsed.root)
        remedy = choose(report, parsed.number)
        if remedy is None:
            return 1
        if parsed.apply:
            apply(remedy, sys.stdout, parsed.root)
    except (ReportError, PatchError) as error:
        raise UsageError(str(error)) from None
    return 0


def _causes(words: list[str]) -> int:
    parsed = _causes_parser().parse_args(words)
    from firstnan.diagnose.causes import catalogue, listing, page

    if parsed.slug is None:
        if parsed.example:
            raise UsageError("--example needs a cause: firstnan causes SLUG --example")
        text = listing()
    else:
        entry = catalogue().get(parsed.slug) or _unknown("cause", parsed.slug, catalogue(), "firstnan causes")
        text = page(entry)
        if parsed.example:
            if entry.example is None:
                raise UsageError(f"there is no example for {entry.slug}")
            text = entry.example.read_text(encoding="utf-8").rstrip()
    with _broken_pipe_ignored():
        print(text, flush=True)
    return 0


def _demo(words: list[str]) -> int:
    parsed = _demo_parser().parse_args(words)
    from firstnan.cli.demos import demos, find

    if parsed.name is None:
        known = demos()
        width = max((len(demo.name) for demo in known), default=0)
        lines = [f"{demo.name:<{width}}  {demo.title}" for demo in known]
        with _broken_pipe_ignored():
            print(*lines, "", "Run one with: firstnan demo NAME", sep="\n", flush=True)
        return 0
    demo = find(parsed.name)
    demo = demo or _unknown("demo", parsed.name, [d.name for d in demos()], "firstnan demo")
    return _investigate(_run_parser().parse_args([]), runner.Program(str(demo.path), ()))


_CHECK_REPLICAS = "FIRSTNAN_CHECK_REPLICAS"
_COMMANDS = {"run": _run, "show": _show, "fix": _fix, "replay": _replay, "causes": _causes, "demo": _demo}


def _unknown(what: str, name: str, known: Iterable[str], lister: str) -> NoReturn:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f" ({lister} lists them)"
    raise UsageError(f"unknown {what} {name!r}{hint}")


@contextmanager
def _broken_pipe_ignored() -> Iterator[None]:
    """Ignores a reader of stdout that closes it early, such as `head` or a pager."""
    try:
        yield
    except BrokenPipeError:
        # Otherwise python would try to write the rest again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- arguments ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, where argparse prints its whole usage; an option is never abbreviated."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        message = message.replace("unrecognized arguments: ", "unknown option or argument: ")
        message = re.sub(r"^the following arguments are required: (.+)", r"no \1 given", message)
        message = re.sub(r"^argument (\S+): expected one argument", r"\1 needs a value", message)
        message = re.sub(r"^argument (\S+): invalid choice: (.+?) \(choose from (.+)\)", _choice, message)
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Once(argparse.Action):
    """Takes one file; a second one would replace the first without a word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            more = "--json FILE adds JSON, which firstnan show converts to other formats"
            raise argparse.ArgumentError(None, f"{option_string} takes one file, got {before!r} and {values!r}: {more}")
        vars(namespace)[self.dest] = values


def _main_parser() -> _Parser:
    parser = _Parser(
        prog="firstnan",
        usage="firstnan [-h] [--version] {run,show,fix,replay,causes,demo} ...",
        description="Finds the first NaN or Inf of a PyTorch training run and explains where it came from.",
        epilog="commands:\n"
        "  run     run an unchanged training program and report its first NaN or Inf\n"
        "  show    print or convert a saved report\n"
        "  fix     show or apply the proven fix of a report\n"
        "  replay  run a program from the failing step saved in a capsule\n"
        "  causes  list the known causes of NaN and Inf, or explain one\n"
        "  demo    list small programs that fail, or run one\n"
        "\nFor the options of a command: firstnan COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"firstnan {__version__}")
    return parser


def _run_parser() -> _Parser:
    parser = _Parser(
        prog="firstnan run",
        usage="firstnan run [options] script.py [arguments]\n       firstnan run [options] -m module [arguments]",
        description="Runs a program as python would and reports its first NaN or Inf on stderr.",
        epilog="Exit code: 3 if a NaN or Inf was found, otherwise the program's own; 2 if it could not be started. "
        "Everything after the script or module is passed to the program.",
    )
    _add_program_options(parser)
    parser.add_argument("--trace", action="store_true", help="record every operator from the first step on (slower)")
    parser.add_argument(
        "--replay",
        choices=("auto", "never"),
        default="auto",
        help="whether to run the failing step again to record its operators (default: auto)",
    )
    parser.add_argument(
        "--verify",
        type=_count,
        metavar="N",
        help="test candidate fixes in copies of the program, up to N steps past the failing one (default: to the end "
        "of training, as far as time allows; 0: none)",
    )
    parser.add_argument(
        "--isolation",
        choices=("auto", "off"),
        default="auto",
        help="auto (default): whatever runs again cannot touch your files, network or processes, and is left out where "
        "that cannot be ensured; off: run it without this protection",
    )
    parser.add_argument("--live", action="store_true", help="show the progress of training in one line")
    parser.add_argument(
        "--csv", action=_Once, metavar="FILE", help="write loss, gradient norm and more of every step to a CSV file"
    )
    parser.add_argument("--fix", action="store_true", help="write the best proven fix as a .patch next to the report")
    parser.add_argument("--capsule", metavar="DIR", help="save the failing step to a file in DIR, for firstnan replay")
    parser.add_argument(
        "--capsule-limit", metavar="SIZE", default="2G", help="maximum size of that file, such as 500M (default: 2G)"
    )
    parser.add_argument(
        "--check-replicas",
        type=_count,
        metavar="N",
        default=os.environ.get(_CHECK_REPLICAS, "0"),
        help="compare the parameters of all ranks after every N updates (default: never)",
    )
    parser.set_defaults(replayed_capsule=None)
    return parser


def _replay_parser() -> _Parser:
    parser = _Parser(
        prog="firstnan replay",
        usage="firstnan replay [options] CAPSULE script.py [arguments]\n"
        "       firstnan replay [options] CAPSULE -m module [arguments]",
        description="Starts a program, restores the failing step from a capsule, and reports the result.",
        epilog="Exit code: 3 if the step failed again, 0 if it was finite; 2 if it could not be replayed.",
    )
    _add_program_options(parser)
    parser.set_defaults(
        trace=False,
        replay="never",
        capsule=None,
        verify=0,
        fix=False,
        isolation="auto",
        check_replicas=0,
        csv=None,
        live=False,
    )
    return parser


def _add_program_options(parser: _Parser) -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument(
        "--json", action=_Once, metavar="FILE", help="write the report as JSON, even if nothing was found"
    )
    parser.add_argument("-o", "--output", action=_Once, metavar="FILE", help=_OUTPUT)
    _add_annotate(parser)
    # Set by startup.py: of several processes of a job, only those that train write a report.
    parser.add_argument("--if-trained", action="store_true", help=argparse.SUPPRESS)


def _add_annotate(parser: _Parser) -> None:
    parser.add_argument(
        "--annotate",
        choices=("github",),
        help="print the finding as a GitHub annotation of its source line",
    )


def _choice(found: re.Match[str]) -> str:
    return f"{found[1]} must be {' or '.join(found[3].replace(chr(39), '').split(', '))}, got {found[2]}"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def _show_parser() -> _Parser:
    parser = _Parser(prog="firstnan show", description="Prints or converts a saved report.")
    parser.add_argument("report", type=Path, metavar="report.json", help="a file written by firstnan run --json")
    parser.add_argument("-o", "--output", action=_Once, metavar="FILE", help=_OUTPUT)
    parser.add_argument("--open", action="store_true", help="write the report as a page and open it in the browser")
    _add_annotate(parser)
    return parser


def _fix_parser() -> _Parser:
    parser = _Parser(
        prog="firstnan fix",
        description="Shows the proven fix of a report, and which others were tried.",
        epilog="Exit code: 0 if a fix was shown or applied, 1 if none is proven, 2 if the report cannot be read or the "
        "fix does not fit the files.",
    )
    parser.add_argument("report", type=Path, metavar="report.json", help="a file written by firstnan run --json")
    parser.add_argument("--apply", action="store_true", help="change the files; each original is kept as FILE.orig")
    parser.add_argument("--number", type=_count, metavar="K", help="the K-th fix of the report, proven or not")
    parser.add_argument(
        "--root", default=os.curdir, metavar="DIR", help="the only folder where files are changed (default: this one)"
    )
    return parser


def _causes_parser() -> _Parser:
    parser = _Parser(
        prog="firstnan causes",
        description="Lists the known causes of NaN and Inf, or explains one.",
    )
    parser.add_argument("slug", nargs="?", metavar="SLUG", help="the cause to explain, as named in a report")
    parser.add_argument("--example", action="store_true", help="print a small program that fails this way")
    return parser


def _demo_parser() -> _Parser:
    parser = _Parser(prog="firstnan demo", description="Lists small programs that fail, or runs one.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the program to run")
    return parser


def _split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the command line into our options and the program with its arguments.

    argparse cannot do this: it would remove a `--` from the program's arguments.
    """
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return words[:at], words[at + 1 :]
        at += 2 if words[at] in _VALUED else 1
    return words[:at], words[at:]


def _capsule_request(parsed: argparse.Namespace) -> Wanted | None:
    """Where to write a capsule and its maximum size; None if none was requested."""
    if parsed.capsule is None:
        return None
    from firstnan.capsule import Wanted

    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(i?B)?", parsed.capsule_limit, re.IGNORECASE)
    if size is None:
        raise UsageError(f"--capsule-limit must be a size such as 500M or 2G, got {parsed.capsule_limit!r}")
    folder = Path(os.path.abspath(parsed.capsule))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"can't write capsules to {parsed.capsule!r}: not a directory")
    return Wanted(folder, int(float(size[1]) * 1024 ** " KMGT".index(size[2].upper() or " ")))


def _csv_log(name: str | None) -> StepLog | None:
    path = _writable(name)
    if path is None or not _is_first_rank():
        return None
    from firstnan.engine.step_log import StepLog
    from firstnan.integrations.csv_file import CsvFile

    return StepLog(CsvFile(path))


def _with_absolute_paths(options: Sequence[str]) -> list[str]:
    """The same options for a process that may begin in another folder."""
    words, before = [], ""
    for word in options:
        name, is_joined, value = word.partition("=")
        if before in _FILES:
            word = os.path.abspath(word)
        elif name in _FILES and is_joined:
            word = f"{name}={os.path.abspath(value)}"
        words.append(word)
        before = word
    return words


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")


def _known_format(name: str | None) -> str | None:
    if name is not None:
        from firstnan.report import FORMATS, listed_formats

        if Path(name).suffix.lower() not in FORMATS:
            raise UsageError(f"can't write {name!r}: the extension must be {listed_formats()}")
    return name


def _writable(name: str | None) -> Path | None:
    """The absolute path, after checking that it can be written by opening it; changes no file."""
    if name is None:
        return None
    try:
        path = Path(os.path.abspath(name))
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            with suppress(FileExistsError):  # another rank may check at the same moment
                path.open("xb").close()
            path.unlink(missing_ok=True)
            return path
        # Opening a pipe would wait for its reader.
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            path.open("ab").close()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"can't write {name!r}: {reason}") from None
    return path
