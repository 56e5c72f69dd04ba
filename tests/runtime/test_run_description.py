"""Texts by which ranks compare what they run: equal for equal things, unlike for unlike ones.

Which differences ranks report is in `tests/ranks/settings/test_setting_differences.py`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.ranks.settings.run_config import Overrides, RunConfig, make_run_config
from penstock.ranks.settings.setting_differences import META, STALE
from penstock.runtime import run_description
from penstock.runtime.run_description import describe, describe_optimizers
from penstock.schedule.op import Schedule
from penstock.stage.stage_builder import Training
from penstock.stage.training_options import TrainingOptions


def crc(*tensors):
    """Return the checksum of some tensors, as text."""
    return f"{zlib.crc32(b''.join(tensor.numpy().tobytes() for tensor in tensors)):08x}"


@dataclasses.dataclass
class Pair:
    """Two values, and one that is not compared."""

    first: object
    second: object
    _cache: int = 0


class Thing:
    """An object without a `repr` of its own."""

    def method(self):
        """Do nothing."""


def function(x, scale=0.5, *, mode="a"):
    """Return the argument."""
    return x


def taking(values=(1, 2), flag=True, dtype=torch.half, name="n"):
    """Take simple and other defaults."""


ONES = torch.ones(2, 3)
HERE = __name__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (3, "3"),
        ("a'b", '"a\'b"'),
        (b"x", "b'x'"),
        (1 + 2j, "(1+2j)"),
        (0.1, "0.1"),
        (np.float64(0.1), "0.1"),
        (float("nan"), "nan"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.channels_last, "torch.channels_last"),
        (torch.device("cpu"), "device(type='cpu')"),
        (ONES, f"tensor of (2, 3), torch.float32, checksum {crc(ONES)}"),
        (torch.empty(2, device="meta"), "tensor of (2,), torch.float32, checksum unknown"),
        ([1, (2.5,)], "[1, [2.5]]"),
        ({"b": 1, "a": [2]}, "{'a': [2], 'b': 1}"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (frozenset("ba"), "{'a', 'b'}"),
        (range(2), "[0, 1]"),
        (collections.OrderedDict(b=1, a=2), "{'a': 2, 'b': 1}"),
        (types.MappingProxyType({1: 2}), "{1: 2}"),
        (Pair(1, [Pair(2, 3)]), "Pair(first=1, second=[Pair(first=2, second=3)])"),
        (Pair, f"{HERE}.Pair"),
        (Thing(), f"{HERE}.Thing"),
        (Thing().method, "Thing.method"),
        (function, f"{HERE}.function with [0.5]"),
        (taking, f"{HERE}.taking with [True, torch.float16, 'n']"),
        (
            functools.partial(function, 2, scale=ONES),
            f"partial({HERE}.function with [0.5], [2], {{'scale': {describe(ONES)}}})",
        ),
    ],
)
def test_values_are_described_without_what_differs_between_processes(value, text):
    """No addresses, no order of sets, no types of NumPy."""
    assert describe(value) == text


def test_functions_of_the_program_have_the_name_that_they_have_where_it_is_imported():
    """Of one rank the script may be the main module."""
    local = types.FunctionType(function.__code__, {}, "function")
    local.__module__ = "__main__"
    assert describe(local) == "function"
    local.__module__ = None
    assert describe(local) == ".function"


def test_nested_values_are_described_down_to_a_depth():
    """Below it by their type; numbers and texts at any depth."""
    assert describe([[[[1, [2], 0.5]]]]) == "[[[[1, list, 0.5]]]]"
    assert describe({"a": ONES}, depth=1) == "{'a': Tensor}"
    assert describe(ONES, depth=0) == "Tensor"
    assert describe([0.5, "a", None], depth=1) == "[0.5, 'a', None]"


def test_modules_are_described_with_their_values_and_without_addresses():
    """A loss may have weights, and a `repr` with the address of a function."""

    class Loss(nn.Linear):
        """A loss with a `repr` that holds an address."""

        def extra_repr(self):
            """Return an address."""
            return "at 0x7f12ab and 0xFF,\n   0xyz"

    loss = Loss(2, 1)
    values = {
        name: zlib.crc32(t.detach().numpy().tobytes()) for name, t in loss.state_dict().items()
    }
    assert describe(loss) == f"Loss( at  and , 0xyz ) with values {describe(values)}"
    assert describe(nn.Tanh()) == "Tanh()"

    class Counting(nn.Module):
        """A loss whose state has more than tensors."""

        def get_extra_state(self):
            """Return a plain value."""
            return {"calls": 3}

        def set_extra_state(self, state):
            """Take it."""

    assert describe(Counting()) == "Counting()"
    other = copy.deepcopy(loss)
    other.bias.data += 1
    assert describe(other) != describe(loss)


def traced(*modules):
    """Return the chain of some layers."""
    return ps.chain(nn.Sequential(*modules))


@pytest.mark.parametrize(
    ("training", "text"),
    [
        ((True, True, True, True), "in training mode"),
        ((False, False, False, False), "in evaluation mode"),
        ((True, False, True, True), "with 3 of 4 modules in training mode"),
        ((False, False, True, False), "with 1 of 4 modules in training mode"),
    ],
)
def test_layers_are_described_with_their_mode(training, text):
    """Also if only some of their modules are in training mode."""
    module = nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.ReLU())
    for part, flag in zip(module.modules(), training, strict=True):
        part.training = flag
    described = run_description._describe_module(module)
    assert described == f"{' '.join(repr(module).split())} {text}"
    module.whole_names = True
    assert run_description._describe_module(module) == f"Sequential {text}"


def test_weights_are_compared_by_layer(monkeypatch):
    """A checksum of parameters and buffers by name, the place of those that are not there yet, and
    no values of layers that others have trained.
    """
    shared = nn.Linear(2, 2)
    mixed = nn.Linear(2, 2)
    mixed.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    layers = [
        nn.BatchNorm1d(2),
        shared,
        nn.Tanh(),
        nn.Linear(2, 2, device="meta"),
        mixed,
        shared,
        nn.Linear(2, 2),
        nn.Linear(2, 2, device="meta"),
    ]
    chain = traced(*layers)
    monkeypatch.setattr(
        run_description, "stale_layers", lambda seen: {6, 7} if seen is chain else 1
    )
    reads = []
    monkeypatch.setattr(
        run_description, "checksum", lambda t: reads.append(t) or zlib.crc32(t.detach().numpy())
    )

    def joined(*texts):
        return f"{zlib.crc32(' '.join(texts).encode()):08x}"

    def sums(module):
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return [
            META if tensor.is_meta else crc(tensor.detach())
            for _, tensor in sorted(tensors.items())
        ]

    rows = run_description._describe_weights(chain)
    assert [name for name, _ in rows] == [layer.name for layer in chain.layers]
    assert [text for _, text in rows] == [
        joined(*sums(layers[0])),
        joined(*sums(shared)),
        joined(),
        META,
        joined(*sums(mixed)),
        joined(*sums(shared)),
        STALE,
        STALE,
    ]
    assert len(reads) == len({id(tensor) for tensor in reads}), "a shared tensor is read once"


def test_every_layer_has_the_first_rank_of_its_stage():
    """Whose weights count."""
    setting = SimpleNamespace(
        schedule=SimpleNamespace(ranks_of_stage=[[2, 0], [1], [0, 1]]), lengths=(2, 1, 3)
    )
    assert run_description._home_ranks(setting) == [2, 2, 1, 0, 0, 0]


def test_optimizers_are_described_by_class_groups_and_options():
    """Of the stages that have one; not by their parameters."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [
        {"params": [("a", parameters[0])]},
        {"params": [("b", parameters[1])], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.25, momentum=0.9)
    stages = [SimpleNamespace(update=SimpleNamespace(optimizer=o)) for o in (None, optimizer, None)]
    facts = describe_optimizers(SimpleNamespace(stages=stages)).facts
    assert facts["optimizer"] == "SGD"
    assert facts["lr of the optimizer's group 0"] == "0.25"
    assert facts["lr of the optimizer's group 1"] == "0.5"
    assert facts["momentum of the optimizer's group 1"] == "0.9"
    assert not [name for name in facts if "param" in name]
    empty = describe_optimizers(SimpleNamespace(stages=stages[:1]))
    assert (empty.facts, empty.lists, empty.weights, empty.homes) == ({}, {}, [], [])


def test_versions_count_to_their_second_number(monkeypatch):
    """A rank with a release of the same minor version computes the same."""
    assert run_description._minor_version("2.13.1+cpu") == "2.13"
    monkeypatch.setattr(run_description, "version", lambda name: f"7.8.9 of {name}")
    assert run_description._penstock_version() == "7.8"

    def missing(name):
        raise run_description.PackageNotFoundError(name)

    monkeypatch.setattr(run_description, "version", missing)
    assert run_description._penstock_version() == "not installed"


def test_the_facts_of_a_run_name_what_ranks_must_share():
    """Further ones by the name that the caller gives; what only concerns one process is left out."""
    chain = traced(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh())
    schedule = ps.schedule("gpipe", stages=2, micro_batches=3)
    pipe_setting = make_run_config(chain, None, Overrides(balance=[1, 2], schedule=schedule))
    training = Training(nn.functional.mse_loss, torch.optim.SGD, 11)
    described = run_description.describe_run(chain, pipe_setting, training, score=[1, 2])
    facts = described.facts
    assert facts["ranks"] == "2 ranks"
    assert facts["layers"] == "3 layers"
    assert facts["cut"] == "stages of [1, 2] layers"
    assert facts["schedule"] == "gpipe with 2 stages, 3 micro-batches"
    assert (facts["seed"], facts["score"]) == ("11", "[1, 2]")
    assert (facts["optimizer"], facts["loss"]) == ("there is one", describe(nn.functional.mse_loss))
    assert facts["torch"] == ".".join(torch.__version__.split(".")[:2])
    assert "planned_busy_s" not in facts
    assert (facts["accumulate"], facts["zero"]) == ("1", describe(training.options.zero))
    assert described.homes == [0, 1, 1]
    assert [row[0] for row in described.lists["program of rank"]] == ["0", "1"]
    for row, program in zip(described.lists["program of rank"], schedule.programs, strict=True):
        assert row[1] == " ".join(map(str, program))
    assert described.lists["layer"] == [(layer.name, layer.kind) for layer in chain.layers]
    assert described.lists["parameter"][1] == ("0.bias", "(2,), float32, trained")
    without = run_description.describe_run(
        chain, pipe_setting, dataclasses.replace(training, optimizer=None)
    )
    assert without.facts["optimizer"] == "none"


def description_of(chain=None, *, balance=(1, 2), schedule=None, **changes):
    """Describe a run of three layers, with changes of the training."""
    chain = chain or layers()
    options = {
        name: changes.pop(name) for name in ("recompute", "weights", "score") if name in changes
    }
    score = options.pop("score", 1)
    schedule = schedule or ps.schedule("gpipe", stages=2, micro_batches=3)
    overrides = Overrides(balance=list(balance), schedule=schedule, **options)
    setting = make_run_config(chain, None, overrides)
    training = Training(nn.functional.mse_loss, torch.optim.SGD, 11)
    training = dataclasses.replace(training, **changes)
    return run_description.describe_run(chain, setting, training, score=score)


def layers(**changes):
    """Return a chain of three layers, with one change."""
    with torch.random.fork_rng():
        torch.manual_seed(changes.get("seed", 0))
        first = nn.Linear(2, 2, bias=changes.get("bias", True))
        modules = [first, nn.Linear(2, 2), nn.Dropout(changes.get("p", 0.5))]
    modules[1].weight.requires_grad_(changes.get("trained", True))
    modules[2].train(changes.get("training", True))
    if changes.get("dtype"):
        modules[0].to(changes["dtype"])
    return traced(*modules)


#: The samples of a micro-batch in slices; its programs are those of as many micro-batches.
SLICED = ps.schedule("terapipe", 2, 3)


def everything(description):
    """Return all that ranks compare."""
    return description.facts, description.lists, description.weights, description.homes


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 12},
        {"loss": nn.functional.l1_loss},
        {"optimizer": None},
        {"score": 2},
        {"balance": (2, 1)},
        {"recompute": "always"},
        {"schedule": ps.schedule("gpipe", stages=2, micro_batches=4)},
        {"schedule": ps.schedule("1f1b", stages=2, micro_batches=3)},
        {"schedule": ps.schedule("naive", stages=2, micro_batches=3)},
        {"schedule": SLICED},
        {"schedule": dataclasses.replace(SLICED, slicing=None)},
        *(
            {"options": TrainingOptions(**{name: value})}
            for name, value in {
                "accumulate": 2,
                "clip_grad_norm": 1.0,
                "clip_norm_type": 1.0,
                "clip_grad_value": 1.0,
                "on_nonfinite": "skip",
                "autocast": "bfloat16",
                "boundary": "int8",
                "deferred_batch_norm": True,
            }.items()
        ),
    ],
)
def test_every_setting_that_changes_the_numbers_or_the_messages_is_described(changes):
    """Ranks that differ in it would wait for each other, or train other models."""
    assert everything(description_of(**changes)) != everything(description_of())
    assert everything(description_of()) == everything(description_of())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"bias": False},
        {"p": 0.25},
        {"trained": False},
        {"training": False},
        {"dtype": torch.float64},
    ],
)
def test_every_difference_of_models_is_described(change):
    """Values, layers, options, modes, dtypes, and what is trained."""
    assert everything(description_of(layers(**change))) != everything(description_of(layers()))
    assert everything(description_of(layers())) == everything(description_of(layers()))


def test_all_fields_of_what_runs_are_described():
    """But for those that do not change what is computed, and those that are compared elsewhere."""
    elsewhere = {"name", "options", "programs", "lengths", "rule", "parallelism"}
    facts = description_of().facts
    for kind, prefix in ((Schedule, "schedule: "), (RunConfig, ""), (Training, "")):
        names = {field.name for field in dataclasses.fields(kind) if field.name[0] != "_"}
        names -= elsewhere | {"planned_busy_s"}
        assert {f"{prefix}{name}" for name in names} <= facts.keys(), kind


def test_the_weight_rule_of_a_stream_is_described():
    """The programs are the same under all rules."""
    schedule = ps.schedule("pipedream", stages=2)
    plain, other = (
        description_of(schedule=schedule, weights=weights) for weights in (None, "pipemare")
    )
    assert plain.lists == other.lists
    assert plain.facts != other.facts
