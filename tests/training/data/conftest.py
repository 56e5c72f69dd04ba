"""Small files in CIFAR-100's binary format."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def records(count: int, seed: int = 0) -> bytes:
    """`count` records with labels in range and random pixels."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 256, (count, 3074), generator=generator, dtype=torch.uint8)
    table[:, 0] %= 20
    table[:, 1] %= 100
    return bytes(table.flatten().tolist())


@pytest.fixture(scope="session")
def cifar_bytes() -> dict[str, bytes]:
    """Five records to train, two to test."""
    return {"train.bin": records(5, seed=1), "test.bin": records(2, seed=2)}


@pytest.fixture
def cifar_folder(tmp_path: Path, cifar_bytes: dict[str, bytes]) -> Path:
    """A folder with both files."""
    folder = tmp_path / "cifar"
    folder.mkdir()
    for name, content in cifar_bytes.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def write_archive(tmp_path: Path) -> Callable[[dict[str, bytes]], Path]:
    """A function that packs members (by their whole names) into a .tar.gz and returns its path."""

    def write(members: dict[str, bytes]) -> Path:
        path = tmp_path / "cifar-100-binary.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path

    return write
