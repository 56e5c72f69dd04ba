"""Quantities of cluster files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.fields import (
    parse_bandwidth,
    parse_clock,
    parse_count,
    parse_flag,
    parse_flops,
    parse_latency,
    parse_memory,
    parse_number,
    parse_peaks,
    parse_text,
)
from penstock.errors import SettingError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10 Gb/s", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("10 GB/s", 10e9),
        ("1 GiB/s", 2**30),
        ("8 b/s", 1.0),
        ("2.5e1 Gb/s", 3.125e9),
        ("100 Mb/s", 12.5e6),
        ("1 Kib/s", 128.0),
        ("1 kB/s", 1000.0),
    ],
)
def test_bandwidth_tells_bits_from_bytes(text, bytes_per_s):
    """A wrong letter is a factor of 8: enough to turn every plan around."""
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text",
    ["10", "10 G", "10 gB/s", "10 Gb", "ten Gb/s", "-1 Gb/s", 10, None, True, 1.25e9, "10 Gbps"],
)
def test_bandwidth_without_a_sure_unit_is_refused(text):
    """A guess at what was meant would be wrong half of the time."""
    with pytest.raises(
        SettingError, match=r"is not a bandwidth; write for example '10 Gb/s' \(bits\)"
    ):
        parse_bandwidth(text)


@given(st.floats(0.001, 1e6))
def test_a_bandwidth_in_bits_is_an_eighth_of_the_one_in_bytes(number):
    """The one relation that must hold whatever the number."""
    text = f"{number:.6f}"
    assert parse_bandwidth(f"{text} Mb/s") * 8 == pytest.approx(parse_bandwidth(f"{text} MB/s"))


def test_memory_is_read_in_bytes_only():
    """16 Gb of memory would be 2 GB, which is never meant."""
    assert (parse_memory("16 GB"), parse_memory("1 GiB"), parse_memory(512)) == (
        16 * 10**9,
        2**30,
        512,
    )
    with pytest.raises(SettingError, match="'16 Gb' counts bits"):
        parse_memory("16 Gb")
    with pytest.raises(SettingError, match="True is not an amount of memory"):
        parse_memory(True)


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_latency, [1], r"\[1\] is not a time"),
        (parse_count, 0, "0 is not a whole number from 1 to 65536"),
        (parse_count, 10**9, "1000000000 is not a whole number"),
        (parse_count, "4", "'4' is not a whole number"),
        (parse_count, True, "True is not a whole number"),
        (parse_flops, 15.7e12, "is not a rate of computing; write for example '15.7 TFLOP/s'"),
        (parse_flops, "15.7 TB/s", "'15.7 TB/s' is not a rate of computing"),
        (parse_flops, "-1 TFLOP/s", "'-1 TFLOP/s' is not a rate of computing"),
        (parse_clock, "200", "'200' is not a clock; write for example '200 MHz'"),
        (parse_peaks, "15 TFLOP/s", "is no mapping of dtypes to rates"),
        (parse_peaks, {}, "is no mapping of dtypes to rates"),
        (parse_peaks, {"float23": "1 TFLOP/s"}, "no dtype called 'float23'"),
        (parse_peaks, {"fp32": "1 GB/s"}, "fp32: '1 GB/s' is not a rate of computing"),
        (parse_peaks, {3: "1 TFLOP/s"}, "no dtype called '3'"),
        (parse_number, -0.5, "-0.5 is not a number of 0 or more"),
        (parse_number, True, "True is not a number"),
        (parse_number, float("nan"), "nan is not a number"),
        (parse_memory, "1e308 GB", "'1e308 GB' is not a quantity"),
        (parse_memory, "1e300", "'1e300' is too large: at most 1.153e.18 B"),
        (parse_latency, "1e300 s", "'1e300 s' is too large: at most 1e.09 s"),
        (parse_bandwidth, "1e300 GB/s", "'1e300 GB/s' is no rate of any device"),
        (parse_flops, "1e-300 TFLOP/s", "'1e-300 TFLOP/s' is no rate of any device"),
        (parse_number, 1e300, "1e.300 is more than 1e.06"),
        (parse_flag, "yes", "'yes' is neither true nor false"),
        (parse_text, 3, "3 is not a text"),
        (parse_text, " ", "' ' is not a text"),
    ],
)
def test_a_value_of_another_type_is_refused(parse, value, message):
    """YAML turns `yes`, `1e3` and `1:30` into other values than written; they must be refused."""
    with pytest.raises(SettingError, match=message):
        parse(value)


def test_rates_are_read_as_datasheets_write_them():
    """TFLOPS, TFLOP/s and short names of dtypes all stand in datasheets."""
    assert (parse_flops("15.7 TFLOPS"), parse_flops("989 TFLOP/s"), parse_clock("200 MHz")) == (
        15.7e12,
        989e12,
        200e6,
    )
    assert parse_peaks({"fp32": "1 TFLOP/s", "bf16": "2 PFLOP/s"}) == (
        ("float32", 1e12),
        ("bfloat16", 2e15),
    )
    assert (parse_number(2), parse_flag(False), parse_bandwidth("unlimited")) == (
        2.0,
        False,
        float("inf"),
    )
