"""An option of training is written in two places of src: where it is declared and where it is
used.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Unpack, get_type_hints

import pytest
import torch

from penstock.cli.train import train
from penstock.option import CommonOptions, check_limits, options_of
from penstock.runtime.pipeline import Pipeline
from penstock.stage.training_arguments import TrainingArguments
from penstock.stage.training_options import TrainingOptions, parse_options
from penstock.training.config import TrainConfig

SOURCE = Path(__file__).parents[1] / "src" / "penstock"

#: Rooms that read options of training. `penstock profile`, studies and planners have records of
#: their own.
ROOMS = ("option.py", "cli/train", "training/", "stage/", "runtime/")

#: Variables and attributes that hold a record of options.
RECORDS = {"config", "settings", "options", "training_options"}

#: Modules that an option passes on its way from the command line to the stages. Here its name
#: counts also as a parameter, a keyword, a field or a string.
STATIONS = {
    "option.py",
    "cli/train.py",
    "cli/flags/train_flags.py",
    "training/config.py",
    "training/optimizer.py",
    "training/resume.py",
    "stage/training_options.py",
    "stage/stage_builder.py",
    "stage/stage.py",
    "runtime/pipeline.py",
    "runtime/global_step.py",
    "runtime/graph_preparation.py",
    "runtime/settings_check.py",
    "runtime/run_description.py",
}

#: Options that stand in more than two modules, and why.
EXCEPTIONS = {
    "what is trained: data, model and measurement must agree in shapes": (
        *("model", "data", "batch", "device"),
    ),
    "checked before the measurement, then given to the planner": (
        *("schedule", "micro_batches", "weights", "weights_options"),
        *("asynchronous", "memory_limit", "recompute", "ranks", "stages"),
    ),
    "a file or folder of the run, which several modules read and write": (*("out", "resume"),),
    "two numbers of plain training to compare with, and a line that prints them": (
        "baseline_steps",
    ),
    "an argument of Pipeline beside the options, with a use of its own in the training room": (
        *("seed", "deadline_s", "optimizer", "loss", "plan"),
    ),
    "refused where a launcher starts the ranks": ("max_restarts",),
    "loaded before the measurement, so that a mistake is reported at once, and on the first rank": (
        "callbacks",
    ),
    "looked for before the measurement, then opened by the first rank": ("wandb",),
    "read before the measurement, so that a wrong file is reported at once, and by all ranks": (
        "initial_weights",
    ),
    "refused where processes share the layers of a stage": ("offload",),
    "asked before an attempt, whose lost state has no copy where copies divide it": ("zero",),
    "named in a message about training that diverges": ("lr",),
    "files hold the name of a dtype, layers and loss use the dtype, float16 scales the loss": (
        *("autocast", "scaler"),
    ),
    "the reference on one device computes as the stages do": ("memory_format",),
}


def places_by_option() -> dict[str, set[str]]:
    """By option, the modules in which it is spelt."""
    names = {entry.name for kind in (TrainConfig, TrainingOptions) for entry, _ in options_of(kind)}
    places: dict[str, set[str]] = {name: set() for name in names}
    for file in sorted(SOURCE.rglob("*.py")):
        module = file.relative_to(SOURCE).as_posix()
        if not module.startswith(ROOMS):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = spelt(node, module)
            if name in places:
                places[name].add(module)
    return places


def spelt(node: ast.AST, module: str) -> object:
    """The name of an option that this node may spell, else None."""
    if isinstance(node, ast.Attribute):
        base = node.value
        holder = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        return node.attr if holder in RECORDS else None
    if module not in STATIONS:
        return None
    if isinstance(node, ast.AnnAssign):
        return getattr(node.target, "id", None)
    if isinstance(node, (ast.arg, ast.keyword)):
        return node.arg
    return node.value if isinstance(node, ast.Constant) else None


def test_an_option_is_written_where_it_is_declared_and_where_it_is_used():
    """A new option that must be forwarded by hand is forgotten at one of the stations."""
    excused = {name for names in EXCEPTIONS.values() for name in names}
    places = places_by_option()
    several = {name: sorted(where) for name, where in places.items() if len(where) > 2}
    assert {name: where for name, where in several.items() if name not in excused} == {}
    assert excused - several.keys() == set(), "these no longer need an exception"


def test_a_new_field_is_a_flag_a_key_and_an_argument():
    """The three are derived from the one declaration."""
    names = {entry.name for entry, _ in options_of(CommonOptions)}
    assert names <= inspect.signature(train).parameters.keys()
    assert names <= inspect.signature(Pipeline).parameters.keys()
    assert names <= {entry.name for entry, _ in options_of(TrainConfig)}
    assert "json" in inspect.signature(train).parameters
    for entry, facts in options_of(TrainingOptions):
        assert f"{entry.name}: {facts.help[:1].lower()}" in str(Pipeline.__doc__)


def test_type_checkers_see_every_training_option_of_pipeline():
    """They cannot read names that are derived at run time, so a TypedDict has them again."""
    declared = get_type_hints(TrainingOptions)
    declared["autocast"] |= torch.dtype
    arguments = get_type_hints(TrainingArguments)
    names = [entry.name for entry, _ in options_of(TrainingOptions)]
    differing = {name for name in names if arguments.get(name) != declared[name]}
    assert arguments.keys() <= set(names), "TrainingArguments has names that are no options"
    assert not differing, f"add the types of {differing} to stage/training_arguments.py"
    hints = get_type_hints(inspect.unwrap(Pipeline.__init__))
    assert hints["options"] == Unpack[TrainingArguments]


def test_every_option_has_a_help_text_that_is_a_sentence():
    """It is all that `--help` and the documentation of Pipeline say of it."""
    for kind in (TrainConfig, TrainingOptions):
        for entry, facts in options_of(kind):
            assert facts.help.endswith("."), entry.name


def test_an_unknown_argument_of_pipeline_is_refused_with_the_known_ones():
    """The options are collected by **options, so Python does not refuse it."""
    with pytest.raises(TypeError, match=r"Pipeline\(\) got .* 'autocats'; .* autocast"):
        parse_options({"autocats": None})


@pytest.mark.parametrize("text", ["bfloat16", torch.bfloat16])
def test_autocast_is_a_dtype_or_its_name(text):
    """Files hold names."""
    options = parse_options({"autocast": text})
    assert (options.autocast, options.autocast_dtype) == ("bfloat16", torch.bfloat16)


def test_an_infinite_norm_clips_nothing_and_is_valid():
    """torch.nn.utils.clip_grad_norm_ takes it, to measure the norm alone."""
    infinite = float("inf")
    assert CommonOptions(clip_grad_norm=infinite).clip_grad_norm == infinite
    check_limits(CommonOptions(clip_grad_norm=infinite))
