"""The roofline: which roof an op is at, what narrower numbers change, and what devices must say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.profile.roofline import (
    WINOGRAD_TRAFFIC,
    Efficiency,
    Roof,
    halves,
    roofline,
    usual_efficiency,
)

DEVICE = Device(
    "toy",
    10**9,
    flops=(("float32", 1000.0), ("float16", 4000.0)),
    memory_bytes_per_s=100.0,
    launch_s=0.5,
)
WHOLE = Efficiency(
    matrix=1, convolution=1, winograd=4, attention=1, recurrent=1, memory=1, fill_s=0.0
)


def counts_of(*forward, batch=8):
    """One layer with this work forward and nothing backward."""
    layer = LayerCounts("fc", "Linear", tuple(forward), (), (), (), 10, 40, 4, 16.0, 8.0)
    return ModelCounts((layer,), "0123456789ab", 12.0, 8.0, batch)


def forward_s(work, efficiency=WHOLE, samples=1, **settings):
    """Seconds of the only layer."""
    return (
        roofline(counts_of(work), DEVICE, sizes=(samples,), efficiency=efficiency, **settings)
        .layers[0]
        .forward.median_s[0]
    )


def test_an_op_takes_the_longer_of_its_operations_and_its_bytes_plus_its_launches():
    """The formula at the top of the file."""
    heavy, wide = (
        Work("mm", "matrix", 3, 500.0, 2000.0, 0.0, 10.0),
        Work("mm", "matrix", 1, 0.0, 100.0, 0.0, 300.0),
    )
    assert forward_s(heavy) == 3 * 0.5 + 2.5
    assert forward_s(wide) == 0.5 + 3
    assert forward_s(wide, replace(WHOLE, memory=0.5, launch=2.0, call_s=7.0)) == 7 + 1 + 6
    assert forward_s(heavy, replace(WHOLE, matrix=0.5, fill_s=0.25)) == 3 * (0.5 + 0.25) + 5
    assert forward_s(replace(wide, family="other"), replace(WHOLE, fill_s=0.25)) == 0.5 + 3


def test_a_layer_that_launches_nothing_takes_no_time():
    """A view is free."""
    estimated = roofline(counts_of(), DEVICE, efficiency=replace(WHOLE, call_s=1.0))
    assert estimated.layers[0].forward.median_s == (0.0,) * 4


def test_a_3x3_convolution_uses_winograd_if_faster_and_only_in_float32():
    """Fewer products, more traffic; tensor cores need neither."""
    deep = Work("convolution", "convolution_3x3", 1, 0.0, 4000.0, 0.0, 10.0)
    assert forward_s(deep) == pytest.approx(0.5 + 1 + WINOGRAD_TRAFFIC * 0.1)
    assert forward_s(replace(deep, family="convolution")) == 0.5 + 4
    assert forward_s(replace(deep, bytes_per_sample=390.0)) == 0.5 + 4
    assert forward_s(deep, dtype="float16") == 0.5 + 1
    assert Roof.of(replace(DEVICE, kind="cpu"), "float32", 4).winograd is False


def test_a_narrower_dtype_needs_fewer_bytes_except_for_tokens_and_parameters():
    """In mixed precision, parameters keep their dtype."""
    wide, narrow = (roofline(counts_of(), DEVICE, dtype=dtype) for dtype in ("float32", "float16"))
    assert (
        wide.layers[0].activation_bytes_per_sample,
        narrow.layers[0].activation_bytes_per_sample,
    ) == (16, 8)
    assert narrow.layers[0].output_bytes_per_sample == 4
    assert (narrow.layers[0].parameter_bytes, narrow.layers[0].buffer_bytes) == (40, 4)
    assert (wide.input_bytes_per_sample, narrow.input_bytes_per_sample) == (12, 4 + 4)
    work = Work("mm", "matrix", 1, 0.0, 100.0, 0.0, 300.0)
    assert forward_s(work, dtype="float16") == 0.5 + 1.5


def test_the_profile_names_its_device_and_has_the_time_of_an_update():
    """SGD with momentum reads three numbers and writes two."""
    estimated = roofline(counts_of(), DEVICE, batch=24, efficiency=replace(WHOLE, memory=0.5))
    assert (estimated.device, estimated.batch, estimated.fingerprint) == ("toy", 24, "0123456789ab")
    assert estimated.sizes == (1, 3, 6, 12, 24)
    assert estimated.update_s_per_byte == pytest.approx(5 / 50)
    assert "toy, by a roofline at float32" in estimated.machine["device"]


@given(st.integers(1, 5000))
@settings(deadline=None, max_examples=60)
def test_sizes_are_the_batch_in_parts_by_powers_of_two(batch):
    """From one sample to the whole batch, each once."""
    sizes = halves(batch)
    assert (sizes[0], sizes[-1]) == (1, batch)
    assert all(a < b for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"device": Device("bare", 1)},
            r"bare has no peak for float32 \(it has one for no dtype\)",
        ),
        ({"device": replace(DEVICE, memory_bytes_per_s=None)}, "toy has no memory bandwidth"),
        ({"dtype": "bfloat16"}, r"no peak for bfloat16 \(it has one for float32, float16\)"),
        ({"dtype": "float3"}, "dtype 'float3' is unknown"),
        ({"sizes": (0, 2)}, "must be 1 or more"),
        ({"batch": 0}, "must be 1 or more"),
    ],
)
def test_missing_figures_of_a_device_or_a_call_are_refused_by_name(settings, words):
    """A missing figure that reads as zero would make every layer free."""
    device = settings.pop("device", DEVICE)
    with pytest.raises(SettingError, match=words):
        roofline(counts_of(), device, **settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [("matrix", 0.0), ("memory", -1.0), ("winograd", float("inf")), ("fill_s", -1e-9)],
)
def test_an_efficiency_that_cannot_be_is_refused(field, value):
    """Shares are above 0; times are not below it."""
    with pytest.raises(SettingError, match=f"efficiency: {field} is"):
        Efficiency(**{field: value})


def test_tensor_cores_are_assumed_to_reach_less_of_their_peak():
    """Their peaks are eight times higher, what feeds them is not."""
    assert usual_efficiency("float32") == Efficiency()
    assert usual_efficiency("bfloat16").matrix < Efficiency().matrix
