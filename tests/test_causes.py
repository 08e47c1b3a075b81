"""The catalogue: complete, the same everywhere; and an example with one thing changed fails for another reason.

That every example fails for the reason it stands for is in test_repairs.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from firstnan.diagnose.causes import catalogue, documents, families, listing, page
from firstnan.diagnose.rules.base import RULES
from zygote import Zygote

pytest_plugins = ["zygote"]

DOCS = Path(__file__).parents[1] / "docs" / "causes"
EXAMPLES = {slug: entry.example for slug, entry in catalogue().items() if entry.example is not None}
# What no program of one process, run twice alike, can show; and where the algorithm gives up depends on the machine.
WITHOUT = {"transient", "collective", "compile_only", "unexplained", "decomposition_failed"}

# Each example with one thing changed: the same place, but another cause, or none ("clean").
NEAR_MISSES = {
    "log_of_zero": ("torch.log(1 - p)", "torch.log(0.9 - p)", "log_of_negative"),
    "log_of_negative": ("predicted + 1", "predicted.relu()", "log_of_zero"),
    "sqrt_of_negative": ("torch.sqrt(p - m**2)", "torch.sqrt((p - m**2).abs())", "clean"),
    "pow_of_zero": ("d**-1.5", "d**1.5", "clean"),
    "pow_of_negative": ("gain * x", "gain * x.clamp_min(0)", "pow_grad_at_zero"),
    "arc_out_of_domain": ("torch.acos(correlation)", "torch.acos(0.9 * correlation)", "clean"),
    "pole": ("torch.erfinv(2 * u - 1)", "torch.erfinv(2 * u)", "arc_out_of_domain"),
    "div_by_zero": ("(predicted - y).abs() / y", "((predicted - y) * y / y).abs()", "zero_over_zero"),
    "zero_over_zero": (
        "vector / vector.norm(dim=1, keepdim=True)",
        "vector * (1 / vector.norm(dim=1, keepdim=True))",
        "div_by_zero",
    ),
    "zero_times_inf": ('float("-inf")', "-1e9", "clean"),
    "inf_minus_inf": ('float("-inf")', "-1e9", "clean"),
    "exp_overflow": ("torch.exp(log_scale)", "torch.exp(log_scale.clamp(max=10))", "clean"),
    "overflow": ("x**4", "torch.exp(x)", "exp_overflow"),
    "low_precision_overflow": (".half()", ".bfloat16()", "clean"),
    "divergence_lr": ("lr=3.0)", "lr=0.01)\nstars[40] = 1e30", "overflow"),
    "exploding_gradient": ("(4,), 3.0", "(4,), 1.1", "clean"),
    "bad_init": ("in_features**5", "in_features**-0.5", "clean"),
    "fully_masked_softmax": ("padding[50] = True", "padding[50, 1:] = True", "clean"),
    "masked_label": ("in_stock[36, bought[36]]", "in_stock[36]", "fully_masked_softmax"),
    "empty_reduction": ("tags[32:40] = -100", "tags[32:40] = 1", "clean"),
    "single_sample_variance": ("team[41]", "team[40:42]", "clean"),
    "ctc_infeasible": ("letters[44] = 14", "letters[44] = 5", "clean"),
    "sqrt_grad_at_zero": (
        "(distance - 1.0).abs()",
        "torch.where(distance > 0, distance, 0.0)",
        "where_grad_trap",
    ),
    "pow_grad_at_zero": ("** 0.45 - y", "** 1.45 - y", "clean"),
    "acos_grad_at_one": ("scale * x", "0.999 * scale * x", "clean"),
    "xlogy_grad_at_zero": ("torch.xlogy(p, p)", "(p * torch.log(p))", "log_of_zero"),
    "logsumexp_grad_all_inf": ("missing[33]", "missing[33, 1:]", "clean"),
    "where_grad_trap": ("torch.where(x == 0, 1.0, torch.sin(x) / x)", "torch.sin(x) / x", "zero_over_zero"),
    "degenerate_decomposition": ("@ y)", "@ y + torch.diag(torch.tensor([0.0, 0.1, 0.2])))", "clean"),
    "custom_backward": ("2 * y / x", "2 * x.abs()", "clean"),
    "infinite_derivative": ("torch.tensor(0.5)", "torch.tensor(1.5)", "clean"),
    "not_positive_definite": ("r = model(x)", "r = 0.99 * torch.tanh(model(x))", "clean"),
    "singular_matrix": ("= design[45, :, 0] = 2.0", "= 2.0", "clean"),
    "nan_input": ("table[43, 2]", "price[43]", "nan_label"),
    "nan_label": ("toxicity[46]", "molecules[46, 0]", "nan_input"),
    "nan_parameter": ("/= 0.0", "/= 2.0", "clean"),
    "uninitialized_memory": ("torch.empty(5)", "torch.ones(5)", "clean"),
    "nan_constant": ('float("nan")', "0.0", "clean"),
    "optimizer_eps": ("eps=0.0", "eps=1e-8", "clean"),
    "optimizer_overflow": ("1e23", "1e3", "clean"),
    "nan_lr": ('float("nan")', "0.05", "clean"),
}


def test_every_rule_is_in_the_catalogue_and_every_cause_has_its_example() -> None:
    assert {rule.slug for rule in RULES} <= set(catalogue())
    assert set(catalogue()) - set(EXAMPLES) == WITHOUT
    assert set(NEAR_MISSES) == set(EXAMPLES)


def test_every_entry_is_of_a_family_and_complete() -> None:
    assert sum(map(len, families().values())) == len(catalogue())
    for entry in catalogue().values():
        assert len(re.findall(r"[.](\s|$)", entry.explanation)) == 2, f"{entry.slug}: not two sentences"
        assert entry.remedies
        assert entry.code or entry.slug == "unexplained"


@pytest.mark.parametrize("slug", EXAMPLES)
def test_examples_are_short_and_say_what_goes_wrong(slug: str) -> None:
    source = EXAMPLES[slug].read_text(encoding="utf-8")
    assert 15 <= len(source.splitlines()) <= 36
    assert ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("slug", NEAR_MISSES)
def test_near_miss_is_not(firstnan: Zygote, tmp_path: Path, slug: str) -> None:
    old, new, outcome = NEAR_MISSES[slug]
    source = EXAMPLES[slug].read_text(encoding="utf-8")
    assert old in source
    program = tmp_path / "near.py"
    program.write_text(source.replace(old, new), encoding="utf-8")
    result = firstnan(["run", program], cwd=tmp_path)
    assert result.report is not None
    said = "clean" if result.report["verdict"] == "clean" else result.cause
    assert said == outcome, result.stderr
    assert result.code == (0 if outcome == "clean" else 3)


def test_documents_are_current() -> None:
    """`python -m firstnan.diagnose.causes docs/causes` writes them."""
    written = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    assert written == documents()


def test_the_command_lists_explains_and_prints(firstnan: Zygote, tmp_path: Path) -> None:
    assert firstnan(["causes"], cwd=tmp_path).stdout == listing() + "\n"
    said = firstnan(["causes", "log_of_zero"], cwd=tmp_path)
    assert (said.code, said.stdout) == (0, page(catalogue()["log_of_zero"]) + "\n")
    printed = firstnan(["causes", "log_of_zero", "--example"], cwd=tmp_path)
    assert printed.stdout == EXAMPLES["log_of_zero"].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["log_of_zeros"], "unknown cause 'log_of_zeros'; did you mean 'log_of_zero'?"),
        (["weather"], "unknown cause 'weather' (firstnan causes lists them)"),
        (["transient", "--example"], "there is no example for transient"),
    ],
)
def test_what_is_not_there_is_one_line_and_a_2(firstnan: Zygote, tmp_path: Path, words: list[str], text: str) -> None:
    result = firstnan(["causes", *words], cwd=tmp_path)
    assert (result.code, result.stdout, result.stderr) == (2, "", f"firstnan: {text}\n")


def test_listing_fits_a_screen_for_each_family() -> None:
    for block in listing().split("\n\n"):
        assert len(block.splitlines()) <= 24
    assert all(len(line) <= 80 for line in listing().splitlines())
