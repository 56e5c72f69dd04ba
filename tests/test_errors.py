"""Exceptions: one base class, values as attributes, and copies that keep them."""

from __future__ import annotations

import copy
import pickle

import pytest

from penstock import errors
from penstock.errors import (
    DeadlineExceeded,
    FileError,
    Finding,
    MissingExtra,
    PeerFailed,
    PenstockError,
    RankDied,
    RanksDiffer,
    RunError,
    ScheduleError,
    StageFailed,
    UnknownName,
)

EXAMPLES = [
    (
        UnknownName("schedule", "zb-h1", ["zb_h1", "gpipe"]),
        "no schedule called 'zb-h1'. Did you mean 'zb_h1'? Known: zb_h1, gpipe",
        {"kind": "schedule", "name": "zb-h1", "valid_names": ("zb_h1", "gpipe")},
    ),
    (FileError("plan.json is not JSON"), "plan.json is not JSON", {}),
    (
        MissingExtra("tensorboard", "metrics", "writing curves"),
        "writing curves needs tensorboard; install it with: pip install 'penstock[metrics]'",
        {"package": "tensorboard", "extra": "metrics", "purpose": "writing curves"},
    ),
    (
        ScheduleError("mine is not sound", [Finding("once", "0F0 stands twice", 1, "0F0")]),
        "mine is not sound",
        {"findings": (Finding("once", "0F0 stands twice", 1, "0F0"),)},
    ),
    (
        StageFailed(5, 2, "2B3", 117, "ZeroDivisionError: division by zero"),
        "rank 5 (stage 2) failed in 2B3 of step 117: ZeroDivisionError: division by zero",
        {
            "rank": 5,
            "stage": 2,
            "op": "2B3",
            "step": 117,
            "cause": "ZeroDivisionError: division by zero",
        },
    ),
    (
        PeerFailed(1, "0F3 from rank 0", "rank 0 failed in 0F3"),
        "rank 0 failed in 0F3 (rank 1 was stopped while it waited for 0F3 from rank 0)",
        {"rank": 1, "waited_for": "0F3 from rank 0", "reason": "rank 0 failed in 0F3"},
    ),
    (
        DeadlineExceeded(1, "0F3 from rank 0", 61.4, ["rank 0 waits for 1B0 from rank 1"]),
        "rank 1 has waited 61 s for 0F3 from rank 0, past its deadline\n  rank 0 waits for 1B0 from rank 1",
        {
            "rank": 1,
            "waited_for": "0F3 from rank 0",
            "seconds": 61.4,
            "other_ranks": ("rank 0 waits for 1B0 from rank 1",),
        },
    ),
    (
        RanksDiffer("seed: 0 on rank 0; 1 on rank 1", ["seed"]),
        "seed: 0 on rank 0; 1 on rank 1",
        {"differences": ("seed",)},
    ),
    (
        RankDied(3, 4242, "was killed by signal 9", "; ranks 0, 1 and 2 were stopped"),
        "rank 3 (pid 4242) was killed by signal 9; ranks 0, 1 and 2 were stopped",
        {"rank": 3, "pid": 4242, "exit_reason": "was killed by signal 9"},
    ),
]
every_error = pytest.mark.parametrize(
    ("error", "text", "fields"), EXAMPLES, ids=[type(error).__name__ for error, *_ in EXAMPLES]
)


@every_error
def test_an_error_says_what_where_and_which_numbers(error, text, fields):
    """Every value that the text quotes is a field as well, so that tools need not parse it."""
    assert str(error) == text
    assert {name: getattr(error, name) for name in fields} == fields


@every_error
def test_an_error_is_whole_after_a_copy(error, text, fields):
    """Python rebuilds an exception from its text alone, which here lacked arguments: a process pool
    then broke on it.
    """
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == text
        assert {name: getattr(other, name) for name in fields} == fields


def test_every_error_is_of_the_family_and_of_a_kind_that_python_knows():
    """`except penstock.PenstockError` catches all, and `except ValueError` what it always did."""
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(classes) >= 15
    for kind in classes:
        assert issubclass(kind, PenstockError)
        assert kind is PenstockError or issubclass(kind, (ValueError, RuntimeError, ImportError))
    assert issubclass(StageFailed, RunError)


def test_a_schedule_error_without_findings_has_none():
    """Families refuse numbers with a text alone."""
    assert ScheduleError("gpipe needs at least 1 of stages").findings == ()
