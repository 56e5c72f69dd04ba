"""Parameters that are frozen or thawed between batches, in all places that hold them."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.runtime.trainability import Trainability


def parameter(*, trains=True):
    """Return a parameter."""
    return nn.Parameter(torch.zeros(1), requires_grad=trains)


class Counter:
    """Counts calls of `refresh`."""

    def __init__(self, **attributes):
        self.refreshed = 0
        self.__dict__.update(attributes)

    def refresh(self):
        """Count."""
        self.refreshed += 1


class Ranks:
    """Two stages of a model of three parameters on this process: "a" and "t" in stage 0, "b" and
    "t" in stage 1, which is tied and has a copy per stage; "r" and "s" are on another process.
    """

    def __init__(self, *, stream=False, steps=True, frozen=()):
        trains = {name: name not in frozen for name in "abtrs"}
        self.stage_parameters = [
            {parameter(trains=trains[name]): name for name in names} for names in ("at", "bt")
        ]
        self.model = {name: parameter(trains=trains[name]) for name in "abtrs"}
        self.stages = [
            SimpleNamespace(
                names=names, update=Counter(parameters=[p for p in names if p.requires_grad])
            )
            for names in self.stage_parameters
        ]
        self.unshared = []
        self.replicas, self.wave_replicas, self.tied = Counter(), Counter(), Counter()
        self.assembly = SimpleNamespace(
            stages=self.stages,
            names=lambda stage: stage.names,
            steps=steps,
            setting=SimpleNamespace(
                schedule=SimpleNamespace(name="mine", stream=object() if stream else None)
            ),
            interpreters={0: SimpleNamespace(replicas={0: self.replicas})},
            wave_replicas={0: {1: self.wave_replicas}},
            tied={0: self.tied},
            check_unshared=lambda what, remedy: self.unshared.append((what, remedy)),
        )
        self.global_step = SimpleNamespace(epoch=0, trained=set())
        self.trainability = Trainability(
            self.assembly, self.global_step, SimpleNamespace(named_parameters=self.model.items)
        )

    def holders(self, name):
        """Return all places of a parameter."""
        places = [
            place
            for names in self.stage_parameters
            for place, other in names.items()
            if other == name
        ]
        return [*places, self.model[name]]

    def flags(self, name):
        """Return whether each place trains."""
        return [place.requires_grad for place in self.holders(name)]

    def refreshed(self):
        """Return how often each list of parameters was renewed."""
        updates = [stage.update.refreshed for stage in self.stages]
        return [
            *updates,
            self.replicas.refreshed,
            self.wave_replicas.refreshed,
            self.tied.refreshed,
        ]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_change_of_one_holder_is_one_of_all(place):
    """A tied weight is frozen in either stage or in the model, and thawed again elsewhere."""
    ranks = Ranks()
    ranks.holders("t")[place].requires_grad_(False)
    ranks.trainability.check()
    assert ranks.flags("t") == [False] * 3
    assert ranks.flags("a") == ranks.flags("b") == [True] * 2
    assert (ranks.trainability.epoch, ranks.global_step.epoch) == (1, 1)
    assert ranks.refreshed() == [1] * 5
    assert ranks.global_step.trained == set(), "what is frozen is not thawed"
    ranks.holders("t")[(place + 1) % 3].requires_grad_(True)
    ranks.trainability.check()
    assert ranks.flags("t") == [True] * 3
    assert ranks.global_step.epoch == 2
    assert ranks.global_step.trained == {"t"}
    assert ranks.refreshed() == [2] * 5


def test_nothing_happens_without_a_change():
    """Neither to the lists nor to the signatures of batches."""
    ranks = Ranks(frozen=["b"])
    batch = SimpleNamespace(training=True, signature="form")
    assert ranks.trainability.checked(batch) is batch
    assert batch.signature == "form"
    assert ranks.refreshed() == [0] * 5
    assert ranks.unshared == []


def test_signatures_of_training_carry_the_number_of_changes():
    """Gradients have other forms then; an evaluation has none, and looks at nothing."""
    ranks = Ranks()
    ranks.model["a"].requires_grad_(False)
    evaluation = SimpleNamespace(training=False, signature="form")
    assert ranks.trainability.checked(evaluation).signature == "form"
    assert ranks.trainability.epoch == 0
    for expected in ("form+1", "form+1"):
        batch = SimpleNamespace(training=True, signature="form")
        assert ranks.trainability.checked(batch).signature == expected
    ranks.model["b"].requires_grad_(False)
    batch = SimpleNamespace(training=True, signature="form")
    assert ranks.trainability.checked(batch).signature == "form+2"
    assert len(ranks.unshared) == 2
    assert ranks.unshared[0][0] == "to freeze or thaw parameters"


def test_parameters_of_other_processes_count_as_changes_and_change_nothing_here():
    """All processes count the same; one that no process refers to any more is no change."""
    ranks = Ranks()
    ranks.model["r"].requires_grad_(False)
    ranks.trainability.check()
    assert (ranks.trainability.epoch, ranks.global_step.epoch) == (1, 1)
    assert ranks.refreshed() == [0] * 5
    ranks.trainability.check()
    assert ranks.trainability.epoch == 1
    assert len(ranks.unshared) == 1
    del ranks.model["r"]
    gc.collect()
    ranks.trainability.check()
    assert ranks.trainability.epoch == 1
    assert len(ranks.unshared) == 1
    assert ranks.model["s"].requires_grad, "another one, which nothing has changed"


@pytest.mark.parametrize("name", ["b", "r"])
def test_a_stream_refuses_to_train_what_it_has_no_versions_of(name):
    """By all processes alike: also what another one holds."""
    ranks = Ranks(stream=True, frozen=[name])
    ranks.model[name].requires_grad_(True)
    for _ in range(2):  # the caller may try the next batch
        with pytest.raises(SettingError, match=f"^{name} had requires_grad=False when the pip"):
            ranks.trainability.check()
        assert (ranks.trainability.epoch, ranks.global_step.epoch) == (0, 0)
        assert ranks.refreshed() == [0] * 5
    ranks.model[name].requires_grad_(False)
    ranks.trainability.check()
    assert ranks.trainability.epoch == 0


@pytest.mark.parametrize("name", ["b", "r"])
def test_a_stream_freezes_and_thaws_what_it_has_versions_of(name):
    """And a stream without an optimizer keeps no versions."""
    ranks = Ranks(stream=True)
    for trains in (False, True):
        ranks.model[name].requires_grad_(trains)
        ranks.trainability.check()
    assert ranks.trainability.epoch == 2
    without = Ranks(stream=True, steps=False, frozen=[name])
    without.model[name].requires_grad_(True)
    without.trainability.check()
    assert without.trainability.epoch == 1


def test_a_refusal_names_three_parameters():
    """And says that there are more."""
    ranks = Ranks(stream=True, frozen="abt")
    for name in "abt":
        ranks.model[name].requires_grad_(True)
    with pytest.raises(SettingError, match=r"^a, t, b had requires_grad=False"):
        ranks.trainability.check()
    many = Ranks(stream=True, frozen="abt")
    many.trainability._check_stream([])
    with pytest.raises(SettingError, match=r"^a, b, c, \.\.\. had requires_grad=False"):
        many.trainability._check_stream(list("abcd"))


def test_a_change_that_shared_layers_refuse_is_refused_again():
    """Nothing has been applied; without the change, training goes on."""
    for name in "ar":
        ranks = Ranks()

        def refuse(what, remedy):
            raise SettingError(f"{what}: {remedy}")

        ranks.assembly.check_unshared = refuse
        ranks.model[name].requires_grad_(False)
        for _ in range(2):
            with pytest.raises(SettingError, match=r"^to freeze or thaw parameters: set requires_"):
                ranks.trainability.check()
        assert ranks.flags("b") == [True] * 2
        assert (ranks.trainability.epoch, ranks.refreshed()) == (0, [0] * 5)
        ranks.model[name].requires_grad_(True)
        ranks.trainability.check()
        assert ranks.trainability.epoch == 0


def test_several_changes_between_two_batches_are_one():
    """Of stages here and of other processes, in both directions."""
    ranks = Ranks(frozen=["b"])
    ranks.model["a"].requires_grad_(False)
    ranks.model["b"].requires_grad_(True)
    ranks.model["r"].requires_grad_(False)
    ranks.trainability.check()
    assert (ranks.flags("a"), ranks.flags("b"), ranks.flags("t")) == (
        [False] * 2,
        [True] * 2,
        [True] * 3,
    )
    assert ranks.trainability.epoch == 1
    assert ranks.global_step.trained == {"b"}
    assert ranks.refreshed() == [1] * 5
    assert len(ranks.unshared) == 1
    ranks.trainability.check()
    assert ranks.trainability.epoch == 1
