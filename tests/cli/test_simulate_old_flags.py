"""`penstock simulate`: flags that were renamed."""

from __future__ import annotations

import pytest

DUALPIPE = ("simulate", "--schedule", "dualpipe", "--stages", 2, "--micro-batches", 4, "--json")
SELECTIVE = (
    "simulate", "--schedule", "1f1b", "--stages", 2, "--micro-batches", 4, "--json",
    "--recompute", "selective", "--activation-bytes", "100",
)  # fmt: skip
BPIPE = ("simulate", "--schedule", "bpipe", "--stages", 4, "--micro-batches", 8, "--json")


@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        (DUALPIPE, "--pair", "--forward-backward"),
        (BPIPE, "--evict", "--offload"),
        (SELECTIVE, "--again", "--recompute-seconds"),
        ((*SELECTIVE, "--saved-bytes", 10), "--again-bytes", "--recompute-peak-bytes"),
        (SELECTIVE, "--kept-bytes", "--saved-bytes"),
    ],
)
def test_an_old_flag_does_what_the_new_one_does_and_names_it(penstock, words, old, new):
    """Scripts of the last version run, and standard output stays JSON."""
    renamed, plain = penstock(*words, new, "5" if "bytes" not in new else "20"), penstock(*words)
    assert renamed.status == 0
    assert renamed.err == ""
    assert renamed.out != plain.out, f"{new} must change something here"
    result = penstock(*words, old, "5" if "bytes" not in old else "20")
    assert (result.status, result.out) == (0, renamed.out)
    assert result.err.strip() == f"{old} is deprecated: use {new}"


def test_both_flags_at_once_are_refused(penstock):
    """One of the two would win in silence."""
    result = penstock(*DUALPIPE, "--pair", 1, "--forward-backward", 2)
    assert result.status == 2
    assert "--pair is the old name of --forward-backward, and both are given" in result.err


def test_help_shows_the_new_flags_alone(penstock):
    """New users must not learn an old name."""
    text = penstock("simulate", "--help").out
    assert "--recompute-seconds" in text
    assert "--again" not in text
