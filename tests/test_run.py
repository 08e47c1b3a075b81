"""`firstnan run` on real programs: ways to loop, to train, to stop, and what is left on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from zygote import Zygote

pytest_plugins = ["zygote"]

PROGRAMS = Path(__file__).parent / "programs"
AGAIN_IN_PLACE = "the failing batch was handed out again"


def marked(path: Path, mark: str = "") -> int:
    """The line of the program that ends in `# <- MARK`."""
    ending = f"# <- {mark}".rstrip()
    lines = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(ending)]
    assert len(lines) == 1, f"{path} has {len(lines)} lines that end in {ending}"
    return lines[0]


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


# --- three textbook programs --------------------------------------------------------------------------------------

DIVERGES = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers += [nn.Linear(16, 16), nn.Tanh() if _ == 0 else nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(64, 16) * 3
    y = x.sum(1, keepdim=True) * 10
    for step in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)  # <-
        loss.backward()
        optimizer.step()
"""

DIVIDES = """
    import torch

    class Ratio(torch.nn.Module):
        def forward(self, x):
            return x / (x - x)  # <-

    out = Ratio()(torch.tensor([1.0, 2.0, 3.0], requires_grad=True))
"""

SELECTS = """
    import torch

    class Positive(torch.nn.Module):
        def forward(self, x):
            x = torch.where(x > 0, x, torch.tensor(float("nan")))  # <-
            return torch.log(x)

    out = Positive()(torch.tensor([1.0, -2.0, 3.0], requires_grad=True))
"""


def test_a_learning_rate_of_one_on_five_layers(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, DIVERGES)
    result = firstnan(["run", path], cwd=tmp_path)
    assert result.cause == "divergence_lr"
    assert result.origin["line"] == marked(path)
    assert result.found["step"] > 0
    assert result.found["reproduced"] == "deterministic"


@pytest.mark.parametrize(
    ("text", "op", "cause"), [(DIVIDES, "div", "div_by_zero"), (SELECTS, "where", "nan_constant")], ids=["div", "where"]
)
def test_a_forward_call_without_backward(firstnan: Zygote, tmp_path: Path, text: str, op: str, cause: str) -> None:
    path = script(tmp_path, text)
    result = firstnan(["run", path], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["line"], result.cause) == ("forward", marked(path), cause)
    assert result.origin["op"] == op


@pytest.mark.parametrize("text", [DIVIDES, SELECTS], ids=["div", "where"])
def test_anomaly_detection_says_nothing_about_a_forward_call(tmp_path: Path, text: str) -> None:
    import torch

    path = script(tmp_path, text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        detection = torch.autograd.detect_anomaly()  # its own warning that it is slow comes here
        said.clear()
        with detection:
            names: dict[str, torch.Tensor] = {}
            exec(compile(path.read_text(), path, "exec"), names)
    assert not torch.isfinite(names["out"]).all()
    assert said == []


# --- ways to take batches -----------------------------------------------------------------------------------------

# The loop ends right after the failing step, or the batch is none that a loader could give again.
ONLY_BY_A_SECOND_RUN = ["break", "islice_last"]
STEP_5 = [
    "enumerate", "tqdm", "next", "islice", "cycle", "zip", "workers", "stream", "batch_sampler", "augment", "scheduler",
    "evaluate", "statistics",
]  # fmt: skip


@pytest.mark.parametrize("way", STEP_5)
def test_the_failing_batch_is_handed_out_again(firstnan: Zygote, tmp_path: Path, way: str) -> None:
    result = firstnan(["run", PROGRAMS / "loops.py", way], cwd=tmp_path)
    assert_log_of_negative(result.origin, result.cause)
    assert result.found["step"] == 5
    assert result.found["batch"]["index"] == 5
    assert_in_place(result.found, result.stderr)


@pytest.mark.parametrize(
    ("way", "step", "batch"), [("sampler", 4, 4), ("persistent", 15, 5), ("chain", 7, 5)], ids=lambda v: str(v)
)
def test_steps_and_batches_are_counted_apart(firstnan: Zygote, tmp_path: Path, way: str, step: int, batch: int) -> None:
    result = firstnan(["run", PROGRAMS / "loops.py", way], cwd=tmp_path)
    assert_log_of_negative(result.origin, result.cause)
    assert result.found["step"] == step
    assert result.found["batch"]["index"] == batch
    assert_in_place(result.found, result.stderr)


@pytest.mark.parametrize("way", ["shuffle", "chance", "chance_numpy", "chance_torch"])
def test_random_numbers_are_put_back(firstnan: Zygote, tmp_path: Path, way: str) -> None:
    result = firstnan(["run", PROGRAMS / "loops.py", way], cwd=tmp_path)
    assert_log_of_negative(result.origin, result.cause)
    # The program says it once while it runs; what it says while the batch is replayed is hidden.
    assert result.stdout == f"negative {result.found['step']}\n"
    assert_in_place(result.found, result.stderr)


@pytest.mark.parametrize("way", ONLY_BY_A_SECOND_RUN)
def test_a_loop_that_ends_with_the_failing_step_needs_no_second_run(firstnan: Zygote, tmp_path: Path, way: str) -> None:
    result = firstnan(["run", PROGRAMS / "loops.py", way], cwd=tmp_path)
    assert_log_of_negative(result.origin, result.cause)
    assert result.found["step"] == 5
    assert result.found["reproduced"] == "deterministic"
    assert "running the program again" not in result.stderr


def assert_log_of_negative(origin: dict[str, object], cause: str) -> None:
    assert (origin["phase"], origin["op"], cause) == ("forward", "log", "log_of_negative")
    assert origin["line"] == marked(PROGRAMS / "loops.py")
    assert origin["file"] == str(PROGRAMS / "loops.py")


def assert_in_place(report: dict[str, object], stderr: str) -> None:
    assert report["replay"] == AGAIN_IN_PLACE
    assert report["reproduced"] == "deterministic"
    assert "running the program again" not in stderr


# --- ways to train ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 3], ids=["first", "middle", "last"])
def test_a_bad_micro_batch(firstnan: Zygote, tmp_path: Path, bad: int) -> None:
    result = firstnan(["run", PROGRAMS / "turns.py", "accumulate", str(bad)], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["op"], result.cause) == ("forward", "div", "zero_over_zero")
    assert result.origin["line"] == marked(PROGRAMS / "turns.py", "accumulate")
    assert result.found["step"] == 3
    assert result.found["batch"]["index"] == 12 + bad
    assert_in_place(result.found, result.stderr)


@pytest.mark.parametrize(("who", "mark", "op"), [("discriminator", "discriminator", "log"), ("generator", "g", "sqrt")])
def test_two_optimizers_that_take_turns(firstnan: Zygote, tmp_path: Path, who: str, mark: str, op: str) -> None:
    result = firstnan(["run", PROGRAMS / "turns.py", "gan", who], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["op"], result.cause) == ("forward", op, f"{op}_of_negative")
    assert result.origin["line"] == marked(PROGRAMS / "turns.py", mark)
    assert result.found["step"] == 5
    assert_in_place(result.found, result.stderr)


@pytest.mark.parametrize("style", ["by_hand", "functional", "tensors_only", "two_models", "trainer", "thread", "clip"])
def test_a_gradient_of_sqrt_at_zero_in_every_style(firstnan: Zygote, tmp_path: Path, style: str) -> None:
    result = firstnan(["run", PROGRAMS / "styles.py", style], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["op"], result.cause) == ("backward", "sqrt", "sqrt_grad_at_zero")
    assert result.origin["line"] == marked(PROGRAMS / "styles.py", "backward")
    assert result.found["step"] == 5
    assert result.found["reproduced"] == "deterministic"


@pytest.mark.parametrize(("style", "cause"), [("lbfgs", "log_of_zero"), ("scaler_nan", "log_of_negative")])
def test_a_bad_loss_in_a_closure_or_under_a_scaler(firstnan: Zygote, tmp_path: Path, style: str, cause: str) -> None:
    result = firstnan(["run", PROGRAMS / "styles.py", style], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["op"], result.cause) == ("forward", "log", cause)
    assert result.origin["line"] == marked(PROGRAMS / "styles.py", "forward")
    assert result.found["step"] == 5


def test_the_first_overflows_of_a_scaler_are_normal(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", PROGRAMS / "styles.py", "scaler_first_overflows"], cwd=tmp_path)
    assert result.code == 0
    assert result.report is not None
    assert (result.report or {})["verdict"] == "clean"
    assert result.stderr == ""
    assert 1 < float(result.stdout.split()[1]) < 2.0**127  # it did overflow


def test_a_scale_that_sinks_below_one_is_not(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", PROGRAMS / "styles.py", "scaler_sinks"], cwd=tmp_path)
    assert (result.origin["phase"], result.cause) == ("backward", "sqrt_grad_at_zero")
    assert result.origin["line"] == marked(PROGRAMS / "styles.py", "backward")


def test_the_main_thread_goes_on_after_a_finding_in_another(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", PROGRAMS / "styles.py", "thread"], cwd=tmp_path)
    assert result.code == 3
    assert result.stdout == "joined\n"


# --- programs that stop by themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["exit", "exit_0", "raise", "break", "return", "assert", "isnan", "categorical", "normal"]
)
def test_a_program_that_notices_it_first(firstnan: Zygote, tmp_path: Path, how: str) -> None:
    result = firstnan(["run", PROGRAMS / "stops.py", how], cwd=tmp_path)
    assert (result.origin["phase"], result.origin["op"], result.cause) == ("forward", "log", "log_of_negative")
    assert result.origin["line"] == marked(PROGRAMS / "stops.py", "log")
    assert result.found["step"] == 5
    # Its own words stay, the second run adds none.
    assert result.stdout == {"break": "after the loop\ndone\n", "return": "done\n"}.get(how, "")
    assert result.stderr.count("Traceback") == (how not in ("exit", "exit_0", "break", "return"))


def test_a_decomposition_that_raises(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", PROGRAMS / "stops.py", "cholesky"], cwd=tmp_path)
    assert (result.origin["phase"], result.cause) == ("forward", "not_positive_definite")
    assert "cholesky" in result.origin["op"]
    assert result.origin["line"] == marked(PROGRAMS / "stops.py", "cholesky")
    assert result.found["step"] == 5
    assert "LinAlgError" in result.stderr


CATCHES_ALL = """
    import torch
    from torch.utils.data import DataLoader

    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    data = torch.rand(40, 4) + 0.5
    data[21] = -1.0
    for x in {batches}:
        try:
            optimizer.zero_grad()
            loss = (weight * torch.log(x)).sum()  # <-
            loss.backward()
            optimizer.step()
        except:
            print("caught")
    print("end")
"""


@pytest.mark.parametrize("batches", ["DataLoader(data, batch_size=4)", "data.split(4)"], ids=["loader", "tensor"])
def test_a_program_that_catches_everything_goes_on(firstnan: Zygote, tmp_path: Path, batches: str) -> None:
    path = script(tmp_path, CATCHES_ALL.format(batches=batches))
    result = firstnan(["run", path], cwd=tmp_path)
    assert (result.origin["line"], result.cause) == (marked(path), "log_of_negative")
    assert result.found["step"] == 5
    assert result.stdout == "caught\nend\n"
    assert result.found["notes"] == [
        "the program caught the SystemExit that should end it here and continued; its later steps were not watched"
    ]


GIVES_UP = """
    import torch

    class Lost(Exception):
        pass

    def fit(model, data):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in data.split(4):
            loss = model(torch.log(x)).pow(2).mean()  # <-
            if not torch.isfinite(loss):
                {reaction}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    torch.manual_seed(0)
    data = torch.rand(40, 4) + 0.5
    bad = data.clone()
    bad[21] = -1.0
    for name, rows in (("first", bad), ("second", data)):
        try:
            print(name, fit(torch.nn.Linear(4, 1), rows))
        except Lost:
            print(name, "lost")
"""


def test_a_training_that_the_program_gives_up_is_explained_and_the_next_one_runs_as_it_would(
    firstnan: Zygote, tmp_path: Path
) -> None:
    path = script(tmp_path, GIVES_UP.format(reaction="raise Lost"))
    plain = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=True)
    result = firstnan(["run", "--verify", "3", path], cwd=tmp_path)
    assert (result.origin["line"], result.cause) == (marked(path), "log_of_negative")
    assert result.found["step"] == 5
    assert result.stdout == plain.stdout
    assert result.stdout.startswith("first lost\nsecond ")
    assert result.found["notes"] == ["the program ended this training itself and began another, which was not watched"]
    assert result.found["remedies"][0]["failing_step_finite"]


def test_a_training_that_skips_a_bad_loss_is_not_given_up(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, GIVES_UP.format(reaction="continue"))
    result = firstnan(["run", path], cwd=tmp_path)
    assert (result.code, result.stderr) == (0, "")


PRESSES_CTRL_C = """
    import {module}
    import torch

    real, pressed = {module}.{name}, []

    def press(*given, **named):
        if not pressed and {when}:
            pressed.append(given)
            raise KeyboardInterrupt
        return real(*given, **named)

    {module}.{name} = press
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    data = torch.rand(40, 4) + 0.5
    data[21] = -1.0
    for x in data.split(4):
        loss = (weight * torch.log(x)).sum()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("module", "name", "when"),
    [("os", "replace", "str(given[1]).endswith('.json')"), ("ast", "parse", "'x' in globals()")],
    ids=["is saved", "is made"],
)
def test_ctrl_c_while_the_first_finding(firstnan: Zygote, tmp_path: Path, module: str, name: str, when: str) -> None:
    """It skips the replay, and what is known is kept."""
    text = PRESSES_CTRL_C.format(module=module, name=name, when=when)
    result = firstnan(["run", script(tmp_path, text)], cwd=tmp_path)
    assert "Traceback" not in result.stderr
    assert (result.code, result.found["verdict"], result.found["step"]) == (3, "nonfinite", 5)
    assert result.found["notes"] == ["the replay of the failing step was ended by Ctrl-C"]


# --- options and files --------------------------------------------------------------------------------------------


def test_tracing_from_the_first_step_needs_no_replay(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", "--trace", PROGRAMS / "loops.py", "enumerate"], cwd=tmp_path)
    assert_log_of_negative(result.origin, result.cause)
    assert result.found["step"] == 5
    assert result.stdout == "negative 5\n"
    assert "running the program again" not in result.stderr


def test_without_a_replay_the_step_is_still_known(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", "--replay", "never", PROGRAMS / "loops.py", "enumerate"], cwd=tmp_path)
    assert (result.found["step"], result.found["origin"], result.found["cause"]) == (5, None, None)
    assert result.found["noticed"]["what"] == "loss"
    assert result.found["reproduced"] == "not_replayed"
    assert result.stdout == "negative 5\n"


def test_a_written_report_shows_as_it_was_printed(firstnan: Zygote, tmp_path: Path) -> None:
    words: list[str | Path] = ["run", "--json", "report.json", "-o", "report.txt", PROGRAMS / "loops.py", "enumerate"]
    result = firstnan(words, cwd=tmp_path)
    assert result.found["format"] == "firstnan-report"
    shown = firstnan(["show", "report.json"], cwd=tmp_path)
    assert (shown.code, shown.stderr) == (0, "")
    assert shown.stdout == (tmp_path / "report.txt").read_text()
    # On the screen one line more says where the report was saved.
    more = [line for line in result.stderr.splitlines() if line not in shown.stdout.splitlines()]
    assert len(more) == 1
    assert "report.json" in more[0]
    assert [line for line in result.stderr.splitlines() if line not in more] == shown.stdout.splitlines()


def test_a_clean_run_writes_its_report_and_says_nothing(firstnan: Zygote, tmp_path: Path) -> None:
    words: list[str | Path] = [
        "run",
        "--json",
        "report.json",
        "-o",
        "report.txt",
        PROGRAMS / "styles.py",
        "scaler_first_overflows",
    ]
    result = firstnan(words, cwd=tmp_path)
    assert (result.code, result.stderr) == (0, "")
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "clean"
    assert (tmp_path / "report.txt").exists()


DIES_IN_SECOND_RUN = """
    import os, signal
    import torch

    if os.path.exists("first"):
        os.kill(int(open("first").read()), signal.SIGKILL)
    print(os.getpid(), file=open("first", "w"), flush=True)
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(5):
        loss = (weight * (3 - step)).log().sum()
        loss.backward()
        optimizer.step()
"""


def test_a_finding_is_on_disk_before_anything_else_is_tried(
    firstnan: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run kills the first with the signal that nothing can catch."""
    monkeypatch.setitem(firstnan.environment, "FIRSTNAN_ISOLATION", "off")
    result = firstnan(["run", script(tmp_path, DIES_IN_SECOND_RUN)], cwd=tmp_path)
    assert result.code == -9
    assert result.report is not None
    assert result.report["verdict"] == "nonfinite"
    assert result.report["step"] == 3


@pytest.mark.parametrize("batches", ["DataLoader(TensorDataset(x), batch_size=4)", "x.split(4)"])
def test_the_bad_update_is_not_written(firstnan: Zygote, tmp_path: Path, batches: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))\n"
        "x[26] = 0\n"
        "net = torch.nn.Linear(3, 3, bias=False)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "try:\n"
        f"    for batch in {batches}:\n"
        "        batch = batch[0] if isinstance(batch, list) else batch\n"
        "        loss = net(batch).square().sum(1).sqrt().mean()\n"
        "        optimizer.zero_grad()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "finally:\n"
        "    print('weights finite:', bool(torch.isfinite(net.weight).all()))\n"
    )
    result = firstnan(["run", program], cwd=tmp_path)
    assert (result.code, result.origin["line"], result.report["step"]) == (3, 10, 6)
    assert result.stdout == "weights finite: True\n"


# --- an explosion that stays finite -------------------------------------------------------------------------------

EXPLODES = """
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr={lr})
    for step in range(100):
        x = torch.randn(32, 10)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())
"""


def test_a_loss_that_explodes_and_stays_finite_is_a_finding(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, EXPLODES.format(lr=1.0))
    result = firstnan(["run", "--verify", "20", path], cwd=tmp_path)
    assert 1e20 < float(result.stdout) < float("inf")
    assert result.code == 3
    report = result.report or {}
    assert (report["verdict"], report["step"], result.cause) == ("diverged", 3, "divergence_lr")
    assert [event["kind"] for event in report["events"] if event["kind"] != "forecast"] == ["explosion"]
    best = report["remedies"][0]
    assert (best["title"], best["tried"]) == ("Lower the learning rate from 1.0 to 0.1", True)
    assert best["note"].startswith("the loss stays in its range, ")
    assert "training diverged from step 3 on; no NaN or Inf" in result.stderr
    assert "its updates made the loss explode" in result.stderr


def test_the_same_training_with_a_good_learning_rate_is_left_in_peace(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, EXPLODES.format(lr=0.01))
    result = firstnan(["run", path], cwd=tmp_path)
    assert (result.code, result.stderr) == (0, "")
    assert (result.report or {})["events"] == []


# --- the page and the annotation -------------------------------------------------------------------------------------


def test_the_report_is_written_as_a_page_and_the_line_is_annotated(tmp_path: Path, firstnan: Zygote) -> None:
    path = script(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        images = torch.rand(24, 1, 8, 8)
        images[17] = 0.25
        w = torch.ones(64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1e-3)
        for (x,) in DataLoader(TensorDataset(images), batch_size=4):
            x = x / x.flatten(1).std(1)[:, None, None, None]  # <-
            loss = (x.flatten(1) * w).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    )
    done = firstnan(["run", "--verify", "2", "-o", "report.html", "--annotate", "github", path.name], cwd=tmp_path)
    assert done.code == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("::")]
    assert line.startswith(f"::error file=train.py,line={marked(path)},endLine={marked(path)},col=9,")
    assert "%0AProven fix: " in line
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    for part in ('class="bar zero"', 'class="preview"', "dataset index 17", "with this change", "proven</dd>"):
        assert part in html


# --- more than one process or thread of control -------------------------------------------------------------------

LOGARITHM = """
    import torch

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def train():
        for step in range(6):
            x = torch.rand(4, 3) + 0.1 - float(step == 3)
            optimizer.zero_grad()
            (model(x) - x.log()).square().mean().backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    "start", ["run([sys.executable, 'worker.py'], check=True)", "run('echo torchrun worker.py', shell=True)"]
)
def test_a_program_started_by_the_program_is_said_not_to_be_watched(
    firstnan: Zygote, tmp_path: Path, start: str
) -> None:
    (tmp_path / "worker.py").write_text(textwrap.dedent(LOGARITHM) + "\ntrain()\n")
    start = f"import subprocess, sys\nsubprocess.{start}\n"
    result = firstnan(["run", script(tmp_path, start)], cwd=tmp_path)
    assert result.report is not None
    assert (result.code, result.report["verdict"]) == (0, "clean")
    assert "but the program started worker.py, which was not watched" in result.stderr


AGAIN = """
    import os, sys
    if "AGAIN" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-u", *sys.argv], {**os.environ, "AGAIN": "1"})
"""


def test_a_program_that_replaces_itself_is_watched_again(firstnan: Zygote, tmp_path: Path) -> None:
    text = textwrap.dedent(AGAIN) + textwrap.dedent(LOGARITHM) + "\nprint(sys.argv[1:])\ntrain()\n"
    result = firstnan(["run", "--verify", "0", script(tmp_path, text), "--lr", "1"], cwd=tmp_path)
    assert (result.code, result.stdout) == (3, "['--lr', '1']\n")
    assert result.origin["op"] == "log"
    assert "not watched" not in result.stderr


def test_a_command_that_can_be_read_only_once_is_started(firstnan: Zygote, tmp_path: Path) -> None:
    text = "import subprocess, sys\nsubprocess.run(iter([sys.executable, '-c', '']), check=True)\nprint('done')\n"
    result = firstnan(["run", script(tmp_path, text)], cwd=tmp_path)
    assert (result.code, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_program_that_takes_the_buffer_of_its_output(tmp_path: Path) -> None:
    """The old stream is still there at the end, and cannot even be asked whether it is closed."""
    path = script(tmp_path, "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint('done')\n")
    command = [sys.executable, "-m", "firstnan", "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_what_else_a_training_starts_is_its_own_affair(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    text = textwrap.dedent(LOGARITHM.replace("step == 3", "step == 9")) + "\ntrain()\n"
    start = "import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], check=True)\n"
    result = firstnan(["run", script(tmp_path, text + start)], cwd=tmp_path)
    assert (result.code, result.stderr) == (0, "")


def test_a_task_that_was_ended_does_not_complain(firstnan: Zygote, tmp_path: Path) -> None:
    text = textwrap.dedent(LOGARITHM) + textwrap.dedent("""
        import asyncio

        async def trained():
            await asyncio.sleep(0)
            train()

        async def main():
            await asyncio.gather(trained(), asyncio.sleep(0))

        asyncio.run(main())
    """)
    result = firstnan(["run", "--verify", "0", script(tmp_path, text)], cwd=tmp_path)
    assert result.code == 3
    assert "never retrieved" not in result.stderr


def test_a_report_that_cannot_be_written_is_said_once(firstnan: Zygote, tmp_path: Path) -> None:
    """The folder is there when the program starts, and is gone when the report is written."""
    (tmp_path / "reports").mkdir()
    text = textwrap.dedent(LOGARITHM) + "\nimport os\nos.rmdir('reports')\ntrain()\n"
    result = firstnan(["run", "-o", "reports/report.html", script(tmp_path, text)], cwd=tmp_path)
    assert result.code == 3
    assert result.stderr.count("can't write") == 1
    assert "reports/report.html" not in result.stderr.partition("can't write")[2].partition("\n")[2]


AHEAD = """
    import os, torch
    from torch.utils.data import DataLoader, TensorDataset

    def ahead(loader):
        batches = iter(loader)
        now = next(batches)
        for following in batches:
            yield now
            now = following
        yield now

    def train():
        x = torch.rand(64, 3) + 0.1
        x[29] = 0
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for (x,) in ahead(DataLoader(TensorDataset(x), 4)):
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True).log()).square().mean().backward()
            optimizer.step()

    child = os.fork()
    if not child:
        train()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_batches_that_a_forked_process_fetches_before_it_trains_are_counted(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", "--verify", "0", script(tmp_path, AHEAD)], cwd=tmp_path)
    assert result.report is not None
    assert (result.report["batch"]["index"], result.report["batch"]["dataset_indices"]) == (7, [29])
