"""The documentation is true: its programs run, its commands parse, its lists are complete, its report is a real one."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import linecache
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import firstnan
from firstnan.cli import main
from firstnan.cli.demos import demos, find
from firstnan.diagnose.causes import catalogue
from firstnan.diagnose.rules.base import RULES
from report_samples import divergence, tried

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The programs of docs/frameworks are run by tests/frameworks, the examples of docs/causes by tests/test_repairs.py.
PAGES = sorted(["README.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
ALL_PAGES = sorted(
    [*PAGES, "CONTRIBUTING.md", "SECURITY.md", *(path.relative_to(ROOT).as_posix() for path in DOCS.glob("*/*.md"))]
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the heading above it."""

    page: str
    line: int
    heading: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found, heading = [], ""
    lines = iter(enumerate(read(page).splitlines(), 1))
    for number, line in lines:
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif line.startswith("```"):
            inside = []
            for _, text in lines:
                if text.startswith("```"):
                    break
                inside.append(text)
            found.append(Block(page, number, heading, line[3:].strip(), "\n".join(inside) + "\n"))
    return found


# --- programs -----------------------------------------------------------------------------------------------------

TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import firstnan
from firstnan import NaNDetector

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.rand(32, 1) + 0.5)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8)
loss_function = lambda predicted, y: ((predicted - y) ** 2 / y).mean()

def train_step(batch):
    x, y = batch
    loss = loss_function(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

batch = next(iter(loader))
x, y = batch
q = model(x)
"""
SPOILED = TRAINING + "data.tensors[1][21] = 0.0\n"
REPORT = """
from firstnan.records.codec import dumps
from report_samples import forward
open("report.json", "w").write(dumps(forward()))
"""


@dataclass(frozen=True)
class Around:
    """What a fragment needs before it, and what has to be true after it."""

    before: str = TRAINING
    after: str = ""


# By page and heading; all other blocks run after TRAINING.
AROUND = {
    ("docs/detector.md", "Policies"): Around(
        SPOILED, "assert detector.summary()['skipped'] == 1 and report.step == 2, detector.summary()"
    ),
    ("docs/detector.md", "Statistics"): Around(after="assert len(rows) > 4"),
    ("docs/detector.md", "A capsule in your own loop"): Around(SPOILED, "assert report.verdict == 'nonfinite'"),
    ("docs/detector.md", "The bad batch and the bad samples"): Around(
        SPOILED + "batch = data[16:24]", "assert found.bad_samples == (5,)"
    ),
    ("docs/detector.md", "Your own rules"): Around(
        after="from firstnan.diagnose.rules.base import RULES\nassert RULES[-1].slug == 'gauge_reset'"
    ),
    ("docs/reports.md", "Reports"): Around(REPORT, "assert report.cause"),
}


@pytest.fixture
def _rules_as_before() -> Iterator[None]:
    before = list(RULES)
    yield
    RULES[:] = before


def run(text: str, name: str, names: dict[str, Any]) -> None:
    """Runs a text as a file of this name; its lines can be looked up, as those of a real file."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)


PROGRAMS = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.mark.slow
@pytest.mark.usefixtures("_rules_as_before")
@pytest.mark.parametrize("page", PROGRAMS)
def test_every_program_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(b for b in blocks(page) if b.language == "python"):
        around = AROUND.get((page, block.heading), Around())
        exec(around.before, names)
        file = tmp_path / f"block{number}.py"
        file.write_text(block.text)
        try:
            run(block.text, str(file), names)
            exec(around.after, names)
        except Exception as error:
            error.add_note(f"in the block at {block}")
            raise


def test_no_prelude_is_left_over() -> None:
    used = {(page, block.heading) for page in PAGES for block in blocks(page) if block.language == "python"}
    assert set(AROUND) <= used


@pytest.mark.parametrize("page", ALL_PAGES)
def test_programs_are_python_and_other_blocks_are_not(page: str) -> None:
    """A block that is Python but is not marked would not be run."""
    for block in blocks(page):
        assert block.language in ("", "python"), block
        if block.language == "python":
            ast.parse(block.text)
        else:
            assert not re.search(r"^(import|from|with|for|def) .*[\w:]$", block.text, re.MULTILINE), block


# The lines "In code" of docs/causes use these names; where one has another meaning, the table below says so.
NAMES = """
import math, types
import numpy, torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal

inf, n, m, fan_in, gamma, temperature, lr, step, total = math.inf, 8, 4, 8, 0.5, 0.7, 0.1, 3, 10
x, y, u, p, a, b, w, h, g, v = (torch.rand(8, 8) for _ in range(10))
z, q, k, scores, logits, baseline, predicted, distance, degree, count, log_var, cosine = (
    torch.rand(8, 8) for _ in range(12)
)
log_p, log_q, loss, gradient, gradient_norm, weight = (torch.rand(8, 8) for _ in range(6))
mask = allowed = torch.rand(8, 8) < 0.5
kernel = covariance = torch.eye(8)
mean, std, power, buffer = torch.zeros(8), torch.ones(8), numpy.ones(3), torch.zeros(8, 8)
model = layer = nn.Linear(8, 8)
params, state, kind, group = list(model.parameters()), {}, 1, torch.arange(8)
x.requires_grad_(True)
"""
MEANINGS = {
    "inf_minus_inf": "m, mask = mask, mask.float()",
    "zero_over_zero": "mask = mask.float()",
    "zero_times_inf": "mask = mask.float()",
    "logsumexp_grad_all_inf": "mask = mask.float()",
    "fully_masked_softmax": "mask = torch.zeros(8, dtype=torch.bool)",
    "masked_label": "y = torch.arange(8)",
    "empty_reduction": "y = torch.full((8,), -100)",
    "single_sample_variance": "g = 0",
    "ctc_infeasible": "log_probs = torch.randn(5, 2, 4).log_softmax(2)\n"
    "targets, input_lengths, target_lengths = torch.ones(2, 2, dtype=torch.long), (5, 5), (2, 2)",
    "custom_backward": "x = x * 1",
    "nan_parameter": "torch.save(model.state_dict(), 'last.pt')",
    # Not installed here; an empty cell is NaN in both.
    "nan_input": "pandas = types.SimpleNamespace(read_csv=lambda name: numpy.genfromtxt(name, delimiter=','))\n"
    "open('rows.csv', 'w').write('1,2\\n3,\\n')",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("slug", [slug for slug, entry in catalogue().items() if entry.code])
def test_the_lines_of_a_cause_run(slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(NAMES, names)
    exec(MEANINGS.get(slug, ""), names)
    with one_rank() if slug == "collective" else contextlib.nullcontext():
        for line in catalogue()[slug].code:
            exec(line, names)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# --- commands -----------------------------------------------------------------------------------------------------

PARSERS = {
    "run": main._run_parser,
    "show": main._show_parser,
    "fix": main._fix_parser,
    "replay": main._replay_parser,
    "causes": main._causes_parser,
    "demo": main._demo_parser,
}


def test_the_table_of_parsers_is_complete() -> None:
    assert set(PARSERS) == set(main._COMMANDS)


def command(line: str) -> list[str] | None:
    """The words after `firstnan` in a line for a shell; None if it is no such line."""
    words = shlex.split(line.replace("[options]", "").translate({ord(c): None for c in "[]"}), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    for word in list(words):
        if not re.match(r"[A-Z_]+=", word):
            break
        check_variable(words.pop(0))
    if "firstnan" not in words:
        return None
    at = words.index("firstnan")
    return words[at + 1 :] if at == 0 or words[at - 1] == "-m" else None


def check_variable(setting: str) -> None:
    name, _, value = setting.partition("=")
    if name == "FIRSTNAN":
        assert value in ("0", "1") or value.endswith(main.startup._SUFFIXES), setting


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    hidden = {name for a in parser._actions if a.help == argparse.SUPPRESS for name in a.option_strings}
    return set(parser._option_string_actions) - hidden


def check_command(words: list[str]) -> None:
    """Fails if the real command line would refuse these words."""
    name, rest = words[0], words[1:]
    if name.startswith("-"):
        assert set(words) <= option_names(main._main_parser()), words
        return
    if name not in ("run", "replay"):
        parsed = PARSERS[name]().parse_args(rest)
        assert name != "demo" or parsed.name in (None, "NAME", *(one.name for one in demos())), words
        assert name != "causes" or parsed.slug in (None, "SLUG", *catalogue()), words
    else:
        options, program = main._split_options(rest)
        if name == "replay":
            more, program = main._split_options(program[1:])
            options += more
        parsed = PARSERS[name]().parse_args(options)
        assert program, f"no program in {words}"
    if getattr(parsed, "output", None) not in (None, "FILE"):
        main._known_format(parsed.output)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_commands_in_blocks_are_accepted(page: str) -> None:
    for block in blocks(page):
        for line in block.text.splitlines() if not block.language else ():
            if re.match(r"\s*([A-Z_]+=\S+ +)*(firstnan|python|torchrun|accelerate) ", line):
                words = command(line)
                try:
                    assert words != []
                    if words is not None:
                        check_command(words)
                except Exception as error:
                    error.add_note(f"in the block at {block}: {line}")
                    raise


@pytest.mark.parametrize("page", ALL_PAGES)
def test_commands_in_sentences_name_real_options(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", prose):
        words = command(" ".join(span.split())) if re.search(r"(^|-m )firstnan\s|^FIRSTNAN=", span) else None
        if not words or words[0].isupper():
            continue
        parser = PARSERS[words[0]]() if not words[0].startswith("-") else main._main_parser()
        given = main._split_options(words[1:])[0] if words[0] == "run" else words
        named = {word for word in given if re.fullmatch(r"--?[a-z][a-z-]*", word)}
        assert named <= option_names(parser), f"{page}: {span}"


# --- lists --------------------------------------------------------------------------------------------------------


def test_the_options_of_run_are_all_there() -> None:
    table = re.search(r"^## Options\n(.*?)^## ", read("docs/run.md"), re.DOTALL | re.MULTILINE)
    assert table is not None
    first_cells = re.findall(r"^\| ([^|]+) \|", table[1], re.MULTILINE)
    named = {word for cell in first_cells for word in re.findall(r"`(--?[a-z-]+)", cell) if word != "---"}
    assert named == option_names(main._run_parser()) - {"-h", "--help"}


def test_the_options_of_the_detector_are_all_there() -> None:
    text = read("docs/detector.md")
    given = set(inspect.signature(firstnan.NaNDetector).parameters)
    assert {name for name in given if not re.search(rf"`{name}\b", text)} == set()


def test_the_reference_has_the_public_names_and_no_others() -> None:
    named = re.findall(r"^::: firstnan\.(\w+)$", read("docs/api.md"), re.MULTILINE)
    assert sorted([*named, "__version__"]) == sorted(firstnan.__all__)


def test_the_fields_of_the_json_are_the_real_ones() -> None:
    cells = re.findall(r"^\| (`.*?) \| ", read("docs/reports.md").partition("## Fields")[2], re.MULTILINE)
    known = fields(tried().to_dict()) | fields(divergence().to_dict())
    named = set()
    for cell in cells:
        first, *others = re.findall(r"`([\w.\[\]]+)`", cell)
        above = first.rpartition(".")[0]
        named |= {first, *(f"{above}.{name}" if above and "." not in name else name for name in others)}
    assert named - known == set()
    assert {name for name in known if "." not in name} <= named


def fields(value: Any, above: str = "") -> set[str]:
    """The names of all fields of a JSON value, as the table writes them: `remedies[].edits`."""
    if isinstance(value, list):
        return set().union(*(fields(member, f"{above}[]") for member in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    names = {f"{above}.{key}" if above else key for key in value}
    return names.union(*(fields(member, f"{above}.{key}" if above else key) for key, member in value.items()))


# --- links --------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """`make docs` checks those between pages of the site; these work on GitHub too."""
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", read(page)):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


# --- the report ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_of_the_readme_and_the_start_page_is_the_real_one(tmp_path: Path) -> None:
    demo = find("siamese")
    assert demo is not None
    (tmp_path / "train.py").write_text(demo.path.read_text())
    words = [sys.executable, "-m", "firstnan", "run", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    shown = re.search(r"<!-- report: .*? -->\n```\n(.*?)```\n<!-- end of report -->", read("README.md"), re.DOTALL)
    assert shown is not None
    # Progress is printed on a busy machine only.
    printed = re.sub(r"^firstnan: \d+ of \d+ tried, at most \d+ s left\n", "", done.stderr, flags=re.M)
    assert shown[1] == printed
    text = read("docs/index.md")
    begin, end = text.index("## The report, line by line"), text.index("## What is not reported")
    quoted = re.findall(r"^```\n(.*?)^```", text[begin:end], re.DOTALL | re.MULTILINE)
    assert len(quoted) == 6
    position = 0
    for part in quoted:
        assert part in printed[position:]
        position = printed.index(part, position)
