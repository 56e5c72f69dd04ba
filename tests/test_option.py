"""An option of training is written in two places of src: where it is declared and where it is
used.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack, get_type_hints

import pytest
import torch

from penstock.cli.train import train
from penstock.errors import SettingError
from penstock.option import (
    CommonOptions,
    Option,
    check_limits,
    check_zero,
    common_values,
    default_of,
    describe_options,
    option,
    options_of,
    signature_with_options,
)
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


@dataclass(frozen=True)
class Base:
    """Options that a record inherits, and a field that is none."""

    rate: float | None = option(0.5, "The rate of it.", minimum=0, maximum=1)
    size: float = option(1.0, "A size.", above=0)
    plain: int = -7


@dataclass(frozen=True)
class Record(Base):
    """A record with options of its own."""

    count: int = option(
        2, "Number of steps, " + "of which there are many, " * 6 + "or few.", minimum=1
    )
    table: dict[str, int] = option({"a": 1}, "A table.")


def test_a_record_has_its_own_options_first_and_no_other_fields():
    """So `--help` begins with what a command adds to the common options."""
    for record in (Record, Record()):
        assert [entry.name for entry, _ in options_of(record)] == ["count", "table", "rate", "size"]
    assert [entry.name for entry, _ in options_of(Base)] == ["rate", "size"]
    defaults = {entry.name: default_of(entry) for entry, _ in options_of(Record)}
    assert defaults == {"count": 2, "table": {"a": 1}, "rate": 0.5, "size": 1.0}


def test_each_record_has_a_dict_of_its_own():
    """A change of one must not be the default of the next."""
    first, second = Record(), Record()
    first.table["b"] = 2
    assert second.table == Record().table == {"a": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": -0.1}, "rate is -0.1; it must be 0 or more"),
        ({"rate": 1.5}, "rate is 1.5; it must be 1 or less"),
        ({"rate": float("nan")}, "rate is nan; it must be finite"),
        ({"rate": float("-inf")}, "rate is -inf; it must be 0 or more"),
        ({"size": 0}, "size is 0; it must be above 0"),
        ({"size": float("nan")}, "size is nan; it must be above 0"),
        ({"size": float("inf")}, "size is inf; it must be finite"),
        ({"count": 0}, "count is 0; it must be 1 or more"),
        (
            {"count": 2**64},
            "count is 18446744073709551616; it must be 18446744073709551615 or less",
        ),
        ({"rate": 0.2, "count": -1}, "count is -1; it must be 1 or more"),
    ],
)
def test_a_number_out_of_its_limits_is_refused(values, message):
    """With its name and the limit that it breaks; NaN is within no limits."""
    with pytest.raises(SettingError) as refusal:
        check_limits(Record(**values))
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 0},
        {"rate": 1.0},
        {"rate": None},
        {"size": 5e-324},
        {"size": sys.float_info.max},
        {"count": 1},
        {"count": 2**64 - 1},
        {"table": {"a": -1}},
    ],
)
def test_limits_are_valid_values_and_other_types_have_none(values):
    """None is no number, and neither is a table."""
    check_limits(Record(**values))


@pytest.mark.parametrize(
    ("synchronous", "value", "needs"),
    [
        (True, 2, True),
        (True, 1, False),
        (True, 0, False),
        (True, None, False),
        (False, 2, False),
        ("skip", "skip", True),
        ("skip", "warn", False),
    ],
)
def test_an_option_needs_a_synchronous_schedule_where_it_is_switched_on(synchronous, value, needs):
    """The default, and a value that switches it off, go with every schedule."""
    assert Option("", synchronous=synchronous).needs_synchronous(value, 1) is needs


@pytest.mark.parametrize("level", [None, 0, 1])
def test_the_levels_of_zero_that_copies_have(level):
    """None is what the plan says."""
    check_zero(level)


@pytest.mark.parametrize(
    ("level", "start"),
    [
        (2, "zero=2: copies of a stage"),
        (3, "zero=3: copies"),
        (4, "zero is 0 or 1, not 4"),
        ("1", "zero is 0 or 1, not '1'"),
    ],
)
def test_other_levels_of_zero_are_refused(level, start):
    """Levels 2 and 3 with what has them."""
    with pytest.raises(SettingError) as refusal:
        check_zero(level)
    assert str(refusal.value).startswith(start)
    assert ("fully_shard" in str(refusal.value)) == (level in (2, 3))


def test_a_signature_has_the_options_in_place_of_the_keywords():
    """Editors and `help` show them with types and defaults."""

    def call(first, *, second=1, **options):
        """Take options."""

    parameters = signature_with_options(call, Record).parameters
    assert list(parameters) == ["first", "second", "count", "table", "rate", "size"]
    assert parameters["count"].kind is inspect.Parameter.KEYWORD_ONLY
    assert (parameters["count"].default, parameters["count"].annotation) == (2, "int")
    assert parameters["table"].default == {"a": 1}
    assert parameters["second"].default == 1


def test_options_are_described_as_arguments_in_a_docstring():
    """In lower case, wrapped and indented as the arguments before them."""
    lines = describe_options(Record).splitlines()
    assert lines[0].startswith("count: number of steps, of which")
    assert [len(line) - len(line.lstrip()) for line in lines[1:3]] == [16, 16]
    assert lines[-3:] == [
        " " * 12 + "table: a table.",
        " " * 12 + "rate: the rate of it.",
        " " * 12 + "size: a size.",
    ]
    assert all(len(line) <= 100 for line in lines)


def test_common_values_are_those_of_the_common_options_alone():
    """They are handed on from a file to a Pipeline."""
    values = common_values(TrainConfig(accumulate=3, zero=1))
    assert list(values) == [entry.name for entry, _ in options_of(CommonOptions)]
    assert (values["accumulate"], values["zero"], values["on_nonfinite"]) == (3, 1, "raise")
