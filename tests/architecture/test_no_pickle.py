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


#: Files that may import a module that unpickles, and why.
PICKLE_USERS = {
    "ranks/processes/launch.py": "functions and results go through files in a folder of mode 0700",
    "ranks/processes/rank_process.py": "the other end of ranks/processes/launch.py",
    "tracing/draws.py": "compares random states by their pickled bytes, and unpickles nothing",
    "checkpoint/dcp_weights.py": "metadata of DCP, with the classes alone that DCP writes",
}
PICKLE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def modules_of(tree: ast.AST) -> set[str]:
    """Return the first words of all imports."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.partition(".")[0])
    return modules


def test_only_known_files_can_unpickle():
    """Another file has to say here what it unpickles and from where."""
    users = {
        str(file.relative_to(SOURCE))
        for file in sorted(SOURCE.rglob("*.py"))
        if modules_of(ast.parse(file.read_text())) & PICKLE_MODULES
    }
    assert users == set(PICKLE_USERS)


def test_weights_are_loaded_without_running_code():
    """`torch.load` unpickles unless weights_only is true."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert arguments.get("weights_only") == "True", f"{file}:{node.lineno}"


def test_connections_between_processes_carry_bytes():
    """`Connection.send` and `recv` of multiprocessing pickle; `send_bytes` and `recv_bytes` do not.

    Sockets, here called control, and the channels of peers/messages.py, which send JSON, have
    methods of these names too.
    """
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        text = file.read_text()
        if "multiprocessing.connection" not in text:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, owner = node.func.attr, ast.unparse(node.func.value)
                other = "control" in owner or "channel" in owner
                pickles = name in ("send", "recv") and not other
                assert not pickles, f"{file.relative_to(SOURCE)}:{node.lineno} {owner}.{name}"
