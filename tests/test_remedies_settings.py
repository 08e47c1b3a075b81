"""Remedies that change settings, data, weights or precision: whole programs, repaired and run again.

`remedies/programs/*.txt` holds them: a head line `### name | slug | n`, the program (other files after a line
`=== other.py`), then `--- change` and what the remedy number n takes away and puts there.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from firstnan.records import Cause, History, OpEvent, Origin, Remedy, Site, StepRecord, TensorStat, Trace
from firstnan.repair import propose
from firstnan.repair.context import Location, SourceFiles
from firstnan.repair.literals import find_literal, format_number
from firstnan.repair.source import SourceFile
from test_remedies import apply, changed_lines
from zygote import Zygote

pytest_plugins = ["zygote"]

PROGRAMS = Path(__file__).with_name("remedies") / "programs"


def read_programs() -> list[Any]:
    found = []
    for path in sorted(PROGRAMS.glob("*.txt")):
        for piece in path.read_text().split("### ")[1:]:
            head, rest = piece.split("\n", 1)
            name, slug, which = (word.strip() for word in head.split("|"))
            program, _, change = rest.partition("--- change\n")
            found.append(pytest.param(slug, int(which), program, change, id=name))
    return found


@pytest.mark.parametrize(("slug", "which", "program", "change"), read_programs())
def test_the_remedy_repairs_the_program(
    slug: str, which: int, program: str, change: str, firstnan: Zygote, tmp_path: Path
) -> None:
    files = ("=== train.py\n" + program).split("=== ")[1:]
    for name, text in (file.split("\n", 1) for file in files):
        (tmp_path / name).write_text(text)
    result = firstnan(["run", "train.py"], cwd=tmp_path)
    assert result.cause == slug
    remedy = result.found["remedies"][which]
    assert changed_lines(remedy["diff"]) == change
    target = Path(remedy["diff"].split("\n", 1)[0].removeprefix("--- a/"))
    target.write_text(apply(target.read_text(), remedy["diff"]))
    again = firstnan(["run", "train.py"], cwd=tmp_path)
    assert again.code == 0, again.stderr


# --- where the number stands --------------------------------------------------------------------------------------

SPELLINGS = {
    "a literal": "opt = SGD(p, lr=0.5)",
    "a name": "rate = 0.5\nopt = SGD(p, lr=rate)",
    "a constant of the module, from inside a function": "LR = 0.5\ndef make(p):\n    return SGD(p, lr=LR)",
    "the default of a parameter": "def make(p, rate=0.5):\n    return SGD(p, lr=rate)",
    "what the call hands over": "def make(p, rate=0.1):\n    return SGD(p, lr=rate)\nmake(p, rate=0.5)",
    "by position, to a method": (
        "class T:\n    def __init__(self, p, rate):\n        self.o = SGD(p, lr=rate)\nT(p, 0.5)"
    ),
    "an attribute": "class T:\n    def f(self, p):\n        self.r = 0.5\n        self.o = SGD(p, lr=self.r)",
    "an option": 'parser.add_argument("--base-lr", type=float, default=0.5)\nopt = SGD(p, lr=args.base_lr)',
    "an option with another name": 'parser.add_argument("-r", dest="rate", default=0.5)\nopt = SGD(p, lr=args.rate)',
    "a field": "class Config:\n    rate: float = 0.5\nopt = SGD(p, lr=config.rate)",
    "a field of a dataclass": "class Config:\n    rate: float = field(default=0.5)\nopt = SGD(p, lr=config.rate)",
    "a table": 'config = {"rate": 0.5}\nopt = SGD(p, lr=config["rate"])',
    "a table with a default": 'config = dict(rate=0.5)\nopt = SGD(p, lr=float(config.get("rate", 0.1)))',
    "several at once": "epochs, rate = 3, 0.5\ndef make(p):\n    return SGD(p, lr=rate)",
    "a list of pairs": "opts = [SGD(p, lr=r) for p, r in ((actor, 0.1), (critic, 0.5))]",
    "two lists": "for p, r in zip(models, (0.1, 0.5)):\n    opts.append(SGD(p, lr=r))",
}


def rate_of(text: str, file: str = "train.py") -> Location[ast.expr]:
    source = SourceFile(file, text)
    call = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and source.called(n).endswith("SGD"))
    return Location(source, next(k.value for k in call.keywords if k.arg == "lr"))


@pytest.mark.parametrize("text", [pytest.param(t, id=n) for n, t in SPELLINGS.items()])
def test_the_literal_behind_a_setting_is_found(text: str) -> None:
    found = find_literal(SourceFiles(), rate_of(text), expected=0.5)
    assert found is not None
    assert found.source.code(found.node) == "0.5"


def test_the_literal_in_another_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("RATE = 0.5\n")
    text = "from settings import RATE\nopt = SGD(p, lr=RATE)"
    found = find_literal(SourceFiles(), rate_of(text, str(tmp_path / "train.py")), expected=0.5)
    assert found is not None
    assert found.source.file == str(tmp_path / "settings.py")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("pkg/settings.py", "from .settings import RATE\nopt = SGD(p, lr=RATE)"),
        ("pkg/settings.py", "from . import settings as s\nopt = SGD(p, lr=s.RATE)"),
        ("settings.py", "from ..settings import RATE as rate\nopt = SGD(p, lr=rate)"),
        ("settings.py", "from settings import RATE\nopt = SGD(p, lr=RATE)"),
        ("settings.py", "import settings\nopt = SGD(p, lr=settings.RATE)"),
        ("settings/__init__.py", "from settings import RATE\nopt = SGD(p, lr=RATE)"),
    ],
)
def test_also_in_a_package_or_the_folder_around_it(tmp_path: Path, settings: str, text: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / settings).parent.mkdir(exist_ok=True)
    (tmp_path / settings).write_text("RATE = 0.5\n")
    found = find_literal(SourceFiles(), rate_of(text, str(tmp_path / "pkg" / "train.py")), expected=0.5)
    assert found is not None
    assert found.source.file == str(tmp_path / settings)


@pytest.mark.parametrize(
    "text",
    [
        'parser.add_argument("--lr", default=0.1)\nopt = SGD(p, lr=args.lr)',  # the command line said something else
        "opt = SGD(p, lr=base * 2)",
        "rate = 0.5\nrate = find_rate(rate)\nopt = SGD(p, lr=rate)",
    ],
)
def test_a_number_that_is_computed_or_another_is_not_taken_for_it(text: str) -> None:
    assert find_literal(SourceFiles(), rate_of(text), expected=0.5) is None


def test_numbers_are_written_as_people_do() -> None:
    numbers = [0.1, 0.05, 3.0, 1e-4, 2.5e-6, 1e15, 12345.0, 0.0]
    assert [format_number(n) for n in numbers] == ["0.1", "0.05", "3.0", "1e-4", "2.5e-6", "1e15", "12345.0", "0.0"]


# --- a run that diverges, in many spellings ---------------------------------------------------------------------


def diverged(text: str, folder: Path, first_step: int = 0, **settings: float) -> tuple[Remedy, ...]:
    """The remedies of a program whose loss grew until a square overflowed; its places are found in the text."""
    file = folder / "train.py"
    file.write_text(text)

    def site(code: str) -> Site | None:
        at = text.find(code)
        line = text.count("\n", 0, at)
        column = at - (text.rfind("\n", 0, at) + 1)
        return Site(str(file), line + 1, column, line + 1, column + len(code), code=code) if at >= 0 else None

    made = text[text.index("SGD(" if "SGD(" in text else "Trainer(") :].split("\n")[0]
    made = made[: made.rindex(")") + 1]
    step = next((s for s in ("scaler.step(opt)", "opt.step()") if s in text), "?")
    read, wrote = TensorStat("self", (4,), "float32", -1e20, 1e20), TensorStat("result", (4,), "float32", posinf=4)
    origin = Origin("forward", "pow", "aten.pow", site=site("err ** 2"), inputs=(read,), produced=wrote, step=9)
    steps = tuple(StepRecord(i, 10.0**i, 10.0**i, settings.get("lr")) for i in range(9))
    history = History(
        steps,
        "SGD",
        tuple(settings.items()),
        made_at=site(made),
        stepped_at=site(step),
        backward_at=site("loss.backward()"),
        first_step=first_step,
    )
    event = OpEvent(0, "pow", "aten.pow", "forward", 9, outputs=(wrote,), born=4)
    cause = Cause("divergence_lr", "", "")
    return propose(Origin(**{**_fields(origin), "event": event}), Trace((event,)), history, [cause])


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


LOOP = """
for x in data:
    err = net(x)
    loss = (err ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def changes(remedies: tuple[Remedy, ...]) -> list[str]:
    return [changed_lines(r.diff) for r in remedies]


def test_rates_come_before_clipping(tmp_path: Path) -> None:
    found = diverged("import torch\nopt = torch.optim.SGD(net.parameters(), lr=0.5)" + LOOP, tmp_path, lr=0.5)
    was = "-opt = torch.optim.SGD(net.parameters(), lr=0.5)\n"
    rates = [was + f"+opt = torch.optim.SGD(net.parameters(), lr={r})\n" for r in ("0.05", "0.005", "5e-4")]
    clip = "+    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
    assert changes(found) == [*rates, clip]


def test_a_rate_that_other_runs_of_the_program_may_have_too(tmp_path: Path) -> None:
    text = "import torch\ndef train(rate):\n    opt = torch.optim.SGD(net.parameters(), lr=rate)" + LOOP.replace(
        "\n", "\n    "
    )
    alone, later = (diverged(text, tmp_path, first_step=n, lr=0.5)[0] for n in (0, 40))
    assert (alone.diff, "another optimizer before" in alone.why) == (later.diff, False)
    assert "lower only the rate of this run" in later.why


def test_a_rate_that_nobody_wrote_is_added(tmp_path: Path) -> None:
    found = diverged("import torch\nopt = torch.optim.SGD(net.parameters())" + LOOP, tmp_path, lr=0.001)
    assert "+opt = torch.optim.SGD(net.parameters(), lr=1e-4)" in changes(found)[0]


@pytest.mark.parametrize(
    ("given", "smaller"),
    [
        ("args = Arguments('out', learning_rate=0.5, epochs=3)", "learning_rate=0.05"),
        ("LR = 0.5\nargs = dict(optimizer__lr=LR)", "LR = 0.05"),
        ("args = {'lr': 0.5, 'momentum': 0.5}", "{'lr': 0.05, 'momentum': 0.5}"),
        ("args = Arguments(lr=0.1, weight_decay=0.5)", ""),  # another number: it was given somewhere else
        ("args = Arguments(lr=0.5)\nother = Arguments(lr=0.5)", ""),  # one of the two
    ],
)
def test_a_rate_given_to_a_framework_is_changed_there(given: str, smaller: str, tmp_path: Path) -> None:
    found = changes(diverged(f"{given}\nTrainer(net, args).fit(x, y)\nerr ** 2\n", tmp_path, lr=0.5))
    assert (smaller in found[0].split("\n+")[1]) if smaller else not found


def test_a_rate_that_something_else_has_set_since_is_changed_there(tmp_path: Path) -> None:
    made = "average = WeightAveraging(swa_lrs=3.0, epochs=3.0)\nopt = torch.optim.SGD(p, lr=0.01)"
    found = diverged("import torch\n" + made + LOOP, tmp_path, lr=1.5, initial_lr=3.0)
    assert "+average = WeightAveraging(swa_lrs=0.3, epochs=3.0)" in changes(found)[0]


def test_groups_with_a_rate_of_their_own(tmp_path: Path) -> None:
    made = 'opt = torch.optim.SGD([{"params": a}, {"params": b, "lr": 0.2}], lr=0.5)'
    found = diverged("import torch\n" + made + LOOP, tmp_path, lr=0.5)
    assert '+opt = torch.optim.SGD([{"params": a}, {"params": b, "lr": 0.02}], lr=0.05)' in changes(found)[0]
    # What the constructor was given cannot be written at the step.
    assert 'clip_grad_norm_([p for group in opt.param_groups for p in group["params"]], 1.0)' in changes(found)[-1]


def test_a_rate_that_is_computed_gets_a_factor(tmp_path: Path) -> None:
    made = "opt = torch.optim.SGD(net.parameters(), lr=base * workers)"
    found = diverged("import torch\n" + made + LOOP, tmp_path, lr=0.5)
    assert "+opt = torch.optim.SGD(net.parameters(), lr=(base * workers) * 0.1)" in changes(found)[0]


def test_with_a_gradient_scaler_the_gradients_are_unscaled_first(tmp_path: Path) -> None:
    loop = LOOP.replace("opt.step()", "scaler.step(opt)\n    scaler.update()")
    found = diverged("import torch\nopt = torch.optim.SGD(net.parameters(), lr=0.5)" + loop, tmp_path, lr=0.5)
    lines = "+    scaler.unscale_(opt)\n+    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
    assert changes(found)[-1] == lines


def test_statements_on_one_line_stay_in_order(tmp_path: Path) -> None:
    loop = LOOP.replace("    loss.backward()\n    opt.step()", "    loss.backward(); opt.step()")
    found = diverged("import torch\nopt = torch.optim.SGD(net.parameters(), lr=0.5)" + loop, tmp_path, lr=0.5)
    line = "+    loss.backward(); torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0); opt.step()\n"
    assert changes(found)[-1].endswith(line)


def test_no_second_clipping(tmp_path: Path) -> None:
    loop = LOOP.replace("    opt.step()", "    torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)\n    opt.step()")
    found = diverged("import torch\nopt = torch.optim.SGD(net.parameters(), lr=0.5)" + loop, tmp_path, lr=0.5)
    assert [r.kind for r in found] == ["setting"] * 3
    assert not any("clip" in c for c in changes(found))


def test_the_step_is_found_behind_backward_where_it_was_not_reached(tmp_path: Path) -> None:
    text = "import torch\nopt = torch.optim.SGD(net.parameters(), lr=0.5)" + LOOP.replace("opt.step()", "opt .step()")
    found = diverged(text, tmp_path, lr=0.5)
    assert "+    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n" in changes(found)


@pytest.mark.parametrize(("eps", "proposes"), [("1e-6", False), ("1e-8", False), ("1e-12", True), ("0.0", True)])
def test_an_eps_is_only_raised(eps: str, proposes: bool, tmp_path: Path) -> None:
    file, call = tmp_path / "train.py", f"torch.optim.Adam(weights, eps={eps})"
    file.write_text(f"import torch\nopt = {call}\n")
    made = Site(str(file), 2, 6, 2, 6 + len(call), code=call)
    history = History((), "Adam", (("eps", float(eps)),), made_at=made)
    origin = Origin("optimizer", "div", "aten.div", site=made, step=3)
    remedies = propose(origin, Trace(), history, [Cause("optimizer_eps", "", "")])
    assert [r.title for r in remedies] == (["Use eps=1e-8"] if proposes else [])


@pytest.mark.parametrize(
    ("nan", "first"),
    [(2, 'table = table.dropna(subset=["hum"])'), (30, 'table["hum"] = table["hum"].fillna(table["hum"].median())')],
)
def test_missing_values_of_a_column_are_left_out_or_filled_in_right_after_it(
    nan: int, first: str, tmp_path: Path
) -> None:
    file, call = tmp_path / "train.py", 'table = pd.read_csv("a.csv")'
    file.write_text(f"import pandas as pd\n{call}\n")
    made = Site(str(file), 2, 0, 2, len(call), code=call)
    s = TensorStat("table['hum']", (100,), "float64", nan=nan)
    origin = Origin("input", "", "", site=made, inputs=(s,), produced=s, role="input", label=s.name)
    remedies = propose(origin, Trace(), History(), [Cause("nan_input", "", "")])
    assert f"\n {call}\n+{first}" in remedies[0].diff
    assert not any("nan_to_num" in r.diff for r in remedies)


def test_a_schedule_whose_rate_a_helper_assigns(tmp_path: Path) -> None:
    file, call = tmp_path / "train.py", "torch.optim.SGD(weights, lr=0.1)"
    file.write_text(f"""
import numpy as np
import torch
opt = {call}
def poly(base, t, total):
    return base * np.power(1 - t / total, 0.9)
def set_rate(opt, lr):
    for group in opt.param_groups:
        group["lr"] = lr
for step in range(9):
    set_rate(opt, poly(0.1, step, 7))
    opt.step()
""")
    made = Site(str(file), 4, 6, 4, 6 + len(call), code=call)
    origin = Origin("optimizer", "add", "aten.add", site=made, step=8)
    remedies = propose(origin, Trace(), History((), "SGD", made_at=made), [Cause("nan_lr", "", "")])
    assert changed_lines(remedies[0].diff) == (
        "-    return base * np.power(1 - t / total, 0.9)\n+    return base * np.power(max(1 - t / total, 0.0), 0.9)\n"
    )


@pytest.mark.parametrize(
    "imported", ["from plans.poly import poly", "import plans.poly as plans", "from plans import poly as plans"]
)
def test_a_schedule_in_a_file_of_its_own(tmp_path: Path, imported: str) -> None:
    file, call = tmp_path / "train.py", "torch.optim.SGD(weights, lr=0.1)"
    called = "poly" if imported.endswith("import poly") else "plans.poly"
    file.write_text(f"""
import torch
opt = {call}
{imported}
for step in range(9):
    lr = {called}(0.1, step, 7)
    for group in opt.param_groups:
        group["lr"] = lr
    opt.step()
""")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "poly.py").write_text(
        "import numpy as np\ndef poly(base, t, total):\n    return base * np.power(1 - t / total, 0.9)\n"
    )
    made = Site(str(file), 3, 6, 3, 6 + len(call), code=call)
    origin = Origin("optimizer", "add", "aten.add", site=made, step=8)
    remedies = propose(origin, Trace(), History((), "SGD", made_at=made), [Cause("nan_lr", "", "")])
    assert remedies[0].edits[0].file == str(tmp_path / "plans" / "poly.py")
    assert changed_lines(remedies[0].diff) == (
        "-    return base * np.power(1 - t / total, 0.9)\n+    return base * np.power(max(1 - t / total, 0.0), 0.9)\n"
    )


def test_a_rate_that_each_branch_computes(tmp_path: Path) -> None:
    """A schedule of its own has several modes, and another method sets the rate."""
    file, call = tmp_path / "train.py", "torch.optim.SGD(weights, lr=0.1)"
    file.write_text(f"""
import numpy as np
import torch
opt = {call}
class Schedule:
    def __call__(self, opt, t):
        if self.mode == "cos":
            lr = self.lr * (1 + np.cos(t / 7))
        elif self.mode == "poly":
            lr = self.lr * np.power(1 - t / 7, 0.9)
        self._adjust(opt, lr)
    def _adjust(self, opt, lr):
        opt.param_groups[0]["lr"] = lr
""")
    made = Site(str(file), 4, 6, 4, 6 + len(call), code=call)
    origin = Origin("optimizer", "add", "aten.add", site=made, step=8)
    remedies = propose(origin, Trace(), History((), "SGD", made_at=made), [Cause("nan_lr", "", "")])
    assert changed_lines(remedies[0].diff).endswith("+            lr = self.lr * np.power(max(1 - t / 7, 0.0), 0.9)\n")


@pytest.mark.parametrize(("below", "guarded"), [("/ TOTAL", "/ max(TOTAL, 1)"), ("/ r.max()", "/ max(r.max(), 1e-8)"),
    ("* WARMUP ** -1.5", "* max(WARMUP, 1) ** -1.5")])  # fmt: skip
def test_only_a_number_of_steps_is_kept_at_1(tmp_path: Path, below: str, guarded: str) -> None:
    file, call = tmp_path / "train.py", "torch.optim.SGD(weights, lr=0.1)"
    file.write_text(f"import torch\nopt = {call}\nfor group in opt.param_groups:\n    group['lr'] = 0.1 * r {below}\n")
    made = Site(str(file), 2, 6, 2, 6 + len(call), code=call)
    origin = Origin("optimizer", "add", "aten.add", site=made, step=8)
    remedies = propose(origin, Trace(), History((), "SGD", made_at=made), [Cause("nan_lr", "", "")])
    assert changed_lines(remedies[0].diff).endswith(f"+    group['lr'] = 0.1 * r {guarded}\n")


def test_a_schedule_that_the_step_does_not_pass_through(tmp_path: Path) -> None:
    """The step is in one file, the function that LambdaLR was given in another."""
    file, call = tmp_path / "train.py", "torch.optim.SGD(weights, lr=0.1)"
    file.write_text(f"import torch\nopt = {call}\n")
    plan = tmp_path / "plan.py"
    plan.write_text("def factor(t):\n    return (1 - t / TOTAL) ** 0.9\n")
    made = Site(str(file), 2, 6, 2, 6 + len(call), code=call)
    history = History((), "SGD", made_at=made, rate_set_at=Site(str(plan), 1, function="factor"))
    origin = Origin("optimizer", "add", "aten.add", site=made, step=8)
    remedies = propose(origin, Trace(), history, [Cause("nan_lr", "", "")])
    assert changed_lines(remedies[0].diff).endswith("+    return max(1 - t / TOTAL, 0.0) ** 0.9\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "torch.sqrt((self.total - self.t) / self.total)",
            "torch.sqrt(((self.total - self.t) / self.total).clamp_min(0.0))",
        ),
        ("torch.tensor(1 - self.t).pow(0.5)", "torch.tensor(1 - self.t).clamp_min(0.0).pow(0.5)"),
    ],
)
def test_a_schedule_of_tensors_whose_number_is_taken(tmp_path: Path, old: str, new: str) -> None:
    file, call = tmp_path / "train.py", "torch.optim.SGD(weights, lr=0.1)"
    file.write_text(f"""
import torch
opt = {call}
class Plan:
    def rate(self):
        return {old}
    def step(self):
        for group in opt.param_groups:
            group["lr"] = self.rate().item()
""")
    made = Site(str(file), 3, 6, 3, 6 + len(call), code=call)
    origin = Origin("optimizer", "add", "aten.add", site=made, step=8)
    remedies = propose(origin, Trace(), History((), "SGD", made_at=made), [Cause("nan_lr", "", "")])
    assert changed_lines(remedies[0].diff).endswith(f"+        return {new}\n")
