"""A checkpoint, and a pipeline that loads it."""

from __future__ import annotations

import pytest
from tests.checkpoint.loading import (
    contents,
    pipeline,
    train,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a checkpoint, and everything in it by name."""
    folder = tmp_path_factory.mktemp("checkpoint") / "original"
    train(pipeline()).save(folder)
    return folder, contents(folder)


@pytest.fixture
def saved(original, tmp_path):
    """A copy of the checkpoint, which a test may change."""
    folder = tmp_path / "saved"
    folder.mkdir()
    for path in original[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def pipe():
    """A pipeline that has been trained otherwise."""
    result = train(pipeline(seed=5), 1)
    yield result
    result.close()
