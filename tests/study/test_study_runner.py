"""The runner: statuses, limits, resuming, and no process left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.study.catalogue import StudyEntry, study_entry
from penstock.study.cell import Cell, options
from penstock.study.records import Records
from penstock.study.run_study import run_study
from penstock.study.runner import RunOptions, pending_units, run_cells
from penstock.study.settings import Settings

MACHINE = {"cores": "2"}


def calls(folder: Path) -> list[str]:
    """What the fake's cells were called with."""
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_every_cell_gets_a_record_that_says_what_happened(fake, light_hosts, tmp_path, recorder):
    """A cell that is refused, lacks a package or fails leaves a row with its reason, and the next
    cells run; the second time nothing is left to run, and a retry runs those without a result.
    """
    entry = study_entry("fake-study")
    run = run_study(entry, Settings(), RunOptions(tmp_path), recorder)
    outcomes = {record.cell.schedule: (record.status, record.reason) for record in run.records}
    assert outcomes["works"] == ("ok", "")
    assert outcomes["refuses"] == ("refused", "SettingError: the fake refuses")
    assert outcomes["misses"][0] == "missing"
    assert "no_such_package" in outcomes["misses"][1]
    assert outcomes["fails"] == ("failed", "rank 0: ZeroDivisionError: the fake failed")
    assert run.records[0].outcome.seconds == (1.0, 2.0, 9.0)
    assert not Path(f"/proc/{run.records[0].outcome.extra['pid']}").exists()
    logs = list((tmp_path / "logs").glob("*fails*.txt"))
    assert "ZeroDivisionError" in logs[0].read_text()
    assert (recorder.pending, recorder.total) == (4, 4)
    table = run.report.pages[0].sections[0].blocks[0]
    assert table.rows[0][5] == 2.0, "the median of the raw times"
    run_study(entry, Settings(), RunOptions(tmp_path), recorder)
    assert recorder.pending == 0
    assert len(calls(tmp_path)) == 4
    run_study(entry, Settings(), RunOptions(tmp_path, retry=True), recorder)
    assert recorder.pending == 3


def test_a_cell_that_hangs_and_one_whose_host_dies_do_not_stop_the_others(
    fake, light_hosts, tmp_path, recorder
):
    """The limit kills the process group; two cells run at the same time."""
    entry = study_entry("fake-study")
    cells = [Cell("fake-study", "fake", name) for name in ("hangs", "works")]
    records = Records(tmp_path, "fake-study", MACHINE)
    run_cells(entry, cells, records, RunOptions(tmp_path, jobs=2, limit_s=5.0), recorder)
    statuses = {record.cell.schedule: record.status for record in records.of(cells)}
    assert statuses == {"hangs": "timeout", "works": "ok"}
    assert "within 5 s" in records.get(cells[0]).reason
    assert not is_running(int((tmp_path / "child.txt").read_text()))
    dead = Cell("fake-study", "fake", "kills")
    run_cells(entry, [dead], records, RunOptions(tmp_path, limit_s=20.0), recorder)
    assert records.get(dead).status == "failed"


def test_an_interrupted_study_goes_on_where_it_stopped(
    fake, light_hosts, tmp_path, recorder, monkeypatch
):
    """Ctrl-C between two cells: the first has its record, the second none, and no process stays."""
    entry = study_entry("fake-study")
    cells = [Cell("fake-study", "fake", "works", repetition=index) for index in range(3)]
    records = Records(tmp_path, "fake-study", MACHINE)

    def interrupt(record, left_s):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recorder, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_cells(entry, cells, records, RunOptions(tmp_path), recorder)
    again = Records(tmp_path, "fake-study", MACHINE)
    assert [record.cell.repetition for record in again.of(cells)] == [0]
    run_cells(entry, cells, again, RunOptions(tmp_path), recorder)
    assert calls(tmp_path) == ["works 0", "works 1", "works 2"]


def test_systems_that_raise_die_or_do_not_take_a_cell_have_rows_that_say_so(
    fake, light_hosts, tmp_path, recorder
):
    """Through the way by which every library is run."""
    entry = StudyEntry("systems", fake.FakeStudy, "")

    def cell(schedule, system="fake", **more):
        return Cell(
            "systems",
            system,
            schedule,
            model="mlp",
            model_options=options(layers=2),
            balance="2",
            data="random",
            batch=4,
            steps=2,
            **more,
        )

    cells = [
        cell("good"),
        cell("raises"),
        cell("dies"),
        cell("unknown"),
        cell("good", options=options(speed=1)),
        cell("good", micro_batches=3),
        cell("1f1b", "deepspeed"),
    ]
    records = Records(tmp_path, "systems", MACHINE)
    empty = tmp_path / "empty"
    empty.mkdir()
    profile_of_two_layers(tmp_path, cells[0])
    settings = RunOptions(tmp_path, limit_s=60.0, environments={"deepspeed": empty})
    run_cells(entry, cells, records, settings, recorder)
    outcomes = [(record.status, record.reason) for record in records.of(cells)]
    assert outcomes[0] == ("ok", "")
    assert len(records.get(cells[0]).outcome.seconds) == 2
    assert len(records.get(cells[0]).outcome.losses) == 2
    assert outcomes[1] == ("failed", "rank 0: ValueError: the fake raised")
    assert outcomes[2] == ("failed", "a process died in train")
    assert outcomes[3][0] == "refused"
    assert "no schedule 'unknown'; it has good" in outcomes[3][1]
    assert outcomes[4][0] == "refused"
    assert "no option 'speed'" in outcomes[4][1]
    assert outcomes[5][0] == "refused"
    assert "no 3 equal micro-batches" in outcomes[5][1]
    assert outcomes[6] == ("missing", "not installed: no module deepspeed")


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def profile_of_two_layers(folder: Path, cell: Cell) -> None:
    """Store a profile, so that none is measured."""
    from penstock.peers.cuts import Cuts
    from penstock.profile.profile import LayerProfile, Profile, Timing
    from penstock.study.train_cell import setup_of_cell

    timing = Timing((1, 8), (1.0, 8.0))
    layers = tuple(
        LayerProfile(f"layer{i}", "Linear", timing, timing, timing, timing, 1, 4, 0, 4.0, 4.0)
        for i in range(2)
    )
    (folder / "profiles").mkdir()
    path = Cuts(folder / "profiles", None)._path(setup_of_cell(cell), "profile.json")
    Profile(layers, "mlp", 4.0, 8, device="cpu").save(path)


def test_cells_in_turn_are_pending_together(tmp_path):
    """If one of a comparison has no record, all of it runs again: times of different runs are not
    compared.
    """
    entry = study_entry("libraries")
    cells = entry.study().cells(Settings())
    records = Records(tmp_path, "libraries", MACHINE)
    units = pending_units(entry, cells, records, retry=False)
    assert [len({(c.model, c.stages, c.micro_batches) for c in unit}) for unit in units] == [1, 1]
    assert sum(map(len, units)) == len(cells)


def test_hosts_see_only_the_folder_of_their_own_library(tmp_path, monkeypatch):
    """A library's folder is on the path of its own processes, not on this one's."""
    from penstock.peers.host import Host
    from penstock.peers.messages import PeerMissing

    monkeypatch.setattr("penstock.peers.host.ALWAYS", ())
    package = tmp_path / "folder" / "some_library.py"
    package.parent.mkdir()
    package.write_text("__version__ = '9.9'\n")
    host = Host(("some_library",), package.parent, tmp_path / "log.txt")
    try:
        assert host.ready()["some_library"] == "9.9"
    finally:
        host.end()
    without = Host(("some_library",), None, tmp_path / "log.txt")
    try:
        with pytest.raises(PeerMissing, match="no module some_library"):
            without.ready()
    finally:
        without.end()
    assert str(package.parent) not in os.environ.get("PYTHONPATH", "")
