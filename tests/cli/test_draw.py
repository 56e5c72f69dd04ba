"""`penstock draw`: one schedule, or several on one time scale."""

from __future__ import annotations

import pytest

SMALL = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)


def test_against_draws_another_schedule_below(penstock, tmp_path):
    """The same model, ranks and micro-batches, in every format that draws one."""
    out = penstock("draw", *SMALL, "--against", "zb-h1").out
    assert sum(line.startswith("rank ") for line in out.splitlines()) == 8
    assert "zb-h1 takes 27, 18.2 % less than 1f1b (33)" in " ".join(out.split())
    for suffix in ("svg", "html", "json", "txt"):
        target = tmp_path / f"two.{suffix}"
        assert (
            penstock("draw", target, *SMALL, "--against", "zb-h1", "--against", "gpipe").status == 0
        )
        assert all(name in target.read_text() for name in ("1f1b", "zb-h1", "gpipe"))


def test_another_number_of_stages_shares_out_the_same_costs(penstock):
    """ZB-V has two stages on a rank, of half a rank's layers each."""
    out = penstock("draw", *SMALL, "--against", "zb-v").out
    assert "zb-v takes 25.5, 22.7 % less than 1f1b (33)" in " ".join(out.split())


def test_costs_per_stage_cannot_be_shared_out(penstock):
    """How a stage of 1F1B falls apart into two is the layers' business; a guess would draw a lie."""
    ran = penstock("draw", *SMALL, "--forward", "1,2,1,1", "--against", "zb-v")
    assert (ran.status, "forward has 4 entries, the schedule needs 8" in ran.err) == (2, True)


def test_bytes_draw_what_the_ranks_hold(penstock, tmp_path):
    """Memory decides between schedules as often as time."""
    target = tmp_path / "out.svg"
    assert (
        penstock(
            "draw", target, *SMALL, "--activation-bytes", "1GiB", "--weight-bytes", "2GiB"
        ).status
        == 0
    )
    assert "peak 6.0 GiB at 3: activations 4.0 GiB, weights 2.0 GiB" in target.read_text()


def test_a_png_is_written_by_its_suffix(penstock, tmp_path):
    """For slides and papers that take no SVG."""
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    assert penstock("draw", target, *SMALL).status == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_schedule_to_compare_with_is_named(penstock):
    """The same words as for the first."""
    ran = penstock("draw", *SMALL, "--against", "zb-h3")
    assert (ran.status, "Did you mean 'zb-h2'" in ran.err or "Did you mean 'zb-h1'" in ran.err) == (
        2,
        True,
    )
