"""The safetensors files of a model's folder, which are not trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from unishard.checkpoint import finding
from unishard.checkpoint.files import open_file, read_bytes
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST = 2**28
"""Bytes of an index; that of 100,000 tensors has 10 MB."""
_SAMPLE = 1 << 12


def files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name. Opens no file that holds pickles.

    Raises:
        ModelError: There are no safetensors, or the index is damaged or names a file that is missing or lies outside
            the folder.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_shapes(folder, SINGLE), SINGLE)
    pickles = sorted(found.name for found in folder.glob("*.bin"))
    if pickles:
        raise ModelError(
            f"{folder} contains {', '.join(pickles[:3])} but no safetensors, and loading a pickle can run code; if you "
            "trust it, convert it once: cls.from_pretrained(path).save_pretrained(other_path)"
        )
    raise ModelError(f"{folder}: neither {SINGLE} nor {INDEX} found; {instead_of(folder)}")


def instead_of(folder: Path) -> str:
    """What to pass in place of a folder without weights of transformers."""
    if not folder.is_dir() or (not finding.checkpoints(folder) and not finding.is_checkpoint(folder)):
        return "pass a directory written by save_pretrained"
    return (
        "it holds a checkpoint of unishard, which engine.load resumes; to use its weights as a model, pass the "
        f"directory that engine.export(directory) writes, or `unishard checkpoint export {folder} DIRECTORY`"
    )


def facts_of(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all ranks: each file's size, and a hash of its header and of the end of its data."""
    facts = {}
    for name in sorted(set(files.values())):
        with open_file(folder / name) as file:
            size, digest = file.seek(0, 2), hashlib.sha256()
            file.seek(0)
            length = file.read(8)
            digest.update(length + file.read(min(int.from_bytes(length, "little"), size)))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
        facts[name] = f"{size} bytes, {digest.hexdigest()[:16]}"
    return facts


def shapes_of(folder: Path, files: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in the files.

    Args:
        folder: The folder.
        files: From `files_of`.

    Raises:
        ModelError: A file is damaged, or lacks a tensor that the index says it has.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(set(files.values())):
        shapes |= {key: shape for key, shape in _shapes(folder, name).items() if files.get(key) == name}
    absent = sorted(files.keys() - shapes.keys())
    if absent:
        raise ModelError(
            f"{folder}: {', '.join(absent[:8])} is not in the file that the index names; copy the whole directory again"
        )
    return shapes


def _shapes(folder: Path, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes in the header of a file."""
    with _readable(folder, name):
        stat = (folder / name).stat()
        return _shapes_in_header(folder / name, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1)
def _shapes_in_header(path: Path, version: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """Read the header as JSON, once: safetensors takes 7 us for each name and shape (safetensors 0.8)."""
    ends = [0]

    def shape_of(entry: dict[str, Any]) -> Any:
        if not isinstance(entry.get("shape"), list):
            return entry
        ends.append(entry["data_offsets"][1])
        return tuple(entry["shape"])

    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, _LARGEST)), object_hook=shape_of)
        if 8 + length + max(ends) != file.seek(0, 2):
            raise ValueError("its size is not that in its header")
    header.pop("__metadata__", None)
    if not all(
        type(shape) is tuple and all(type(each) is int and each >= 0 for each in shape) for shape in header.values()
    ):
        raise ValueError("its header has an entry that is no tensor")
    return header  # type: ignore[no-any-return]


@contextmanager
def _readable(folder: Path, name: str) -> Iterator[None]:
    """Raise what goes wrong with a file of a folder as ModelError."""
    path = folder / name
    try:
        open_file(file_inside(folder, name)).close()
        yield
    except OutsideFolderError as error:
        raise ModelError(f"{folder}: {error}; do not trust this model, or put the file into the folder") from None
    except (OSError, MemoryError) as error:  # the latter where the file is too large to be mapped
        raise ModelError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); copy the whole directory again"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: is damaged ({str(error)[:200]}); copy it again") from error


@contextmanager
def opened(folder: Path, name: str) -> Iterator[Any]:
    """A safetensors file of a folder, for reading.

    Raises:
        ModelError: It is damaged, or a link to a file outside the folder.
    """
    from safetensors import SafetensorError

    with _readable(folder, name):
        stat = (folder / name).stat()
        try:
            yield _mapped(folder / name, (stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except SafetensorError as error:
            raise ValueError(error) from error


@lru_cache(maxsize=1)
def _mapped(path: Path, version: tuple[int, int, int]) -> Any:
    """The file that was read last stays open: to open it reads the header, and its tensors are read one after
    another.
    """
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _indexed(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        index: Any = json.loads(read_bytes(path, _LARGEST))
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); pass a directory written by save_pretrained"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: is not JSON ({str(error)[:200]}); it is damaged, copy the whole directory again"
        ) from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(
            f"{path}: has no weight_map of tensors to files; it is damaged, copy the whole directory again"
        )
    names = sorted(set(files.values()))
    try:
        absent = [name for name in names if not file_inside(folder, name).is_file()]
    except OutsideFolderError as error:
        raise ModelError(f"{path}: {error}; do not trust this model, or put the file into the folder") from None
    except OSError as error:  # such as a name that is too long
        raise ModelError(
            f"{path}: names what is no file ({error.strerror}); it is damaged, copy the whole directory again"
        ) from None
    if absent:
        raise ModelError(f"{folder}: {', '.join(absent)} is in the index but missing; copy the whole directory")
    return files
