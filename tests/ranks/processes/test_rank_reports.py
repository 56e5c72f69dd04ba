"""Success or failure of all ranks together, over a world that gathers within this process."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from penstock.errors import CheckpointDamaged, FileError, PlanError, RunError, SettingError
from penstock.ranks.processes.rank_reports import Report, attempt, check_reports, exchange


def world_of(size):
    """A world of ranks of this process, which notes the forms of what it gathers."""
    notes = []

    def gather(local, forms):
        assert local.keys() == forms.keys() == set(range(size))
        for rank, tensors in local.items():
            for tensor, form in zip(tensors, forms[rank], strict=True):
                assert (tuple(tensor.shape), tensor.dtype) == (form.shape, form.torch_dtype)
        notes.append([[form.shape for form in row] for row in forms.values()])
        # The order of arrival is not that of the ranks.
        return dict(reversed(list(local.items())))

    def broadcast(value, source):
        assert source == 0
        return value

    return SimpleNamespace(size=size, gather=gather, broadcast=broadcast, notes=notes)


def test_reports_come_in_the_order_of_ranks_with_their_values():
    """Whatever their lengths, and also where text is not ASCII."""
    reports = [
        Report(0, "a", {"x": [1, 2.5, None]}),
        Report(1, "é" * 50, "ü" * 300),
        Report(2, "b", None, ("SettingError", "no")),
    ]
    world = world_of(3)
    assert exchange(world, dict(enumerate(reports))) == reports
    assert world.notes[0] == [[(1,)]] * 3
    assert len(set(map(str, world.notes[1]))) == 3


def test_a_process_gathers_the_reports_of_all_ranks_whichever_are_its_own():
    """Rank 0 must know that each rank sends one; the others have their texts from it."""
    reports, forms = [Report(rank, "h", rank) for rank in range(3)], []
    texts = [f'[{rank}, "h", {rank}, null]' for rank in range(3)]

    def gather(local, forms_of_ranks):
        assert list(local) == [1]
        forms.append(forms_of_ranks)
        return {}

    def broadcast(value, source):
        assert (value, source) == (None, 0)
        return texts

    world = SimpleNamespace(size=3, gather=gather, broadcast=broadcast)
    assert exchange(world, {1: reports[1]}) == reports
    assert list(forms[0]) == [0, 1, 2]
    assert {(form.shape, form.dtype) for (form,) in forms[0].values()} == {((1,), "int64")}


def test_text_of_other_ranks_does_not_act_on_a_terminal():
    """Names of hosts and messages may have control characters."""
    report = Report(0, "a\x1b[2J", None, ("RunError", "one\r\ntwo\x07"))
    (received,) = exchange(world_of(1), {0: report})
    assert received.host == "a\\x1b[2J"
    assert received.error == ("RunError", "one\\r\n  two\\x07")


@pytest.mark.parametrize("error", [SettingError("no"), CheckpointDamaged("half"), RunError("x")])
def test_errors_of_penstock_are_reported_and_others_raised(error):
    """The latter are defects, or the user's Ctrl-C."""

    def fail():
        raise error

    report = attempt(3, fail)
    host = socket.gethostname()
    assert report == Report(3, host, None, (type(error).__name__, str(error)))
    assert attempt(2, lambda: [5]) == Report(2, host, [5])
    with pytest.raises(ZeroDivisionError):
        attempt(0, lambda: 1 / 0)


def failed(rank, kind="SettingError", text="no"):
    """A rank that has failed."""
    return Report(rank, f"h{rank}", None, (kind, text))


def message_of(reports, kind):
    """What is raised, and that it is of a class."""
    with pytest.raises(kind) as raised:
        check_reports(reports, "nothing was loaded")
    assert type(raised.value) is kind
    return str(raised.value)


def test_one_error_of_all_ranks_is_raised_as_it_is():
    """One that is not of all is listed with rank and host, and with what follows from it."""
    check_reports([Report(0, "a"), Report(1, "b")], "nothing")
    assert message_of([failed(0), failed(1)], SettingError) == "no"
    assert message_of([failed(0)], SettingError) == "no"
    text = "rank 1 on host h1: no\n(nothing was loaded)"
    assert message_of([Report(0, "a"), failed(1)], SettingError) == text
    text = "rank 0 on host h0: no\nrank 1 on host h1: yes\n(nothing was loaded)"
    assert message_of([failed(0), failed(1, text="yes")], SettingError) == text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SettingError", SettingError),
        ("CheckpointDamaged", CheckpointDamaged),
        ("RunError", RunError),
        ("FileError", FileError),
        ("PlanError", FileError),
        ("Path", FileError),
        ("SystemExit", FileError),
        ("_private", FileError),
    ],
)
def test_the_class_is_that_of_the_first_failed_rank_if_it_is_one_of_four(name, kind):
    """The name comes from another process: it must not choose any class of the module."""
    assert PlanError is not FileError
    assert "h1" in message_of([Report(0, "a"), failed(1, name), failed(2, "RunError")], kind)


def test_eight_errors_are_listed_and_others_counted():
    """A job has thousands of ranks."""
    eight = message_of([Report(99, "a"), *map(failed, range(8))], SettingError)
    assert eight.count(" on host ") == 8
    assert "more" not in eight
    ten = message_of([Report(99, "a"), *map(failed, range(10))], SettingError)
    assert ten.splitlines()[7:] == [
        "rank 7 on host h7: no",
        "and 2 more ranks",
        "(nothing was loaded)",
    ]
