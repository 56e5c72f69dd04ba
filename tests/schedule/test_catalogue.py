"""The list of schedules: names, aliases, facts that hold, and numbers that are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ScheduleError, UnknownName
from penstock.schedule.catalogue import FAMILIES, schedule, schedules
from penstock.schedule.op import Schedule

TESTS = Path(__file__).parent / "families"


@pytest.mark.parametrize("name", sorted(schedules()))
def test_facts_hold_for_the_schedule_that_is_made(name):
    """Planners choose by these facts without making the schedule."""
    facts = schedules()[name]
    family_schedule = None
    for stages, micro_batches in ((4, 8), (2, 4), (8, 16), (3, 6), (1, 1)):
        try:
            family_schedule = schedule(name, stages, micro_batches)
            break
        except ScheduleError:
            continue
    assert family_schedule is not None, (
        f"{name} takes none of five common sizes, such as 4 stages and 8 micro-batches: accept one"
    )
    assert family_schedule.name == name == facts.name
    for fact in ("synchronous", "splits_backward"):
        actual, declared = getattr(family_schedule, fact), getattr(facts, fact)
        assert actual == declared, f"@register of {name} says {fact}={declared}: make it {actual}"
    assert facts.source, f"say where {name} is from: @register(..., source=...)"
    assert facts.stages_per_rank, f"@register of {name} needs stages_per_rank=, such as '1'"
    for alias in facts.aliases:
        assert (
            schedule(alias, family_schedule.stages, family_schedule.micro_batches)
            == family_schedule
        )


#: Facts that docstrings declare, and what a test of them mentions.
FACTS = {
    "makespan": r"makespan",
    "longest span": r"span",
    "per batch": r"seconds_per_batch",
    "per W batches": r"seconds_per_batch",
    "in flight": r"in_flight|peak",
    "staleness": r"staleness|gaps",
    "local staleness": r"staleness|gaps",
    "global staleness": r"staleness|gaps",
    "versions": r"versions",
    "memory": r"memory|limit",
    "weights": r"ranks_of_stage|gradients|copies|replicas",
}


@pytest.mark.parametrize("name", sorted(schedules()))
def test_the_docstring_declares_facts_and_the_familys_tests_hold_each(name):
    """A formula that no test evaluates is right on the day on which it is written."""
    make = FAMILIES.find(name).make
    facts = re.search(r"^    Facts .*?:$\n(.*?)^$", make.__doc__, re.MULTILINE | re.DOTALL)
    assert facts, f'add "Facts for equal costs ...:" to the docstring of {name}, as of `gpipe`'
    declared = re.findall(r"^        (\w[\w ]*?)(?:, [^ ].*?)?  +\S", facts[1], re.MULTILINE)
    assert "in flight" in declared, f"{name}: say how many micro-batches are in flight"
    assert {"makespan", "longest span", "per batch", "per W batches"} & set(declared), (
        f"{name}: say how long a batch takes, in closed form"
    )
    tests = TESTS / f"test_{make.__module__.rpartition('.')[2]}.py"
    assert tests.exists(), f"write {tests}, which holds these facts: {', '.join(declared)}"
    # What follows from its weight rule may be held by the tests of the rule.
    rule = schedules()[name].weights.replace("-", "_")
    of_rule = TESTS.parents[1] / "weights" / f"test_{rule}.py"
    text = "".join(path.read_text(encoding="utf-8") for path in (tests, of_rule) if path.exists())
    for fact in declared:
        words = FACTS.get(fact)
        assert words, f"{name}: name the fact {fact!r} as one of {', '.join(FACTS)}"
        assert re.search(words, text), (
            f"{tests} does not test {fact!r} of {name}: evaluate it there"
        )


def test_a_family_that_refuses_its_numbers_says_no_more_without_replicas():
    """The numbers in its message are those that were asked for."""
    with pytest.raises(ScheduleError) as caught:
        schedule("dualpipe-v", 4, 3)
    assert str(caught.value) == (
        "dualpipe-v of 4 stages takes 4 micro-batches or more and got 3; zb-v takes any number"
    )


def test_a_type_error_inside_a_family_is_passed_on_if_no_option_can_be_its_cause(monkeypatch):
    """It is a defect of the family, and no misspelt option."""

    def broken(stages, micro_batches, group=1):
        """Add a number to a text."""
        return stages + "micro-batches" * group

    entry = replace(FAMILIES.find("gpipe"), make=broken)
    monkeypatch.setattr(FAMILIES, "find", lambda name: entry)
    with pytest.raises(TypeError, match="unsupported operand"):
        schedule("gpipe", 2, 2)
    with pytest.raises(ScheduleError, match="gpipe cannot use group=3: unsupported operand"):
        schedule("gpipe", 2, 2, group=3)


def test_no_alias_hides_a_schedule():
    """An alias that is also a name, or stands twice, would make one of the two unreachable."""
    facts = schedules()
    words = [word for name in facts for word in (name, *facts[name].aliases)]
    assert len(words) == len(set(words))


def test_the_schedules_of_the_core_are_there():
    """A family file that does not import would silently not be listed."""
    assert {"gpipe", "1f1b", "naive"} <= set(schedules())


def test_an_unknown_schedule_is_refused_with_the_closest_name():
    """The message suggests the name that was probably meant."""
    with pytest.raises(
        UnknownName, match=r"no schedule called '1f1c'. Did you mean '1f1b'\? Known: 1f1b, .*gpipe"
    ) as caught:
        schedule("1f1c", 4, 8)
    assert (caught.value.kind, caught.value.name) == ("schedule", "1f1c")


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", True, None])
def test_numbers_that_count_nothing_are_refused(number):
    """A bool counts as an int in Python; as a number of stages it is a mistake."""
    with pytest.raises(ScheduleError, match="gpipe needs at least 1 of stages and got"):
        schedule("gpipe", number, 2)
    with pytest.raises(ScheduleError, match="gpipe needs at least 1 of micro-batches and got"):
        schedule("gpipe", 2, number)


def test_one_stage_and_one_micro_batch_are_enough():
    """The smallest schedule there is; the number of micro-batches may be left out."""
    assert str(schedule("gpipe", 1)) == str(schedule("gpipe", 1, 1)) == "rank 0 | 0F0 0B0 0U1"


def test_an_option_that_the_schedule_does_not_take_is_refused_by_name():
    """A misspelt option must not be ignored."""
    with pytest.raises(
        ScheduleError, match="1f1b does not take chunks: it takes warm_up, replicas"
    ):
        schedule("1f1b", 2, 2, chunks=3)


def test_only_the_options_that_it_does_not_take_are_blamed():
    """`chunks` is right: a message that names it too would send the reader the wrong way."""
    with pytest.raises(
        ScheduleError,
        match=r"^interleaved does not take split_backward: it takes chunks, group, replicas$",
    ):
        schedule("interleaved", 4, 4, chunks=2, split_backward=True)


def test_the_schedule_remembers_its_name_and_options():
    """Plans and drawings say how a schedule was made, by its own name and not by the alias."""
    dapple = schedule("dapple", 2, 2)
    assert (dapple.name, dapple.options) == ("1f1b", ())
    assert isinstance(dapple, Schedule)


def test_replicas_are_one_of_the_options():
    """A plan stores name, numbers and options, and no programs; one replica is what there is
    anyway.
    """
    gpipe = schedule("gpipe", 2, 4, replicas=[2, 1], backward_order="reverse")
    assert gpipe.options == (("replicas", (2, 1)), ("backward_order", "reverse"))
    assert schedule(gpipe.name, gpipe.stages, gpipe.micro_batches, **dict(gpipe.options)) == gpipe
    assert schedule("gpipe", 2, 4, replicas=1) == schedule("gpipe", 2, 4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chimera", {"concatenation": "doubling"}),
        ("autopipe", {"sliced": 3}),
        ("bpipe", {"ratio": 1}),
        ("terapipe", {"slices": 3}),
        ("seq1f1b", {"slice_shares": [0.75, 0.25]}),
        ("1f1b", {"warm_up": [8, 2, 1, 1], "replicas": [2, 1, 1, 1]}),
        ("interleaved", {"chunks": 2, "replicas": 2}),
    ],
)
def test_name_numbers_and_options_make_the_same_schedule_again(name, options):
    """What `options` is there for."""
    family_schedule = schedule(name, 4, 8, **options)
    assert (
        schedule(
            family_schedule.name,
            family_schedule.stages,
            family_schedule.micro_batches,
            **dict(family_schedule.options),
        )
        == family_schedule
    )


def test_facts_that_few_families_state_are_theirs_alone():
    """The defaults of all others: no costs, no causal model, a flush."""
    facts = schedules()
    assert {name for name, fact in facts.items() if fact.needs_costs} <= {"synthesised"}
    assert {name for name, fact in facts.items() if fact.causal} == {"seq1f1b", "terapipe"}
    assert {name for name, fact in facts.items() if fact.weights == "flush"} == {
        name for name, fact in facts.items() if fact.synchronous
    }


def test_replicas_of_a_stream_need_equal_parts_of_a_batch_and_others_do_not():
    """Without a flush a replica with less to do would overtake the others."""
    assert schedule("1f1b", 2, 5, replicas=2).micro_batches == 5
    assert schedule("pipedream", 2, 4, replicas=2).micro_batches == 4
    with pytest.raises(ScheduleError, match=r"replicas=2 .*: 5 is not a multiple of 2"):
        schedule("2bw", 2, 5, replicas=2)
    with pytest.raises(
        ScheduleError, match=r"needs at least 3 micro-batches, one for each .* got 2"
    ):
        schedule("1f1b", 2, 2, replicas=3)
    with pytest.raises(ScheduleError, match=r"the first replica has 3 of the 5 micro-batches\)"):
        schedule("chimera", 4, 5, replicas=2)
