"""Weights of a whole model in the formats of others: `state_dict`, safetensors, Hugging Face, DCP.

Reading executes nothing: PyTorch's files are read with `weights_only=True`, the metadata of
`torch.distributed.checkpoint` (DCP), a pickle, with the classes alone that DCP writes
(`dcp_weights`), and all others are safetensors and JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.checkpoint_files import check_content, read_header, read_tensors
from penstock.checkpoint.checkpoint_index import INDEX, read_index
from penstock.checkpoint.dcp_weights import METADATA, load_dcp_weights
from penstock.errors import FileError, SettingError
from penstock.files.read import read_json
from penstock.files.regular import check_regular
from penstock.files.text import quote, shorten

#: Name of the only file, or of the index, of a model in Hugging Face's layout.
_HF_FILE, _HF_INDEX = "model.safetensors", "model.safetensors.index.json"
#: Names of its files if there are several, such as `model-00001-of-00003.safetensors`.
_HF_SHARDS = "model-" + "[0-9]" * 5 + "-of-" + "[0-9]" * 5 + ".safetensors"

#: Bytes of a file of Hugging Face's layout at most, as `save_pretrained` has it by default.
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class _ShardIndex:
    """The index of a model in Hugging Face's layout: the file of every tensor."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = field(default_factory=dict)


# -- reading -------------------------------------------------------------------------------------


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the weights of a model, for `Pipeline.load_state_dict` or any other module.

    Args:
        path: a checkpoint of `Pipeline.save` or `Checkpoints`; a file of safetensors; a folder in
            Hugging Face's layout (`model.safetensors`, or several files with their index); a folder
            of `torch.distributed.checkpoint`, however its tensors are sharded; or a `state_dict`
            that `torch.save` has written.

    Returns:
        Parameters and buffers on the CPU, by their names in the model.

    Raises:
        FileError: there is no such file, it is damaged, or it has something else than tensors.

    Examples:
        ```python
        model.load_state_dict(load_weights("weights.safetensors"))
        ```
    """
    source = Path(path)
    try:
        if source.is_dir():
            return _load_folder(source)
        if source.suffix == ".safetensors":
            return _load_safetensors(source)
        return _load_torch(source)
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        # The reasons of safetensors quote what stands in the file.
        reason = getattr(error, "strerror", None) or shorten(str(error), 300)
        raise FileError(f"cannot read the weights in {source}: {reason}") from error


def _load_folder(folder: Path) -> dict[str, Tensor]:
    """Read the weights in a folder.

    Raises:
        FileError: it has none that can be read.
    """
    if (folder / INDEX).exists():
        return checkpoint_weights(folder)
    if (folder / _HF_INDEX).exists():
        return _load_shards(folder)
    if (folder / _HF_FILE).exists():
        return _load_safetensors(folder / _HF_FILE)
    if (folder / METADATA).exists():
        return load_dcp_weights(folder)
    raise FileError(
        f"{folder} holds no weights: there is neither {INDEX} nor {_HF_INDEX} nor {_HF_FILE}"
    )


def checkpoint_weights(folder: Path) -> dict[str, Tensor]:
    """Return the model in a checkpoint, verified, under all names of each tensor.

    Raises:
        FileError: the checkpoint is damaged.
    """
    index = read_index(folder)
    tensors: dict[str, Tensor] = {}
    for name in index.files:
        header = read_header(folder, name, index)
        check_content(folder, name, index)
        keys = [key for key in header.tensors if key.startswith("model/")]
        for key, tensor in read_tensors(folder, name, keys).items():
            tensors[key.removeprefix("model/")] = tensor
    for alias, name in index.aliases.items():
        if name in tensors:
            tensors[alias] = tensors[name]
    return tensors


def _load_shards(folder: Path) -> dict[str, Tensor]:
    """Read a model in several files.

    Raises:
        FileError: the index names a file outside of the folder, or a tensor is not in its file.
    """
    weight_map = read_json(folder / _HF_INDEX, _ShardIndex).weight_map
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FileError(f"{folder / _HF_INDEX} names {name[:80]!r}, which is no file beside it")
        tensors |= _load_safetensors(folder / name)
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise FileError(f"{folder} has no {quote(missing[0])}, which {_HF_INDEX} names")
    return {name: tensors[name] for name in weight_map}


def _load_safetensors(file: Path) -> dict[str, Tensor]:
    """Read a file of safetensors.

    Raises:
        OSError: it cannot be read, or is no regular file.
        SafetensorError: it is damaged.
    """
    check_regular(file)
    return dict(load_file(file))


def _load_torch(file: Path) -> dict[str, Tensor]:
    """Read a `state_dict`.

    Raises:
        FileError: it is something else.
        OSError: it cannot be read, or is no regular file.
    """
    check_regular(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch's unpickler pops and looks up what a damaged file says
        raise FileError(
            f"{file} is no state_dict that can be read without running code: save "
            "model.state_dict() by torch.save, or safetensors"
        ) from error
    if not isinstance(content, Mapping):
        raise FileError(f"{file} holds a {type(content).__name__}, and not a state_dict")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise FileError(
                f"{file} holds a {type(tensor).__name__} as {str(name)[:80]!r}, and a state_dict "
                "holds tensors by name: save that of the model alone"
            )
    return dict(content)


# -- writing -------------------------------------------------------------------------------------


def save_weights(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    format: str = "safetensors",  # noqa: A002
) -> list[Path]:
    """Write the weights of a model in the format of others.

    Args:
        tensors: parameters and buffers by their names, such as `Pipeline.state_dict` returns.
        path: the file to write; for "huggingface" and "dcp" the folder.
        format: one of `WEIGHT_FORMATS`: "safetensors", "state-dict" (`torch.save`),
            "huggingface" or "dcp" (`torch.distributed.checkpoint`).

    Returns:
        The files.

    Raises:
        SettingError: there is no such format, or it cannot hold a tensor's dtype.
        FileError: a file cannot be written.

    Examples:
        ```python
        save_weights(pipe.state_dict(), "weights.safetensors", "safetensors")
        ```
    """
    if format not in WEIGHT_FORMATS:
        raise SettingError(f"format is {', '.join(WEIGHT_FORMATS)}, not {format!r}")
    target = Path(path)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return WEIGHT_FORMATS[format](plain, target)
    except KeyError as error:
        raise SettingError(f"safetensors cannot hold tensors of {error.args[0]}") from error
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write the weights to {target}: {reason}") from error


def _save_safetensors(tensors: Mapping[str, Tensor], file: Path) -> list[Path]:
    """Write one file."""
    save_file(_without_sharing(tensors), file, metadata={"format": "pt"})
    return [file]


def _save_state_dict(tensors: Mapping[str, Tensor], file: Path) -> list[Path]:
    """Write a file that `torch.load(weights_only=True)` reads."""
    torch.save(dict(tensors), file)
    return [file]


def _save_huggingface(tensors: Mapping[str, Tensor], folder: Path) -> list[Path]:
    """Write files of at most `SHARD_BYTES`, with an index if there are several.

    A tensor with several names is written under the first one, as `save_pretrained` does.
    """
    folder.mkdir(exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room, visited = SHARD_BYTES, set()
    for name, tensor in tensors.items():
        # Views of one memory may begin at the same address and still be different tensors.
        identity = tensor.data_ptr(), tensor.shape, tensor.dtype
        if tensor.numel() and identity in visited:
            continue
        visited.add(identity)
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    files = _save_shards(shards, folder)
    # Files of an earlier model would be read in place of these, or beside them.
    for file in (folder / _HF_FILE, folder / _HF_INDEX, *folder.glob(_HF_SHARDS)):
        if file not in files:
            file.unlink(missing_ok=True)
    return files


def _save_shards(shards: Sequence[Mapping[str, Tensor]], folder: Path) -> list[Path]:
    """Write one file for each of several parts of a model, with an index; of one part the file."""
    if len(shards) == 1:
        return _save_safetensors(shards[0], folder / _HF_FILE)
    files, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files += _save_safetensors(shard, file)
        weight_map.update(dict.fromkeys(shard, file.name))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*files, folder / _HF_INDEX]


def _save_dcp(tensors: Mapping[str, Tensor], folder: Path) -> list[Path]:
    """Write a checkpoint of `torch.distributed.checkpoint`."""
    from torch.distributed.checkpoint.state_dict_saver import save  # imported late: takes a second

    with warnings.catch_warnings():
        # One process, on purpose.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(dict(tensors), checkpoint_id=folder, no_dist=True)
    return sorted(folder.iterdir())


def _without_sharing(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors whose memory does not overlap, as safetensors requires: those that share memory
    with an earlier one, such as tied weights, are copied.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        spans_of_storage = spans.setdefault(tensor.untyped_storage().data_ptr(), [])
        is_shared = any(first < other_end and start < end for start, other_end in spans_of_storage)
        separate[name] = tensor.clone() if is_shared else tensor
        spans_of_storage.append((first, end))
    return separate


#: By format, the function that writes it.
WEIGHT_FORMATS: dict[str, Callable[[Mapping[str, Tensor], Path], list[Path]]] = {
    "safetensors": _save_safetensors,
    "state-dict": _save_state_dict,
    "huggingface": _save_huggingface,
    "dcp": _save_dcp,
}
