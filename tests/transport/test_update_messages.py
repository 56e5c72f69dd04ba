"""Message numbers of an update: one space, declared once."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock
from penstock.transport.update_messages import UpdateMessage, wave_message

SOURCE = Path(penstock.__file__).parent


def test_no_number_is_used_twice():
    """Neither by another name, nor by a wave."""
    names = UpdateMessage.__members__
    assert len(names) == len(set(map(int, names.values())))
    single = {int(number) for number in UpdateMessage if number is not UpdateMessage.FIRST_WAVE}
    waves = {wave_message(0, wave).micro_batch for wave in range(10_000)}
    assert not single & waves
    assert len(waves) == 4096, "waves that are in flight together have numbers of their own"
    assert wave_message(2, 0) == UpdateMessage.FIRST_WAVE.of_stage(2)
    assert UpdateMessage.NORMS.of_run == UpdateMessage.NORMS.of_stage(0)


def test_messages_of_updates_are_made_in_one_module():
    """The others name a member; `tell` between processes has a stage that no schedule has."""
    makers = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func) == "Message" and ast.unparse(node.args[0]) == "Kind.U":
                makers.add(path.relative_to(SOURCE).as_posix())
    assert makers == {"transport/update_messages.py", "ranks/process_world.py"}
