"""Reports built by hand, one of each kind, for the tests of the report."""

from __future__ import annotations

from math import inf, nan

from firstnan.records import (
    Batch,
    Cause,
    History,
    LayerTrack,
    NaNEvent,
    Noticed,
    OpEvent,
    Origin,
    PathStep,
    Remedy,
    Report,
    Site,
    StepRecord,
    TensorStat,
)

F = "nowhere/train.py"  # does not exist: the excerpts must come out of the reports alone


def forward() -> Report:
    site = Site(
        F, 10, 15, 10, 34, "forward", "torch.log(x + 1e-3)", ("        return torch.log(x + 1e-3) * self.scale",), 10
    )
    x = TensorStat("self", (16, 8), "float32", -0.499, 1.0, 0.001, 0, 1)
    y = TensorStat("result", (16, 8), "float32", -6.9078, 0.0009995, nan=1, first_index=(6, 3))
    event = OpEvent(7, "log", "aten.log.default", "forward", 11, witness=(("self", -0.499), ("result", nan)))
    ops = [("mul", 12), ("add", 12), ("layer_norm", 14), *[("linear", 20 + i) for i in range(12)], ("mean", 31)]
    return Report(
        "nonfinite",
        step=11,
        batch=Batch(11, 16, (6,)),
        origin=Origin("forward", "log", "aten.log.default", event, None, site, "encoder.norm", "LayerNorm", (x,), y),
        cause=Cause(
            "log_of_negative",
            "logarithm of a negative number",
            "torch.log read -0.499 at [6, 3], and the logarithm is only defined above 0. "
            "The 1e-3 that is added does not help against a value that is more negative than that.",
            ("1 of 128 inputs is negative, none is 0", "the least input is -0.499"),
            0.95,
            "docs/causes/log_of_negative.md",
        ),
        other_causes=(Cause("nan_input", "bad data", "", (), 0.2),),
        remedies=(
            Remedy(
                "clamp before the logarithm",
                "--- train.py\n+++ train.py\n@@ -10 +10 @@\n-        return torch.log(x + 1e-3) * self.scale\n"
                "+        return torch.log(x.clamp_min(1e-3)) * self.scale",
                True,
                True,
                20,
            ),
            Remedy("look at sample 6 of the batch"),
        ),
        path=tuple(PathStep(op, line, F) for op, line in ops),
        noticed=Noticed("loss"),
        reproduced="deterministic",
        replay="the failing batch was handed out again",
        environment={"torch": "2.13.0"},
    )


def backward() -> Report:
    source = (
        "    loss = torch.sqrt(",
        "        ((prediction - target) ** 2)",
        "        .sum(dim=1)",
        "    ).mean()",
    )
    site = Site(F, 40, 11, 43, 5, "step", "torch.sqrt(((prediction - target) ** 2).sum(dim=1))", source, 40)
    grad = TensorStat("grad", (4,), "torch.float32", 0.25, 0.25, 0.25)
    result = TensorStat("other", (4,), "torch.float32", 0.0, 2.0, 0.0, 1)
    made = TensorStat("result", (4,), "torch.float32", 0.0625, 0.5, posinf=1, first_index=(2,))
    event = OpEvent(
        90,
        "div",
        "aten.div.Tensor",
        "backward",
        3,
        library_site=Site("/usr/lib/engine.py", 54, function="inner"),
        node="SqrtBackward0",
        witness=(("grad", 0.25), ("other", 0.0), ("result", inf)),
    )
    ahead = OpEvent(5, "sqrt", "aten.sqrt.default", "forward", 3, library_site=Site("/usr/lib/roots.py", 7))
    path = (
        PathStep("sum", 42, F, phase="backward"),
        PathStep("pow", 41, F, phase="backward"),
        PathStep("linear", 38, F, phase="backward"),
    )
    return Report(
        "nonfinite",
        step=3,
        batch=Batch(3, 4, (2,)),
        origin=Origin("backward", "sqrt", "aten.sqrt.default", event, ahead, site, "", "", (grad, result), made),
        cause=Cause(
            "sqrt_grad_at_zero", "derivative of sqrt at 0", "The derivative of sqrt is 1 / (2 sqrt(x)).", (), 0.9
        ),
        path=path,
        noticed=Noticed("gradient", "net.0.weight"),
        reproduced="deterministic",
    )


def optimizer() -> Report:
    site = Site(F, 52, 4, 52, 20, "<module>", "optimizer.step()", ("    optimizer.step()",), 52)
    library = Site("/opt/venv/lib/python3.11/site-packages/torch/optim/adam.py", 447, function="_single_tensor_adam")
    event = OpEvent(
        3,
        "addcdiv",
        "aten.addcdiv_.default",
        "optimizer",
        0,
        scalars=(("value", -0.001), ("dims", (0, 1)), ("top", inf), ("unused", None)),
        library_site=library,
        witness=(("self", 0.1), ("tensor1", 0.0), ("tensor2", 0.0), ("result", nan)),
    )
    inputs = (
        TensorStat("self", (8, 4), "float32", -0.4, 0.4, 0.01, 0, 14),
        TensorStat("tensor1", (8, 4), "float32", 0.0, 0.0, 0.0, 32),
        TensorStat("tensor2", (8, 4), "float32", 0.0, 0.0, 0.0, 32),
    )
    made = TensorStat("result", (8, 4), "float32", nan=32, first_index=(0, 0))
    return Report(
        "nonfinite",
        step=0,
        origin=Origin(
            "optimizer",
            "addcdiv",
            "aten.addcdiv_.default",
            event,
            None,
            site,
            "",
            "",
            inputs,
            made,
            "parameter",
            "fc.weight",
        ),
        cause=Cause("optimizer_eps", "Adam divides by 0", "eps is 0 and the second moment is 0.", ("eps = 0",), 0.9),
        remedies=(Remedy("give Adam an eps", "-eps=0\n+eps=1e-8", True, False),),
        noticed=Noticed("parameter", "fc.weight"),
        reproduced="transient",
        replay="the program was started again",
        rank=1,
        world_size=4,
        notes=("the optimizer ran on fused kernels; the trace shows the plain ones",),
    )


def input_() -> Report:
    site = Site(F, 30, 6, 30, 18, "main", "x.to(device)", ("\tfor x, y in loader:", "\t\tx = x.to(device)"), 29)
    bad = TensorStat(
        "x", (32, 1, 28, 28), "float16", -1.0, 1.0, 0.0, 3, 9, nan=784, neginf=2, first_index=(17, 0, 0, 0)
    )
    return Report(
        "nonfinite",
        step=4,
        batch=Batch(4, 32, (1, 2, 3, 5, 8, 13, 17, 21, 30)),
        origin=Origin("input", "", "", None, None, site, "", "", (), bad, "input", "batch[0]"),
        cause=Cause(
            "nan_input", "bad data [bold]not markup[/bold]", "The batch holds NaN before the model sees it.", (), 1.0
        ),
        noticed=Noticed("loss"),
        reproduced="deterministic",
    )


def parameter() -> Report:
    stat = TensorStat("weight", (10, 64), "bfloat16", -0.5, 0.5, 0.001, 0, 300, nan=1, first_index=(9, 63))
    return Report(
        "nonfinite",
        step=0,
        origin=Origin("parameter", "", "", produced=stat, role="parameter", label="head.weight"),
        cause=Cause(
            "nan_parameter", "NaN in the loaded weights", "The weights were bad before the first step.", (), 0.3
        ),
        noticed=Noticed("loss"),
        notes=("one", "two", "three", "four", "five", "six"),
    )


def divergence() -> Report:
    losses = [2.3, 2.9, 8.0, 41.0, 900.0, 2.5e5, 7.7e9, 1.2e19, inf]
    steps = tuple(StepRecord(i, v, v * 3, 5.0, 10.0 + v) for i, v in enumerate(losses))
    site = Site(F, 18, 11, 18, 29, "forward", "self.fc(F.relu(h))", ("    return self.fc(F.relu(h))",), 18)
    inputs = (
        TensorStat("input", (64, 128), "float32", 0.0, 8.1e37, 0.0, 4000),
        TensorStat("weight", (10, 128), "float32", -3e20, 2e20, 1e13, 0, 600),
    )
    made = TensorStat("result", (64, 10), "float32", -1e38, 3e38, posinf=12, neginf=3, first_index=(0, 4))
    return Report(
        "nonfinite",
        step=8,
        origin=Origin("forward", "linear", "aten.addmm.default", None, None, site, "fc", "Linear", inputs, made),
        cause=Cause("divergence_lr", "training diverged", "The loss grew 5e+18-fold in 8 steps.", ("lr is 5",), 0.8),
        history=History(steps, "SGD", (("lr", 5.0), ("momentum", 0.9), ("betas", (0.9, 0.999)), ("foreach", None))),
        path=(PathStep("cross_entropy", 44, F),),
        noticed=Noticed("loss"),
        reproduced="deterministic",
    )


def watched() -> Report:
    """What a run with layer hooks and statistics knows besides."""
    report = forward()
    bad = TensorStat("['hidden']", (16, 32), "float32", -3.5, 2.0, nan=3, first_index=(0, 2))
    layer = NaNEvent(
        "nonfinite", "NaN in the output of encoder.1 (Linear)", step=11, batch=11, epoch=0, phase="forward",
        what="output", layer="encoder.1", paths=("encoder.1", "decoder.tied"), layer_type="Linear", call=2, tensor=bad,
        thread="MainThread", time=1700000000.125,
    )  # fmt: skip
    boundless = TensorStat("", (2,), "float16", -inf, nan, posinf=0, neginf=2, first_index=(0,))
    return report.with_(
        events=(
            NaNEvent("spike", "gradient norm 81.2 is 40 times the usual", step=9, what="gradient", grad_norm=81.25),
            NaNEvent("nonfinite", "an earlier one", step=10, phase="forward", what="input", layer="embed"),
            NaNEvent("nonfinite", "the loss", step=11, phase="forward", what="loss", layer="criterion"),
            layer,
            NaNEvent("nonfinite", "and so on", step=11, phase="backward", what="output", layer="head",
                     tensor=boundless, grad_norm=nan, rank=3),
        ),
        history=History(
            layers=(
                LayerTrack("encoder.layers.11.self_attention.out_proj", "backward", (7, 8, 9, 10),
                           (1.0, 4.0, 90.0, 8e9), (0.25, 1.5, 31.0, 2.5e9)),
                LayerTrack("encoder.1", "forward", (8, 9, 10, 11), (1.0, 1.1, 90.0, nan), (0.25, 0.25, 31.0, inf)),
            ),
        ),
    )  # fmt: skip


def tried() -> Report:
    """What trying several changes showed."""
    two_places = (
        f"--- a/{F}\n+++ b/{F}\n@@ -1,4 +1,5 @@\n import math\n+import torch\n \n \n def loss(p, y):\n"
        "@@ -7,7 +8,7 @@\n\n     # probabilities\n     p = p / p.sum(dim=1, keepdim=True)\n"
        "-    return -(y * torch.log(p)).sum(dim=1).mean()\n"
        "+    return -(y * torch.log(p.clamp_min(torch.finfo(p.dtype).tiny)).nan_to_num()).sum(dim=1).mean()\n"
        " \n \n loader = DataLoader(rows)\n"
    )
    one = f"--- a/{F}\n+++ b/{F}\n@@ -10 +10 @@\n-    x = 1\n+    x = 2\n"
    return forward().with_(
        remedies=(
            Remedy("keep p above 0", two_places, True, True, 20, "A 0 becomes the least number.", loss_change=2.1e-8),
            Remedy("log1p instead of log", one, True, True, 1, loss_change=0.1432),
            Remedy("cut the batch", one, True, kind="data", note="the program stopped in step 0: IndexError: 3"),
            Remedy(
                "learning rate 0.01", one, True, True, None, kind="setting", note="the loss is non-finite in step 14"
            ),
            Remedy("take the absolute value", one, True, False, note="a gradient"),
        )
    )


def untried() -> Report:
    """As a detector reports it, which does not run the program again."""
    one = f"--- a/{F}\n+++ b/{F}\n@@ -10 +10 @@\n-    x = 1\n+    x = 2\n"
    return forward().with_(remedies=(Remedy("add an eps", one, why="No 0 is left."), Remedy("look at the data")))


def clean() -> Report:
    return Report("clean", step=199)


def minimal() -> Report:
    return Report("nonfinite")


def no_cause() -> Report:
    """An origin with hardly anything known about it, in a column-less place."""
    site = Site(F, 5, code="1 / x")
    return Report("nonfinite", step=1, origin=Origin("forward", "reciprocal", "aten.reciprocal.default", site=site))


SAMPLES = {
    "forward": forward,
    "backward": backward,
    "optimizer": optimizer,
    "input": input_,
    "parameter": parameter,
    "divergence": divergence,
    "watched": watched,
    "tried": tried,
    "untried": untried,
    "clean": clean,
    "minimal": minimal,
    "no_cause": no_cause,
}
