"""The safetensors files of a model's folder, from an index that is not trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.checkpoint.regular_file import open_file, read_bytes
from unishard.errors import ModelError

__all__ = ["INDEX", "SINGLE", "facts_of", "files_of"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST = 2**28
"""Bytes of an index; that of 100,000 tensors has 10 MB."""
_SAMPLE = 1 << 12


def files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name. Opens no file that holds pickles.

    Raises:
        ModelError: There are no safetensors, or the index is damaged or names a file that is missing or lies outside the folder.
    """
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, framework="pt") as file:
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
    if absent:
        raise ModelError(f"{folder}: {', '.join(absent)} is in the index but missing; copy the whole directory")
    return files
