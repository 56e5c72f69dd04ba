"""Every asynchronous rule, run by the pipeline, has the losses and weights of its paper's update
equation: `asynchronous.py`.

Models in double precision agree to 1e-9 in every loss of 16 batches, twice as many as are ever under
way, and in all weights; any two rules differ by 1e-5 and more. Rules with several copies of the
weights take 28 batches, for each copy has a part of them.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from tests.conformance.async_cases import LEARNING, Case, assert_same, run_all
from tests.conformance.asynchronous import REFERENCES
from tests.selection import selected_parameters

import penstock as ps
from penstock.ranks.processes.launch import launch
from penstock.weights.compatibility import rules

ANY = ("sgd", "momentum", "adam", "adamw")
#: The optimizers that a rule is run with, by turns.
TAKES = {
    "stash": (*ANY, "adamw, two groups", "rmsprop"),
    "vertical-sync": ANY,
    "double-buffer": ANY,
    "none": ANY,
    "spectrain": ("momentum",),
    "xpipe": ("adam", "adamw", "adamw, two groups"),
    "pipeoptim": (*ANY, "amsgrad", "rmsprop", "adamw, two groups"),
    "pipemare": ANY,
    "wpipe": ANY,
    "avgpipe": ANY,
    "hetpipe": ANY,
}
#: The schedule that is made for a rule, where it is not plain 1F1B without flushes.
OWN_SCHEDULE = {
    "double-buffer": "2bw",
    "xpipe": "xpipe",
    "wpipe": "wpipe",
    "avgpipe": "avgpipe",
    "hetpipe": "hetpipe",
}


def sizes(rule):
    """Ranks and micro-batches that the rule takes."""
    least = {"double-buffer": lambda ranks: ranks, "wpipe": lambda ranks: 2 * (ranks - 1)}.get(
        rule, lambda ranks: 1
    )
    counts = {"spectrain": (1,), "double-buffer": (2, 3, 4), "wpipe": (2, 4, 6)}.get(
        rule, (1, 2, 4)
    )
    valid = [(ranks, m) for ranks, m in itertools.product((2, 3, 4), counts) if m >= least(ranks)]
    if len(valid) == 9 and len(TAKES[rule]) <= 4:
        # Of nine sizes four, in which every number stands: one for each optimizer.
        return valid[1::2]
    return valid


def copies_of(rule, number):
    """How many copies of the weights there are, in the schedule's words and in the reference's."""
    pipelines = 2 + number % 2
    if rule == "avgpipe":
        words = {"pipelines": pipelines}
        return {"making": words, "reference": words, "updates": 28}
    if rule == "hetpipe":
        words = {"virtual_workers": pipelines, "in_flight": 2 + number % 4, "distance": number % 2}
        return {"making": words, "reference": words, "updates": 28}
    return {}


def grid():
    """Every rule in every size; optimizers and models by turns."""
    for rule, optimizers in TAKES.items():
        for number, (ranks, m) in enumerate(sizes(rule)):
            models = [
                name
                for name, learning in LEARNING.items()
                if ranks * (1 + (rule == "wpipe")) in learning.cuts
            ]
            yield Case(
                rule,
                ranks,
                m,
                optimizers[number % len(optimizers)],
                models[(number + number // 4) % len(models)],
                OWN_SCHEDULE.get(rule, "pipedream"),
                **copies_of(rule, number),
            )


CASES = list(grid())
MORE = [
    Case("double-buffer", 3, 3, "adam"),
    Case("xpipe", 4, 2, "adam"),  # on the plain stream
    Case("pipemare", 3, 2, "momentum", options={"decay": 0.5, "annealing": 10.0}),
    Case("pipemare", 4, 1, "adamw", options={"annealing": 0.0}),
    Case("pipemare", 4, 2, "sgd", options={"lockstep": 1.0}),
    Case("pipemare", 3, 2, "momentum", options={"warm_up": 6.0}),
    Case("pipemare", 4, 1, "adam", options={"warm_up": 5.0, "annealing": 0.0}),
    *(
        Case(
            "hetpipe",
            ranks,
            1,
            "momentum, plain",
            schedule="hetpipe",
            making=words,
            reference=words,
            updates=40,
        )
        for ranks, words in (
            (3, {"virtual_workers": 2, "in_flight": 5, "distance": 2}),
            (1, {"virtual_workers": 2, "in_flight": 3, "distance": 0}),
            (2, {"virtual_workers": 1, "in_flight": 3, "distance": 0}),
        )
    ),
    Case("stash", 3, 2, "adam", dtype=torch.float32),
    Case("pipeoptim", 3, 2, "adam", dtype=torch.float32),
    *(
        Case(rule, 4, 1, "momentum", recompute="always")
        for rule in ("stash", "none", "pipemare", "spectrain", "pipeoptim")
    ),
    Case("xpipe", 4, 1, "adam", recompute="always"),
    Case("double-buffer", 2, 4, "adam", recompute="except_last"),
    Case("stash", 1, 2, "adam"),
    Case("double-buffer", 1, 1, "momentum"),
    Case("none", 1, 4, "sgd"),
    Case("stash", 4, 3, "momentum", "conv"),
    Case("none", 4, 3, "adam", "gpt"),
    Case("pipeoptim", 4, 5, "adamw"),
]
"""Rules on schedules that are not their own, options, recomputing, single stages, and other sizes."""


@cache
def expected(case):
    """By the reference."""
    return case.expected()


def test_every_rule_of_the_catalogue_has_a_reference():
    """A rule without one would be believed for its name."""
    assert set(rules(synchronous=False)) == set(REFERENCES) - {"flush"} == set(TAKES)


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_updates_of_every_rule_equal_its_papers_equation(case):
    """Unequal stages, every number of ranks and micro-batches that the rule takes, optimizers and
    models by turns.
    """
    assert_same(case.run(), expected(case), case)


def in_processes(ranks):
    """All rules whose pipeline has this number of processes. HetPipe's two virtual workers take twice
    the ranks of one. The equations are held against more batches, and more numbers of stages, in
    threads; here messages are, with one neighbour and with two.
    """
    for number, (rule, optimizers) in enumerate(TAKES.items()):
        m = {"spectrain": 1, "double-buffer": ranks, "wpipe": max(2, 2 * (ranks - 1))}.get(rule, 2)
        if rule != "hetpipe" and ranks <= 4:
            yield Case(
                rule,
                ranks,
                m,
                optimizers[(number + ranks) % len(optimizers)],
                schedule=OWN_SCHEDULE.get(rule, "pipedream"),
                **{"updates": 12, **copies_of(rule, 2)},
            )
    if ranks % 2 == 0:
        yield Case(
            "hetpipe",
            ranks // 2,
            1,
            "momentum, plain",
            schedule="hetpipe",
            **copies_of("hetpipe", 2),
        )


IN_PROCESSES = {ranks: list(in_processes(ranks)) for ranks in (2, 4, 6)}


@pytest.fixture(scope="module")
def played(request):
    """What every rank of a case came to, by number of ranks and number of the case. One launch for
    all rules that are selected, since it costs seconds.
    """
    selected = selected_parameters(request, "ranks", "number")

    @cache
    def play_all(ranks):
        numbers = [number for other, number in selected if other == ranks]
        cases = [IN_PROCESSES[ranks][number] for number in numbers]
        results = launch(run_all, ranks, cases, threads=1)
        return dict(zip(numbers, zip(*results, strict=True), strict=True))

    return lambda ranks, number: play_all(ranks)[number]


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        pytest.param(ranks, number, id=f"{ranks}-{case}")
        for ranks, cases in IN_PROCESSES.items()
        for number, case in enumerate(cases)
    ],
)
def test_the_same_in_processes_of_their_own(played, ranks, number):
    """Real ranks and real messages: every rule in two stages and in four."""
    case = IN_PROCESSES[ranks][number]
    first, *others = played(ranks, number)
    assert_same(first, case.expected(), case)
    for losses, state in others:
        assert torch.equal(torch.stack(losses), torch.stack(first[0]))
        assert state == {}


def test_unequal_micro_batches_and_a_short_last_batch_are_weighed_by_their_samples():
    """7 samples in 4 parts are 2, 2, 2, 1; the last batch has fewer samples than micro-batches."""
    for rule, optimizer in (
        ("stash", "momentum"),
        ("double-buffer", "adam"),
        ("none", "adam"),
        ("xpipe", "adam"),
    ):
        case = Case(rule, 3, 4, optimizer)
        batches = case.batches([7] * 11 + [2])
        pipe = case.pipeline()
        actual = list(pipe.train(batches)), pipe.state_dict()
        assert_same(actual, case.expected(batches=batches), case)


REFUSED = [
    (
        Case("double-buffer", 4, 2, "sgd"),
        "'double-buffer' needs at least as many micro-batches .* pipedream has 2 .* and 4 stages. Give 4",
    ),
    (
        Case("double-buffer", 4, 2, "sgd", schedule="2bw"),
        "2bw in 4 stages .* enough with 4 or more .* not with 2",
    ),
    (
        Case("wpipe", 3, 2, "sgd", schedule="wpipe"),
        "wpipe on 3 ranks .* enough with 4 or more .* with 2 some gradients would be 2 updates",
    ),
    (
        Case("wpipe", 2, 1, "sgd"),
        "no gradient more than 1 update old, and here one would be 3 old on stage 0",
    ),
    (
        Case("spectrain", 2, 1, "adam"),
        "'spectrain' has no formula for Adam: it predicts by the momentum of SGD",
    ),
    (Case("spectrain", 2, 1, "sgd"), "'spectrain' has no formula for SGD with momentum=0"),
    (
        Case("spectrain", 2, 2, "momentum"),
        "'spectrain' has distances for batches of one micro-batch, and pipedream has 2",
    ),
    (
        Case("xpipe", 2, 2, "momentum"),
        "'xpipe' has no formula for SGD: .* it goes with Adam and AdamW",
    ),
    (
        Case("flush", 2, 2, "sgd"),
        "'flush' does not go with pipedream, which is asynchronous, .* stash",
    ),
    (
        Case("stash", 2, 2, "sgd", schedule="1f1b"),
        "'stash' does not go with 1f1b, which is synchronous, .* flush",
    ),
    (
        Case("avgpipe", 3, 2, "sgd"),
        "'avgpipe' averages several copies .* pipedream has one: take the schedule 'avgpipe'",
    ),
    (
        Case("hetpipe", 3, 2, "sgd"),
        "'hetpipe' is for copies of stages .* pipedream has none: take the schedule 'hetpipe'",
    ),
    (
        Case("stash", 3, 2, "sgd", schedule="avgpipe"),
        "avgpipe has 2 copies of the weights that take turns",
    ),
    (
        Case("stash", 3, 2, "sgd", schedule="hetpipe"),
        "in hetpipe copies of a stage do not synchronise at every U",
    ),
    (
        Case("hetpipe", 2, 1, "sgd", schedule="hetpipe", making={"distance": -1}),
        "hetpipe takes distance of 0 or more, not -1",
    ),
    (
        Case("stash", 2, 2, "sgd", options={"decay": 1.0}),
        "'stash' has no option decay: it takes none",
    ),
    (
        Case("pipemare", 2, 2, "sgd", options={"decay": 1.5}),
        "decay is above 0 and below 1, not 1.5",
    ),
]


@pytest.mark.parametrize(("case", "words"), [pytest.param(*row, id=str(row[0])) for row in REFUSED])
def test_what_does_not_go_together_is_refused_with_the_reason_and_a_way_out(case, words):
    """Before anything runs: the schedule, the optimizer or the option that a rule's paper has no
    answer for.
    """
    with pytest.raises(ps.PenstockError, match=words):
        case.pipeline()


@pytest.mark.parametrize("rule", TAKES)
def test_no_case_would_pass_by_training_synchronously(rule):
    """Staleness must show in the losses of every case by far more than the tolerance, or the case
    proves nothing.
    """
    for case in CASES:
        if case.rule == rule:
            losses, plain = (
                torch.stack(run[0][:12]) for run in (expected(case), case.synchronous(12))
            )
            assert (losses - plain).abs().max() > 1e-5, str(case)
