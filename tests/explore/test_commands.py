"""The commands that reproduce the page."""

from __future__ import annotations

import json
import shlex

import pytest

from penstock.cli.flags.train_flags import settings_of_flags
from penstock.cli.main import status
from penstock.explore.commands import commands
from penstock.explore.evaluate import evaluate
from penstock.explore.state import parse_state
from penstock.training.config import TrainConfig, validate_settings

QUERIES = [
    "a=1f1b",
    "ranks=2&micro_batches=4&a=zb-v&forward=1ms,3ms&backward=2.5ms&update=10us",
    "a=interleaved&a.chunks=3&boundary_bytes=1MiB&bandwidth=1GB&latency=3us&links=shared",
    "a=1f1b&a.warm_up=4,4,2,1&overlap=no&boundary_bytes=7&bandwidth=1KB",
    "a=gpipe&a.backward_order=reverse&recompute=except_last&activation_bytes=1MiB&weight_bytes=7",
    "a=bpipe&a.ratio=1.5&activation_bytes=3,5,7,11",
    "ranks=3&micro_batches=6&a=1f1b&replicas=2,1,1&weight_bytes=1GiB",
    "ranks=3&micro_batches=6&a=1f1b&replicas=2",
    "ranks=3&micro_batches=4&a=pipedream&batches=2&weight_bytes=1GiB",
    "a=zb-auto&forward=1,1,2,1&a.memory_limit=3",
    "a=synthesised&a.max_rounds=0&a.split=no",
    "a=terapipe&a.slices=2",
    "ranks=1&a=naive&boundary_bytes=1KiB&bandwidth=1GB",
]


@pytest.mark.parametrize("query", QUERIES)
def test_the_simulate_command_prints_the_page_s_figures(query, capsys):
    """Every setting of the page is in the command, to the last digit."""
    state = parse_state(query)
    (panel,) = evaluate(state)
    words = shlex.split(commands(state, panel)[0].text)
    assert words[0] == "penstock"
    assert status([*words[1:], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    timeline = panel.result.timeline
    assert facts["makespan"] == timeline.makespan
    assert facts["bubble_ratio"] == timeline.bubble_ratio
    assert facts["peak_in_flight"] == list(timeline.peak_in_flight)
    peaks = timeline.peak_memory
    assert facts["peak_memory"] == (None if peaks is None else list(peaks))


@pytest.mark.parametrize("query", [*QUERIES, "memory_limit=2GiB&a=1f1b"])
def test_the_train_command_has_valid_settings(query):
    """It names a schedule, stages and ranks that go together, and says what it leaves out."""
    state = parse_state(query)
    (panel,) = evaluate(state)
    command = commands(state, panel)[1]
    words = shlex.split(command.text)
    assert words[:2] == ["penstock", "train"]
    flags = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(words[2::2], words[3::2], strict=True)
    }
    flags["model_options"] = [flags.pop("model_option")]
    for name in ("batch", "ranks", "micro_batches"):
        flags[name] = int(flags[name])
    config = validate_settings(settings_of_flags(flags), "the command")
    assert isinstance(config, TrainConfig)
    whole = panel.result.whole
    assert (config.schedule, config.stages, config.ranks) == (
        whole.name,
        whole.stages,
        whole.ranks,
    )
    assert config.batch % config.micro_batches == 0
    assert ("planner chooses" in command.about) == bool(panel.options or state.replicas != (1,))


def test_a_schedule_that_does_not_fit_has_no_commands():
    """They would fail."""
    state = parse_state("ranks=3&a=chimera")
    assert commands(state, evaluate(state)[0]) == ()
