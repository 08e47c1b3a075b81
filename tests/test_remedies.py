"""Every remedy on small pieces of training code: the change as a golden, applied, and run for 50 steps.

`remedies/*.txt` holds them: a head line `### name | slug`, the code (what stands before `# step` runs once), then
`--- change` and what the first remedy takes away and puts there.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstnan.diagnose.rules import explain
from firstnan.records import Cause, History, Origin, Remedy, Site, StepRecord, TensorStat, Trace
from firstnan.repair import propose
from firstnan.repair.patch import edited
from test_blame_snippets import GUILTY
from traced import STEP, Outcome, run_snippet
from zygote import Zygote

pytest_plugins = ["zygote"]

STEPS = 50
CHANGE = "--- change\n"


def read_pieces() -> list[Any]:
    found = []
    for path in sorted(Path(__file__).with_name("remedies").glob("*.txt")):
        for piece in path.read_text().split("### ")[1:]:
            head, rest = piece.split("\n", 1)
            name, slug = (word.strip() for word in head.split("|"))
            source, _, change = rest.partition(CHANGE)
            found.append(pytest.param(slug, source, change, id=name))
    return found


PIECES = read_pieces()


def proposed(source: str, folder: Path, slug: str = "") -> tuple[Outcome, list[Cause], tuple[Remedy, ...]]:
    """Runs the piece from a file of its own and asks for remedies."""
    file = folder / "train.py"
    file.write_text(source.strip() + "\n")
    outcome = run_snippet(source, str(file))
    causes = explain(outcome.origin, outcome.trace, History())
    assert not slug or causes[0].slug == slug
    return outcome, causes, propose(outcome.origin, outcome.trace, History(), causes)


def changed_lines(diff: str) -> str:
    """What a diff takes away and puts there, without its frame."""
    lines = [line for line in diff.splitlines(keepends=True) if line[0] in "+-"]
    return "".join(line for line in lines if not line.startswith(("--- ", "+++ ")))


def apply(text: str, diff: str) -> str:
    """The text after the change; every line that the diff names must be there as it says."""
    lines, out, at = text.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True)[2:]:
        if line.startswith("@@"):
            start = int(line.split()[1].removeprefix("-").split(",")[0]) - 1
            out += lines[at:start]
            at = start
        elif line[0] in " -":
            assert lines[at] == line[1:]
            out += [line[1:]] if line[0] == " " else []
            at += 1
        elif line[0] == "+":
            out.append(line[1:])
    return "".join(out + lines[at:])


def stays_finite(source: str) -> bool:
    """Whether loss and gradients are finite in every one of the steps."""
    before, _, step = source.partition(STEP + "\n")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(before, "before", "exec"), names)
    code = compile(step, "step", "exec")
    leaves = [v for v in names.values() if isinstance(v, Tensor) and v.requires_grad]
    leaves += [p for v in names.values() if isinstance(v, torch.nn.Module) for p in v.parameters()]
    for _ in range(STEPS):
        try:
            exec(code, names)
        except RuntimeError:
            return False
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if not all(bool(t.isfinite().all()) for t in [names["loss"], *grads]):
            return False
        with torch.no_grad():
            for leaf in leaves:
                leaf -= 0 if leaf.grad is None else 1e-6 * leaf.grad
                leaf.grad = None
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("slug", "source", "change"), PIECES)
def test_the_first_remedy_is_the_golden_one_and_one_of_the_first_three_helps(
    slug: str, source: str, change: str, tmp_path: Path
) -> None:
    _, _, remedies = proposed(source, tmp_path, slug)
    assert changed_lines(remedies[0].diff) == change
    text = (tmp_path / "train.py").read_text()
    assert not stays_finite(text)
    assert any(stays_finite(apply(text, r.diff)) for r in remedies[:3])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", [pytest.param(s.values[2], id=s.id) for s in GUILTY])
def test_every_diff_applies_and_is_python(source: str, tmp_path: Path) -> None:
    _, _, remedies = proposed(source, tmp_path)
    text = (tmp_path / "train.py").read_text()
    for remedy in remedies:
        assert remedy.diff.startswith(f"--- a/{tmp_path}/train.py\n+++ b/{tmp_path}/train.py\n@@ ")
        ast.parse(apply(text, remedy.diff))
        assert edited(text, remedy.edits) == apply(text, remedy.diff)
        assert remedy.title
        assert remedy.why
    assert len({r.diff for r in remedies}) == len(remedies) <= 8


def test_every_cause_of_an_expression_has_pieces() -> None:
    assert len(PIECES) > 60
    assert len({p.id for p in PIECES}) == len(PIECES)
    assert len({p.values[0] for p in PIECES}) > 24


def test_a_quotient_inside_a_logarithm_is_not_set_to_zero(tmp_path: Path) -> None:
    """Where q is 0, log(0) would be as bad as log(p / 0)."""
    _, _, remedies = proposed(
        """
        import torch
        w = torch.ones(2, requires_grad=True)
        q = torch.tensor([0.0, 1.0])
        # step
        loss = torch.log(w / q).sum()
        loss.backward()
        """.replace("        ", ""),
        tmp_path,
        "div_by_zero",
    )
    assert len(remedies) > 1
    assert not any("where(" in r.diff for r in remedies)


# --- near misses: what looks alike and must not be changed so ---------------------------------------------------

NEAR_MISSES = {
    "the logits have changed since the softmax": (
        """
        w = torch.tensor([[0.0, 200.0]], requires_grad=True)
        # step
        z = w * 1.0
        p = torch.softmax(z, dim=1)
        z = z * 2
        loss = torch.log(p).sum() + z.sum()
        loss.backward()
        """,
        "log_softmax(z, dim=1).sum()",  # written where z has changed
    ),
    "the softmax of a layer that would run twice": (
        """
        net = nn.Linear(2, 2)
        x = torch.tensor([[9e3, -9e3]])
        def head(x):
            return net(x)
        # step
        p = torch.softmax(head(x), dim=1)
        loss = torch.log(p).sum() + p.sum()
        loss.backward()
        """,
        "log_softmax",
    ),
    "the norm of another vector": (
        """
        w = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
        # step
        loss = ((w * 2) / w.norm(dim=1, keepdim=True)).sum()
        loss.backward()
        """,
        "normalize",
    ),
    "a norm that is not euclidean": (
        """
        w = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
        # step
        loss = (w / w.norm(p=1, dim=1, keepdim=True)).sum()
        loss.backward()
        """,
        "normalize",
    ),
    "an infinity that starts a minimum, far from the origin": (
        """
        w = torch.tensor([0.0, 2.0], requires_grad=True)
        best = float("inf")
        # step
        loss = torch.log(w).sum()
        loss.backward()
        best = min(best, 1.0)
        """,
        "1e9",
    ),
    "a count is no measurement": (
        """
        w = torch.tensor([0.0, 0.25], requires_grad=True)
        # step
        loss = (torch.ones(2) / w.relu()).sum()
        loss.backward()
        """,
        "clamp_min(1)",
    ),
    "a division in place is not one that returns": (
        """
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        # step
        v = torch.zeros(3)
        v.div_(v.norm())
        loss = (w.sum() * v).sum()
        loss.backward()
        """,
        "normalize",
    ),
    "a ratio of counts is no count": (
        """
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        hits, labels = torch.tensor([True, False, True]), torch.tensor([0, 1, 0])
        # step
        recall = torch.bincount(labels[hits], minlength=2) / torch.bincount(labels)
        loss = (w * (1.0 / recall)).sum()
        loss.backward()
        """,
        "clamp_min(1)",
    ),
    "an eps that float16 rounds to 0": (
        """
        w = torch.tensor([0.0, 1.0], requires_grad=True, dtype=torch.float16)
        # step
        loss = torch.log(w * 1.0 + 1e-8).sum()
        loss.backward()
        """,
        "clamp_min(0)",
    ),
    "a shift is no eps": (
        """
        w = torch.tensor([-2.0, -0.5], requires_grad=True)
        # step
        loss = torch.log(w * 1.0 + 1.0).sum()
        loss.backward()
        """,
        "clamp_min(0)",
    ),
    "the numbers of an empty mean": (
        """
        w = torch.tensor([0.5, 1.0], requires_grad=True)
        # step
        pos = w[w > 5]
        loss = w.sum() + 0.1 * pos.pow(2).mean()
        loss.backward()
        """,
        "clamp_min(1e-8)",
    ),
}


def test_an_eps_of_the_program_is_not_undone_by_a_smaller_bound(tmp_path: Path) -> None:
    source = f"""
import torch
w = torch.tensor([-3e-4, 1.0], requires_grad=True)
{STEP}
loss = torch.rsqrt(w * 1.0 + 1e-5).sum()
loss.backward()
"""
    _, _, remedies = proposed(source, tmp_path)
    assert not [r.title for r in remedies if "1e-12" in r.title or "1e-6" in r.title]


def test_an_eps_of_another_object_is_not_the_one_that_is_added(tmp_path: Path) -> None:
    source = f"""
import torch
class Norm:
    def __init__(self, eps=1e-4):
        self.eps = eps
class Loss:
    def __init__(self, eps):
        self.eps = eps
    def __call__(self, x):
        return torch.log(x + self.eps).sum()
norm, loss_of = Norm(), Loss(float("0"))
w = torch.tensor([0.0, 1.0], requires_grad=True)
{STEP}
loss = loss_of(w * 1.0)
loss.backward()
"""
    _, _, remedies = proposed(source, tmp_path)
    assert remedies[0].title == "Keep `x + self.eps` at 1e-12 or above"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_looks_alike_is_left_alone(name: str, tmp_path: Path) -> None:
    source, never = NEAR_MISSES[name]
    _, _, remedies = proposed(textwrap.dedent(source), tmp_path)
    assert remedies, "another remedy fits"
    assert not [r.diff for r in remedies if never in changed_lines(r.diff)]


@pytest.mark.parametrize(("operation", "proposes"), [("rate.view(2).log()", True), ("(rate - 0.2).log()", False),
    ("(1 - rate).log()", False), ("(rate * 3).exp()", True), ("(rate / 0.1).exp()", False)])  # fmt: skip
def test_a_guard_where_a_value_is_made_is_one_for_the_same_numbers(
    operation: str, proposes: bool, tmp_path: Path
) -> None:
    """Or for the size of them: a sum of numbers that are not large is not large, but may be negative."""
    source = f"""
import torch
w = torch.tensor([0.0, 200.0], requires_grad=True)
{STEP}
rate = w * 1.0
loss = (rate + {operation}).sum()
loss.backward()
"""
    _, _, remedies = proposed(source, tmp_path)
    made = [r for r in remedies if "where it is computed" in r.title]
    assert bool(made) == proposes
    text = (tmp_path / "train.py").read_text()
    assert all(stays_finite(apply(text, r.diff)) for r in made)


@pytest.mark.parametrize(
    ("lines", "change"),
    [
        # Each line after `var` is made; the second reads it once, or not for its numbers.
        ("loss = (torch.log(var) + 1 / var).sum()", "+var = (w * 1.0).clamp_min(1e-12)\n"),
        ("loss = torch.log(var).sum() / var.numel()", "+loss = torch.log(var.clamp_min(1e-12)).sum() / var.numel()\n"),
        ("ok = var > 1; loss = torch.log(var)[ok].sum()", "clamp_min(1e-12))[ok].sum()\n"),
        ("ok = torch.isnan(var); loss = torch.log(var)[~ok].sum()", "clamp_min(1e-12))[~ok].sum()\n"),
        (
            "loss = torch.log(var).sum()\nvar = w * 2\nloss = loss + var.sum()",
            "+loss = torch.log(var.clamp_min(1e-12))",
        ),
        ("var, other = var * 2, 1\nloss = (var.log() * var).sum()", "+var = var.clamp_min(1e-12)\n"),
        ("if True:\n    var = var * 2\nloss = (var.log() * var).sum()", "+loss = (var.clamp_min(1e-12).log() * var)"),
    ],
)
def test_a_name_that_is_read_elsewhere_too_is_guarded_where_it_is_made_first(
    lines: str, change: str, tmp_path: Path
) -> None:
    start = f"import torch\nw = torch.tensor([0.0, 2.0], requires_grad=True)\n{STEP}\nvar = w * 1.0\n"
    _, _, remedies = proposed(f"{start}{lines}\nloss.backward()\n", tmp_path)
    assert change in changed_lines(remedies[0].diff)


@pytest.mark.parametrize(("use", "first"), [("torch.log(var) + 1 / var", "rates = (w * 1.0).clamp_min(1e-12)"),
    ("torch.log(var)", "return torch.log(var.clamp_min(1e-12))")])  # fmt: skip
def test_a_parameter_that_is_read_twice_is_guarded_by_the_caller(use: str, first: str, tmp_path: Path) -> None:
    source = f"""
import torch
w = torch.tensor([0.0, 2.0], requires_grad=True)
def nll(var):
    return {use}
{STEP}
rates = w * 1.0
loss = nll(rates).sum()
loss.backward()
"""
    _, _, remedies = proposed(source, tmp_path)
    assert first in changed_lines(remedies[0].diff)


def test_what_would_be_computed_twice_gets_its_guard_on_a_line_of_its_own(tmp_path: Path) -> None:
    source = f"""
import torch
w = torch.tensor([0.0, -2.0], requires_grad=True)
{STEP}
slope = torch.mul(w, 3)
loss = (1 / slope + slope).sum()
loss.backward()
"""
    _, _, remedies = proposed(source, tmp_path)
    assert changed_lines(remedies[0].diff) == "+slope = torch.where(slope.abs() < 1e-8, 1e-8, slope)\n"


def test_where_a_value_is_made_the_bounds_are_those_of_its_use(tmp_path: Path) -> None:
    source = f"""
import torch
w = torch.tensor([[0.0, 200.0]], requires_grad=True)
{STEP}
s, t = (w * 1.0).chunk(2, dim=1)
loss = (torch.exp(t) + t + s).sum()
loss.backward()
"""
    _, _, remedies = proposed(source, tmp_path)
    bounds = ["20", "80", "10", "2"]
    assert [changed_lines(r.diff) for r in remedies[:4]] == [f"+t = t.clamp_max({b})\n" for b in bounds]
    assert [r.title for r in remedies[4:]] == [f"Keep `t` at {b} or below" for b in bounds[: len(remedies) - 4]]


def test_without_a_file_there_is_advice_and_no_diff() -> None:
    outcome = run_snippet("w = torch.zeros(2, requires_grad=True)\n# step\nloss = torch.log(w).sum()\nloss.backward()")
    causes = explain(outcome.origin, outcome.trace, History())
    (remedy,) = propose(outcome.origin, outcome.trace, History(), causes)
    assert remedy.diff == ""
    assert "logarithm" in remedy.title


def test_a_file_that_has_changed_since_costs_nothing(tmp_path: Path) -> None:
    source = "import torch\nw = torch.zeros(2, requires_grad=True)\n# step\nloss = torch.log(w).sum()\nloss.backward()"
    outcome, causes, remedies = proposed(source, tmp_path)
    assert remedies
    for text in ("", "this is no python (", "x = 1\n", "\n" * 50, "loss = 'é' + torch.log(w).sum()\n"):
        (tmp_path / "train.py").write_text(text)
        for remedy in propose(outcome.origin, outcome.trace, History(), causes):
            if remedy.diff:
                ast.parse(apply(text, remedy.diff))


def test_the_spread_of_one_row_in_numpy(tmp_path: Path) -> None:
    text = "import numpy as np\nspread = np.std(rows, axis=0, ddof=1)\nplain = np.std(rows, axis=0)\n"
    (tmp_path / "train.py").write_text(text)
    changes = []
    for line, end in ((2, 37), (3, 29)):
        bad = TensorStat("spread", (3,), "float64", nan=3)
        origin = Origin("input", "", "", site=Site(str(tmp_path / "train.py"), line, 0, line, end), produced=bad)
        changes.append(
            [changed_lines(r.diff) for r in propose(origin, Trace(), History(), [Cause("nan_input", "", "")])]
        )
    assert changes[0][:3] == [
        f"-spread = np.std(rows, axis=0, ddof=1)\n+spread = {new}\n"
        for new in (
            "np.std(rows, axis=0, ddof=min(1, rows.shape[0] - 1))",
            "np.maximum(np.std(rows, axis=0, ddof=min(1, rows.shape[0] - 1)), 1e-8)",
            "np.std(rows, axis=0, ddof=0)",
        )
    ]
    assert not any("ddof" in change for change in changes[1])


def test_a_division_by_a_number_needs_no_guard(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import numpy as np\ndepth = np.sqrt(pixels) / 1000\n")
    site, bad = Site(str(tmp_path / "train.py"), 2, 0, 2, 30), TensorStat("depth", (3,), "float64", nan=3)
    origin = Origin("input", "", "", site=site, produced=bad)
    changes = [changed_lines(r.diff) for r in propose(origin, Trace(), History(), [Cause("nan_input", "", "")])]
    assert "+depth = np.sqrt(np.maximum(pixels, 1e-12)) / 1000\n" in changes[0]
    assert not any("maximum(1000" in change for change in changes)


@pytest.mark.parametrize(
    ("infinite", "first"),
    [
        (2, "np.where(old == 0, 0.0, (new - old) / np.where(old == 0, 1.0, old))"),
        (0, "(new - old) / np.maximum(old, 1e-8)"),
    ],
)
def test_data_that_would_be_far_from_all_others(tmp_path: Path, infinite: int, first: str) -> None:
    """A quotient with 1e-8 is finite, but a feature of a billion is no better."""
    (tmp_path / "train.py").write_text("import numpy as np\ngrowth = (new - old) / old\n")
    site = Site(str(tmp_path / "train.py"), 2, 0, 2, 26)
    bad = TensorStat("growth", (9,), "float32", nan=3, posinf=infinite)
    origin = Origin("input", "", "", site=site, produced=bad)
    changes = [changed_lines(r.diff) for r in propose(origin, Trace(), History(), [Cause("nan_input", "", "")])]
    assert changes[0] == f"-growth = (new - old) / old\n+growth = {first}\n"


def test_the_logarithm_of_a_count_in_the_data(tmp_path: Path) -> None:
    """log(1e-12) would be far from the logarithms of all other counts."""
    text = "import torch\nw, stamps = torch.ones(1, requires_grad=True), torch.tensor([3, 5, 5])\n# step\n"
    text += "loss = (w * torch.log((stamps[1:] - stamps[:-1]).float())).sum()\nloss.backward()\n"
    outcome, causes, _ = proposed(text, tmp_path)
    event = outcome.origin.event
    assert event is not None
    data = replace(outcome.origin, event=replace(event, region="data"))
    (first, *_) = propose(data, outcome.trace, History(), causes)
    assert "(stamps[1:] - stamps[:-1]).float().clamp_min(1)" in first.diff


@pytest.mark.parametrize(("sign", "endless"), [(-1, True), (1, False)])
def test_a_loss_that_falls_without_bound(tmp_path: Path, sign: int, endless: bool) -> None:
    """A smaller learning rate only delays its end; a term may have the wrong sign."""
    text = "import torch\nw = torch.tensor([1e30], requires_grad=True)\n# step\n"
    text += "penalty = (w * w).sum()\nloss = w.sum() - 3 * penalty\nloss.backward()\n"
    (tmp_path / "train.py").write_text(text)
    outcome = run_snippet(text, str(tmp_path / "train.py"))
    history = History(steps=tuple(StepRecord(i, sign * 10.0**i, 10.0**i, 0.1) for i in range(3, 30)))
    causes = explain(outcome.origin, outcome.trace, history)
    assert causes[0].slug == "divergence_lr"
    assert (causes[0].title == "The loss falls without bound") == endless
    assert ("The loss fell from -1000 in step 3 to -1e+29 in step 29" in causes[0].why) == endless
    changes = [changed_lines(r.diff) for r in propose(outcome.origin, outcome.trace, history, causes)]
    added = "-loss = w.sum() - 3 * penalty\n+loss = w.sum() + 3 * penalty\n"
    assert changes == [added] if endless else added not in changes


def test_numbers_that_numpy_draws_are_no_distribution_of_torch(tmp_path: Path) -> None:
    text = "import numpy as np\nimport torch\nfrom torch.distributions import Gamma\nrng = np.random.default_rng(0)\n"
    text += (
        "w, size = torch.ones(2, requires_grad=True), [2]\ny = 0 * torch.tensor(rng.gamma(2.0, 1.0, size))\n# step\n"
    )
    text += "loss = -Gamma(w / 2, w, validate_args=False).log_prob(y).mean()\nloss.backward()\n"
    changes = [changed_lines(r.diff) for r in proposed(text, tmp_path)[2]]
    assert any("w.clamp_min(1e-6), validate_args" in change for change in changes)
    assert not any("rng.gamma" in change for change in changes)


# --- whole programs ---------------------------------------------------------------------------------------------

HELPERS = """\
import torch

def whiten(z):
    centred = z - z.mean(0)
    return torch.linalg.cholesky(centred.T @ centred)
"""
IN_ANOTHER_FILE = """\
import torch
from helpers import whiten
torch.manual_seed(0)
net = torch.nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(2 if step == 4 else 9, 3)
    loss = whiten(net(x)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
IN_NUMPY = """\
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
class Prices(Dataset):
    def __init__(self):
        self.rows = np.random.default_rng(0).uniform(1, 2, (24, 4))
        self.rows[17, 2] = 0.0
    def __len__(self):
        return 24
    def __getitem__(self, i):
        row = np.log(self.rows[i])
        return torch.tensor(row, dtype=torch.float32)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for x in DataLoader(Prices(), batch_size=4):
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

A_NUMBER = """\
import torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
def number(text):
    return float(text) if text else float("nan")
class Houses(Dataset):
    def __init__(self):
        self.rows = [["1", "2"] for _ in range(24)]
        self.rows[17][1] = ""
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.tensor([number(text) / 2 for text in self.rows[i]])
net = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for x in DataLoader(Houses(), batch_size=4):
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def run_and_repair(firstnan: Zygote, folder: Path) -> tuple[str, int]:
    """The first change that the report of the program shows, and the exit code of the program with it in place."""
    remedy = firstnan(["run", "train.py"], cwd=folder).found["remedies"][0]
    file = Path(remedy["diff"].split("\n")[0].removeprefix("--- a/"))
    file.write_text(apply(file.read_text(), remedy["diff"]))
    return changed_lines(remedy["diff"]), firstnan(["run", "train.py"], cwd=folder).code


def test_a_change_in_another_file(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_ANOTHER_FILE)
    (tmp_path / "helpers.py").write_text(HELPERS)
    change, code = run_and_repair(firstnan, tmp_path)
    assert "+    matrix = centred.T @ centred\n+    return torch.linalg.cholesky(matrix + 1e-6 * torch.eye(" in change
    assert code == 0


def test_a_change_of_numpy_code_in_a_dataset(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_NUMPY)
    change, code = run_and_repair(firstnan, tmp_path)
    assert change.endswith("+        row = np.log(np.maximum(self.rows[i], 1e-12))\n")
    assert code == 0


def test_a_number_is_filled_in_as_a_number(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(A_NUMBER)
    change, code = run_and_repair(firstnan, tmp_path)
    assert change.endswith('+    return value if abs(value) < float("inf") else 0.0\n')
    assert "nan_to_num" not in change
    assert code == 0


EXTREME = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(24, 3)
x[17, 1] = 2e38
net = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for x, y in DataLoader(TensorDataset(x, torch.zeros(24, 1)), batch_size=4):
    loss = torch.nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_sample_with_an_extreme_number_is_left_out_and_the_loss_not_bounded(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXTREME)
    remedies = firstnan(["run", "train.py"], cwd=tmp_path).found["remedies"]
    assert "+    keep = (x.abs() < 1e15).flatten(1).all(1)\n+    x, y = x[keep], y[keep]\n" in remedies[0]["diff"]
    assert not [r for r in remedies if r["title"] == "Bound the result"]


def test_the_sums_of_a_function_in_float32(tmp_path: Path) -> None:
    """The sum that overflows is one of several, and what is computed from the others would overflow next."""
    source = """
    import torch
    w = torch.full((260, 250), 5.0, dtype=torch.float16, requires_grad=True)
    def dice(logits):
        p = logits.sigmoid()
        inter = (p * p).sum()
        union = p.sum() + torch.ones_like(p).sum()
        return 1 - (2 * inter + 1) / (union + 1)
    # step
    loss = dice(w)
    loss.backward()
    """
    _, _, remedies = proposed(textwrap.dedent(source), tmp_path, "low_precision_overflow")
    (found,) = [r for r in remedies if r.title == "Run the sums of this function in float32"]
    new = [line for line in changed_lines(found.diff).splitlines() if line.startswith("+")]
    assert [line.strip("+ ") for line in new] == [
        "inter = (p * p).float().sum()",
        "union = p.float().sum() + torch.ones_like(p).float().sum()",
    ]


def test_a_call_that_writes_to_its_argument_gets_no_copy_of_it(tmp_path: Path) -> None:
    source = """
    w = torch.full((4,), 300.0, requires_grad=True)
    # step
    flat = (w * 2).half()
    flat.mul_(torch.full_like(flat, 300.0))
    loss = flat.float().sum()
    loss.backward()
    """
    _, _, remedies = proposed(textwrap.dedent(source), tmp_path, "low_precision_overflow")
    assert remedies[0].title == "Keep `flat` in float32"
    assert changed_lines(remedies[0].diff) == "-flat = (w * 2).half()\n+flat = (w * 2).float()\n"
    assert not [r.title for r in remedies if "flat.float().mul_" in r.diff or "clamp" in r.diff]
