"""The learning rate in use: in the history, in the cause, in what is changed; histories of several optimizers."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstnan.diagnose.rules import explain
from firstnan.diagnose.rules.base import rate_rise
from firstnan.engine.turn import loops_of
from firstnan.gate.by_hand import HandWritten
from firstnan.gate.gate import Gate
from firstnan.records import (
    Cause,
    History,
    Operand,
    OpEvent,
    OptimizerHistory,
    Origin,
    Site,
    StepRecord,
    TensorStat,
    Trace,
)
from firstnan.repair import propose
from firstnan.repair.context import SourceFiles
from firstnan.repair.rates import assigned_rates, changed_at, manual_rates
from firstnan.repair.source import SourceFile
from test_turn import program
from zygote import Zygote

pytest_plugins = ["zygote"]

# --- histories ----------------------------------------------------------------------------------------------------


def train(gate: Gate, optimizer: Any, loss: Tensor, place: object) -> None:
    """One step, as the session tells the gate of it."""
    optimizer.zero_grad()
    gate.steps.backward_from(place)
    gate.backward_begins([loss])
    loss.backward()
    gate.check_update(optimizer, False)
    gate.update_begins(optimizer)
    optimizer.step()
    gate.update_ended(optimizer)


def two_optimizers() -> tuple[Gate, list[Any], list[nn.Linear]]:
    gate, models = Gate(), [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m, lr in zip(models, (0.1, 0.01), strict=True)]
    for optimizer in optimizers:
        gate.optimizer_made(optimizer)
    return gate, optimizers, models


def test_each_optimizer_has_a_history_of_its_own() -> None:
    gate, (critic, generator), models = two_optimizers()
    x = torch.ones(4, 2)
    for _ in range(3):
        for _ in range(5):
            train(gate, critic, models[0](x).mean(), "critic")
        train(gate, generator, models[1](x).mean(), "generator")
    past = gate.past(updated=True)
    assert [s.step for s in past.steps] == [0, 1, 2]
    assert {s.lr for s in past.steps} == {0.01}
    (other,) = past.others
    assert [s.step for s in other.steps] == list(range(15))
    assert {s.lr for s in other.steps} == {0.1}


def test_the_place_of_a_backward_call_tells_whose_step_it_is() -> None:
    gate, (critic, generator), models = two_optimizers()
    x, seen = torch.ones(4, 2), []
    for _ in range(2):
        for _ in range(5):
            train(gate, critic, models[0](x).mean(), "critic")
            gate.steps.backward_from("critic")
            seen.append(gate.steps.current)
        train(gate, generator, models[1](x).mean(), "generator")
        gate.steps.backward_from("generator")
        assert gate.steps.current == gate.steps.of(generator)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_two_backward_calls_before_two_steps_belong_to_them_in_their_order() -> None:
    gate, (one, other), _ = two_optimizers()
    for _ in range(2):
        gate.steps.backward_from("a")
        gate.steps.backward_from("b")
        gate.steps.add(one)
        gate.steps.add(other)
    gate.steps.add(other)
    gate.steps.backward_from("a")
    assert gate.steps.current == 2
    gate.steps.backward_from("b")
    assert gate.steps.current == 3


def test_each_of_two_losses_is_in_the_history_of_its_optimizer() -> None:
    gate, optimizers, models = two_optimizers()
    for _ in range(3):
        for place, (model, factor) in enumerate(zip(models, (1.0, 1e3), strict=True)):
            gate.steps.backward_from(place)
            loss = model(torch.ones(4, 2)).square().mean() * 0 + factor
            gate.backward_begins([loss])
            loss.backward()
        for optimizer in optimizers:
            gate.check_update(optimizer, False)
            gate.update_begins(optimizer)
            optimizer.step()
            gate.update_ended(optimizer)
    past = gate.past(updated=True)
    assert [s.loss for s in past.steps] == [1e3] * 3
    assert [s.loss for s in past.others[0].steps] == [1.0] * 3


def test_a_loss_from_an_unknown_place_belongs_to_what_it_trains() -> None:
    gate, (critic, generator), models = two_optimizers()
    x = torch.ones(4, 2)
    for _ in range(5):
        train(gate, critic, models[0](x).mean(), "critic")
    gate.steps.backward_from("generator")
    assert gate.backward_begins([models[1](x).mean() * float("nan")])
    assert gate.steps.current == gate.steps.of(generator) == 0


def test_an_optimizer_made_anew_goes_on_with_the_history() -> None:
    gate, model = Gate(), nn.Linear(2, 1)
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gate.optimizer_made(optimizer)
        for _ in range(2):
            train(gate, optimizer, model(torch.ones(4, 2)).mean(), "here")
    assert [s.step for s in gate.past(updated=True).steps] == [0, 1, 2, 3, 4, 5]


def test_micro_batches_are_one_step_of_the_history() -> None:
    gate, w = Gate(), torch.ones(3, requires_grad=True)
    for _ in range(4):
        for _ in range(3):
            loss = (w * w).sum()
            gate.backward_begins([loss])
            loss.backward()
            gate.backward_ended([loss])
            gate.end_manual_step()
        with torch.no_grad():
            w -= 0.01 * w.grad
        w.grad = None
    gate.backward_begins([(w * w).sum()])
    assert [s.step for s in gate.past().steps][:4] == [0, 1, 2, 3]
    assert len({s.step for s in gate.past().steps}) == len(gate.past().steps)


# --- updates by hand ----------------------------------------------------------------------------------------------


def by_hand(update: Any, *, clip: float | None = None) -> list[StepRecord]:
    gate, model = Gate(), nn.Linear(3, 2)
    for step in range(4):
        model.zero_grad()
        loss = (model(torch.ones(5, 3)) - 3).square().mean()
        gate.backward_begins([loss])
        loss.backward()
        gate.backward_ended([loss])
        gate.end_manual_step()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            gate.gradients_clipped(list(model.parameters()), clip, norm)
        for p in model.parameters():
            update(p, step)
    model.zero_grad()
    gate.backward_begins([loss])
    return list(gate.past().steps)[:4]


def plain(p: Tensor, step: int) -> None:
    assert p.grad is not None
    p.data.add_(p.grad, alpha=-0.01 * 2**step)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_rate_of_an_update_by_hand_is_measured(clip: float | None) -> None:
    rates = [s.lr for s in by_hand(plain, clip=clip)]
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.08], rel=1e-2)


def test_an_update_that_is_no_multiple_of_the_gradient_has_no_rate() -> None:
    def update(p: Tensor, step: int) -> None:
        p.data += torch.arange(p.numel()).view(p.shape) * 0.1

    assert [s.lr for s in by_hand(update)] == [None] * 4


def test_the_weights_of_an_update_by_hand_are_in_the_history() -> None:
    assert all(s.param_norm is not None and s.loss is not None and s.grad_norm is not None for s in by_hand(plain)[:3])


def test_updates_by_hand_count_even_if_there_is_an_optimizer_that_is_not_used() -> None:
    gate, model = Gate(), nn.Linear(3, 2)
    unused = torch.optim.SGD(model.parameters(), lr=0.1)
    gate.optimizer_made(unused)
    for _ in range(6):
        model.zero_grad()
        loss = model(torch.ones(5, 3)).square().mean()
        gate.backward_begins([loss])
        loss.backward()
        if gate.uses_gradients_at_once:
            gate.backward_ended([loss])
            if gate.is_by_hand:
                gate.end_manual_step()
        for p in model.parameters():
            plain(p, 0)
    assert gate.is_by_hand
    assert gate.steps.current == 6


def test_accumulated_gradients_before_the_first_step_are_no_updates_by_hand() -> None:
    gate, model = Gate(), nn.Linear(3, 2)
    gate.optimizer_made(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(6):
        loss = model(torch.ones(5, 3)).square().mean()
        gate.backward_begins([loss])
        loss.backward()
        gate.backward_ended([loss])
    assert not gate.is_by_hand


def test_only_a_gradient_with_respect_to_all_weights_is_a_step() -> None:
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    written = HandWritten()
    assert written.is_step("step", [(w * 2).sum()], [w])
    assert not written.is_step("saliency", [(w * x).sum()], [x])


# --- the cause ----------------------------------------------------------------------------------------------------


def rates(*values: float, losses: tuple[float, ...] = (), norm: float = 1.0, site: Site | None = None) -> History:
    losses = losses or (1.0,) * len(values)
    steps = tuple(StepRecord(i, x, norm, r) for i, (r, x) in enumerate(zip(values, losses, strict=True)))
    return History(steps, "SGD", (("lr", values[-1]),), rate_set_at=site, name="opt")


def overflow(history: History, weight: float = 1.0, step: int | None = None) -> list[Cause]:
    """The causes of a product with a weight of this size that overflowed."""
    read = TensorStat("mat2", (4, 4), "float32", -weight, weight)
    large = TensorStat("mat1", (4, 4), "float32", -1e30, 1e30)
    made = TensorStat("result", (4, 4), "float32", posinf=16)
    at = len(history.steps) - 1 if step is None else step
    inputs = (Operand("mat1", large), Operand("mat2", read, role="parameter", label="fc.weight"))
    event = OpEvent(0, "mm", "aten.mm", "forward", at, inputs, (made,), born=16)
    origin = Origin("forward", "mm", "aten.mm", event, inputs=(large, read), produced=made, step=at)
    return explain(origin, Trace((event,)), history)


def test_a_rate_that_rose_is_named_with_the_line_that_sets_it() -> None:
    history = rates(1e-3, 1e-3, 0.1, 10.0, 462.0, losses=(1.0, 0.9, 5.0, 1e9, 1e30), site=Site("train.py", 7, code="x"))
    cause = overflow(history)[0]
    assert cause.slug == "divergence_lr"
    assert "learning rate rose from 0.001 in step 1 to 462 in step 4" in cause.why
    assert "train.py:7 sets it" in cause.why


def test_a_rate_that_jumps_explains_an_overflow_before_anything_could_grow() -> None:
    cause = overflow(rates(1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e8, 1e8), weight=1e7)[0]
    assert cause.slug == "divergence_lr"
    assert "rose too far" in cause.title


def test_a_warm_up_does_not_explain_an_overflow_of_ordinary_weights() -> None:
    assert overflow(rates(1e-6, 1e-5, 1e-4, 1e-3, 1e-3, 1e-3, 1e-3), weight=1.0)[0].slug == "overflow"


def test_a_rate_that_came_down_again_did_not_rise() -> None:
    assert rate_rise(rates(1e-5, 1e-2, 1e-3, 1e-5)) is None
    assert rate_rise(rates(1e-3, 2e-3, 4e-3)) is None


def test_the_optimizer_that_diverges_may_be_another_one() -> None:
    own = StepRecord(0, 1.0, 1.0, 1e-4), StepRecord(1, 1.1, 1.0, 1e-4), StepRecord(2, 1e3, 1.0, 1e-4)
    grown = tuple(StepRecord(i, 10.0 ** (4 * i), 1.0, 5.0, 10.0**i) for i in range(8))
    other = OptimizerHistory(grown, "SGD", (("lr", 5.0),), name="opt_d")
    cause = overflow(History(own, "Adam", (("lr", 1e-4),), others=(other,)))[0]
    assert cause.slug == "divergence_lr"
    assert "opt_d (SGD)" in cause.why
    assert "learning rate is 5" in cause.why


def test_nothing_is_said_to_be_flat_beside_an_optimizer_whose_numbers_grow() -> None:
    flat = tuple(StepRecord(i, 1.0, 1.0, 1e-3) for i in range(6))
    grown = tuple(StepRecord(i, x, 1.0, 1e-3) for i, x in enumerate((1.0, 9.0, 2.0, 1e9, 3.0, 1.0)))
    assert "did not grow" in overflow(History(flat, "SGD"))[0].why
    assert "did not grow" not in overflow(History(flat, "SGD", others=(OptimizerHistory(grown, "SGD"),)))[0].why


# --- the source ---------------------------------------------------------------------------------------------------


def sources(folder: Path, text: str) -> tuple[SourceFiles, list[str]]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return SourceFiles(), [str(path)]


def test_an_assignment_belongs_to_the_optimizer_it_names(tmp_path: Path) -> None:
    files, names = sources(
        tmp_path,
        """
        config["lr"] = 3.0
        for group in opt_g.param_groups:
            group["lr"] = slow(step)
        for i, group in enumerate(opt_d.param_groups):
            group["lr"] = fast(step)
        """,
    )
    (found,) = assigned_rates(files, names, "opt_d")
    assert (found.site.line, found.site.code) == (6, 'group["lr"] = fast(step)')


@pytest.mark.parametrize(
    "assignment",
    [
        'group["lr"] = 0.1',
        "group['lr'] *= 0.1",
        'group[ "lr" ] //= 2',
        'group["lr"] \\\n    = 0.1',
        '(group["lr"]) = 0.1',
        'rate = group["lr"] = 0.1',
        'group["lr"] **= 2 if rate == 1 else 3',
    ],
)
def test_an_assignment_is_found_however_it_is_written(tmp_path: Path, assignment: str) -> None:
    files, names = sources(tmp_path, f"for group in opt.param_groups:\n{textwrap.indent(assignment, '    ')}\n")
    (found,) = assigned_rates(files, names, "opt")
    assert found.site.line == 2


def test_files_that_assign_no_rate_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the program are asked for, and there may be hundreds."""
    texts = {"reads.py": 'if group["lr"] == 3: print(opt.param_groups[0]["lr"])\n', "other.py": "x = 1\n"}
    texts["sets.py"] = "def set_rate(o, lr):\n    o.param_groups[0]['lr'] = lr\n"
    texts["calls.py"] = "from sets import set_rate as put\nput(opt, 0.5)\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    parsed, parse = list[str](), SourceFile.parsed
    monkeypatch.setattr(SourceFile, "parsed", lambda file, text: (parsed.append(Path(file).name), parse(file, text))[1])
    (found,) = assigned_rates(SourceFiles(), [str(tmp_path / name) for name in texts], "opt")
    assert (Path(found.site.file).name, found.site.line) == ("calls.py", 2)
    assert sorted(parsed) == ["calls.py", "sets.py"]


def test_a_helper_is_followed_to_its_call(tmp_path: Path) -> None:
    files, names = sources(
        tmp_path,
        """
        def set_rate(optimizer, lr):
            for group in optimizer.param_groups:
                group["lr"] = lr
        for step in range(9):
            set_rate(self.opt_g, 1e-4)
            set_rate(self.opt_d, 2.0 ** step)
        """,
    )
    (found,) = assigned_rates(files, names, "self.opt_d")
    assert (found.site.line, found.value.code(found.value.node)) == (7, "2.0 ** step")


@pytest.mark.parametrize(
    "update",
    [
        "p.data.add_(p.grad, alpha=-lr)",
        "p.data -= lr * p.grad",
        "p = p - lr * p.grad",
        "params = [q - lr * g for q, g in zip(params, torch.autograd.grad(loss, params))]",
        "grads = torch.autograd.grad(loss, params)\nparams = [q - lr * g for q, g in zip(params, grads)]",
    ],
)
def test_the_rate_of_an_update_by_hand_is_found(tmp_path: Path, update: str) -> None:
    files, names = sources(tmp_path, f"import torch\n{update}\n")
    assert [setter.value.code(setter.value.node) for setter in manual_rates(files, names)] == ["lr"]


RISING = """
import torch
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(99):
    for group in opt.param_groups:
        SETS
    err = net(x)
    loss = (err ** 2).mean()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("sets", "changed"),
    [
        ('group["lr"] = schedule(step)', 'group["lr"] = min(schedule(step), 0.001)'),
        ('group["lr"] *= 3', 'group["lr"] = min(group["lr"] * 3, 0.001)'),
    ],
)
def test_what_sets_the_rate_is_bounded_first(tmp_path: Path, sets: str, changed: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(RISING.replace("SETS", sets))
    steps = tuple(StepRecord(i, 10.0**i, 10.0**i, 1e-3 * 3**i) for i in range(9))
    history = History(
        steps,
        "SGD",
        (("lr", 19.0), ("lr_at_start", 1e-3)),
        made_at=Site(str(path), 3),
        rate_set_at=Site(str(path), 6),
        name="opt",
    )
    made = TensorStat("result", (4,), "float32", posinf=4)
    event = OpEvent(0, "pow", "aten.pow", "forward", 9, outputs=(made,), born=4)
    origin = Origin("forward", "pow", "aten.pow", event, site=Site(str(path), 8), produced=made, step=9)
    first = propose(origin, Trace((event,)), history, [Cause("divergence_lr", "", "")])[0]
    assert f"+        {changed}\n" in first.diff


# --- loops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("for epoch in range(1, 4):\n for i, x in enumerate('abc'):\n  here()", [("epoch", 1, 0), ("i", 0, 0)]),
        ("for i in range(10, 30, 5):\n  if i == 20: here()", [("i", 20, 2)]),
        ("n = 40\nwhile n < 43:\n  here()\n  n += 1", [("n", 40, None)]),
        ("for x in [3, 4]:\n  here()", []),
    ],
)
def test_loops_say_how_far_they_were(tmp_path: Path, loop: str, expected: list[tuple[str, int, int | None]]) -> None:
    names, owns = program(tmp_path, f"def main():\n{textwrap.indent(loop, ' ')}\nmain()")
    found = loops_of(names["turns"][0], owns)
    assert [(turn.variable, turn.value, turn.iteration) for turn in found] == expected


# --- whole programs -----------------------------------------------------------------------------------------------

CRITICS = """
import torch
from torch import nn

torch.manual_seed(0)
critic, generator = nn.Linear(2, 1), nn.Linear(2, 2)
opt_d = torch.optim.SGD(critic.parameters(), lr=1e-3)
opt_g = torch.optim.SGD(generator.parameters(), lr=1e-3)

def set_rate(opt, rate):
    for group in opt.param_groups:
        group["lr"] = rate

for it in range(60):
    set_rate(opt_g, 1e-3)
    set_rate(opt_d, 1e-3 * 2.0 ** it)  # <- rate
    for _ in range(5):
        real = torch.randn(8, 2) + 2
        loss = (critic(real) - 1).square().mean()  # <-
        opt_d.zero_grad()
        loss.backward()
        opt_d.step()
    loss = -critic(generator(torch.randn(8, 2))).mean()
    opt_g.zero_grad()
    loss.backward()
    opt_g.step()
"""


def test_of_five_critics_and_a_generator_the_one_that_diverges(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CRITICS)
    found = firstnan(["run", "--verify", "5", "train.py"], cwd=tmp_path).found
    lines = CRITICS.splitlines()
    history, (loop, _) = found["history"], found["loops"]
    assert found["cause"]["slug"] == "divergence_lr"
    assert (history["name"], [other["name"] for other in history["others"]]) == ("opt_d", ["opt_g"])
    assert history["rate_set_at"]["line"] == 1 + next(i for i, x in enumerate(lines) if x.endswith("# <- rate"))
    assert loop["variable"] == "it"
    assert loop["value"] == found["step"] // 5
    steps = [record["step"] for record in history["steps"]]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    best = found["remedies"][0]
    assert best["failing_step_finite"]
    assert "min(1e-3 * 2.0 ** it, 0.001)" in best["diff"]


BY_HAND = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
x = torch.randn(32, 4)

def rate(step):
    return 1e-3 * 2.0 ** step

for step in range(80):
    lr = rate(step)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)  # <- rate
"""


def test_the_rate_of_a_program_that_updates_by_hand(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    found = firstnan(["run", "--verify", "5", "train.py"], cwd=tmp_path).found
    history = found["history"]
    assert found["cause"]["slug"] == "divergence_lr"
    assert "learning rate rose from" in found["cause"]["why"]
    known = [(record["step"], record["lr"]) for record in history["steps"] if record["lr"] is not None]
    assert [rate for _, rate in known] == pytest.approx([1e-3 * 2.0**step for step, _ in known], rel=0.05)
    assert "alpha=-lr" in history["rate_set_at"]["code"]
    assert found["remedies"][0]["failing_step_finite"]
    assert "min(lr" in found["remedies"][0]["diff"]


ADAM_BY_HAND = """
import math
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
params = list(model.parameters())
first = [torch.zeros_like(p) for p in params]
second = [torch.zeros_like(p) for p in params]


def update(t, lr):
    for p, m, v in zip(params, first, second):
        m.mul_(0.9).add_(p.grad, alpha=0.1)
        v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        size = lr * math.sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t)
        p.data.addcdiv_(m, v.sqrt().add_(1e-8), value=-size)


lr = 1e-3
for t in range(1, 120):
    x = torch.randn(32, 6)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean() + model(x).exp().mean()
    model.zero_grad()
    loss.backward()
    lr = lr * 1.15
    update(t, lr)
"""


def test_the_rate_of_adam_by_hand(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ADAM_BY_HAND)
    found = firstnan(["run", "--verify", "5", "train.py"], cwd=tmp_path).found
    history = found["history"]
    known = [(record["step"], record["lr"]) for record in history["steps"] if record["lr"] is not None]
    assert len(known) > 20
    assert [rate for _, rate in known] == pytest.approx([1e-3 * 1.15 ** (step + 1) for step, _ in known], rel=0.05)
    assert found["cause"]["slug"] == "divergence_lr"
    assert "learning rate rose from" in found["cause"]["why"]
    assert "addcdiv_" in history["rate_set_at"]["code"]
    assert "min(size" in found["remedies"][0]["diff"]
    assert found["remedies"][0]["failing_step_finite"]


@pytest.mark.parametrize(
    ("update", "fixed"), [("lr /= 0.25", "lr *= 0.25"), ("lr *= 10", "lr *= 0.1"), ("lr /= 4", ""), ("lr += 1", "")]
)
def test_the_line_that_changes_a_rate_by_hand(tmp_path: Path, update: str, fixed: str) -> None:
    files, names = sources(
        tmp_path,
        f"""
        def train(lr):
            for step in range(9):
                loss.backward()
                for p in net.parameters():
                    p.data.add_(p.grad, alpha=-lr)
                {update}
        """,
    )
    changed = changed_at(manual_rates(files, names)[0])
    assert (changed.site.line if changed is not None else None) == (None if "+=" in update else 7)
    if changed is None:
        return
    steps = tuple(StepRecord(i, 10.0**i, 10.0**i, 6.0 * 4**i) for i in range(9))
    history = History(steps, "", (), rate_set_at=changed.site)
    cause = overflow(history)[0]
    assert f"train.py:7 changes it: `{update}`" in cause.why
    origin = Origin("forward", "mm", "aten.mm", site=Site(names[0], 4), step=8)
    remedies = propose(origin, Trace(), history, [Cause("divergence_lr", "", "")])
    assert [r.title for r in remedies if r.title.startswith("Use `lr")] == ([f"Use `{fixed}`"] if fixed else [])


TRANSFORMED = """
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
params = {name: p.detach().clone() for name, p in model.named_parameters()}


def loss_of(params, x, y):
    slope = vmap(jacrev(lambda one: functional_call(model, params, (one,)).sum()))(x)
    error = (functional_call(model, params, (x,)).squeeze(-1) - y) / SCALE
    return error.square().mean() + 1e-3 * slope.square().mean()


for step in range(12):
    x = torch.randn(6, 3)
    y = x[:, 0].clone()
    y[4] = 0.0 if step == 7 else 1.0
    weight = OUTSIDE
    GRADIENTS
    params = {name: p - 0.01 * weight * grads[name] for name, p in params.items()}
    if step % 2:
        shown = vmap(jacrev(lambda one: functional_call(model, params, (one,)).sum()))(x).norm()
"""


@pytest.mark.parametrize(
    ("gradients", "scale", "outside", "line"),
    [
        ("grads, loss = grad_and_value(loss_of)(params, x, y)", "y", "1.0", "SCALE"),
        (
            "(grads,) = vjp(lambda p: loss_of(p, x, y), params)[1](torch.ones(()))",
            "2.0",
            "1.0 / y.abs().min()",
            "OUTSIDE",
        ),
        ("grads = grad(loss_of)(params, x, y); weight = 1.0 / y.abs().min()", "2.0", "0.0", "GRADIENTS"),
    ],
)
def test_training_by_transforms_alone(
    firstnan: Zygote, tmp_path: Path, gradients: str, scale: str, outside: str, line: str
) -> None:
    """Gradients of `torch.func` are steps too, and weights that an update has lost are blamed on that update."""
    program = TRANSFORMED.replace("GRADIENTS", gradients).replace("SCALE", scale).replace("OUTSIDE", outside)
    (tmp_path / "train.py").write_text(program)
    found = firstnan(["run", "--verify", "2", "train.py"], cwd=tmp_path).found
    at = next(i for i, text in enumerate(TRANSFORMED.splitlines(), 1) if line in text)
    assert (found["step"], found["origin"]["line"], found["cause"]["slug"]) == (7, at, "div_by_zero")
    assert found["reproduced"] == "deterministic"


NORMALISED = """
import torch

torch.manual_seed(0)
weight = torch.randn(3, requires_grad=True)
bias = torch.zeros(1, requires_grad=True)
for step in range(9):
    x = torch.randn(8, 3) * (step != 5)
    loss = (x @ weight + bias - 1).square().mean()
    weight.grad = bias.grad = None
    loss.backward()
    with torch.no_grad():
        for p in (weight, bias):
            p -= 0.01 * p.grad / p.grad.norm()
"""


def test_an_update_by_hand_of_tensors_that_belong_to_no_module(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NORMALISED)
    found = firstnan(["run", "--verify", "2", "train.py"], cwd=tmp_path).found
    assert (found["step"], found["origin"]["phase"], found["origin"]["line"]) == (5, "optimizer", 14)
    assert found["cause"]["slug"] == "optimizer_eps"
    assert found["loops"] == []  # the update is judged in the next turn
