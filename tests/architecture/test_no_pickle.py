"""Nothing that arrives from outside is executed (law 4): no pickle, and no collective of torch that
uses it.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "penstock"

#: Collectives that pickle what they send.
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def test_no_collective_pickles_what_it_sends():
    """`transport/exchange.py` sends plain values as JSON."""
    uses = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            if name in OBJECT_COLLECTIVES:
                uses.append(f"{file.relative_to(SOURCE)}:{node.lineno} {name}")
    assert not uses
