"""Who compares settings with whom, and in which order: with stand-ins for stores and groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.errors import SettingError
from penstock.runtime import settings_check
from penstock.runtime.settings_check import (
    compare_optimizers,
    compare_settings,
    next_settings_exchange,
    place_on_hosts,
)


class Exchange:
    """An exchange that records."""

    def __init__(self, name, log):
        self.name, self.log, self.number, self.closed = name, log, 5, False

    def compare(self, description):
        """Record a comparison."""
        self.log.append(("compare", description))

    def exchange(self, value):
        """Return this value and that of another rank."""
        self.log.append(("exchange", value))
        return [value, {**value, "name": "other"}]


@pytest.fixture
def log(monkeypatch):
    """The calls in order; the job has an exchange, and each pipeline its own."""
    calls = []

    def record(name, result=None):
        def call(*args, **options):
            calls.append((name, *args, *options.items()))
            return result

        return call

    group = SimpleNamespace(settings_exchange=record("of pipeline", Exchange("pipeline", calls)))
    monkeypatch.setattr(settings_check, "join", record("join"))
    monkeypatch.setattr(
        settings_check.SettingsExchange, "next", record("of job", Exchange("job", calls))
    )
    monkeypatch.setattr(settings_check.RankGroup, "of_pipeline", record("group", group))
    monkeypatch.setattr(
        settings_check, "in_threads", lambda schedule, place: place.executor == "threads"
    )
    return calls


def place(executor="processes", mesh=None):
    """Return where ranks run."""
    return SimpleNamespace(executor=executor, mesh=mesh, deadline_s=7.0, device="a device")


SETTING = SimpleNamespace(schedule="a schedule")


def test_threads_have_nothing_to_compare_and_are_in_no_mesh(log):
    """No process group is made for them."""
    assert next_settings_exchange(SETTING, place("threads")) == (None, None)
    with pytest.raises(SettingError, match="mesh= is for ranks that are processes"):
        next_settings_exchange(SETTING, place("threads", mesh="a mesh"))
    assert not log


def test_a_pipeline_that_has_the_job_compares_with_all_of_it(log):
    """The process group is there before its store is used."""
    exchange, group = next_settings_exchange(SETTING, place())
    assert (exchange.name, group) == ("job", None)
    assert log == [("join", 7.0), ("of job", 7.0)]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_pipelines_of_a_mesh_compare_their_own_ranks(log, width):
    """Those whose processes share layers compare all processes of the job, which must agree."""
    mesh = SimpleNamespace(pipeline=(2, 0), width=width)
    exchange, group = next_settings_exchange(SETTING, place(mesh=mesh))
    assert exchange.name == "pipeline"
    assert exchange.spans_job == (width > 1)
    assert group.settings_exchange
    assert [entry[0] for entry in log] == ["join", "of job", "group", "of pipeline"]
    assert log[2][1] == (2, 0)
    assert (log[2][2].name, log[2][3]) == ("job", "a device")
    assert log[3][1:] == (5, 7.0)


def test_programs_go_to_the_processes_of_their_devices(log, monkeypatch):
    """By the names of the hosts of all ranks, which messages need later, too."""
    monkeypatch.setattr(settings_check, "Host", lambda **fields: fields["name"])
    monkeypatch.setattr(settings_check, "this_host", lambda: "this")
    monkeypatch.setattr(settings_check, "asdict", lambda host: {"name": host})
    monkeypatch.setattr(settings_check, "host_names", lambda hosts: [f"host {h}" for h in hosts])
    monkeypatch.setattr(settings_check, "place", lambda setting, hosts: (setting, hosts))
    assert place_on_hosts(None, SETTING) is SETTING
    exchange = Exchange("job", log)
    hosts = ["host this", "host other"]
    assert place_on_hosts(exchange, SETTING) == (SETTING, hosts)
    assert exchange.hosts == hosts


def test_settings_are_described_only_where_they_are_compared(log, monkeypatch):
    """It reads all weights."""
    monkeypatch.setattr(settings_check, "describe_run", lambda *args, **further: (*args, further))
    compare_settings(None, "model", SETTING, "training", score=3)
    assert not log
    compare_settings(Exchange("job", log), "model", SETTING, "training", score=3)
    assert log == [("compare", ("model", SETTING, "training", {"score": 3}))]


@pytest.mark.parametrize("steps", [False, True])
def test_the_comparison_ends_with_the_optimizers(log, monkeypatch, steps):
    """Also without any: a failure afterwards is none of the comparison's."""
    monkeypatch.setattr(settings_check, "describe_optimizers", lambda assembly: "optimizers")
    exchange = Exchange("job", log)
    compare_optimizers(exchange, SimpleNamespace(steps=steps))
    assert log == [("compare", "optimizers")] * steps
    assert exchange.closed
    compare_optimizers(None, None)
