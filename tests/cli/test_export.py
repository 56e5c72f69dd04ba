"""`penstock export`, and what `penstock verify --csv` says of files with transfers."""

from __future__ import annotations

import json

import pytest

from penstock.schedule.catalogue import schedule
from penstock.schedule.torch_csv.files import from_csv, to_csv

SMALL = ("--schedule", "zb-v", "--stages", 4, "--micro-batches", 4)


def test_export_prints_a_schedule_for_torch(penstock):
    """Into a pipe, with nothing else among it."""
    result = penstock("export", *SMALL)
    assert (result.status, result.out, result.err) == (0, to_csv(schedule("zb-v", 4, 4)), "")


@pytest.mark.parametrize(
    ("flags", "form"), [((), "compute_only"), (("--communication",), "compute_comms")]
)
def test_export_writes_a_file_and_says_how_to_load_it(penstock, tmp_path, flags, form):
    """torch must be told the form, and which stages to build on which rank."""
    path = tmp_path / "schedule.csv"
    result = penstock("export", *SMALL, "--to", path, *flags)
    assert (result.status, result.out) == (0, "")
    assert result.err.splitlines() == [
        f"wrote {path}: load it with _PipelineScheduleRuntime._load_csv('{path}', format='{form}')",
        "  rank 0 holds stages 0 3",
        "  rank 1 holds stages 1 2",
    ]
    assert from_csv(path.read_text()).programs == schedule("zb-v", 4, 4).programs
    assert penstock("verify", "--csv", path).status == 0
    facts = json.loads(penstock("simulate", "--csv", path, "--json").out)
    assert facts["makespan"] == json.loads(penstock("simulate", *SMALL, "--json").out)["makespan"]


def test_export_adds_transfers_to_a_file(penstock, tmp_path):
    """One's own order, made ready for torch."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    out = penstock("export", "--csv", path, "--communication").out
    assert out == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
    )


def test_export_proves_a_schedule_before_it_writes(penstock, tmp_path):
    """A file that stands still in torch tells less than we do here."""
    path = tmp_path / "bad.csv"
    path.write_text("0B0,0F0\n")
    result = penstock("export", "--csv", path, "--to", tmp_path / "out.csv")
    assert result.status == 2
    assert "rank 0 cannot start 0B0: it needs 0F0 on rank 0" in result.err
    assert not (tmp_path / "out.csv").exists()


def test_export_says_where_it_cannot_write(penstock, tmp_path):
    """The path is one of the words, and every command exits with status 2 for it."""
    result = penstock("export", *SMALL, "--to", tmp_path / "missing" / "schedule.csv")
    assert result.status == 2
    assert "cannot write" in result.err
    assert "the folder" in result.err
    assert "does not exist; create it first" in result.err


@pytest.mark.parametrize("command", [("export", "--to"), ("draw",)])
def test_a_schedule_that_is_given_as_a_file_is_refused_with_its_flag(penstock, tmp_path, command):
    """Nothing else tells that the first word is a file."""
    name, *to = command
    result = penstock(name, "1f1b", "--stages", 4, "--micro-batches", 8, *to, tmp_path / "x.csv")
    assert result.status == 2
    assert f"1f1b is the name of a schedule: penstock {name} --schedule 1f1b" in result.err
    assert not any(tmp_path.iterdir())


def test_the_help_of_export_has_an_example(penstock):
    """The example is what people read."""
    result = penstock("export", "--help")
    assert result.status == 0
    assert "Example: penstock export" in result.out


def test_verify_finds_receives_in_another_order_than_was_sent(penstock, tmp_path):
    """torch plays such a file with wrong gradients; here it has a name, the ranks and the messages."""
    path = tmp_path / "swapped.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
    )
    result = penstock("verify", "--csv", path)
    assert result.status == 1
    assert (
        "[receive order] message 1 from rank 0 to rank 1 is sent as 0SEND_F0 and received as 1RECV_F1"
        in result.err
    )
    (finding,) = json.loads(penstock("verify", "--csv", path, "--json").out)["findings"]
    assert (finding["rule"], finding["rank"], finding["op"]) == ("receive order", 1, "1RECV_F1")
    assert "receive order" in penstock("simulate", "--csv", path).err


def test_verify_names_a_missing_op_before_the_transfers_that_lack_it(penstock, tmp_path):
    """The cause first: transfers of an op that is not there are needless too."""
    path = tmp_path / "short.csv"
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_B0\n")
    facts = json.loads(penstock("verify", "--csv", path, "--json").out)
    assert [(finding["rule"], finding["op"]) for finding in facts["findings"]] == [
        ("one backward", "1B0")
    ]
