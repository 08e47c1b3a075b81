"""Compares a graph as a compiler runs it with the same graph run operator by operator: where is only one finite?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from firstnan.records import TensorStat
from firstnan.tensors.finite import is_finite, stat, tensors_in

_SECONDS = 60.0
"""How long is searched for the first operator; a compiler may take seconds for each question."""
_MORE_THAN_ROUNDING = 100.0
"""Differences are named from so many times the precision of the type on, relative to the largest number."""

Compile = Callable[[Any, Any], Callable[..., Any]]
"""A compiler: a graph and examples of its inputs -> what runs it."""


@dataclass(frozen=True)
class GraphDifference:
    """The first operator of a graph whose result is finite only if it is not compiled."""

    phase: Literal["forward", "backward"] = "forward"
    op: str = ""
    """Empty if only the whole graph is known to differ."""
    aten: str = ""
    frames: tuple[tuple[str, int, str], ...] = ()
    """Where in the source the operator is called: file, line, function; the innermost is the last."""
    module: str = ""
    module_type: str = ""
    read: tuple[TensorStat, ...] = ()
    uncompiled: TensorStat | None = None
    compiled: TensorStat | None = None
    earlier: str = ""
    """An operator before it whose compiled result differs by more than rounding, in words."""
    backend: str = ""
    """What has compiled the graph: `inductor`."""


class GraphComparison:
    """Runs each graph both ways, until one of them is finite only uncompiled; then calls `found`."""

    def __init__(self, found: Callable[[GraphDifference], None]) -> None:
        self._tell = found
        self._backend, self._over = "", False

    def _found(self, difference: GraphDifference) -> None:
        self._tell(replace(difference, backend=self._backend))

    def forward(self, graph: fx.GraphModule, compiler: Compile, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What to run in place of a compiled forward graph."""
        self._backend = str(getattr(compiler, "_compiler_name", None) or getattr(compiler, "__name__", ""))

        def run(*args: Any) -> Any:
            if self._over:
                return compiled(*args)
            given, state = _copies(args), torch.get_rng_state()
            values, expected = _values(graph, given)
            torch.set_rng_state(state)
            results = compiled(*args)
            if _only_first_is_finite(expected, results):
                self._over = True
                self._found(_search("forward", graph, compiler, args, values) or GraphDifference("forward"))
            return results

        return run

    def backward(self, graph: fx.GraphModule, compiler: Compile, compiled: Any) -> Callable[..., Any]:
        """What to run in place of a compiled backward graph; it takes its arguments in one list, and empties that."""
        boxed = getattr(compiled, "_boxed_call", False)

        def run(args: list[Any]) -> Any:
            given = [] if self._over else _copies(args)
            results = compiled(args) if boxed else compiled(*args)
            bad = not self._over and any(not is_finite(t) for _, t in tensors_in(results))
            if bad and all(is_finite(t) for _, t in tensors_in(given)):
                self._over = True
                values, _ = _values(graph, given)
                made = next((node for node in values if _creates(node, values)), None)
                if made is not None:  # the compiler has taken an operator apart in a way that is not finite
                    self._found(_described("backward", made, values, None, values[made]))
                else:
                    found = _search("backward", graph, compiler, given, values)
                    self._found(found or GraphDifference("backward"))
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _search(
    phase: Literal["forward", "backward"],
    graph: fx.GraphModule,
    compiler: Compile,
    args: Sequence[Any],
    values: dict[fx.Node, Any],
) -> GraphDifference | None:
    """The first operator whose compiled result is not finite: all results at once, then one after the other."""
    until = time.monotonic() + _SECONDS
    nodes = [node for node, value in values.items() if _is_number(value) and node.op != "placeholder"]
    for grad in (False, True):
        with contextlib.suppress(Exception), torch.set_grad_enabled(grad):
            expected, results = _both(graph, compiler, args, nodes, backward=phase == "backward")
            earlier = ""
            for node, one, other in zip(nodes, expected, results, strict=True):
                if _only_first_is_finite(one, other):
                    return _described(phase, node, values, one, other, earlier)
                earlier = earlier or _difference(node, one, other)
    low, high = 0, len(nodes) - 1  # with fewer results to keep, a compiler may join operators as it did
    found: GraphDifference | None = None
    while low <= high and time.monotonic() < until:
        middle = (low + high) // 2
        try:
            with torch.no_grad():
                [one], [other] = _both(graph, compiler, args, [nodes[middle]], backward=phase == "backward")
        except Exception:
            break
        if _only_first_is_finite(one, other):
            found, high = _described(phase, nodes[middle], values, one, other), middle - 1
        else:
            low = middle + 1
    return found


def _both(
    graph: fx.GraphModule, compiler: Compile, args: Sequence[Any], nodes: Sequence[fx.Node], *, backward: bool
) -> tuple[list[Any], list[Any]]:
    """The results of these operators without the compiler, and with it."""
    state = torch.get_rng_state()
    expected = list(_returning(graph, nodes)(*_copies(args)))
    torch.set_rng_state(state)
    compiled, given = compiler(_returning(graph, nodes), _copies(args)), _copies(args)
    boxed = backward and getattr(compiled, "_boxed_call", False)
    results = list(compiled(given) if boxed else compiled(*given))
    return expected, results


def _copies(args: Sequence[Any]) -> list[Any]:
    """The same numbers in other memory: a graph may write into its inputs."""
    return [
        arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) and not arg.is_sparse else arg
        for arg in args
    ]


def _values(graph: fx.GraphModule, args: Sequence[Any]) -> tuple[dict[fx.Node, Any], Any]:
    """What each operator of the graph returns, and what the graph does, if they run one by one."""
    values: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = values[n] = super().run_node(n)
            return value

    with torch.no_grad():
        result = Keeping(graph, garbage_collect_values=False).run(*args)
    return values, result


def _returning(graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """The same graph, with the results of these operators."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op != "output":
            made[node] = copy.node_copy(node, made.__getitem__)
    copy.output(tuple(made[node] for node in nodes))
    copy.eliminate_dead_code()
    return fx.GraphModule(graph, copy)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _only_first_is_finite(one: Any, other: Any) -> bool:
    """Whether elements are finite in the first result and not in the second."""
    pairs = zip(tensors_in(one), tensors_in(other), strict=False)
    for (_, expected), (_, given) in pairs:
        if is_finite(given) or expected.shape != given.shape:
            continue
        if bool((torch.isfinite(expected.detach()) & ~torch.isfinite(given.detach())).any()):
            return True
    return False


def _creates(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether an operator returns something non-finite although all that it reads is finite."""
    bad = not is_finite(values[node]) if _is_number(values[node]) else False
    return bad and all(is_finite(values[one]) for one in node.all_input_nodes if _is_number(values.get(one)))


def _difference(node: fx.Node, one: Tensor, other: Tensor) -> str:
    """How far a compiled result is from the other, in words; empty if that may be rounding."""
    if one.shape != other.shape or not one.numel() or not is_finite(one) or not is_finite(other):
        return ""
    largest, far = float(one.abs().max()), float((one - other).abs().max())
    if far <= _MORE_THAN_ROUNDING * torch.finfo(one.dtype).eps * max(largest, torch.finfo(one.dtype).tiny):
        return ""
    return f"`{_name(node)[0]}` differs before it: by {far:.3g}, where its largest number is {largest:.3g}"


def _described(
    phase: Literal["forward", "backward"],
    node: fx.Node,
    values: dict[fx.Node, Any],
    uncompiled: Tensor | None,
    compiled: Tensor,
    earlier: str = "",
) -> GraphDifference:
    op, aten = _name(node)
    read = [(one.name, values.get(one)) for one in node.all_input_nodes]
    module, module_type = _module(node)
    return GraphDifference(
        phase,
        op,
        aten,
        tuple(_frames(node)),
        module,
        module_type,
        tuple(stat(name, value.detach()) for name, value in read if value is not None and _is_number(value)),
        stat("", uncompiled.detach()) if uncompiled is not None else None,
        stat("", compiled.detach()),
        earlier,
    )


def _name(node: fx.Node) -> tuple[str, str]:
    """The familiar name of an operator, and its name in aten if it is one of those."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2], str(target)
    if node.op == "call_module":
        return str(target).rpartition(".")[2], ""
    return (target if isinstance(target, str) else getattr(target, "__name__", str(target))).strip("_"), ""


def _frames(node: fx.Node) -> Iterator[tuple[str, int, str]]:
    """The callers that the compiler has noted, the innermost last."""
    for text in (node.stack_trace or "").splitlines():
        if text.lstrip().startswith('File "'):
            file, _, rest = text.strip().removeprefix('File "').partition('", line ')
            line, _, function = rest.partition(", in ")
            if line.isdigit():
                yield file, int(line), function


def _module(node: fx.Node) -> tuple[str, str]:
    """The path and class of the innermost module around an operator."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    parts = path.replace("L['self']", "").replace("['", ".").replace("']", "").replace("_modules.", "")
    return parts.strip("."), kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
