"""Valid files, and strategies that damage them: in their bytes, or in the values that they hold."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

#: Numbers that Python's json module does not write, put in as a text and replaced afterwards.
_RAW = {
    '"@huge@"': "1e400",
    '"@long@"': "9" * 5000,
    '"@half@"': r'"\ud800"',
    '"@nul@"': r'"a\u0000b"',
    "@twice@": "",
}

#: Values that no field expects.
VALUES = st.one_of(
    st.sampled_from([None, True, False, [], {}, [[]], {"": None}, [None] * 50, ["0F0"] * 3]),
    st.sampled_from([0, -1, 1, 2.5, -0.0, 1e308, 5e-324, 10**9, 2**62, -(2**62), 10**30]),
    st.sampled_from([float("nan"), float("inf"), "@huge@", "@long@"]),
    st.sampled_from(["", "0", "x" * 3000, "a\nb", "\x1b[2J", "0F999999999", "@half@", "@nul@"]),
    st.sampled_from([json.loads("[" * 60 + "]" * 60), json.loads('{"a":' * 300 + "1" + "}" * 300)]),
    st.sampled_from(
        ["\u202eevil", "a\u2028b", "\x85", "\x9b31m", "\ufeff", "e\u0301", "../../x", "/dev/zero"]
    ),
    st.sampled_from(
        [2**53 + 1, 2**63, 2**64, -(10**300), 1e-320, "1e400", "NaN", "-Infinity", "0x10"]
    ),
    st.sampled_from(
        [[0] * 3000, {str(n): n for n in range(500)}, {"__class__": "x"}, {"a\x1b": 1}]
    ),
)
#: Bytes that end up in files by accident or on purpose.
CHUNKS = st.one_of(
    st.sampled_from([b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r"]),
    st.sampled_from([b"&a [*a, *a]", b"*a", b"<<: {a: 1}\n", b"!!python/object/apply:os.abort []"]),
    st.sampled_from(
        [b"[" * 20_000, b"{a: " * 2000, b"1e400", b".nan", b"9" * 6000, b"%YAML 9.9\n"]
    ),
    st.sampled_from([b"\n---\n", b"\t", b'"', b"'", b"\\u0000", b"-"]),
    st.sampled_from([b"\xe2\x80\xae", b"\xe2\x80\xa8", b"\xc2\x9b", b"\x1b]0;x\x07", b"\x7f"]),
    st.sampled_from([b"\xff" * 8, b"\x80\x04", b"cos\nsystem\n", b"\x00" * 4096, b"PK\x03\x04"]),
    st.sampled_from(
        [b'{"a":' * 5000, b"-" * 3000, b"? ", b"!!binary x", b"&a *a", b"1_000", b"1:30"]
    ),
)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values below the top."""
    keys: Any = ()
    if isinstance(tree, dict):
        keys = tree
    elif isinstance(tree, list):
        keys = range(len(tree))
    paths = []
    for key in keys:
        paths += [(*path, key), *_paths(tree[key], (*path, key))]
    return paths


@st.composite
def damaged_trees(draw: Any, tree: Any) -> bytes:
    """JSON of the tree with values removed, replaced, renamed or written twice."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 2))):
        *parents, key = draw(st.sampled_from(_paths(tree) or [("x",)]))
        place = tree
        for parent in parents:
            place = place[parent]
        change = draw(
            st.sampled_from(["replace", "replace", "replace", "remove", "twice", "rename"])
        )
        if not isinstance(place, (dict, list)) or (isinstance(place, dict) and key not in place):
            continue
        if change == "remove":
            del place[key]
        elif change == "replace" or isinstance(place, list):
            place[key] = deepcopy(draw(VALUES))
        else:
            name = f"{key}@twice@" if change == "twice" else "colour"
            place[name] = place[key]
    text = json.dumps(tree)
    for mark, raw in _RAW.items():
        text = text.replace(mark, raw)
    return text.encode()


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """The content with bytes changed, cut off, repeated or put in."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(content) - 1)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        change = draw(st.sampled_from(["flip", "insert", "insert", "remove", "repeat", "cut off"]))
        middle = content[start:end]
        if change == "flip":
            middle = draw(st.binary(min_size=1, max_size=3)) + middle[3:]
        elif change == "insert":
            middle = draw(CHUNKS) + middle
        elif change == "repeat":
            middle *= 2
        else:
            middle = b""
        content = content[:start] + middle + (b"" if change == "cut off" else content[end:])
    return content


def damaged(content: bytes, tree: Any = None) -> st.SearchStrategy[bytes]:
    """The content damaged in its bytes, or in the values of its tree if it has one."""
    if tree is None:
        return damaged_bytes(content)
    return damaged_trees(tree) | damaged_trees(tree) | damaged_bytes(content)
