"""Whatever stands in a file is read, or refused with one line: never another exception.

Inputs are the same in every run: a failure repeats, and a change of a reader sees the same files.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.files.damage import damaged
from tests.files.readers import READERS, run

#: Damaged files of each kind: some 1,080 in all, for most readers are made of the same parts. Other
#: files come with `make fuzz`.
EXAMPLES = 30


@pytest.mark.parametrize("kind", READERS)
def test_a_valid_file_of_every_kind_is_read(kind, tmp_path):
    """Damage shows nothing where the file was refused before."""
    reader = READERS[kind]
    assert run(reader, reader.content(tmp_path), tmp_path) is None


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory) -> dict[str, tuple[bytes, Any]]:
    """By kind, the content of a valid file and its plain values."""
    folder = tmp_path_factory.mktemp("valid")
    files = {}
    for kind, reader in READERS.items():
        content = reader.content(folder)
        files[kind] = content, reader.parse(content) if reader.parse else None
    return files


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_damaged_file_is_read_or_refused_with_one_line(kind, valid_files, tmp_path, data):
    """Files are cut off by full disks, edited by hand, and written by strangers."""
    message = run(READERS[kind], data.draw(damaged(*valid_files[kind])), tmp_path)
    if message is not None:
        assert "\n" not in message
        assert message.isprintable()
        assert len(message) < 1000
