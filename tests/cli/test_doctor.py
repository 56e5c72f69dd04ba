"""`penstock doctor`: does this machine work?"""

from __future__ import annotations

import json


def test_doctor_finds_this_machine_sound_and_measures_its_link(penstock):
    """The first thing to ask of somebody who reports a problem."""
    ran = penstock("doctor", "--json")
    facts = json.loads(ran.out)
    assert ran.status == 0
    assert facts["sound"] is True
    assert facts["two processes"].startswith("talk: ")
    assert "gloo" in facts["backends"]


def test_doctor_fails_when_two_processes_cannot_talk(penstock, monkeypatch):
    """A report that says all is well when it is not would be worse than none."""
    from penstock.errors import RunError
    from penstock.runtime import link

    def broken() -> None:
        raise RunError("rank 1 was killed")

    monkeypatch.setattr(link, "link_here", broken)
    ran = penstock("doctor")
    assert ran.status == 1
    assert "do not talk: rank 1 was killed" in ran.out
