"""`penstock profile --cluster`: measuring machines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.cluster.cluster import cluster


@pytest.fixture
def measured(monkeypatch):
    """What two ranks would find, without their minutes; the words that they were started with are
    kept.
    """
    from penstock.cluster.device import Device
    from penstock.cluster.machines import Cluster
    from penstock.measure.cluster import ClusterMeasurement, PairMeasurement, RankMeasurement
    from penstock.measure.fit import fit
    from penstock.measure.messages import SIZES, Times
    from penstock.ranks.processes import launch

    times = tuple(1e-4 + size / 1e9 for size in SIZES)
    pair = PairMeasurement(0, 1, Times(SIZES, times, times, 1.9), fit(SIZES, times))
    link = pair.fit.link(shared=True)
    device = Device(
        "cpu", 2**30, "cpu", (("float32", 5e10), ("bfloat16", 1e11)), 1e10, 2e-6, together=1.5
    )
    busy = tuple(
        (name, 1.5) for name in ("matmul float32", "matmul bfloat16", "conv", "memory", "ops")
    )
    ranks = tuple(RankMeasurement(rank, "here", device, busy) for rank in range(2))
    measurement = ClusterMeasurement(
        Cluster("local:2", (device,) * 2, 2, link, link, source="measured by a test"),
        ranks,
        (pair,),
        1.0,
    )
    started = []

    def launched(fn, ranks, *args, threads):
        started.append((ranks, args, threads))
        return [measurement] * ranks

    monkeypatch.setattr(launch, "launch", launched)
    return started


def test_what_was_found_is_shown_and_written(penstock, measured, tmp_path):
    """The file is what `penstock plan --cluster` takes."""
    path = tmp_path / "lab.yaml"
    result = penstock(
        "profile", "--cluster", "local:2", "--threads", 3, "--repeats", 2, "--out", path
    )
    assert result.status == 0
    assert measured == [(2, ("local:2", 2, 3), 3)]
    assert f"wrote {path}; plan for it with: penstock plan PROFILE --cluster {path}" in result.err
    assert cluster(path).link(0, 1).shared
    for words in (
        "local:2: 2 ranks on 1 node (cpu)",
        "100.0 us + 1 GB/s, shared (measured: off by 0%",
        "matmul bfloat16",
        "50 GFLOP/s",
        "x 1.90",
        "0-1     100.1 us",
        "memory to use",
    ):
        assert words in result.out


def test_ranks_of_one_host_are_said_to_share_its_card(measured, capsys):
    """Pairs on a slow link have times of short messages alone."""
    from penstock.cli.profiles.profile_cluster import _print_measurement
    from penstock.measure.cluster import PairMeasurement
    from penstock.measure.messages import SIZES, Times
    from penstock.ranks.processes import launch

    measurement = launch.launch(None, 1, threads=1)[0]
    inside = measurement.pairs[0]
    sizes, seconds = SIZES[:3], (1e-4, 2e-4, 0.06)
    network = PairMeasurement(0, 2, Times(sizes, seconds, seconds), inside.fit)
    ranks = [replace(measurement.ranks[0], rank=rank, host="ab"[rank // 2]) for rank in range(3)]
    _print_measurement(replace(measurement, ranks=tuple(ranks), pairs=(network, inside)))
    printed = capsys.readouterr().out
    assert "ranks 0 and 1 share the memory and the network card of a\n" in printed
    assert "of b" not in printed
    rows = [line.split() for line in printed.splitlines()]
    assert next(row for row in rows if row[:1] == ["0-2"])[1:5] == ["100.0", "us", "60.0", "ms"]


def test_json_has_every_time(penstock, measured):
    """For those who fit by themselves."""
    content = json.loads(penstock("profile", "--cluster", "local:2", "--json").out)
    assert content["cluster"]["devices"][0]["together"] == 1.5
    assert len(content["pairs"][0]["times"]["fresh_s"]) == len(
        content["pairs"][0]["times"]["sizes"]
    )


def test_one_process_is_measured_from_start_to_end(penstock, tmp_path):
    """The whole way once, in a real process."""
    path = tmp_path / "one.yaml"
    result = penstock("profile", "--cluster", "local:1", "--repeats", 1, "--out", path)
    assert result.status == 0
    assert cluster(path).devices[0].peak("float32") > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("local",), "--cluster local: must be local:N"),
        (
            ("8xH100-NVLink",),
            "must be local:N (N processes on this host) or `here`",
        ),
        (("local:0",), "--cluster local:0: N must be 1 to 64"),
        (("local:99999999",), "must be local:N"),
        (("here",), "torchrun did not start this process: use torchrun"),
        (("local:2", "--repeats", "0"), "threads 1 and repeats 0 must be 1 or more"),
        (
            ("local:2", "--model", "mlp", "--batch", "8"),
            "--model, --batch: for a model's profile",
        ),
        (
            ("local:2", "--out", "/nowhere/x.yaml"),
            "cannot write /nowhere/x.yaml: the folder /nowhere does not exist; create it first",
        ),
    ],
)
def test_wrong_words_are_refused_before_anything_is_started(
    penstock, measured, monkeypatch, words, message
):
    """Minutes of measuring must not end in a message that could have come at once."""
    monkeypatch.delenv("RANK", raising=False)
    result = penstock("profile", "--cluster", *words)
    assert result.status == 2
    assert message in result.err
    assert measured == []


def test_a_busy_host_is_said_to_be(penstock, measured, monkeypatch):
    """Figures from it are not those of the machine."""
    import os

    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 1.0, 1.0))
    assert "this host is busy: 99.0 programs" in penstock("profile", "--cluster", "local:2").err
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 1.0, 1.0))
    assert "busy" not in penstock("profile", "--cluster", "local:2").err
