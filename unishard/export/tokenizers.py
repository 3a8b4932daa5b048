"""The files of a tokenizer or processor, which are exported with the weights."""

from __future__ import annotations

import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unishard.errors import CheckpointError

__all__ = ["beside", "files_of"]

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
)
"""Files that tokenizers and processors of transformers 5.23 write."""


def beside(folder: Path) -> dict[str, bytes]:
    """The tokenizer files in the folder of a model; none if it is not a folder."""
    if not folder.is_dir():
        return {}
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and any(fnmatchcase(path.name, name) for name in _NAMES))
    return {path.name: path.read_bytes() for path in found}


def files_of(tokenizer: Any) -> dict[str, bytes]:
    """The files of a given tokenizer or processor.

    Args:
        tokenizer: A folder with tokenizer files, a transformers object, or None.

    Raises:
        CheckpointError: The folder has no such files, or the object cannot be saved.
    """
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, str | Path):
        found = beside(Path(tokenizer))
        if not found:
            raise CheckpointError(f"{tokenizer}: no tokenizer here; give a folder that tokenizer.save_pretrained wrote")
        return found
    if not hasattr(tokenizer, "save_pretrained"):
        raise CheckpointError(f"tokenizer: got a {type(tokenizer).__name__}; pass a transformers tokenizer, or a folder with one")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
