"""Forecasts as sentences."""

from __future__ import annotations

from firstnan.records import Forecast

_TYPES = ("float16", "bfloat16", "float32", "float64")


def subject(forecast: Forecast) -> str:
    """`the gradient norm of opt_d`, `decoder.ffn.2`."""
    if forecast.what == "layer":
        return forecast.name or "a layer"
    if forecast.kind in _TYPES and forecast.what == "operator":
        return f"the result of {forecast.name}"
    return _SUBJECTS[forecast.what] + (f" of {forecast.name}" if forecast.name else "")


_SUBJECTS = {
    "loss": "the loss",
    "gradient": "the gradient norm",
    "scale": "the scale of the gradient scaler",
    "weights": "the norm of the weights",
    "operator": "the argument",
    "variance": "the variance of the input",
    "attention": "the entropy of the attention",
}


def sentence(forecast: Forecast) -> str:
    """`decoder.ffn.2 reaches the limit of float16 in about 40 steps (25 to 70): it is 1.2e+03 and keeps growing`."""
    f = forecast
    if f.what == "scale":
        return f"{subject(f)} has sunk to {f.now:g} and falls below {f.limit:g} in about {_steps(f)}"
    if f.kind == "rate":
        told = f"has risen from {f.limit:.3g} to {f.now:.3g} with the learning rate, which is being raised"
        return f"{subject(f)} {told}: training is likely to diverge"
    if f.kind == "updates":
        of = f" of {f.name}" if f.name else ""
        told = f"are {f.now:.2g} times as large as the weights themselves"
        return f"the last updates{of} together {told}: training is likely to diverge"
    if f.what == "weights":
        told = ", and the loss has not improved"
        if f.kind == "jump":
            told = "; it became that large within a few updates"
        return f"{subject(f)} is {f.now:.3g} times its initial value{told}: training is likely to diverge"
    if f.what == "attention":
        told = f"its entropy is {1 / f.now:.2g} of the largest possible, and keeps falling"
        return f"the attention at {f.name} gives all weight to one position in about {_steps(f)}: {told}"
    if f.what == "variance":
        return (
            f"{subject(f)} falls below {1 / f.limit:.3g} in about {_steps(f)}: it is {1 / f.now:.3g} and keeps falling"
        )
    if f.what == "operator" and f.kind == "min":
        return f"{subject(f)} reaches its limit in about {_steps(f)}: it is {1 / f.now:.3g} away and getting closer"
    if f.what == "operator" and f.kind == "max":
        return (
            f"{subject(f)} reaches its limit of {f.limit:.4g} in about {_steps(f)}: it is {f.now:.3g} and keeps growing"
        )
    return f"{subject(f)} reaches the limit of {f.kind} in about {_steps(f)}: it is {f.now:.3g} and keeps growing"


def _steps(f: Forecast) -> str:
    steps = f"{f.in_steps} step{'s' * (f.in_steps != 1)}"
    return steps if f.low == f.high else f"{steps} ({f.low} to {f.high})"
