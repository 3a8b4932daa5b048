"""The files of a tokenizer or processor, which are exported with the weights."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unishard.checkpoint.export.optional_files import optional, written_by
from unishard.checkpoint.files import path_of, read_bytes
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.errors import CheckpointError

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "chat_template.json",
    "*.jinja",
    "*processor_config.json",
    "tokenization_*.py",
    "*processing_*.py",
)
"""Files that tokenizers and processors of transformers 5.23 write, and those of their own code on the hub."""
_LARGEST = 2**30
"""Bytes of one of them; the largest vocabularies have some 50 MB."""


def tokenizer_beside(folder: Path) -> dict[str, bytes]:
    """The tokenizer files in the folder of a model; none if it is not a folder.

    Raises:
        CheckpointError: A file cannot be read, or is a link to one outside the folder.
    """
    if not folder.is_dir():
        return {}
    paths = (
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatchcase(path.name, name) for name in _NAMES)
    )
    return {path.name: _content(path) for path in paths}


def _content(path: Path) -> bytes:
    try:
        return read_bytes(file_inside(path.parent, path.name), _LARGEST)
    except OutsideFolderError as error:
        raise CheckpointError(f"{path.parent}: {error}; do not trust this folder, or put the file into it") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); give a folder that tokenizer.save_pretrained wrote"
        ) from error


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a given tokenizer or processor.

    Args:
        tokenizer: A folder with tokenizer files, a transformers object, or None.

    Raises:
        CheckpointError: The folder has no such files, or the object cannot be saved.
    """
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, str | Path):
        files = tokenizer_beside(path_of(tokenizer, "tokenizer"))
        if not files:
            raise CheckpointError(f"{tokenizer}: no tokenizer here; give a folder that tokenizer.save_pretrained wrote")
        return files
    if not hasattr(tokenizer, "save_pretrained"):
        raise CheckpointError(
            f"tokenizer: got a {type(tokenizer).__name__}; pass a transformers tokenizer, or a folder with one"
        )
    return optional("the tokenizer", lambda: written_by(tokenizer.save_pretrained))
