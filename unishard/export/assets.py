"""What an export needs beside the tensors: other files, and the name of each tensor in them. Taken from a model once, kept in checkpoints.

With these an export from a checkpoint needs neither the model's class nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from unishard.errors import CheckpointError
from unishard.export.plan import DTYPES

__all__ = ["FOLDER", "INDEX", "Assets", "TensorSlice", "require_inside"]

FOLDER = "assets/"
"""Where they lie in a checkpoint."""
INDEX = FOLDER + "export.json"
"""The names; the other files of the folder are exported as they are."""

_CONFIG = "config.json"


class TensorSlice(BaseModel):
    """A part of a tensor that lies in one stretch of it, such as one expert's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: int
    shape: list[int]


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["model", "adapter", "plain"]
    names: dict[str, dict[str, str]]
    pieces: dict[str, TensorSlice] = {}
    refusal: str | None = None


class Assets(_Index):
    """What an export needs beside the tensors."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    kind: Literal["model", "adapter", "plain"]
    """A model of transformers, adapters of PEFT, or any other module, which has tensors alone."""
    names: dict[str, dict[str, str]]
    """By file, without its ending: the name in the model of each exported tensor, by its name in the file."""
    pieces: dict[str, TensorSlice] = {}
    """By the name in the file: exported tensors that are not the whole of the model's."""
    refusal: str | None = None
    """Why the model cannot be exported, and what instead; it can be trained and saved all the same."""
    files: dict[str, bytes]
    """What lies beside the tensors, such as `config.json`."""

    def to_files(self) -> dict[str, bytes]:
        """The files to keep in a checkpoint, by their paths in it."""
        index = self.model_dump_json(exclude={"files"}, indent=1) + "\n"
        return {FOLDER + name: data for name, data in self.files.items()} | {INDEX: index.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Assets:
        """The inverse of `to_files`; files outside its folder are passed over.

        Raises:
            CheckpointError: The names are not there, are damaged, or lead outside the folder.
        """
        try:
            index = _Index.model_validate_json(files[INDEX])
        except KeyError:
            raise CheckpointError(f"there is no {INDEX}; the checkpoint says nothing of an export") from None
        except ValidationError as error:
            raise CheckpointError(f"{INDEX}: {error.errors()[0]['msg']}; it is damaged, or written by a later unishard") from error
        for name in (*index.names, *files):
            require_inside(name)
        rest = {name.removeprefix(FOLDER): data for name, data in files.items() if name.startswith(FOLDER) and name != INDEX}
        return cls(**dict(index), files=rest)

    def dtype_of(self, word: str | None) -> torch.dtype:
        """The format that floating tensors are exported in.

        Args:
            word: `fp32`, `bf16` or `fp16`; None for what the model's config names, else fp32.

        Raises:
            CheckpointError: It is none of these.
        """
        if word is not None:
            if word not in DTYPES:
                raise CheckpointError(f"dtype: {word!r} is none of {', '.join(DTYPES)}")
            return DTYPES[word]
        config = self._config()
        named = config.get("dtype") or config.get("torch_dtype") or "float32"
        found = next((dtype for dtype in DTYPES.values() if str(dtype) == f"torch.{named}"), None)
        if found is None:
            raise CheckpointError(f"{_CONFIG} of the model names the dtype {named!r}; say which one to export: {', '.join(DTYPES)}")
        return found

    def files_in(self, dtype: torch.dtype) -> dict[str, bytes]:
        """The files beside tensors of a format: the model's config names it."""
        config = self._config()
        if not config:
            return dict(self.files)
        config.pop("torch_dtype", None)
        _name_format(config, str(dtype).removeprefix("torch."))
        return self.files | {_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}

    def _config(self) -> dict[str, object]:
        text = self.files.get(_CONFIG) if self.kind == "model" else None
        if text is None:
            return {}
        try:
            config: dict[str, object] = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{FOLDER}{_CONFIG}: {error}; it is damaged") from error
        return config


def require_inside(name: str) -> None:
    """Check that a path that a checkpoint names stays within its folder.

    Raises:
        CheckpointError: It does not.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{name} lies outside the folder; do not trust this checkpoint")


def _name_format(config: dict[str, object], dtype: str) -> None:
    """In a config, and in those of the models inside that name a format of their own."""
    config["dtype"] = dtype
    for inner in config.values():
        if isinstance(inner, dict) and "model_type" in inner and inner.get("dtype") is not None:
            _name_format(inner, dtype)
