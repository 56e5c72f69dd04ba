"""Run the command line in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from penstock.cli.main import status


class Ran(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str


@pytest.fixture
def penstock(capsys):
    """Call it with words; what comes back has the exit status and what was printed."""

    def run(*words: object) -> Ran:
        code = status([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def profile_file(tmp_path):
    """A profile of five made-up layers."""
    from penstock.profile.profile import LayerProfile, Profile, Timing

    def timing(seconds: float) -> Timing:
        return Timing((1, 8), (seconds, 8 * seconds))

    layers = tuple(
        LayerProfile(
            f"layer{i}",
            kind,
            timing(s),
            timing(2 * s),
            timing(s),
            timing(s),
            10,
            40,
            0,
            100.0,
            50.0,
        )
        for i, (kind, s) in enumerate(
            zip(
                ["Conv2d", "ReLU", "Conv2d", "ReLU", "Linear"],
                [3.0, 1.0, 2.0, 1.0, 5.0],
                strict=True,
            )
        )
    )
    path = tmp_path / "profile.json"
    Profile(layers, "0123456789ab", 12.0, 8).save(path)
    return path
