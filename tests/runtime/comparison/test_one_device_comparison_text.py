"""Relative differences of a comparison and how they print."""

from __future__ import annotations

import pytest

from penstock.runtime.comparison.one_device_comparison import Comparison


def test_a_comparison_prints_the_worst_of_each_kind_first():
    """The text says whether, where and by how much the results differ."""
    gradients = {f"layer{n}.weight": n * 1e-9 for n in range(12)}
    scale = dict.fromkeys(gradients, 1.0) | {
        "loss": 2.0,
        "buffer norm.running_mean": 0.5,
        "output output": 4.0,
    }
    comparison = Comparison(gradients, {"norm.running_mean": 0.25}, 1e-7, scale, {"output": 0.0})
    assert comparison.relative == 0.5
    assert str(comparison).splitlines() == [
        (
            "pipeline against one device: 12 gradients, 1 buffer, 1 output and the loss; "
            "largest relative difference 0.5"
        ),
        "  loss      loss               differs by 1.00e-07 (relative 5.0e-08)",
        "  output    output             differs by 0.00e+00 (relative 0.0e+00)",
        *[
            f"  gradient  layer{n}.weight{' ' * (6 - (n > 9))}differs by "
            f"{n * 1e-9:.2e} (relative {n * 1e-9:.1e})"
            for n in range(11, 3, -1)
        ],
        "  buffer    norm.running_mean  differs by 2.50e-01 (relative 5.0e-01)",
        "  and 4 more, which differ no more than the last line of their kind",
    ]
    frozen = str(Comparison(scale={"output output": 4.0}, outputs={"output": 1.0}))
    assert "one device: 0 gradients, 0 buffers, 1 output and the loss;" in frozen
    assert str(Comparison()) == "nothing was compared here: rank 0 has the comparison"


def test_negligible_values_are_compared_relative_to_others_of_their_kind():
    """Gradients of biases before a softmax are rounding errors, which any other order of sums
    changes by 100 %.
    """
    comparison = Comparison(
        {"a": 1e-9, "b": 0.0}, {}, 0.0, {"a": 1e-9, "b": 1.0, "loss": 1.0}, {"output": 0.0}
    )
    assert comparison.relative == pytest.approx(1e-6)


def test_every_kind_of_value_has_a_scale_and_a_smallest_scale():
    """Rows are in the order of their relative differences, not of the absolute ones."""
    comparison = Comparison(
        gradients={"w": 1e-3, "tiny": 1e-6},
        buffers={"mean": 4.0},
        loss=50.0,
        scale={
            "w": 0.01,
            "tiny": 1e-9,
            "buffer mean": 100.0,
            "output .0": 2.0,
            "output .1": 1e-9,
            "loss": 1e6,
        },
        outputs={".0": 1.0, ".1": 1e-3},
    )
    rows = [(kind, name, error) for kind, name, error, _ in comparison.rows()]
    assert rows == [
        ("output", ".0", 1.0),
        ("output", ".1", 1e-3),
        ("gradient", "w", 1e-3),
        ("gradient", "tiny", 1e-6),
        ("buffer", "mean", 4.0),
        ("loss", "loss", 50.0),
    ]
    relative = [row[3] for row in comparison.rows()]
    # The smallest scale is a thousandth of the largest of the same kind.
    assert relative == pytest.approx([0.5, 1e-3 / 2e-3, 0.1, 1e-6 / 1e-5, 0.04, 5e-5])
    assert comparison.relative == 0.5
    assert comparison.worst == ("loss", 50.0)


def test_names_are_aligned_by_the_longest_that_is_printed():
    """A longer one among the values that are left out would only widen the gap."""
    gradients = {f"w{number}": 1.0 for number in range(8)} | {"a_long_name_of_a_layer": 1e-9}
    comparison = Comparison(gradients, scale=dict.fromkeys(gradients, 1.0) | {"loss": 1.0})
    lines = str(comparison).splitlines()
    assert lines[1].startswith("  loss      loss  differs by ")
    assert lines[2].startswith("  gradient  w0    differs by ")
    assert lines[-1].startswith("  and 1 more, ")


@pytest.mark.parametrize("settings", [(), ("TF32 off", "deterministic algorithms on")])
def test_an_accelerator_is_printed_with_its_settings(settings):
    """They decide whether equal work gives equal bits; on a CPU nothing does."""
    values = {"outputs": {"": 0.0}, "scale": {"output ": 1.0, "loss": 1.0}}
    line = str(Comparison(**values, device="cuda:1", settings=settings)).splitlines()[-1]
    assert line == "  the one device is " + "; ".join(("cuda:1", *settings))
    assert "the one device" not in str(Comparison(**values, settings=settings))
