"""What a run is asked to do is checked before anything is measured or started."""

from __future__ import annotations

import pytest

from penstock.errors import FileError, SettingError
from penstock.training.config import TrainConfig
from penstock.training.sources.user_settings import load_settings


def test_a_file_and_flags_make_one_configuration_and_flags_win(tmp_path):
    """A configuration is shared; what one tries today is said on the command line."""
    path = tmp_path / "run.yaml"
    path.write_text("model: mlp\nbatch: 32\nlr: 0.1\n")
    assert load_settings(path, {"batch": 16}) == TrainConfig(model="mlp", batch=16, lr=0.1)


def test_a_written_configuration_reads_back_the_same(tmp_path):
    """A run's folder must say exactly how to run it again."""
    config = TrainConfig(
        model="gpt", data="text", model_options={"layers": 2}, stages=3, partition="3,4,5", seed=7
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.as_yaml())
    assert load_settings(path, {}) == config


def test_an_empty_file_means_the_defaults(tmp_path):
    """YAML reads an empty file as nothing, which is no mistake."""
    path = tmp_path / "empty.yaml"
    path.write_text("# only a comment\n")
    assert load_settings(path, {}) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: mlp", "unknown settings: modle"),
        ("- model", "must be a mapping"),
        ("model: [", "is not YAML"),
        ("lr: 0.1\nbatch: 8\nlr: 0.2", "duplicate key 'lr'"),
        ("model_options: {layers: 1, layers: 2}", "duplicate key 'layers'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, text, words):
    """A misspelt key that is silently ignored costs a night's training."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=words) as caught:
        load_settings(path, {})
    assert "run.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch: '32'", "batch: Input should be a valid integer, not '32'"),
        ("batch: 32.0", "batch: Input should be a valid integer, not 32.0"),
        ("epochs: true", "epochs: Input should be a valid integer, not True"),
        ("lr: fast", "lr: Input should be a valid number, not 'fast'"),
        ("self_check: 1", "self_check: Input should be a valid boolean, not 1"),
        ("model_options: [layers]", "model_options: Input should be a valid dictionary"),
        ("stages: many", "stages: .*'cores'.*, not 'many'"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path, text, words):
    """A value that is converted silently may mean something else than its writer thinks."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=rf"run\.yaml: {words}"):
        load_settings(path, {})


def test_numbers_without_a_point_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-3 as a string; an integer is a valid number of seconds."""
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-3\ndeadline_s: 60\nstages: cores\ncompile: {backend: aot_eager}\n")
    config = load_settings(path, {})
    assert (config.lr, config.deadline_s, config.stages) == (0.001, 60, "cores")
    assert config.compile == {"backend": "aot_eager"}


def test_a_missing_file_is_named():
    """The first mistake that everybody makes."""
    with pytest.raises(
        FileError, match=r"cannot read the configuration nowhere.yaml: No such file"
    ):
        load_settings("nowhere.yaml", {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch is 0; it must be 1 or more"),
        ({"lr": 0.0}, "lr is 0.0; it must be above 0"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm is -1.0; it must be above 0"),
        ({"micro_batches": -1}, "micro_batches is -1; it must be 1 or more"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be 0 or more"),
        ({"accumulate": 0}, "accumulate is 0; it must be 1 or more"),
        ({"autocast": "float8"}, "autocast: Input should be 'bfloat16' or 'float16', not 'float8'"),
        ({"optimizer": "sdg"}, "optimizer: .*not 'sdg'"),
        ({"epochs": "many"}, "epochs: .*not 'many'"),
        ({"resume": True}, "resume needs out"),
        ({"deadline_s": -1}, "deadline_s is -1"),
        ({"lr": float("inf")}, "lr is inf; it must be finite"),
        ({"lr": 1e300}, r"lr is 1e\+300; it must be 3\.40\d+e\+38 or less"),
        ({"weight_decay": 1e39}, r"weight_decay is 1e\+39; it must be 3\.40\d+e\+38 or less"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm is inf; it must be finite"),
        ({"deadline_s": 1e300}, "deadline_s is 1e\\+300; it must be 1000000.0 or less"),
        ({"batch": 10**26}, "batch is 1000.*; it must be 18446744073709551615 or less"),
        ({"zero": 99}, "zero is 0 or 1, not 99"),
        ({"momentum": float("nan")}, "momentum is nan; it must be finite"),
        ({"target_accuracy": 95.0}, "target_accuracy is 95.0; it must be 1 or less"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(changes, words):
    """The message names the setting and what it was."""
    with pytest.raises(SettingError, match=words):
        load_settings(None, changes)


def test_a_cut_is_a_name_or_numbers_with_commas():
    """Both are written in one flag."""
    assert TrainConfig(partition="type:conv").lengths() == "type:conv"
    assert TrainConfig(partition="5, 6,4").lengths() == [5, 6, 4]
