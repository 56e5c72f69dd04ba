"""Saved state of optimizers that does not fit: another class, other groups, tensors of other shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from penstock.checkpoint.checkpoint_fit import Findings
from penstock.checkpoint.optimizer_checkpoint import Facts
from penstock.checkpoint.optimizer_fit import OptimizerState, check_optimizer_state
from penstock.optim.optimizer_state import PARAMETER_SHAPED

ADVICE = "To load weights, buffers and step, and start with a new optimizer, pass skip='optimizer'"
GROUPS = f"Construct the optimizer with the groups that were saved. {ADVICE}"
SGD_NAME = "torch.optim.sgd.SGD"


class Case:
    """An optimizer over parameters of three elements in groups by name, such as `["ab", "c"]`."""

    def __init__(self, *groups, make=SGD, **options):
        self.parameters = {name: nn.Parameter(torch.zeros(3)) for group in groups for name in group}
        rows = [{"params": [self.parameters[name] for name in group]} for group in groups]
        self.optimizer = make(rows, lr=0.1, **options)

    def findings(self, facts=None, tensors=None, files=None):
        """Return what is said of saved state; all of it is from one file if not told otherwise."""
        facts = facts or {}
        names = {parameter: name for name, parameter in self.parameters.items()}
        saved = OptimizerState(tensors or {}, facts, files or dict.fromkeys(facts, "file"))
        findings = Findings()
        check_optimizer_state(self.optimizer, names, saved, findings)
        return findings.text()


def saved(group, kind=SGD_NAME, **options):
    """Return the saved facts of a parameter."""
    return Facts({"lr": 0.1} | options, {}, group, kind)


# -- class ---------------------------------------------------------------------------------------


def test_state_of_another_class_is_refused_once_and_its_groups_are_not_compared():
    """They would only lengthen the message; classes of scripts are compared by their own names."""
    case = Case("ab", "c")
    other = {"a": saved(0, "torch.optim.adam.Adam"), "c": saved(0, "torch.optim.adam.Adam")}
    assert case.findings(other) == (
        "it holds the state of torch.optim.adam.Adam, and the optimizer of this pipeline is "
        f"{SGD_NAME}. {ADVICE}"
    )
    assert case.findings({"a": saved(0), "b": saved(0), "c": saved(1)}) == ""
    assert case.findings({"a": saved(0, "__main__.SGD")}) == ""
    assert case.findings({}) == ""
    assert case.findings({"foreign": saved(0, "x.Adam")}) == ""


def facts_without_class(optimizer, more=(), less=()):
    """Return facts of schema 1, with more options than an optimizer has, or with less."""
    options = {key: 0.1 for key in optimizer.param_groups[0] if key not in ("params", *less)}
    return Facts(options | dict.fromkeys(more, 1), {})


@pytest.mark.parametrize(
    ("more", "less", "text"),
    [
        ((), (), ""),
        (("betas", "amsgrad"), (), ""),
        ((), ("nesterov",), ""),
        (
            ("betas", "amsgrad"),
            ("nesterov", "dampening"),
            (
                f"it holds the state of an optimizer other than {SGD_NAME}: one with amsgrad, betas "
                f"and without dampening, nesterov. {ADVICE}"
            ),
        ),
    ],
)
def test_without_a_recorded_class_options_tell_it(more, less, text):
    """Versions of a class differ by added or by removed options, but not by both."""
    case = Case("a")
    assert case.findings({"a": facts_without_class(case.optimizer, more, less)}) == text


def test_options_that_are_functions_are_in_no_file_and_so_never_missing():
    """Such as the shape function of an optimizer."""
    case = Case("a")
    case.optimizer.param_groups[0]["shape"] = print
    assert case.findings({"a": facts_without_class(case.optimizer, ("betas",), ("shape",))}) == ""


# -- groups --------------------------------------------------------------------------------------


def test_two_groups_that_are_one_here_are_refused_with_their_first_different_option():
    """The options of one would apply to the parameters of both."""
    case = Case("abc")
    assert case.findings({"a": saved(0), "b": saved(1)}) == (
        f"a and b were in two parameter groups when it was saved, and are in one here. {GROUPS}"
    )
    facts = {"a": saved(0), "b": saved(0), "c": saved(1, weight_decay=0.5, momentum=0.9)}
    facts["a"].options.update(weight_decay=0, momentum=0.9)
    facts["b"].options.update(weight_decay=0, momentum=0.9)
    assert case.findings(facts) == (
        "a and c were in two parameter groups (weight_decay 0 and 0.5) when it was saved, and are "
        f"in one here. {GROUPS}"
    )
    facts["c"].options.update(lr=0.2)
    assert "(lr 0.1 and 0.2)" in case.findings(facts)


def test_groups_of_different_files_are_compared_by_their_options():
    """Every stage counts its groups from 0, and a stage may not have all of them."""
    case = Case("ab")
    files = {"a": "one", "b": "two"}
    assert case.findings({"a": saved(0), "b": saved(1)}, files=files) == ""
    assert "in two parameter groups (lr 0.1 and 0.5)" in case.findings(
        {"a": saved(0), "b": saved(0, lr=0.5)}, files=files
    )
    two = Case("a", "b")
    assert two.findings({"a": saved(0), "b": saved(0)}, files=files) == ""


def test_one_group_that_is_two_here_is_refused():
    """Options that were those of both would be set apart by the next scheduler."""
    facts = {"a": saved(1), "b": saved(0), "c": saved(0)}
    assert Case("a", "b", "c").findings(facts) == (
        "b and c were in one parameter group when it was saved, and are in two here. " + GROUPS
    )
    assert Case("a", "bc").findings(facts) == ""
    assert Case("bc", "a").findings(facts) == ""


def test_options_that_this_version_does_not_have_do_not_divide_a_group():
    """Nor do parameters without saved state, nor tuples that have become lists in a file."""
    case = Case("abc")
    facts = {"a": saved(0, unknown=1, momentum=0.0), "c": saved(0, unknown=2)}
    assert case.findings(facts) == ""
    facts["a"].options["betas"], facts["c"].options["betas"] = (0.9, 0.99), [0.9, 0.99]
    case.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    assert case.findings(facts) == ""


def test_groups_without_recorded_numbers_are_compared_by_their_options():
    """Those of schema 1."""
    none = {name: saved(None) for name in "ab"}
    assert Case("a", "b").findings(none) == ""
    assert Case("ab").findings(none) == ""
    assert "(lr 0.1 and 0.5)" in Case("ab").findings({"a": none["a"], "b": saved(None, lr=0.5)})


# -- shapes --------------------------------------------------------------------------------------


def form(key, name, shape, dtype="float32"):
    """Return the message on a tensor of another form."""
    return f"{key} of {name} is {dtype} {shape} in the state, and the parameter is of shape (3,)"


@pytest.mark.parametrize("key", sorted(PARAMETER_SHAPED))
def test_moments_must_have_the_shape_of_their_parameter(key):
    """torch would broadcast them, or fail in the first step."""
    case = Case("a")
    assert case.findings(tensors={f"a/{key}": torch.zeros(3)}) == ""
    assert case.findings(tensors={f"a/{key}": torch.zeros(3, dtype=torch.complex64)}) == ""
    assert case.findings(tensors={f"a/{key}": torch.zeros(1, 3)}) == form(key, "a", (1, 3))
    whole = torch.zeros(3, dtype=torch.int64)
    assert case.findings(tensors={f"a/{key}": whole}) == form(key, "a", (3,), "int64")


def test_all_moments_of_other_shapes_are_listed_and_other_state_may_have_any():
    """Such as counters, and moments of parameters of other stages."""
    case = Case("a", "b", make=Adam)
    tensors = {
        "a/step": torch.zeros(()),
        "a/exp_avg": torch.zeros(2),
        "b/exp_avg_sq": torch.zeros(()),
        "other/exp_avg": torch.zeros(7),
        "a/exp_avg_scale": torch.zeros(7),
    }
    text = f"{form('exp_avg', 'a', (2,))}, {form('exp_avg_sq', 'b', ())}"
    assert case.findings(tensors=tensors) == text
    wrong = {"a": saved(0, "x.Lion")}
    assert case.findings(wrong, tensors).endswith(f"pass skip='optimizer'; {text}")


class Factored(Adam):
    """An optimizer of the user whose moments have a shape of their own."""


def test_moments_of_other_optimizers_have_the_shapes_that_they_choose():
    """Only torch's own are known."""
    case = Case("a", make=Factored)
    assert case.findings(tensors={"a/exp_avg": torch.zeros(1)}) == ""
