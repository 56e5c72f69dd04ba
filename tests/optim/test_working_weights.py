"""Working weights: the present contents of the parameters, and copies of others."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from penstock.optim.update import Update
from penstock.optim.working_weights import WorkingWeights


def working_parameter(value=1.0):
    """Return a parameter with one element, and its working weights, whose newest version is called
    0.
    """
    parameter = nn.Parameter(torch.tensor([value]))
    return parameter, WorkingWeights(Update([parameter], None), newest=0)


def plus(amount, calls=None):
    """Return a change that adds a number."""

    def change(values):
        if calls is not None:
            calls.append(amount)
        values[0].add_(amount)

    return change


def test_while_only_the_newest_is_shown_nothing_is_copied():
    """A stage that neither predicts nor corrects has the memory of plain training."""
    parameter, working = working_parameter()
    for _ in range(3):
        working.show(0)
        working.begin_step()
        parameter.data += 1
        working.end_step(0)
    working.restart(0)
    assert (parameter.item(), working.held_bytes()) == (4, 4)


def test_a_prediction_is_made_once_and_the_newest_comes_back():
    """Contents that the parameters hold already are not computed again."""
    parameter, working = working_parameter()
    calls = []
    for content in ("ahead", "ahead", 0, 0, "ahead"):
        working.show(content, plus(10, calls))
        assert parameter.item() == (1 if content == 0 else 11)
    assert calls == [10, 10]
    assert working.held_bytes() == 8


def test_every_change_begins_at_the_newest_version():
    """Changes do not accumulate."""
    parameter, working = working_parameter()
    working.show("one", plus(10))
    working.show("two", plus(20))
    assert parameter.item() == 21


@pytest.mark.parametrize("soon", [True, False])
def test_what_is_kept_can_be_had_after_an_update_as_it_was(soon):
    """XPipe's later micro-batches read the first one's prediction, whose base version is no longer
    available.
    """
    parameter, working = working_parameter()
    working.show("ahead", plus(10))
    working.keep("forward", "ahead", plus(10), soon=soon)
    working.show(0)
    assert working.held_bytes() == (12 if soon else 8)
    working.begin_step()
    parameter.data += 100
    working.end_step(1)
    assert working.held_bytes() == 12
    assert working.has("ahead")
    working.show("ahead", plus(-1))
    assert parameter.item() == 11
    working.keep("forward", None)
    working.show(1)
    assert parameter.item() == 101
    assert not working.has("ahead")


def test_what_is_kept_again_after_an_update_is_still_as_it_was():
    """A prediction of an older version cannot be computed from the newest."""
    parameter, working = working_parameter()
    for version in range(3):
        working.show("ahead", plus(10))
        assert parameter.item() == 11
        working.keep("forward", "ahead", plus(10))
        working.show(version)
        working.begin_step()
        parameter.data += 100
        working.end_step(version + 1)


def test_what_is_kept_soon_is_not_made_again():
    """A copy takes less time than computing Adam's direction."""
    _, working = working_parameter()
    for soon, expected_calls in ((True, 1), (False, 2)):
        calls = []
        working.show("ahead", plus(10, calls))
        working.keep("forward", "ahead", plus(10, calls), soon=soon)
        working.show(0)
        working.show("ahead", plus(10, calls))
        assert len(calls) == expected_calls
        working.restart(0)


def test_the_newest_version_can_be_kept_over_an_update_too():
    """With distance 0 the prediction is the version itself."""
    parameter, working = working_parameter()
    working.show(0)
    working.keep("forward", 0)
    working.show("other", plus(5))
    working.begin_step()
    parameter.data += 100
    working.end_step(1)
    working.show(0)
    assert parameter.item() == 1
    working.show(1)
    assert parameter.item() == 101


def test_a_restart_shows_the_newest_and_forgets_what_was_kept():
    """After a drain others may write into the parameters, and their values count."""
    parameter, working = working_parameter()
    working.show("ahead", plus(10))
    working.keep("forward", "ahead")
    working.restart(0)
    assert parameter.item() == 1
    parameter.data.fill_(7)
    working.show("ahead", plus(10))
    assert parameter.item() == 17
    working.show(0)
    assert parameter.item() == 7


def test_changes_are_none_to_autograd():
    """Graphs in flight are meant to read the changed values."""
    parameter, working = working_parameter(2.0)
    graph = parameter * parameter
    working.show("ahead", plus(1))
    graph.backward()
    assert parameter.grad.item() == 6


def test_a_parameter_that_a_layer_has_moved_is_followed():
    """On a GPU, recurrent layers make their weights contiguous."""
    parameter, working = working_parameter()
    working.show("ahead", plus(10))
    parameter.data = parameter.data.clone()
    working.show(0)
    assert parameter.item() == 1


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_contents_is_what_a_copy_of_each_would_be(seed):
    """Against a reference that stores every content when it is first shown: predictions of several
    versions, cached under two names, over steps and restarts.
    """
    rng = random.Random(seed)
    parameter, weights = working_parameter()
    newest = parameter.item()
    version, cached, soon = 0, {}, {}
    contents = {0: newest}

    for _ in range(40):
        action = rng.choice(["show", "show", "cache", "step", "restart"])
        if action in ("show", "cache"):
            known = [entry for entry in cached.values() if entry is not None]
            content = rng.choice([version, (version, 1), (version, 2), *known])
            amount = content[1] if isinstance(content, tuple) else 0
            if content not in contents:
                contents[content] = newest + amount
            weights.show(content, plus(amount))
            assert weights.has(content)
            assert parameter.item() == contents[content]
        if action == "cache":
            name = rng.choice("ab")
            soon.setdefault(name, rng.random() < 0.5)
            cached[name] = content = rng.choice([content, content, None])
            weights.keep(name, content, plus(amount), soon=soon[name])
        elif action == "step":
            weights.begin_step()
            assert parameter.item() == newest, "a step changes the newest version"
            parameter.data.mul_(1.5)
            version += 1
            weights.end_step(version)
            newest = parameter.item()
            stored_contents = {
                content: contents[content] for content in cached.values() if content is not None
            }
            contents = {version: newest, **stored_contents}
            assert all(weights.has(content) for content in stored_contents)
        elif action == "restart":
            version += 100
            weights.restart(version)
            assert parameter.item() == newest
            cached.clear()
            parameter.data.add_(0.25)
            newest = parameter.item()
            contents = {version: newest}
        # The parameter, a copy of the newest version, and one for each of the two names.
        assert weights.held_bytes() in (4, 8, 12, 16)


def test_only_stored_contents_and_those_that_are_shown_are_available():
    """Any other has to be computed from the newest version, which is always available."""
    _, working = working_parameter()
    working.show("ahead", plus(10))
    working.keep("forward", "ahead", plus(10))
    assert [working.has(content) for content in (0, "ahead", "other")] == [True, True, False]
    working.show("other", plus(20))
    assert [working.has(content) for content in (0, "ahead", "other")] == [True, False, True]
