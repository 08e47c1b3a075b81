"""The turn of a loop, taken from its source: which loop, which variables, where it may begin, what comes next."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from firstnan.engine.turn import LeftLoop, Turn, turns_around, turns_in_traceback
from firstnan.observe.forked import NotContinued


def program(folder: Path, text: str) -> tuple[dict[str, Any], Callable[[CodeType], bool]]:
    """Runs a program, which calls `here()` where its turns are wanted; returns its names, and what is its own."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    linecache.checkcache(str(path))

    def owns(code: CodeType) -> bool:
        return code.co_filename == str(path)

    names: dict[str, Any] = {"__name__": "__main__", "turns": []}
    names["here"] = lambda: names["turns"].append(turns_around(sys._getframe(1), owns))
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names, owns


def first_turns(folder: Path, text: str) -> list[Turn]:
    turns: list[list[Turn]] = program(folder, text)[0]["turns"]
    return turns[0]


def rerun(turn: Turn, start: int = 0) -> dict[str, Any]:
    code = turn.compiled(start=start)
    assert code is not None
    turn.run(code)
    return turn.names


def test_the_body_runs_again_with_the_variables_of_its_turn(tmp_path: Path) -> None:
    text = """
        seen = []
        for i in range(5):
            x = i * 10
            seen.append(x)
            if i == 3 and not turns:
                here()
        """
    (turn,) = first_turns(tmp_path, text)
    assert (turn.line, turn.at) == (3, 7)
    turn.names["i"] = 3
    assert rerun(turn)["seen"] == [0, 10, 20, 30, 40, 30]


def test_the_body_may_use_the_name_of_values_that_nobody_reads(tmp_path: Path) -> None:
    text = """
        for x, _ in [(1, "label")]:
            here()
        """
    (turn,) = first_turns(tmp_path, text)
    assert rerun(turn)["_"] == "label"


def test_what_the_body_has_counted_before_it_failed_is_counted_once(tmp_path: Path) -> None:
    text = """
        def train():
            done = tried = skipped = after = 0
            while True:
                try:
                    tried += 1
                except StopIteration:
                    break
                if skipped:
                    skipped += 1
                done += 1
                here()
                after += 1
                if done == 3:
                    break
        train()
        """
    (turn,) = program(tmp_path, text)[0]["turns"][2]
    turn.take_back_counts()
    assert [turn.names[name] for name in ("done", "tried", "skipped", "after")] == [2, 2, 0, 2]
    code = turn.compiled()
    assert code is not None
    with pytest.raises(LeftLoop):
        turn.run(code)


def test_all_loops_of_the_functions_that_run_innermost_first(tmp_path: Path) -> None:
    text = """
        def step(x):
            here()

        def epoch(n):
            for batch in range(n):
                step(batch)

        for e in range(1):
            for part in "a":
                epoch(1)
        """
    assert [turn.line for turn in first_turns(tmp_path, text)] == [6, 10, 9]


def test_a_loop_of_another_function_in_the_same_lines_is_not_meant(tmp_path: Path) -> None:
    text = """
        for i in range(1):
            def closure():
                here()
            closure()
        """
    assert [turn.line for turn in first_turns(tmp_path, text)] == [2]


def test_a_library_between_counts_but_not_who_runs_the_program(tmp_path: Path) -> None:
    for _ in range(1):  # this file is not the program's
        turns = first_turns(tmp_path, "for i in range(1):\n    here()\n")
    assert [turn.file for turn in turns] == [str(tmp_path / "program.py")]


def test_it_may_begin_at_later_statements_also_inside_a_block(tmp_path: Path) -> None:
    text = """
        calls = []
        for i in range(1):
            calls.append("fetch")
            with open(__import__("os").devnull):
                calls.append("model")
                calls.append("loss")
                here()
            calls.append("log")
        """
    (turn,) = first_turns(tmp_path, text)
    assert turn.starts == [0, 1, 2, 3, 4][: len(turn.starts)]
    rests = []
    for start in turn.starts:
        turn.names["calls"].clear()
        rests.append(list(rerun(turn, start)["calls"]))
    everything = ["fetch", "model", "loss", "log"]
    assert rests == [everything[i:] for i in (0, 1, 2, 3)]


def test_what_the_statements_left_out_have_assigned(tmp_path: Path) -> None:
    text = """
        for i in range(1):
            x = i
            y, z = x, x
            here()
        """
    (turn,) = first_turns(tmp_path, text)
    assert [turn.assigned_before(start) for start in turn.starts] == [set(), {"x"}, {"x", "y", "z"}]


@pytest.mark.parametrize("leaves", ["return 5", "break", "continue"])
def test_leaving_the_body(tmp_path: Path, leaves: str) -> None:
    text = f"""
        def run():
            total = 0
            while True:
                total += 1
                if not turns:
                    here()
                if total > 1:
                    {leaves if leaves != "continue" else "break"}
                {leaves}
        run()
        """
    (turn,) = first_turns(tmp_path, text)
    with pytest.raises(LeftLoop):
        rerun(turn)
    assert turn.names["total"] == 2


def test_private_names_get_their_class(tmp_path: Path) -> None:
    text = """
        class Trainer:
            def __init__(self):
                self.__count = 0

            def fit(self):
                for i in range(1):
                    self.__count += 1
                    here()

        trainer = Trainer()
        trainer.fit()
        """
    (turn,) = first_turns(tmp_path, text)
    rerun(turn)
    assert turn.names["self"]._Trainer__count == 2


def test_nobody_takes_what_a_body_yields(tmp_path: Path) -> None:
    text = """
        seen = []
        def numbers():
            for i in range(2):
                seen.append(i)
                here()
                got = yield i
                rest = yield from (n for n in range(3) if not seen.append("inner"))
        list(numbers())
        """
    turn = first_turns(tmp_path, text)[0]
    turn.names["seen"].clear()
    names = rerun(turn)
    assert (names["seen"], names["got"], names["rest"]) == ([0, "inner", "inner", "inner"], None, None)


def test_a_body_that_awaits_runs_without_the_other_tasks(tmp_path: Path) -> None:
    text = """
        import asyncio
        seen = []
        async def train(queue):
            for i in range(2):
                if i == 0:
                    here()
                await asyncio.sleep(0)
                queue.put_nowait(i)
                seen.append(await queue.get())
        async def main():
            await train(asyncio.Queue())
        asyncio.run(main())
        """
    turn = first_turns(tmp_path, text)[0]
    turn.names["seen"].clear()
    turn.names["here"] = lambda: None
    assert rerun(turn)["seen"] == [0]


def test_what_an_asynchronous_loop_goes_through_next_is_not_known(tmp_path: Path) -> None:
    text = """
        import asyncio
        async def stream():
            for i in range(2):
                yield i
        async def main():
            async for i in stream():
                here()
                await asyncio.sleep(0)
        asyncio.run(main())
        """
    turn = first_turns(tmp_path, text)[0]
    assert (turn.line, turn.given) == (7, {"i"})
    with pytest.raises(NotContinued):
        next(turn.following())


def test_the_frames_that_an_exception_has_left(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("def train():\n    for i in range(9):\n        1 / (3 - i)\ntrain()\n")
    try:
        exec(compile(path.read_text(), str(path), "exec"), {})
    except ZeroDivisionError as error:
        (turn,) = turns_in_traceback(error, lambda code: code.co_filename == str(path))
    assert (turn.line, turn.at, turn.names["i"]) == (2, 3, 3)


def test_numbers_of_a_range_go_on_and_a_while_loop_needs_none(tmp_path: Path) -> None:
    (counted,) = first_turns(tmp_path, "for i in range(0, 10, 2):\n    if i == 4: here()\n")
    counted.names["i"] = 4
    assert [names["i"] for names in counted.following()] == [6, 8]
    (endless,) = first_turns(tmp_path, "more = True\nwhile more:\n    here()\n    more = False\n")
    assert list(endless.following()) == []
    endless.names["more"] = True
    assert next(endless.following()) == {}
    (other,) = first_turns(tmp_path, "for word in ['a']:\n    here()\n")
    assert list(other.following()) == []


@pytest.mark.parametrize(
    "loop",
    [
        "for i in range(10):",
        "for i in list(range(10)):",
        "for i, _ in enumerate([0] * 10):",
        "i = 0\nwhile i < 10:",
    ],
)
def test_the_turns_of_a_step_that_takes_several(tmp_path: Path, loop: str) -> None:
    after = "    i += 1\n" if "while" in loop else ""
    text = f"""
seen, found = [], []
def train():
{textwrap.indent(loop, "    ")}
        seen.append(i)
        if i == 6:
            here()
            found.append(turns[0][0].with_step(3))
            found.append(turns[0][0].with_step(9))
    {after}
train()
"""
    step, beyond = program(tmp_path, text)[0]["found"]
    assert [names["i"] for names in step.of_step] == [4, 5, 6]
    assert beyond is None or "while" in loop  # where a loop without a range has begun is not known
    seen: list[int] = step.names["seen"]
    seen.clear()
    step.names["here"], step.names["turns"] = lambda: None, [[step]]
    step.run_step(step.compiled())
    assert seen == [4, 5, 6]


def test_a_message_that_nobody_answers_does_not_end_the_turn(tmp_path: Path) -> None:
    text = """
        seen, alone = [], False
        def send(text):
            if alone:
                raise AssertionError("no answer")
        def check(number):
            if number == 4:
                raise ValueError("another error")
        for i in range(3):
            send("begin")
            seen.append(i)
            if i == 2:
                here()
            send("end")
            check(i)
        """
    (turn,) = first_turns(tmp_path, text)
    turn.names.update({"alone": True, "here": lambda: None})
    turn.names["seen"].clear()
    code = turn.compiled()
    assert code is not None
    for i in (2, 3):
        turn.names["i"] = i
        turn.run(code)
    assert turn.names["seen"] == [2, 3]
    turn.names["i"] = 4
    with pytest.raises(ValueError, match="another error"):
        turn.run(code)


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "refused"), TimeoutError(), EOFError()])
@pytest.mark.parametrize("statement", ["send()", "assert send() == 'ok'"])
def test_nor_does_one_after_the_failing_statement(tmp_path: Path, statement: str, error: Exception) -> None:
    text = f"""
        def send():
            return "ok"
        for i in range(1):
            here()
            {statement}
            done = True
        """
    (turn,) = first_turns(tmp_path, text)

    def send() -> None:
        raise error

    turn.names.update({"here": lambda: None, "send": send, "done": False})
    turn.run(turn.compiled())
    assert turn.names["done"]
