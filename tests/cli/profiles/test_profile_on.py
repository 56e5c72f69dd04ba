"""`penstock profile --on`: a device that is not here."""

from __future__ import annotations

import json

import pytest

from penstock.profile.profile import Profile


def test_a_preset_s_device_gives_a_profile_that_plan_takes(penstock, tmp_path):
    """These two commands must work without a GPU."""
    out = tmp_path / "p.json"
    result = penstock(
        "profile", "--model", "vgg16", "--image", 224, "--batch", 1024, "--on", "v100", "--out", out
    )
    assert result.status == 0, result.err
    assert (
        "vgg16 on gpu: V100, by a roofline at float32, estimated; times for 1024 samples"
        in result.out
    )
    assert "features.conv1_1" in result.out
    estimated = Profile.load(out)
    assert (estimated.device, estimated.batch, len(estimated)) == ("V100", 1024, 39)
    assert estimated.layers[-1].parameters == 4096 * 1000 + 1000, (
        "the paper's 1,000 classes, not those of some data"
    )


@pytest.mark.parametrize(
    ("words", "input_bytes"),
    [
        (("--model", "gnmt", "--model-option", "hidden=64", "--tokens", 12), 2 * 12 * 8),
        (
            ("--model", "gpt", "--model-option", "layers=1", "--tokens", 32, "--dtype", "bfloat16"),
            32 * 8,
        ),
        (("--model", "mlp", "--model-option", "features=20", "--dtype", "bfloat16"), 20 * 2),
        (("--model", "mlp", "--data", "digits", "--image", 8, "--channels", 1), 64 * 4),
    ],
)
def test_inputs_of_each_kind_take_their_shape_from_the_flags(penstock, words, input_bytes):
    """Tokens stay as wide as they are; a data set is loaded only where it is named."""
    result = penstock(
        "profile", *words, "--batch", 8, "--sizes", "2,8", "--on", "A100-80", "--json"
    )
    assert result.status == 0, result.err
    content = json.loads(result.out)
    assert content["input_bytes_per_sample"] == input_bytes
    assert content["layers"][0]["forward"]["sizes"] == [2, 8]


def test_a_cluster_s_first_device_may_be_named_and_a_profile_calibrates(penstock, tmp_path):
    """As `profile --cluster` writes it, with a profile measured there."""
    (tmp_path / "here.yaml").write_text(
        "name: here\ndevices_per_node: 1\nbetween: 10GbE\ndevices:\n"
        "  - {name: box, kind: cpu, memory: 8 GB, flops: {float32: 60 GFLOP/s}, memory_bandwidth: 10 GB/s, launch: 2 us, count: 2}\n"
    )
    measured = tmp_path / "m.json"
    words = (
        "profile",
        "--model",
        "mlp",
        "--data",
        "digits",
        "--image",
        8,
        "--channels",
        1,
        "--batch",
        8,
        "--json",
    )
    assert penstock(*words, "--repeats", 1, "--sizes", 8, "--out", measured).status == 0
    result = penstock(*words, "--on", tmp_path / "here.yaml", "--calibrate", measured)
    assert result.status == 0, result.err
    assert json.loads(result.out)["device"] == "box"
    assert json.loads(result.out)["machine"]["efficiency"] == "a profile on cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "V1000"), "no device called 'V1000'"),
        (("--on", "V100", "--dtype", "float3"), "dtype 'float3' is unknown"),
        (("--dtype", "float16"), "name its device with --on"),
        (("--calibrate", "x.json"), "name its device with --on"),
        (("--on", "V100", "--model", "vgg17"), "no model called 'vgg17'"),
        (("--on", "V100", "--model", "mlp", "--model-option", "features=many"), "features"),
    ],
)
def test_wrong_words_end_with_what_was_wrong(penstock, words, message):
    """One line, and no traceback."""
    result = penstock("profile", *words)
    assert result.status != 0
    assert message in result.err
