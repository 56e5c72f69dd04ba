"""The comparison with peers: every system trains like plain training, and leaves no process behind.

Peers that need a separate environment are checked by the benchmark itself, at every run.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
SYSTEMS = (
    "penstock 1f1b",
    "penstock gpipe",
    "torch 1f1b",
    "torch interleaved",
    "ddp",
    "ddp accumulated",
    "plain, 1 thread",
    "floor: gloo",
    "floor: shared memory",
)


@pytest.fixture(scope="module")
def peers():
    """The benchmark's modules, which stand beside its run.py and not in a package."""
    before = set(sys.modules)
    sys.path.insert(0, str(PEERS))
    names = ("cells", "measuring", "processes", "rank", "report", "workloads", "adapters.catalogue")
    yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in names})
    sys.path.remove(str(PEERS))
    for name in set(sys.modules) - before:
        if str(PEERS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def bench(peers, tmp_path_factory):
    """One process that has loaded what all these systems need, and files for the MLP."""
    folder = tmp_path_factory.mktemp("peers")
    imports = ("torch", "torch.distributed.pipelining", "penstock.runtime.pipeline")
    anybody = replace(peers.catalogue.systems()["plain, 1 thread"], imports=imports)
    nursery = peers.processes.Nursery(anybody, None, folder / "log.txt")
    files = folder / "weights", folder / "gradients"
    names = peers.rank.reference(*files, "mlp")
    cell, cuts = peers.cells.Cell("mlp", 2, 4), peers.cells.Cuts((9, 7), (5, 4, 4, 3))
    yield SimpleNamespace(
        nursery=nursery, files=files, names=names, cell=cell, cuts=cuts, folder=folder
    )
    nursery.end()


def alive(pid: int) -> bool:
    """Whether a process is still there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def measured(peers, bench, wanted, rounds=1):
    """Rows by name, and the bound."""
    systems = peers.catalogue.systems()
    nurseries = {system.peer: bench.nursery for system in systems.values()}
    peers.measuring.ROUND_S = 0.0  # a step is enough here
    made = peers.measuring.Bench(
        nurseries, (rounds, rounds), None, lambda _: None, bench.folder / "errors.txt"
    )
    rows, bound = made.measure(
        bench.cell, bench.cuts, [systems[name] for name in wanted], bench.files, bench.names
    )
    return {row.system: row for row in rows}, bound


def test_every_system_has_plain_trainings_gradients_before_its_first_update(peers, bench):
    """A faster step that trains something else is no faster step."""
    rows, _ = measured(peers, bench, SYSTEMS)
    assert {name: row.note for name, row in rows.items() if row.note} == {}
    assert {name for name, row in rows.items() if not row.error < 1e-6} == set()
    assert all(len(row.seconds) == 1 and len(row.peaks) in {1, 2} for row in rows.values())


def test_no_rank_is_left_after_a_system_is_closed(peers, bench):
    """A remaining process would disturb all later measurements."""
    system = peers.catalogue.systems()["floor: shared memory"]
    team = peers.processes.Team(system, bench.nursery, bench.cell, bench.cuts, bench.files)
    assert all(alive(pid) for pid in team.pids)
    team.end()
    assert len(team.pids) == 2
    assert not any(alive(pid) for pid in team.pids)


def test_a_rank_that_raises_is_reported_and_the_others_are_ended(peers, bench):
    """One peer's failure must not end the comparison of the others."""
    rows, _ = measured(peers, bench, ("penstock 1f1b", "penstock auto", "plain, 1 thread"))
    assert rows["penstock auto"].note == "no plan was made"
    system = peers.catalogue.systems()["ddp"]
    bad = peers.cells.Cell("no such workload", 2, 4)
    with pytest.raises(
        peers.processes.PeerBroke, match=r"rank \d, make: KeyError: 'no such workload'"
    ):
        peers.processes.Team(system, bench.nursery, bad, bench.cuts, bench.files)


def test_a_peer_that_is_not_installed_is_a_note_and_no_error(peers, bench, tmp_path):
    """Few machines have all peers installed."""
    system = replace(peers.catalogue.systems()["torchgpipe never"], imports=("no_such_peer",))
    nursery = peers.processes.Nursery(system, tmp_path, tmp_path / "log.txt")
    try:
        with pytest.raises(peers.processes.NotInstalled, match=r"not installed \(no_such_peer\)"):
            peers.processes.Team(system, nursery, bench.cell, bench.cuts, bench.files)
    finally:
        nursery.end()


def test_the_bound_is_the_busiest_rank_and_its_unavoidable_waiting(peers):
    """The expected values are computed by hand for two stages, and for four stages on two cores,
    where the work of all ranks divided by the cores is larger.
    """
    bound = peers.measuring.bound_s
    assert (
        bound([(4.0, 8.0, 1.0), (1.0, 2.0, 0.5)], micro_batches=4, cores=2) == 13.0
    )  # the first stage never waits
    # The last works 12 s. Before its next: gradient back 2, update 1, forward 1; its own update of
    # 0.5 fits into that.
    assert bound([(4.0, 8.0, 1.0), (4.0, 8.0, 0.5)], micro_batches=4, cores=2) == 12.0 + 3.0 + 1.0
    assert bound([(1.0, 1.0, 1.0)] * 4, micro_batches=100, cores=2) == 6.0


def test_the_table_has_every_system_with_the_reason_if_not_measured(peers, bench):
    """A missing row would look like a system that was never considered."""
    rows, bound = measured(
        peers, bench, ("bound", "penstock 1f1b", "plain, 1 thread", "penstock auto")
    )
    found = peers.report.record(bench.cell, bench.cuts, list(rows.values()), bound)
    assert found["systems"]["penstock 1f1b"]["ratio"]["median"] == 1.0
    assert found["bound_ms"]["alone"] > 0
    text = peers.report.table(found)
    assert "plain, 1 thread" in text
    assert "penstock auto           no plan was made" in text
