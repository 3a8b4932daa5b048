"""The safetensors files of a model's folder, which are not trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.checkpoint.regular_file import open_file, read_bytes
from unishard.errors import ModelError

__all__ = ["INDEX", "SINGLE", "facts_of", "files_of", "opened", "shapes_of"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST = 2**28
"""Bytes of an index; that of 100,000 tensors has 10 MB."""
_SAMPLE = 1 << 12


def files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name. Opens no file that holds pickles.

    Raises:
        ModelError: There are no safetensors, or the index is damaged or names a file that is missing or lies outside the folder.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        with opened(folder, SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    pickles = sorted(found.name for found in folder.glob("*.bin"))
    if pickles:
        raise ModelError(
            f"{folder} contains {', '.join(pickles[:3])} but no safetensors, and loading a pickle can run code; if you trust it, convert "
            "it once: cls.from_pretrained(path).save_pretrained(other_path)"
        )
    raise ModelError(f"{folder}: neither {SINGLE} nor {INDEX} found; pass a directory written by save_pretrained")


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
        with opened(folder, name) as file:
            keys = [key for key in file.keys() if files.get(key) == name]  # noqa: SIM118 (not a mapping)
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    absent = sorted(files.keys() - shapes.keys())
    if absent:
        raise ModelError(f"{folder}: {', '.join(absent[:8])} is not in the file that the index names; copy the whole directory again")
    return shapes


@contextmanager
def opened(folder: Path, name: str) -> Iterator[Any]:
    """A safetensors file of a folder, for reading.

    Raises:
        ModelError: It is damaged, or a link to a file outside the folder.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / name
    try:
        open_file(file_inside(folder, name)).close()
        with safe_open(path, framework="pt") as file:
            yield file
    except OutsideFolderError as error:
        raise ModelError(f"{folder}: {error}; do not trust this model, or put the file into the folder") from None
    except (OSError, MemoryError) as error:  # the latter where the file is too large to be mapped
        raise ModelError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); copy the whole directory again") from error
    except SafetensorError as error:
        raise ModelError(f"{path}: is damaged ({str(error)[:200]}); copy it again") from error


def _indexed(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        found: Any = json.loads(read_bytes(path, _LARGEST))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); pass a directory written by save_pretrained") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON ({str(error)[:200]}); it is damaged, copy the whole directory again") from error
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"{path}: has no weight_map of tensors to files; it is damaged, copy the whole directory again")
    names = sorted(set(files.values()))
    try:
        absent = [name for name in names if not file_inside(folder, name).is_file()]
    except OutsideFolderError as error:
        raise ModelError(f"{path}: {error}; do not trust this model, or put the file into the folder") from None
    except OSError as error:  # such as a name that is too long
        raise ModelError(f"{path}: names what is no file ({error.strerror}); it is damaged, copy the whole directory again") from None
    if absent:
        raise ModelError(f"{folder}: {', '.join(absent)} is in the index but missing; copy the whole directory")
    return files
