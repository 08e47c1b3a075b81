"""`FIRSTNAN=1 python train.py`: the same as `firstnan run train.py`, called by firstnan.pth when python starts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_SUFFIXES = (".json", ".txt")
_NOT_WATCHED = ("firstnan", "pip")
_LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
_LAUNCHER_SCRIPTS = ("torchrun", "accelerate", "deepspeed")
_OPTIONS = "FIRSTNAN_OPTIONS"
"""The options of `firstnan run` for every process of a launcher that was started with them."""


def begin() -> None:
    """Starts python again as `python -m firstnan run`, unless it runs no program of the user's."""
    setting, words = os.environ.get("FIRSTNAN", ""), sys.orig_argv
    command = Command.of(words[1:])
    if setting in ("", "0") or command is None or not sys.executable:
        return
    if setting != "1" and not setting.lower().endswith(_SUFFIXES):
        _say(f"FIRSTNAN must be 1 or the name of a .json or .txt file, got {setting!r}")
        return
    given = os.environ.get(_OPTIONS)
    words = command.watched(setting) if given is None else command.watched_with(["--if-trained", *shlex.split(given)])
    try:
        os.execv(sys.executable, [sys.executable, *words])
    except OSError as error:
        _say(f"can't start {sys.executable} again: {error.strerror}")


def is_launcher(target: str, *, module: bool) -> bool:
    """Whether this program trains in the processes that it starts."""
    return target in _LAUNCHERS if module else os.path.basename(target) in _LAUNCHER_SCRIPTS


def follow(launcher: str, options: Sequence[str]) -> None:
    """Has every python that this process starts watched with these options, as with FIRSTNAN in its environment."""
    if any(os.path.isfile(os.path.join(folder, "firstnan.pth")) for folder in sys.path):
        os.environ["FIRSTNAN"] = "1"
        os.environ[_OPTIONS] = shlex.join(word for word in options if word != "--if-trained")
        return
    text = f"the processes that {launcher} starts are not watched, because firstnan.pth is missing: install firstnan"
    print(f"firstnan: {text}", file=sys.stderr)


def _say(why: str) -> None:
    print(f"firstnan: {why}; the program is not watched", file=sys.stderr)


@dataclass(frozen=True)
class Command:
    """What python was started with: its own options, and the script or module with its arguments."""

    options: tuple[str, ...]
    program: tuple[str, ...]
    is_module: bool

    @staticmethod
    def of(words: Sequence[str]) -> Command | None:
        """None if there is no program: a command (-c), an interactive session, standard input, or firstnan itself."""
        options, at, is_module = _split(words)
        program = (*words[at:],) if at is not None else ()
        if not program or program[0] in ("", "-"):
            return None
        name = program[0].partition(".")[0] if is_module else os.path.basename(program[0])
        return None if name in _NOT_WATCHED else Command(options, program, is_module)

    def watched(self, setting: str) -> list[str]:
        """The arguments of python that run and watch this program."""
        return self.watched_with(["--if-trained", *([] if setting == "1" else ["-o", setting])])

    def watched_with(self, options: Sequence[str]) -> list[str]:
        """The same with these options of `firstnan run`."""
        module = ["-m"] if self.is_module else []
        return [*self.options, "-m", "firstnan", "run", *options, *module, "--", *self.program]


def _split(words: Sequence[str]) -> tuple[tuple[str, ...], int | None, bool]:
    """Python's own options, where the program begins, and whether that is a module (as python's getopt does it)."""
    options: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        letters = "" if word.startswith("--") else word[1:]
        takes_value = word == "--check-hash-based-pycs"
        for i, letter in enumerate(letters, 1):
            if letter in "ci":
                return (), None, False
            if letter == "m" and word[i + 1 :]:
                return (), None, False  # -mNAME: rare, and the name would have to be split off
            if letter == "m":
                return (*options, *([word[:i]] if i > 1 else [])), at, True
            if letter in "WX":
                takes_value = not word[i + 1 :]
                break
        options += words[at - 1 : at + takes_value]
        at += takes_value
    return tuple(options), at, False
