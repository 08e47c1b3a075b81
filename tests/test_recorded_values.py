"""What a report keeps of the values: histograms of what the origin read, values and previews of bad samples."""

from __future__ import annotations

import base64
import itertools
from math import inf, nan

import pytest
import torch
from torch import Tensor

import firstnan
from firstnan import NonFiniteError
from firstnan.engine.samples.cut import Cut
from firstnan.records import Report
from firstnan.tensors.finite import BINS, histogram

WIDE = torch.randn(4096, generator=torch.Generator().manual_seed(0)).exp() ** 12


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(1000, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0.0, 0.0, 1.0, nan, inf, -inf]),
        torch.cat([WIDE, -WIDE, torch.zeros(7)]),
        torch.tensor([-1.7e308, 1e-300, 1.7e308], dtype=torch.float64),
        torch.tensor([0.0, 1e-45]),
        torch.randn(64, 64).to(torch.bfloat16)[::2, ::3].t(),
        torch.randn(8, dtype=torch.complex64),
    ],
)
def test_every_finite_value_is_in_its_bin(t: Tensor) -> None:
    found = histogram(t)
    assert found is not None
    values = torch.view_as_real(t) if t.is_complex() else t
    values = values[torch.isfinite(values)].to(torch.float64).flatten()
    assert len(found.counts) == BINS
    assert sum(found.counts) == len(values)
    assert (found.edges[0], found.edges[-1]) == (values.min(), values.max())
    for i, (low, high) in enumerate(itertools.pairwise(found.edges)):
        assert low <= high
        inside = (values >= low) & ((values < high) if i < BINS - 1 else (values <= high))
        assert found.counts[i] == int(inside.sum())


def test_bins_grow_where_values_span_magnitudes_and_only_there() -> None:
    wide, usual = histogram(WIDE), histogram(torch.randn(4096))
    assert wide is not None
    assert usual is not None
    assert wide.log
    assert max(wide.counts) < 0.5 * sum(wide.counts)
    assert not usual.log


@pytest.mark.parametrize("t", [torch.tensor([]), torch.full((9,), 2.0), torch.tensor([nan, inf]), torch.arange(9)])
def test_there_is_no_histogram_of_nothing(t: Tensor) -> None:
    assert histogram(t) is None


def test_the_origin_has_histograms_of_what_it_read_and_nothing_else_has() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        loss = (x * 2).log().sum()
        loss.backward()
    report = Report.from_dict(caught.value.report.to_dict())
    assert report.origin is not None
    (read,) = report.origin.inputs
    assert read.histogram is not None
    assert sum(read.histogram.counts) == 64
    assert report.origin.produced is not None
    assert report.origin.produced.histogram is None


def test_the_values_of_bad_samples_are_few_and_images_are_small() -> None:
    images = torch.linspace(0, 1, 200 * 100).reshape(1, 100, 200).expand(8, 3, 100, 200).clone()
    images[2], images[3, 0, 0, 0] = 0.5, nan
    labels = torch.arange(8)
    values = Cut((images, labels, torch.randn(8, 5)), 8).values(range(8))
    assert [one.sample for one in values] == sorted([0, 1, 2, 3] * 3)
    grey = values[6]
    assert (grey.sample, grey.member, grey.shape, len(grey.values)) == (2, "batch[0]", (3, 100, 200), 16)
    assert grey.preview is not None
    assert (grey.preview.width, grey.preview.height, grey.preview.channels) == (64, 64, 3)
    assert set(base64.b64decode(grey.preview.pixels)) == {128}  # in the shades of the batch
    assert values[7].values == (2.0,)
    assert values[7].preview is None
    assert values[9].preview is not None
    assert base64.b64decode(values[9].preview.pixels)[:3] == b"\xdc\x26\x26"  # what is not finite is red


def test_a_grey_image_has_its_bad_pixels_in_red() -> None:
    images = torch.linspace(0, 1, 2 * 64).reshape(2, 1, 8, 8).clone()
    images[0, 0, 3, 4] = inf
    bad, healthy = Cut(images, 2).values(range(2))
    assert bad.preview is not None
    assert healthy.preview is not None
    assert (bad.preview.channels, healthy.preview.channels) == (3, 1)
    pixels = base64.b64decode(bad.preview.pixels)
    at = 3 * (3 * 8 + 4)
    assert pixels[at : at + 3] == b"\xdc\x26\x26"
    assert pixels.count(b"\xdc\x26\x26") == 1


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 4), (2, 9, 9), (3, 2, 2), (6, 7)])
def test_what_is_no_image_has_no_preview(shape: tuple[int, ...]) -> None:
    (one,) = Cut(torch.randn(4, *shape), 4).values([1])
    assert one.preview is None
