"""The hooks on a model's layers: put on, taken off, and what they hand to forward and backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from firstnan.observe.layers.backward import Backward
from firstnan.observe.layers.choose import Layer, Trackable, layers_of
from firstnan.observe.layers.forward import Forward
from firstnan.observe.layers.found import Sink
from firstnan.observe.layers.tensors import Call, Here, Passed, Seen, Waiting, floating, version_of
from firstnan.observe.patches import Hook

# Layers that wait to be thought about: their tensors are kept alive until then.
_MOST_PASSED = 6
# Calls of a model whose loss is awaited: likewise.
_MOST_PUT_OFF = 3
# Everything is looked at in so many steps at first, and after something went wrong; then in every eighth.
_CLOSELY = 16
_EVERY = 8


class LayerWatch:
    """Watches the layers of `roots` (prefix of the names -> model) and tells `sink` of every tensor that is not finite.

    `trackable` replaces the choice of layers, `skip` takes types, names or globs out of it, `statistics` tells the
    sink the magnitudes of every output and of its gradient too. With `in_turn` most steps only take notes, until the
    loss is known: `look_back` where it is bad, `pass_over` where it is not. Every eighth step is looked at in full, and
    so are the first ones, counted from `steps`.
    """

    def __init__(
        self,
        roots: Mapping[str, Module],
        sink: Sink,
        *,
        trackable: Trackable | None = None,
        skip: Iterable[type | str] = (),
        statistics: bool = False,
        in_turn: bool = False,
        steps: int = 0,
    ) -> None:
        self.training_thread: int | None = None
        """The thread whose forward passes are the training step; None: every thread that records gradients."""
        self.trouble: Exception | None = None
        """The first error of our own."""
        self.rests: Callable[[], bool] = lambda: False
        """Whether nothing is looked at for now: asked when a model is called, and when a gradient comes."""
        self._roots, self._trackable, self._skip = dict(roots), trackable, tuple(skip)
        self._statistics, self._in_turn = statistics, in_turn and not statistics
        self._closely_until = _CLOSELY
        self._lock = threading.Lock()
        self._on = False
        self.steps = steps
        """How many were watched, by those before this one too."""
        self._handles: list[Any] = []
        self._here = Here()
        self._waiting = Waiting()
        self._forward = Forward(sink, self._waiting, statistics)
        self._backward = Backward(sink, self._waiting, statistics, self._run_awake)

    def attach(self) -> None:
        """Sets the hooks on the modules that the models have now."""
        with self._lock:
            if self._on:
                return
            self._here = Here()
            for root in self._roots.values():
                enter = _Hook(root, partial(self._run, self._enter))
                self._handles.append(root.register_forward_pre_hook(enter))
            for module, layer in layers_of(self._roots, self._trackable, self._skip):
                self._handles.append(module.register_forward_hook(_LayerHook(module, layer, self), with_kwargs=True))
            for root in self._roots.values():
                leave = _Hook(root, partial(self._run, self._leave))
                self._handles.append(root.register_forward_hook(leave, always_call=True))
            self._on = True

    def detach(self) -> None:
        """Takes every hook away, those on the graph and on tensors included."""
        with self._lock:
            self._on = False
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._backward.detach()
            self._waiting.clear()
            self._here = Here()

    def new_step(self) -> None:
        """From here on calls are counted from 0 again."""
        self.steps += 1
        self._backward.new_step()

    def wake(self) -> None:
        """Something is wrong or about to be: from the next step on everything is looked at for a while."""
        self._closely_until = self.steps + 1 + _CLOSELY

    def look_back(self) -> None:
        """The loss of this thread's forward pass is bad: what its layers did is looked at now."""
        self.wake()
        self._run(self._look_at_put_off)

    def pass_over(self) -> None:
        """The loss of this thread's forward pass is good."""
        self._here.put_off.clear()

    def collect(self) -> list[Tensor]:
        """Single values on devices where a read waits; once they are read, hand them to `judge` in this order."""
        return self._waiting.collect()

    def judge(self, values: list[float]) -> None:
        """Tells the sink what the values of the oldest `collect` mean."""
        self._run(self._waiting.judge, values)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        """Every hook comes through here: an error of our own is kept and goes no further."""
        if torch.compiler.is_compiling() or not self._on:
            return
        try:
            function(*args)
        except Exception as error:
            self.trouble = self.trouble or error

    def _run_awake(self, function: Callable[..., None], *args: Any) -> None:
        if not self.rests():
            self._run(function, *args)

    def _blind(self) -> bool:
        """Whether not to look: told so, or inside a functional transform or a tracer, where tensors have no values."""
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        return in_transform or torch._C._get_tracing_state() is not None or self.rests()

    def _enter(self, module: Module, args: Any) -> None:
        here = self._here
        if here.depth == 0 or here.entered != self.steps:  # else an interrupted call would never end
            # Asked once for a whole model: so much of a hook's time goes into asking torch.
            here.recording, here.again, here.blind = torch.is_grad_enabled(), _again(), self._blind()
            plain = not (here.again or here.blind or self._statistics or torch.is_inference_mode_enabled())
            here.depth, here.entered, here.passed = 0, self.steps, [] if plain else None
            here.light = plain and module.training and self._rests_now(here)
        here.depth += 1

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        here = self._here
        here.depth = max(0, here.depth - 1)
        if here.depth == 0 and here.light:
            here.put_off.append(here.passed or [])
            here.light, here.passed = False, None
            while len(here.put_off) > _MOST_PUT_OFF:
                self._look_at_notes(here, here.put_off.pop(0))
        elif here.depth == 0:
            self._catch_up(here)
            self._forward.close(here)
            here.passed = None

    def _catch_up(self, here: Here) -> None:
        """Thinks about layers that have run; several at once, since code that ran a moment ago runs much faster."""
        passed = here.passed
        if not passed:
            return
        here.passed = []
        for one in passed:
            self._to_judge(here, one)(follow=one[-1] is not None)

    def _to_judge(self, here: Here, passed: Passed) -> Callable[..., None]:
        """What is known of the tensors of a layer that has run, to be judged by reading them."""
        layer, t, version, node, made, made_version, made_node = passed
        call = self._call(here, layer, here.recording, False)
        read = [("", here.known(t, version), t, node)]
        outputs = [("", here.known(made, made_version), made, made_node)]
        return partial(self._judge, here, call, read, outputs, again=False)

    def _rests_now(self, here: Here) -> bool:
        """Whether the call of a model that begins only takes notes."""
        if not (self._in_turn and here.recording) or self.training_thread not in (None, here.thread):
            return False
        return self.steps >= self._closely_until and self.steps % _EVERY != 0

    def _look_at_put_off(self) -> None:
        here = self._here
        put_off, here.put_off = [*here.put_off, here.passed or []] if here.light else here.put_off, []
        here.light, here.passed = False, None
        for notes in put_off:
            self._look_at_notes(here, notes)

    def _look_at_notes(self, here: Here, notes: list[Any]) -> None:
        here.depth += 1  # as inside the call in which they were taken
        here.looks_back = True
        try:
            for one in notes:
                judge = self._to_judge(here, one) if isinstance(one, tuple) else one
                judge(follow=False)
            self._forward.close(here)
        finally:
            here.depth -= 1
            here.looks_back = False

    def _called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        here = self._here
        if here.light and here.passed is not None:
            # It may have written in place what the layers before it made: those are known first.
            earlier = [self._to_judge(here, one) for one in here.passed if isinstance(one, tuple)]
            here.passed = [one for one in here.passed if not isinstance(one, tuple)] + earlier
            note = partial(self._judge, here, *self._noted(here, layer, args, kwargs, output), again=False)
            here.passed.append(note)
            return
        self._catch_up(here)
        again, blind = (here.again, here.blind) if here.depth else (_again(), self._blind())
        if blind:
            return
        call, read, made = self._noted(here, layer, args, kwargs, output, again)
        self._judge(here, call, read, made, again, follow=torch.is_grad_enabled() and bool(made))

    def _noted(
        self, here: Here, layer: Layer, args: Any, kwargs: Any, output: Any, again: bool = False
    ) -> tuple[Call, list[Seen], list[Seen]]:
        """What a layer read and made, as it is now."""
        trains = torch.is_grad_enabled() or (here.depth > 0 and here.recording)
        call = self._call(here, layer, trains, again)
        given = floating(args[0] if len(args) == 1 else args)
        for name, value in kwargs.items():
            given += floating(value, name)
        outputs = floating(output)
        # What the layer wrote in place is known as it was before, if at all.
        written = [id(t) for _, t in outputs]
        read = []
        for place, t in given:
            known = here.before(t) if id(t) in written else here.known(t, version_of(t))
            if known is not None:
                read.append((place, known, t, t.grad_fn))
        return call, read, [(place, here.known(t, version_of(t)), t, t.grad_fn) for place, t in outputs]

    def _judge(self, here: Here, call: Call, read: list[Seen], made: list[Seen], again: bool, *, follow: bool) -> None:
        if not again:
            self._forward.called(here, call, read, made)
        if follow:
            self._backward.follow(call, read, made)

    def _call(self, here: Here, layer: Layer, trains: bool, again: bool) -> Call:
        in_step = again or (trains and self.training_thread in (None, here.thread))
        return Call(layer, here.number(layer, self.steps, again), in_step, here.name)


def _again() -> bool:
    """Activation checkpointing runs layers again during backward: the same calls, looked at already."""
    return torch._C._current_autograd_node() is not None


class _Hook(Hook):
    """A hook on one module of the user's, and on its replicas."""

    __slots__ = ("_module",)

    def __init__(self, module: Module, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._module = weakref.ref(module)

    def __call__(self, module: Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module is self._module() or module.__dict__.get("_is_replica"):
            self._act(module, *args)


class _LayerHook(_Hook):
    """After every call of a layer: of the usual one, one tensor in and one out, it only takes a note."""

    def __init__(self, module: Module, layer: Layer, watch: LayerWatch) -> None:
        super().__init__(module, partial(watch._run, watch._called, layer))
        self._layer, self._watch = layer, watch

    def __call__(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module is self._module() or module.__dict__.get("_is_replica")):
            return
        here = self._watch._here
        passed = here.passed
        if passed is not None and self._layer.faithful and len(args) == 1 and not kwargs:
            t = args[0]
            usual = type(t) is Tensor and type(output) is Tensor and t is not output
            if usual and output.is_floating_point() and not t.is_inference():
                passed.append((self._layer, t, t._version, t.grad_fn, output, output._version, output.grad_fn))
                if len(passed) >= _MOST_PASSED and not here.light:
                    self._watch._run(self._watch._catch_up, here)
                return
        self._act(args, kwargs, output)
