"""A step that failed in one run fails again in another that lands in it: same step, same operator, same line."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import firstnan as package
from capsules import signed, taken_apart
from firstnan.capsule.content import load
from firstnan.capsule.file import CapsuleError
from zygote import Result, Zygote

pytestmark = pytest.mark.slow

pytest_plugins = ["zygote"]

HEAD = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
"""
LOADER = (
    HEAD
    + """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4))
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.body(x))

    x, y = torch.randn(320, 6), torch.rand(320, 1)
    y[77] = -3.0
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for a, b in loader:
        loss = (net(a) - torch.log(b + 0.5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"{loss.item():.9f} {optimizer.param_groups[0]['lr']:.9f}")
"""
)
ACCUMULATES = (
    HEAD
    + """
    data = [{"x": torch.randn(4), "name": f"n{i}"} for i in range(120)]
    data[61]["x"] = data[61]["x"] * 1e30
    net = nn.Linear(4, 4)
    next(iter(DataLoader(data, batch_size=5)))  # a look at the shapes
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=5)
    assert sum(len(batch["x"]) for batch in loader) == 120  # and through all of it
    for i, batch in enumerate(loader):
        loss = net(batch["x"]).exp().mean() if batch["name"] else None
        (loss / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
"""
)
GAN = (
    HEAD
    + """
    def net():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    generator, critic = net(), net()
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
    data = torch.randn(96, 4)
    data[42] = 300.0
    for (real,) in DataLoader(TensorDataset(data), batch_size=8, shuffle=True):
        noise = torch.randn(8, 4)
        of_critic.zero_grad()
        (critic(generator(noise).detach()) - critic(real).tanh()).square().mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        (critic(generator(noise)).square().mean() * (real.abs().max().exp() / 1e3)).backward()
        of_generator.step()
"""
)
UPDATE = (
    HEAD
    + """
    x = torch.randn(160, 3)
    x[:, 0] = 0.0
    net = nn.Linear(3, 2, bias=False)
    late = torch.zeros(())
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, eps=0.0)
    for i, (a,) in enumerate(DataLoader(TensorDataset(x + 1.0), batch_size=16)):
        if len(optimizer.state) and optimizer.state[net.weight]["step"] >= 6:
            a = a - 1.0
            optimizer.state[net.weight]["square_avg"].mul_(0.0)
        net(a).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
DRAWS = (
    HEAD
    + """
    data = torch.randn(500, 3)
    data[::7] *= 60
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for i in range(400):
        at = torch.randint(0, 500, (4,))
        loss = net(data[at]).exp().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


def captured(firstnan: Zygote, folder: Path, *options: str) -> tuple[Result, Path]:
    """The run that fails, and the capsule that it leaves."""
    result = firstnan(["run", "--capsule", folder / "kept", *options, folder / "train.py"], cwd=folder)
    (path,) = (folder / "kept").iterdir()
    assert result.found["capsule"] == str(path)
    assert str(path) in "".join(result.stderr.split())  # a long name is folded
    return result, path


def replayed(firstnan: Zygote, folder: Path, capsule: Path) -> Result:
    report = folder / "replayed.json"
    return firstnan._ask(["replay", "--json", str(report), str(capsule), "train.py"], folder, 120, report)


def where(result: Result) -> tuple[Any, ...]:
    """What two runs have to agree on."""
    origin, found = result.origin, result.found
    produced = {k: v for k, v in origin["produced"].items() if k != "name"}
    return found["step"], found["batch"], origin["phase"], origin["op"], origin["line"], produced, result.cause


@pytest.mark.parametrize(
    "text", [LOADER, ACCUMULATES, GAN, UPDATE, DRAWS], ids=["loader", "accumulates", "gan", "update", "draws"]
)
def test_it_happens_again(firstnan: Zygote, tmp_path: Path, text: str) -> None:
    script(tmp_path, text)
    first, capsule = captured(firstnan, tmp_path)
    again = replayed(firstnan, tmp_path, capsule)
    assert first.found["step"] > 0
    assert capsule.name == f"firstnan-step{first.found['step']:06}.capsule"
    assert where(again) == where(first)
    assert again.found["replay"] == "the captured step was replayed"
    assert len(again.stdout.splitlines()) <= 1, "the earlier steps are not made again"


def test_the_capsule_knows_the_whole_report(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER)
    first, capsule = captured(firstnan, tmp_path)
    content = load(capsule)
    assert content.report.to_dict() == first.found
    assert content.sources == {str(path): path.read_text()}
    assert content.environment["torch"] == torch.__version__
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "train.py"]


def test_a_repaired_program_is_finite_there(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER)
    _, capsule = captured(firstnan, tmp_path)
    path.write_text(path.read_text().replace("b + 0.5", "(b + 0.5).clamp(min=1e-3)"))
    again = replayed(firstnan, tmp_path, capsule)
    assert again.code == 0
    assert again.report is not None
    assert again.report["verdict"] == "clean"
    assert "was finite here" in again.stderr
    assert "train.py has changed since the step was captured" in again.stderr


def test_another_model_takes_what_fits_and_says_what_does_not(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER)
    _, capsule = captured(firstnan, tmp_path)
    changed = path.read_text().replace("self.head = nn.Linear(8, 1)", "self.head = nn.Linear(8, 1, bias=False)")
    path.write_text(
        changed.replace("nn.Linear(6, 8)", "nn.Linear(6, 8, bias=True)").replace("class Net", "class Other")
    )
    path.write_text(path.read_text().replace("Net()", "Other()"))
    notes = " | ".join(replayed(firstnan, tmp_path, capsule).found["notes"])
    assert "not in the program's model: head.bias" in notes
    path.write_text(path.read_text().replace("(6, 8", "(6, 9").replace("(8)", "(9)").replace("Linear(8,", "Linear(9,"))
    notes = " | ".join(replayed(firstnan, tmp_path, capsule).found["notes"])
    assert "the shape differs" in notes
    path.write_text(path.read_text().replace("b + 0.5", "(b + 0.5).clamp(min=1e-3)"))
    finite = replayed(firstnan, tmp_path, capsule)
    assert finite.code == 2
    told = " ".join(finite.stderr.split())
    assert "was not replayed as it was captured: the model does not match the capsule's (not restored" in told
    assert "was finite here" not in told


def test_another_torch_and_a_gpu_that_is_not_here(firstnan: Zygote, tmp_path: Path) -> None:
    script(tmp_path, LOADER)
    first, capsule = captured(firstnan, tmp_path)
    header, tensors = taken_apart(capsule.read_bytes())
    text = header["__metadata__"]["firstnan"].replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"')
    header["__metadata__"]["firstnan"] = text.replace('"name": "t', '"device": "cuda:3", "name": "t')
    capsule.write_bytes(signed(header, tensors))
    assert any(p.device == "cuda:3" for p in load(capsule).models[0].parameters.values())
    again = replayed(firstnan, tmp_path, capsule)
    assert where(again) == where(first)
    assert any("captured with torch 1.0" in note for note in again.found["notes"])


def test_no_training_step_to_land_in(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER)
    _, capsule = captured(firstnan, tmp_path)
    path.write_text("import torch\nprint('only this')\n")
    again = replayed(firstnan, tmp_path, capsule)
    assert again.code == 2
    assert again.stdout == "only this\n"
    assert "reached no training step" in again.stderr
    path.write_text("raise SystemExit(5)\n")
    assert replayed(firstnan, tmp_path, capsule).code == 5


# --- what is in the way of a capsule ------------------------------------------------------------------------------

FULL = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"


def without_capsule(result: Result, folder: Path) -> str:
    """Why there is no capsule, in a report that is complete otherwise."""
    assert result.origin["op"] == "log"
    assert result.found["capsule"] == ""
    assert not (folder / "kept").is_dir() or list((folder / "kept").iterdir()) == []
    (note,) = result.found["notes"]
    return str(note)


def test_a_full_disk_stops_nothing(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER)
    path.write_text(FULL + path.read_text().replace("nn.Linear(6, 8)", "nn.Linear(6, 4096), nn.Linear(4096, 8)"))
    result = firstnan(["run", "--capsule", "kept", path], cwd=tmp_path)
    assert without_capsule(result, tmp_path) == "no capsule was written: File too large"


def test_a_folder_that_cannot_be_made(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER)
    (tmp_path / "file").write_text("")
    result = firstnan(["run", "--capsule", tmp_path / "file" / "kept", path], cwd=tmp_path)
    assert without_capsule(result, tmp_path) == "no capsule was written: Not a directory"


def test_the_limit(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER.replace("nn.Linear(6, 8)", "nn.Linear(6, 512), nn.Linear(512, 8)"))
    result = firstnan(["run", "--capsule", "kept", "--capsule-limit", "10K", path], cwd=tmp_path)
    assert "left out" not in without_capsule(result, tmp_path)
    assert "the limit is 10.0 KiB" in without_capsule(result, tmp_path)
    first, capsule = captured(firstnan, tmp_path, "--capsule-limit", "70K")
    assert any(
        note.endswith("was left out: the capsule would exceed its 70.0 KiB limit") for note in first.found["notes"]
    )
    again = replayed(firstnan, tmp_path, capsule)
    assert where(again) == where(first)
    assert any("not in the capsule: the optimizer state" in note for note in again.found["notes"])


def test_healthy_training_leaves_nothing(firstnan: Zygote, tmp_path: Path) -> None:
    path = script(tmp_path, LOADER.replace("y[77] = -3.0", "pass"))
    plain = firstnan.python([path], cwd=tmp_path)
    watched = firstnan(["run", "--capsule", "kept", path], cwd=tmp_path)
    assert (watched.code, watched.stdout, watched.stderr) == (0, plain.stdout, "")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["replay"], "firstnan replay [options] CAPSULE"),
        (["replay", "nowhere", "train.py"], "nowhere: No such file"),
        (["replay", "train.py", "train.py"], "not a firstnan capsule"),
        (["run", "--capsule", "train.py", "train.py"], "not a directory"),
        (
            ["run", "--capsule", "x", "--capsule-limit", "much", "train.py"],
            "must be a size such as 500M or 2G, got 'much'",
        ),
    ],
)
def test_a_wrong_command_line(firstnan: Zygote, tmp_path: Path, words: list[str], part: str) -> None:
    script(tmp_path, "print('started' * 20)")
    result = firstnan._ask(words, tmp_path, 60, tmp_path / "none.json")
    assert result.code == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


# --- in one's own loop --------------------------------------------------------------------------------------------


class Loop:
    """A training loop that somebody has, with a bad sample late in it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2))
        self.net.append(torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.data = torch.rand(40, 3)
        self.data[29, 1] = -9.0
        self.data = self.data.split(4)

    def step(self, batch: torch.Tensor) -> None:
        loss = (self.net(batch) * batch.sqrt()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def values(loop: Loop) -> list[torch.Tensor]:
    kept = [*loop.net.state_dict().values()]
    states = [s["exp_avg"] for s in loop.optimizer.state.values()]
    return [t.clone() for t in (*kept, *states, torch.get_rng_state())]


@pytest.mark.parametrize("policy", ["raise", "skip", "warn", "rollback"])
@pytest.mark.parametrize("through", ["batches", "step", "plain"])
def test_the_detector_keeps_the_state_before_the_step(tmp_path: Path, policy: str, through: str) -> None:
    loop, before = Loop(), list[torch.Tensor]()
    options: dict[str, Any] = {"on_nonfinite": policy, "capsule_dir": tmp_path / "kept"}
    with package.NaNDetector(loop.net, loop.optimizer, **options) as detector:
        try:
            data = loop.data[:8]
            for i, batch in enumerate(detector.batches(data) if through == "batches" else data):
                if i == 7:
                    before = values(loop)
                if through == "step":
                    detector.step(loop.step, batch)
                else:
                    loop.step(batch)
        except package.NonFiniteError:
            assert policy == "raise"
    assert detector.report is not None
    (path,) = (tmp_path / "kept").iterdir()
    assert detector.report.capsule == str(path)
    assert path.name == "firstnan-step000007.capsule"
    other, seen = Loop(), list[torch.Tensor]()

    def step(batch: torch.Tensor | None) -> None:
        seen.extend(values(other))
        other.step(other.data[7] if batch is None else batch)

    report = package.replay(path, step=step, model=other.net, optimizer=other.optimizer)
    assert report.origin is not None
    assert (report.verdict, report.step, report.origin.op) == ("nonfinite", 7, "sqrt")
    assert report.reproduced == "deterministic"
    assert report.cause is not None
    assert report.cause.slug == "sqrt_of_negative"
    assert all(map(torch.equal, seen, before))


def test_a_step_that_is_finite_here(tmp_path: Path) -> None:
    loop = Loop()
    with (
        pytest.raises(package.NonFiniteError) as caught,
        package.NaNDetector(loop.net, loop.optimizer, capsule_dir=tmp_path) as detector,
    ):
        for batch in detector.batches(loop.data):
            loop.step(batch)
    capsule = caught.value.report.capsule

    def step(batch: torch.Tensor) -> None:
        loop.step(batch.clamp(min=0.1))

    report = package.replay(capsule, step=step, model=loop.net, optimizer=loop.optimizer)
    assert report.verdict == "clean"
    with pytest.raises(ZeroDivisionError):
        package.replay(capsule, step=lambda _: 1 // 0, model=loop.net, optimizer=loop.optimizer)
    with pytest.raises(CapsuleError, match="was not replayed as captured: no model of this program matches"):
        package.replay(capsule, step=step, model=torch.nn.Bilinear(1, 1, 1))


def test_a_loop_that_is_left_in_the_middle_of_it(tmp_path: Path) -> None:
    loop = Loop()
    with (
        pytest.raises(package.NonFiniteError) as caught,
        package.NaNDetector(loop.net, loop.optimizer, capsule_dir=tmp_path) as detector,
    ):
        for i, batch in enumerate(detector.batches(loop.data)):
            if i > 7:
                break
            loop.step(batch)
    report = package.replay(caught.value.report.capsule, step=loop.step, model=loop.net, optimizer=loop.optimizer)
    assert report.step == 7
    assert report.origin is not None
    assert report.origin.op == "sqrt"


def test_an_update_that_is_bad_by_itself_is_taken_back_for_it(tmp_path: Path) -> None:
    loop = Loop()
    for group in loop.optimizer.param_groups:
        group["eps"] = 0.0
    loop.net[0].weight.register_hook(lambda grad: grad * 0)  # type: ignore[union-attr]
    before = [p.detach().clone() for p in loop.net.parameters()]
    with (
        pytest.raises(package.NonFiniteError),
        package.NaNDetector(loop.net, loop.optimizer, capsule_dir=tmp_path) as detector,
    ):
        for batch in detector.batches(loop.data):
            loop.step(batch)
    assert detector.report is not None
    content = load(detector.report.capsule)
    assert content.steps.current == 0
    assert all(p.state is None for p in content.optimizers[0].parameters)
    package.replay(detector.report.capsule, step=lambda _: None, model=loop.net, optimizer=loop.optimizer)
    assert all(map(torch.equal, [p.detach() for p in loop.net.parameters()], before))


def test_json_of_a_capsules_report_is_a_report(firstnan: Zygote, tmp_path: Path) -> None:
    script(tmp_path, LOADER)
    _, capsule = captured(firstnan, tmp_path)
    header, _ = taken_apart(capsule.read_bytes())
    manifest = json.loads(header["__metadata__"]["firstnan"])
    (tmp_path / "report.json").write_text(json.dumps(manifest["report"]))
    assert package.load(tmp_path / "report.json").capsule == str(capsule)
