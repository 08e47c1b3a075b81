"""Gradient scalers: a search is no failure but an event, and updates that are skipped for another reason are one."""

from __future__ import annotations

import pytest
import torch

from firstnan import NaNDetector, NonFiniteError


def train(scale: float, steps: int, bad_from: int | None, **options: float) -> NaNDetector:
    """With `bad_from`, the derivative of a root at 0 is infinite from that step on, at any scale."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
    with NaNDetector(model, optimizer) as detector:
        for step in range(steps):
            x = torch.ones(4, 3)
            optimizer.zero_grad()
            loss = (model(x) * 100).square().mean()
            if bad_from is not None and step >= bad_from:
                loss = loss + (model(x) * 0).abs().sqrt().mean()  # born
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return detector


def test_a_search_for_a_scale_is_told_as_events() -> None:
    detector = train(2.0**127, steps=20, bad_from=None)
    events = [event for event in detector.events if event.kind == "scale"]
    assert detector.report is None
    assert [event.step for event in events[:3]] == [0, 1, 2]
    assert "overflowed at scale 1.70141e+38" in events[0].message
    assert len(events) < 20


@pytest.mark.parametrize("backoff", [0.5, 0.9])
def test_many_overflows_that_no_scale_explains_are_a_finding(backoff: float) -> None:
    with pytest.raises(NonFiniteError) as error:
        train(2.0**10, steps=60, bad_from=3, backoff_factor=backoff)
    report = error.value.report
    assert report.step == 3
    assert report.origin is not None
    assert report.origin.site is not None
    assert "# born" in report.origin.site.source[0]
    assert report.cause is not None
    assert report.cause.slug == "sqrt_grad_at_zero"
    assert any("has skipped every update since step 3" in note for note in report.notes)
