"""Which layer is running, by its path in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import firstnan
from firstnan.observe.module_stack import ModuleStack, whole_path
from firstnan.tensors.models import Models, readable_path


class Spy(nn.Module):
    """Notes where the stack says it is, each time it runs."""

    def __init__(self, seen: list[tuple[str, str]], stack: ModuleStack) -> None:
        super().__init__()
        self.seen, self.stack = seen, stack

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.stack.current()[:2])
        return x


@pytest.fixture
def stack() -> Any:
    stack = ModuleStack()
    stack.attach()
    yield stack
    stack.detach()


@pytest.fixture
def seen() -> list[tuple[str, str]]:
    return []


X = torch.ones(1)


def test_paths_below_the_outermost_module(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    net = nn.Sequential(Spy(seen, stack), nn.Sequential(nn.Identity(), Spy(seen, stack)))
    net(X)
    assert seen == [("0", "Spy"), ("1.1", "Spy")]
    assert stack.current() == ("", "", None)


def test_the_outermost_module_itself(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    Spy(seen, stack)(X)
    assert seen == [("", "Spy")]


def test_a_layer_shared_by_two_parents_has_two_paths(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    shared = Spy(seen, stack)
    net = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(nn.Identity(), shared)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.parts["decoder"](self.parts["encoder"](x))
            return out

    Net()(X)
    assert [path for path, _ in seen] == ["parts.encoder.0", "parts.decoder.1"]


def test_a_layer_called_twice_and_one_that_calls_itself(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Spy(seen, stack)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.leaf(x)
            return self(x, depth - 1) if depth else x

    nn.Sequential(Recursive())(X)
    assert [path for path, _ in seen] == ["0.leaf"] * 3
    assert stack.current() == ("", "", None)


def test_layers_that_nobody_registered(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Sequential(Spy(seen, stack))]  # a plain list

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    nn.Sequential(Hidden())(X)
    assert seen == [("0.<Sequential>.<Spy>", "Spy")]


def test_a_layer_added_between_two_calls(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    net = nn.Sequential(Spy(seen, stack))
    net(X)
    net.append(nn.Sequential(Spy(seen, stack)))
    net(X)
    assert [path for path, _ in seen] == ["0", "0", "1.0"]


def test_a_layer_replaced_by_another_of_the_same_address(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    for _ in range(20):
        net = nn.Sequential(nn.Sequential(nn.Identity(), Spy(seen, stack)))
        net(X)
        other = nn.Sequential(Spy(seen, stack))
        other(X)
        del net, other
    assert {path for path, _ in seen} == {"0.1", "0"}
    assert [path for path, _ in seen] == ["0.1", "0"] * 20


def test_an_exception_on_the_way(stack: ModuleStack, seen: list[tuple[str, str]]) -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = nn.Sequential(nn.Sequential(Bad()))
            self.spy = Spy(seen, stack)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(ValueError, match="no"):
                self.bad(x)
            out: Tensor = self.spy(x)
            return out

    Net()(X)
    with pytest.raises(ValueError, match="no"):
        nn.Sequential(Bad())(X)
    assert seen == [("spy", "Spy")]
    assert stack.current() == ("", "", None)


def test_a_hook_of_the_program_that_raises(stack: ModuleStack) -> None:
    net = nn.Sequential(nn.Identity())

    def refuse(*_: Any) -> None:
        raise KeyError("hook")

    net[0].register_forward_pre_hook(refuse)
    with pytest.raises(KeyError):
        net(X)
    assert stack.current() == ("", "", None)


def test_attached_in_the_middle_of_a_call(seen: list[tuple[str, str]]) -> None:
    stack = ModuleStack()

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Spy(seen, stack))

        def forward(self, x: Tensor) -> Tensor:
            stack.attach()
            out: Tensor = self.inner(x)
            return out

    try:
        nn.Sequential(Late())(X)
        assert seen == [("0", "Spy")]
        assert stack.current() == ("", "", None)
    finally:
        stack.detach()


def test_no_hook_and_no_attribute_is_left() -> None:
    net = nn.Sequential(nn.Linear(1, 1))
    before = {name: sorted(vars(m)) for name, m in net.named_modules()}
    stack = ModuleStack()
    hooks = len(torch_modules._global_forward_hooks), len(torch_modules._global_forward_pre_hooks)
    stack.attach()
    net(X)
    stack.detach()
    stack.detach()
    assert (len(torch_modules._global_forward_hooks), len(torch_modules._global_forward_pre_hooks)) == hooks
    assert {name: sorted(vars(m)) for name, m in net.named_modules()} == before


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("", ""),
        ("encoder.0", "encoder.0"),
        ("_orig_mod.encoder.0", "encoder.0"),
        ("module.encoder.0", "encoder.0"),
        ("_orig_mod.module.encoder", "encoder"),
        ("module._orig_mod.encoder", "encoder"),
        ("_fsdp_wrapped_module.layers.1._fsdp_wrapped_module.fc", "layers.1.fc"),
        ("layers.0._checkpoint_wrapped_module.fc", "layers.0.fc"),
        ("layers.0._orig_mod.fc", "layers.0.fc"),
        ("blocks.0.module.fc", "blocks.0.module.fc"),
        ("module", ""),
    ],
)
def test_readable_paths(name: str, path: str) -> None:
    assert readable_path(name) == path


def test_a_part_that_is_called_by_itself_has_its_path_in_the_model(stack: ModuleStack) -> None:
    places = []

    class Place(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places.append(stack.current())
            return x

    model = nn.ModuleList([nn.Sequential(Place(), nn.Sequential(Place())) for _ in range(3)])
    for part in (model[2], model[1][1], Place(), nn.Sequential(nn.Sequential(Place()))):
        part(X)
    parts = Models({"": model}).parts()
    assert [whole_path(place, parts) for place in places] == ["2.0", "2.1.0", "1.1.0", "", "0.0"]
    assert [whole_path(place, {}) for place in places] == ["0", "1.0", "0", "", "0.0"]
    del model, part
    parts = {key: (nn.Identity(), path) for key, (_, path) in parts.items()}  # others, where those were in memory
    assert [whole_path(place, parts) for place in places] == ["0", "1.0", "0", "", "0.0"]


def test_a_model_that_is_entered_by_a_method_of_its_own() -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Softplus()) for _ in range(3))

        def log_prob(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    torch.manual_seed(0)
    model = Flow()
    with torch.no_grad():
        model.layers[0][0].bias.fill_(9.0)  # type: ignore[index, union-attr, operator]
        model.layers[1][0].weight.fill_(3e38)  # type: ignore[index, union-attr, operator]
    with pytest.raises(firstnan.NonFiniteError) as caught, firstnan.trace():
        model.log_prob(torch.ones(4, 2)).backward()  # type: ignore[no-untyped-call]
    origin = caught.value.report.origin
    assert origin is not None
    assert (origin.module, origin.module_type) == ("layers.1.0", "Linear")


def test_a_loss_module_does_not_tell_how_many_samples_there_are() -> None:
    stack = ModuleStack()
    stack.attach()
    try:
        rows = nn.Linear(3, 5)(torch.randn(4, 7, 3)).flatten(0, 1)
        nn.CrossEntropyLoss()(rows, torch.zeros(28, dtype=torch.long))
    finally:
        stack.detach()
    assert stack.batch_size == 4


def test_a_step_may_call_its_model_with_several_numbers_of_samples() -> None:
    stack, model = ModuleStack(), nn.Linear(3, 5)
    stack.attach()
    try:
        for rows in (81, 32):
            model(torch.randn(rows, 3))
    finally:
        stack.detach()
    assert [stack.size_with(rows) for rows in (81, 32, 7, None)] == [81, 32, 32, 32]


def test_the_features_of_one_sample_are_not_samples() -> None:
    stack, model = ModuleStack(), nn.Linear(3, 5)
    stack.attach()
    try:
        model(torch.randn(3))
    finally:
        stack.detach()
    assert stack.batch_size is None
