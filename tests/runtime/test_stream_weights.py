"""The weight rules of the stages of a stream: their settings, checkpoints and peak numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import stream_weights
from penstock.runtime.stream_weights import StreamWeights
from penstock.weights.weight_uses import uses


class Rule:
    """A weight rule that records."""

    def __init__(self, site):
        self.site, self.drained = site, 0
        # Ranks and stages differ.
        self.peak_versions = 10 * site.stage + 1

    def drain(self):
        """Count."""
        self.drained += 1


@pytest.fixture
def rules(monkeypatch):
    """The rules that are made, in order."""
    made_rules = []

    def make(site):
        made_rules.append(Rule(site))
        return made_rules[-1]

    monkeypatch.setattr(stream_weights, "stage_weights", make)
    return made_rules


def assembly_of(schedule, balance, **options):
    """Return the assembly of an asynchronous pipeline of threads."""
    pipe = ps.Pipeline(
        [nn.Linear(2, 2) for _ in range(sum(balance))],
        balance=balance,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        executor="threads",
        device="cpu",
        **options,
    )
    return pipe._assembly


def test_every_stage_has_a_rule_with_its_own_uses_and_the_runs_options(rules):
    """Of its own stage: early ones are more stale. A restart makes new rules, which start from the
    present parameters.
    """
    schedule = ps.schedule("pipedream", stages=3)
    assembly = assembly_of(schedule, (1, 1, 1))
    rules.clear()
    setting = assembly.setting
    weights = StreamWeights(assembly)
    assert sorted(weights.by_rank) == [0, 1, 2]
    reference = uses(setting.schedule, setting.rule)
    for rank, by_stage in weights.by_rank.items():
        assert list(by_stage) == [rank]
        site = by_stage[rank].site
        assert site.stage == rank
        assert site.rule is setting.rule
        assert (site.pipelines, site.waves) == (1, None)
        assert site.update is assembly.interpreters[rank].stages[rank].update
        assert site.exchange is None
        assert site.staleness == reference.staleness(rank)
        assert site.stages == 3
        for number in (0, 1, 7):
            assert site.use(number) == reference.at(rank, number)
    # Stages, and not ranks, of which a stage may have several.
    assembly_of(ps.schedule("pipedream", 2, 2, replicas=(2, 1)), (1, 1))
    assert {rule.site.stages for rule in rules[-3:]} == {2}
    del rules[3:]
    first = weights.by_rank
    weights.restart()
    assert len(rules) == 6
    assert all(weights.by_rank[rank][rank] is not first[rank][rank] for rank in range(3))


def test_recomputed_forwards_may_read_newer_weights(rules):
    """In a stream a backward may, so recomputed values are not compared."""
    assembly = assembly_of(ps.schedule("pipedream", stages=2), (1, 1))
    for stage in assembly.stages:
        stage._compares = True
    StreamWeights(assembly)
    assert not any(stage._compares for stage in assembly.stages)


def test_a_rank_is_drained_alone(rules):
    """Ranks end their parts of a stream one by one."""
    weights = StreamWeights(assembly_of(ps.schedule("pipedream", stages=3), (1, 1, 1)))
    weights.drain(1)
    assert [weights.by_rank[rank][rank].drained for rank in range(3)] == [0, 1, 0]


def scripted(by_rank, holders, wave_stages=()):
    """Return the weights of ranks with these peak numbers of versions, by rank and stage.

    `wave_stages` are those whose replicas average after waves.
    """
    weights = StreamWeights.__new__(StreamWeights)
    groups = {index: object() for index in wave_stages}
    gathers = []

    def gather(rows, forms):
        gathers.append(forms)
        assert {row.dtype for (row,) in rows.values()} == {torch.int64}
        return rows

    def broadcast(value, source, form):
        assert gathers == [{rank: [form] for rank in range(len(by_rank))}]
        assert (form.shape, form.dtype, source) == ((len(holders),), "int64", 0)
        return value

    weights.by_rank = {
        rank: {index: SimpleNamespace(peak_versions=peak) for index, peak in rules.items()}
        for rank, rules in by_rank.items()
    }
    weights._assembly = SimpleNamespace(
        setting=SimpleNamespace(
            lengths=(1,) * len(holders), schedule=SimpleNamespace(ranks_of_stage=holders)
        ),
        world=SimpleNamespace(size=len(by_rank), gather=gather, broadcast=broadcast),
        interpreters={
            rank: SimpleNamespace(stages={index: (rank, index) for index in rules})
            for rank, rules in by_rank.items()
        },
        wave_replicas=dict.fromkeys(by_rank, groups),
    )
    return weights


def test_the_peak_number_of_versions_of_a_stage_is_that_of_its_worst_rank():
    """Stages of one rank may have unlike numbers, and a stage on several ranks, too."""
    by_rank = {0: {0: 4, 2: 1}, 1: {0: 2, 1: 3}, 2: {1: 5}}
    weights = scripted(by_rank, [[0, 1], [1, 2], [0]])
    assert weights.peak_versions() == (4, 5, 1)


def test_a_process_without_rank_0_gets_the_peak_numbers_from_it():
    """It gathers nothing."""
    weights = scripted({0: {0: 4}, 1: {1: 2}}, [[0], [1]])
    weights._assembly.world.gather = lambda rows, forms: {}
    received = []

    def broadcast(value, source, form):
        received.append(value)
        return torch.tensor([7, 8])

    weights._assembly.world.broadcast = broadcast
    assert weights.peak_versions() == (7, 8)
    assert received == [None]


def test_copies_that_average_after_waves_are_saved_each():
    """Others are equal, so that one of them is saved; numbers are those among the stage's ranks."""
    by_rank = {5: {0: 1, 1: 1}, 3: {1: 1}, 4: {0: 1}}
    holders = [[4, 5], [3, 5]]
    for wave_stages, copies in (((), (0, 0, 0, 0)), ((0,), (1, 0, 0, 0)), ((0, 1), (1, 1, 0, 0))):
        versions = scripted(by_rank, holders, wave_stages).versions()
        assert [(version.rank, version.stage) for version in versions] == [
            (5, (5, 0)),
            (5, (5, 1)),
            (3, (3, 1)),
            (4, (4, 0)),
        ]
        assert tuple(version.copy for version in versions) == copies


def test_any_rule_may_have_more_optimizers():
    """Of any stage of any rank."""
    weights = scripted({0: {0: 1, 2: 1}, 1: {1: 1}}, [[0], [1], [0]])
    rules = [rule for by_stage in weights.by_rank.values() for rule in by_stage.values()]
    for chosen in (None, *rules):
        for rule in rules:
            rule.more_optimizers = lambda has=rule is chosen: [object()] * has
        assert weights.has_more_optimizers() == (chosen is not None)


def test_a_rule_gets_the_options_of_the_run_and_defaults_for_the_others(rules):
    """Of the rule's own names."""
    options = {"warm_up": 3}
    assembly = assembly_of(
        "pipedream", (1, 1), micro_batches=1, weights="pipemare", weights_options=options
    )
    rule = assembly.setting.rule
    assert rule.with_defaults({}) != rule.with_defaults(options)
    assert [result.site.options for result in rules] == [rule.with_defaults(options)] * 2


def test_copies_that_average_after_waves_exchange_with_those_of_their_stage(rules):
    """Pipelines that take turns on one rank exchange nothing."""
    assembly = assembly_of("hetpipe", (1, 1), micro_batches=1)
    stream = assembly.setting.schedule.stream
    assert stream.waves is not None
    for rank, stages in assembly.wave_replicas.items():
        for index, group in stages.items():
            (site,) = [
                result.site
                for result in rules
                if result.site.update is assembly.interpreters[rank].stages[index].update
            ]
            assert site.waves is stream.waves
            assert site.pipelines == stream.pipelines
            assert site.exchange.replica is group
    # A rank may have stages of which no other rank has a copy.
    (index, group), *_ = assembly.wave_replicas[0].items()
    assembly.wave_replicas[0].clear()
    assembly.wave_replicas[0].update({7: object(), index: group})
    assert StreamWeights(assembly).by_rank[0][index].site.exchange.replica is group
    del assembly.wave_replicas[0][index]
    assert StreamWeights(assembly).by_rank[0][index].site.exchange is None
    turns = assembly_of("avgpipe", (1, 1), micro_batches=1)
    stream = turns.setting.schedule.stream
    sites = [result.site for result in rules[-2:]]
    assert [(site.pipelines, site.exchange) for site in sites] == [(stream.pipelines, None)] * 2
    assert stream.pipelines > 1
