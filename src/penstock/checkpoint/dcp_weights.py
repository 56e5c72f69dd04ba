"""Read the weights in a folder of `torch.distributed.checkpoint` (DCP) without running its code.

DCP's `.metadata` is a pickle, and `FileSystemReader` unpickles it with no restriction (torch 2.13,
`read_metadata`). Here only the classes that DCP itself writes are allowed: none of them does
anything but hold values. Files that the metadata names must lie in the folder, and only tensors are
read, each by torch with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import FileError
from penstock.files.regular import open_file

METADATA = ".metadata"

#: Module and name of every class and function that a `.metadata` may name. The folder's own path
#: is stored as a `pathlib` path, whose module differs between versions of Python.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
#: Parts of the path of a tensor in the saved state that stand for the model.
_MODEL = ("model", "model_state_dict")


class _RestrictedUnpickler(pickle._Unpickler):
    """Unpickles the classes of DCP's metadata, and nothing else.

    The Python implementation of `pickle`, since that in C has no hook for BUILD, which could give a
    class other attributes.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, or a dtype.

        Raises:
            UnpicklingError: it is not allowed.
        """
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:120])
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set the attributes of a value.

        Raises:
            UnpicklingError: of a class or a function.
        """
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError("it changes a class")
        build: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = load_build


def load_dcp_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a model in a folder of DCP, on the CPU, in one process.

    If the saved state has a part `model`, its tensors are returned under their names in it. If it
    has none, the state is that of a model, and all tensors at its top are returned.

    Raises:
        FileError: the folder is damaged, has no weights, or its metadata names other classes than
            DCP writes.
    """
    # Imported late: takes a second.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _read_metadata(folder)

    class Reader(FileSystemReader):
        """Reads the files of a folder whose metadata has been read."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            """Return the metadata."""
            del args, kwargs
            read: Metadata = metadata
            return read

    names = _weight_names(folder, metadata)
    tensors: dict[str, Tensor] = {}
    for key in names:
        form = metadata.state_dict_metadata[key]
        tensors[key] = torch.empty(form.size, dtype=form.properties.dtype)
    try:
        with warnings.catch_warnings():
            # One process, on purpose.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=Reader(folder), no_dist=True)
    except CheckpointException as error:
        # Its text is a traceback; the failures are those of one rank, since there is one process.
        reasons = [str(failure[0]).partition("\n")[0] for failure in error.failures.values()]
        raise FileError(
            f"cannot read the weights in {folder}, whose files are damaged: {reasons[0][:200]}"
        ) from error
    return {names[key]: tensor for key, tensor in tensors.items()}


def _read_metadata(folder: Path) -> Any:
    """Return the metadata of a folder, checked.

    Raises:
        FileError: it is damaged, or names something else than DCP's own classes, or files outside
            of the folder.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    path = folder / METADATA
    try:
        with open_file(path) as file:
            metadata = _RestrictedUnpickler(file).load()
        damage = "" if isinstance(metadata, Metadata) else "it holds something else"
        damage = damage or _storage_damage(folder, metadata)
    except OSError:
        # A file that cannot be read is not a damaged one.
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises almost anything
        damage = str(error) or type(error).__name__
    if damage:
        raise FileError(
            f"{path} is no metadata that torch.distributed.checkpoint writes: {damage}. Nothing "
            "was read, since unpickling other content could run code"
        )
    # As `FileSystemReader.read_metadata` does, which is not called.
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _storage_damage(folder: Path, metadata: Any) -> str:
    """Return what is wrong with the files and sizes that the metadata names; empty if nothing
    is.
    """
    for info in metadata.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            return f"it names {str(name)[:80]!r}, which is no file in the folder"
        if getattr(info, "transform_descriptors", None):
            return "its files are transformed (compressed or encrypted)"
    files = {folder / info.relative_path for info in metadata.storage_data.values()}
    for file in files:
        # A link could lead out of the folder.
        if file.is_symlink() or not file.is_file():
            return f"there is no file {file.name}"
    available = sum(file.stat().st_size for file in files)
    for key, form in metadata.state_dict_metadata.items():
        size = _bytes_of(form)
        # `load_dcp_weights` allocates this size before it reads.
        if not isinstance(key, str) or size < 0 or size > available:
            return f"{str(key)[:80]!r} is larger than all files"
    return ""


def _bytes_of(form: Any) -> int:
    """Return the bytes of an entry of the state; 0 if it is no tensor."""
    if not hasattr(form, "properties"):
        return 0
    count = 1
    for length in form.size:
        count *= length
    return count * int(form.properties.dtype.itemsize)


def _weight_names(folder: Path, metadata: Any) -> Mapping[str, str]:
    """Return the keys of the model's tensors, and their names in the model.

    Raises:
        FileError: there are none.
    """
    paths: dict[str, tuple[Any, ...]] = {}
    for key, form in metadata.state_dict_metadata.items():
        if hasattr(form, "properties"):
            paths[key] = tuple((metadata.planner_data or {}).get(key, (key,)))
    names: dict[str, str] = {}
    for key, path in paths.items():
        part = next((place for place, word in enumerate(path[:-1]) if word in _MODEL), None)
        if part is not None:
            names[key] = ".".join(map(str, path[part + 1 :]))
    if not names:
        names = {key: str(path[0]) for key, path in paths.items() if len(path) == 1}
    if not names:
        raise FileError(
            f"{folder} holds no weights of a model: its tensors are "
            f"{', '.join(paths)[:200] or 'none'}"
        )
    return names
