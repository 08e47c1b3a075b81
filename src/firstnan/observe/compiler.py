"""Keeps torch's compiler away from firstnan's own functions, which run between those of a compiled program.

While a compiled function runs Python, the compiler also compiles what that calls. It would compile our checks again and
again and warn about them. It may still look into a hook while it traces the program; hooks return at once then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from firstnan.observe.runner import when_imported

_ALONE: set[str] = set()
"""Modules of ours whose functions are already left alone."""
_looked_at: list[int] = [0]
"""How many modules there were when they were last looked through."""
_ENTRIES = ("guarded", "_quickly", "_run", "__call__")
"""Functions through which our own work is done: what they call is not compiled either. Others may call the program."""


def stay_uncompiled() -> Callable[[], None]:
    """As soon as the program uses the compiler, it leaves our functions alone; returns a function that cancels this."""
    return when_imported("torch._dynamo", _leave_alone)


def compiles() -> bool:
    """Whether the program has asked torch to compile something; torch imports its compiler in any case."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", None)
    return frames is not None and (backends is None or any(one is not None for one in backends.values()))


def _leave_alone() -> None:
    skip = _skip_code()
    if skip is None or _looked_at == [len(sys.modules)]:
        return
    _looked_at[0] = len(sys.modules)
    ours = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == ours and name not in _ALONE and module is not None:
            _ALONE.add(name)
            for code in _codes_in(module):
                skip(code, code.co_name in _ENTRIES)


def _skip_code() -> Callable[[CodeType, bool], Any] | None:
    """Torch's function for this, which changes from version to version; None if there is none."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    with suppress(AttributeError, TypeError):
        skip, as_usual = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategies = [frames._FrameExecStrategy(skip, below) for below in (as_usual, skip)]
        set_strategy = frames.set_code_exec_strategy
        return lambda code, whole: set_strategy(code, strategies[whole])
    older: Callable[[CodeType], Any] | None = getattr(frames, "skip_code", None)
    return None if older is None else lambda code, whole: older(code)


def _codes_in(module: ModuleType) -> Iterator[CodeType]:
    """The code of every function of a module, of its classes, and of the functions that these make."""
    waiting: list[Any] = list(vars(module).values())
    seen: set[int] = set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            waiting += vars(thing).values()
        elif isinstance(thing, staticmethod | classmethod):
            waiting.append(thing.__func__)
        elif isinstance(thing, property):
            waiting += [f for f in (thing.fget, thing.fset) if f is not None]
        elif isinstance(thing, FunctionType) and thing.__module__ == module.__name__:
            waiting.append(getattr(thing, "__wrapped__", None))  # of a context manager
            waiting.append(thing.__code__)
        elif isinstance(thing, CodeType):
            waiting += [c for c in thing.co_consts if isinstance(c, CodeType)]
            yield thing


def was_used() -> bool:
    """Whether the program has compiled anything."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


Around = Callable[[Any, Any, Any], Any]
"""A graph, its compiler, and what that has made of it -> what to run instead."""


def compile_again(forward: Around, backward: Around) -> None:
    """Forgets what was compiled; every graph that the program compiles from here on passes through these functions.

    For a forked child only: nothing of it is undone.
    """
    import torch._dynamo
    from torch import fx
    from torch._dynamo import output_graph
    from torch._dynamo.backends import common

    graphs: Any = output_graph.OutputGraph
    backends: Any = common
    torch._dynamo.reset()
    with suppress(ImportError, AttributeError):  # a cache would have the backward graph without compiling it
        torch._functorch.config.enable_autograd_cache = False
    with suppress(ImportError, AttributeError):  # the processes that compile are the parent's
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1
    compile_graph, make = graphs.call_user_compiler, backends.aot_module_simplified

    def call_user_compiler(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        original = fx.GraphModule(graph, deepcopy(graph.graph))  # a compiler may change what it is given
        return forward(original, self.compiler_fn, compile_graph(self, graph, *args, **kwargs))

    def aot_module_simplified(*args: Any, **kwargs: Any) -> Any:
        compiler = kwargs.get("bw_compiler")
        if compiler is not None:

            def compile_backward(graph: Any, examples: Any) -> Any:
                original = fx.GraphModule(graph, deepcopy(graph.graph))
                return backward(original, compiler, compiler(graph, examples))

            kwargs["bw_compiler"] = compile_backward
        return make(*args, **kwargs)

    graphs.call_user_compiler = call_user_compiler
    backends.aot_module_simplified = aot_module_simplified
