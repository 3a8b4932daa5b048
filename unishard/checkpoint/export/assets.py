"""What an export needs besides the tensors: other files, and the names of the exported tensors.

Stored in every checkpoint.

With these, an export from a checkpoint needs neither the model's class nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from unishard.checkpoint.inside_folder import leaves
from unishard.distributed.dtypes import DTYPES, name_of
from unishard.errors import CheckpointError

FOLDER = "assets/"
"""Their folder in a checkpoint."""
INDEX = FOLDER + "export.json"
"""The file with the names; the other files of the folder are exported unchanged."""

_CONFIG = "config.json"


class TensorSlice(BaseModel):
    """A contiguous slice of a tensor that is exported under its own name, such as one expert of stacked experts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: int
    shape: list[int]


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["model", "adapter", "plain"]
    """A transformers model, PEFT adapters, or any other module, of which only tensors are exported."""
    names: dict[str, dict[str, str]]
    """By file, without its suffix: for each exported tensor, its name in the file to its name in the model."""
    pieces: dict[str, TensorSlice] = {}
    """By the name in the file: exported tensors that are only a slice of the model's tensor."""
    joined: dict[str, list[str]] = {}
    """By the name in the file: exported tensors that are several of the model's, one behind the other by rows; `names`
    has the first."""
    kept: dict[str, list[str]] = {}
    """By the dtype of an export, as `config.json` names it: the model's tensors that its class keeps in fp32."""
    refusal: str | None = None
    """Why the model cannot be exported, and what to do instead; it can still be trained and saved."""


class Assets(_Index):
    """What an export needs besides the tensors."""

    files: dict[str, bytes]
    """The other files of the export, such as `config.json`."""

    @property
    def sources(self) -> set[str]:
        """The model's tensors that are exported."""
        return {source for names in self.names.values() for source in names.values()}.union(*self.joined.values())

    def to_files(self) -> dict[str, bytes]:
        """The files to store in a checkpoint, by their paths in it."""
        later = {
            name for name in ("joined", "kept") if not getattr(self, name)
        }  # whoever does not know a field refuses it
        index = self.model_dump_json(exclude={"files", *later}, indent=1) + "\n"
        return {FOLDER + name: data for name, data in self.files.items()} | {INDEX: index.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Assets:
        """The inverse of `to_files`; files outside its folder are ignored.

        Raises:
            CheckpointError: The file with the names is missing or damaged, or a name leads outside the folder.
        """
        try:
            index = _Index.model_validate_json(files[INDEX])
        except KeyError:
            raise CheckpointError(f"{INDEX} is missing; the checkpoint has no information for an export") from None
        except ValidationError as error:
            raise CheckpointError(
                f"{INDEX}: {error.errors()[0]['msg']}; the file is damaged, or was written by a later version of "
                "unishard"
            ) from error
        for name in (*index.names, *files):
            require_inside(name)
        rest = {
            name.removeprefix(FOLDER): data for name, data in files.items() if name.startswith(FOLDER) and name != INDEX
        }
        return cls(**dict(index), files=rest)

    def dtype_of(self, word: str | None) -> torch.dtype:
        """The dtype of exported floating-point tensors.

        Args:
            word: `fp32`, `bf16` or `fp16`; None for the dtype in the model's config, else fp32.

        Raises:
            CheckpointError: It is another word, or the model's config names another dtype.
        """
        if word is not None:
            if word not in DTYPES:
                raise CheckpointError(f"dtype: must be one of {', '.join(DTYPES)}, got {word!r}")
            return DTYPES[word]
        config = self._config()
        named = config.get("dtype") or config.get("torch_dtype") or "float32"
        exported = next((dtype for dtype in DTYPES.values() if name_of(dtype) == named), None)
        if exported is None:
            raise CheckpointError(
                f"the model's {_CONFIG} has dtype {named!r}; choose the dtype of the export: {', '.join(DTYPES)}"
            )
        return exported

    def files_in(self, dtype: torch.dtype) -> dict[str, bytes]:
        """The other files of an export with this dtype, which the model's config names."""
        config = self._config()
        if not config:
            return dict(self.files)
        config.pop("torch_dtype", None)
        _set_dtype(config, name_of(dtype))
        return self.files | {_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}

    def _config(self) -> dict[str, object]:
        text = self.files.get(_CONFIG) if self.kind == "model" else None
        if text is None:
            return {}
        try:
            config: dict[str, object] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{FOLDER}{_CONFIG}: {error}; it is damaged") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{FOLDER}{_CONFIG}: is no mapping; it is damaged")
        return config


def require_inside(name: str) -> None:
    """Check that a path from a checkpoint stays within its folder.

    Raises:
        CheckpointError: It does not.
    """
    if leaves(name):
        raise CheckpointError(f"{name!r:.200} lies outside the folder; do not trust this checkpoint")


def _set_dtype(config: dict[str, object], dtype: str) -> None:
    """Set the dtype of a config, and of the configs of inner models that name one."""
    config["dtype"] = dtype
    for inner in config.values():
        if isinstance(inner, dict) and "model_type" in inner and inner.get("dtype") is not None:
            _set_dtype(inner, dtype)
