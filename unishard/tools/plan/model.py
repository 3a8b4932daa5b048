"""A model by its name on the command line, and what is computed from it once.

Imports torch only for what is not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from unishard.config import Config
from unishard.config.loading.text_file import text_of
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.model_shape import ModelShape
from unishard.tools.plan.activations import Activations
from unishard.tools.plan.refusals import refusal
from unishard.version import __version__

# Shapes and activations of models that were planned before, in files of the user's cache directory. Imports no torch.
# A file has two lines: the SHA-256 of the second, and JSON.

_VERSION = 12
"""Raised when what is computed, or its file, changes."""
_LARGEST_ENTRY = 2**28
"""Bytes of a file; the shape of a model of 100,000 parameters has 10 MB."""
Planned = TypeVar("Planned", ModelShape, Activations)


def cache_folder() -> Path:
    """`unishard/tools/plan` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unishard" / "plan"


def cached_shape(key: Sequence[Any], make: Callable[[], ModelShape]) -> ModelShape:
    """The cached shape of a key, made if it is missing."""
    return _cached(key, TypeAdapter(ModelShape), make)


def cached_activations(key: Sequence[Any], make: Callable[[], Activations]) -> Activations:
    """The cached activations of a key, made if they are missing."""
    return _cached(key, TypeAdapter(Activations), make)


def _cached(key: Sequence[Any], kind: TypeAdapter[Planned], make: Callable[[], Planned]) -> Planned:
    """What the file of a key holds; made and stored where there is none, or its content is not what was stored."""
    path = cache_folder() / f"{_digest(json.dumps([_VERSION, *key], default=str))[:32]}.json"
    with contextlib.suppress(ValueError):  # also a ConfigError and a ValidationError
        digest, _, content = text_of(path, _LARGEST_ENTRY).partition("\n")
        if digest == _digest(content):
            return kind.validate_json(content)
    made = make()
    content = kind.dump_json(made).decode()
    _store(path, f"{_digest(content)}\n{content}".encode())
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _store(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


_LARGEST = 2**24
"""Bytes of the config of a model; those of transformers have a few kB."""


class PlannedModel:
    """A local folder with `config.json`, or a factory `module:function`. Nothing is downloaded."""

    def __init__(self, name: str, cfg: Config) -> None:
        """Find the model; it is built when it is needed.

        Args:
            name: The folder or factory.
            cfg: The config, for units, precision and recomputation.

        Raises:
            ConfigError: There is no such folder or module.
        """
        self.name = name
        self.cfg = cfg
        self._folder = None if ":" in name and not Path(name).exists() else _folder(name)
        source = _source(name) if self._folder is None else text_of(self._folder / "config.json", _LARGEST)
        sharding = cfg.sharding
        self._key = [
            str(self._folder or name),
            source,
            sharding.units,
            sharding.min_unit_params,
            sharding.conditional_modules,
            sharding.replicate,
            cfg.quantization.model_dump(),
            cfg.parallel.expert.size,
            cfg.parallel.tensor.model_dump(),
        ]
        self._key += [__version__, *map(_version, ("torch", "transformers"))]

    @property
    def folder(self) -> Path | None:
        """The folder with `config.json`; None for a factory."""
        return self._folder

    def configured(self, cfg: Config) -> PlannedModel:
        """The same with another config."""
        return PlannedModel(self.name, cfg)

    @property
    def shape(self) -> ModelShape:
        """The shape.

        Raises:
            ConfigError: The model cannot be built.
            ModelError: A class in the section `sharding` is not in it.
        """

        def make() -> ModelShape:
            from unishard.tools.plan.building import BuiltModel

            return BuiltModel(self.name, self._folder).shape(self.cfg)

        return cached_shape(["shape", *self._key], make)

    def native(self, backend: str, topology: Topology) -> Native:
        """All that an engine is built from, in its own words.

        Raises:
            ConfigError: The model cannot be built, or the config does not fit the ranks.
            ModelError: A class in the section `sharding` is not in it.
        """
        from unishard.tools.plan.building import BuiltModel

        return BuiltModel(self.name, self._folder).engine(self.cfg, backend, topology).native

    def activations(self, micro_batch_size: int, seq_len: int, recomputation: str | list[str]) -> Activations:
        """The activations of a micro-batch.

        Args:
            micro_batch_size: Samples.
            seq_len: Tokens of each; of a rank's part of it, where `parallel.sequence` is on.
            recomputation: `activation_checkpointing`.

        Raises:
            ConfigError: The model cannot be built.
            ModelError: It cannot be run, or not without data.
        """

        def make() -> Activations:
            from unishard.tools.plan.building import BuiltModel

            changes = (f"activation_checkpointing={json.dumps(recomputation)}", "offload.activations=none")
            cfg = self.cfg.override(*changes)
            return BuiltModel(self.name, self._folder).activations(cfg, micro_batch_size, seq_len)

        key: list[Any] = [
            "activations",
            *self._key,
            self.cfg.precision.compute,
            self.cfg.training.loss_chunk_tokens,
            str(self.cfg.parallel.sequence),
            recomputation,
            micro_batch_size,
            seq_len,
        ]
        found = cached_activations(key, make)
        return found if self.cfg.offload.activations == "none" else found.offloaded()


def _folder(name: str) -> Path:
    folder = Path(name).parent if Path(name).name == "config.json" else Path(name)
    if not folder.is_dir():
        raise refusal(
            f"{name} is no folder; write a folder with config.json (nothing is downloaded), or module:factory"
        )
    if not (folder / "config.json").is_file():
        raise refusal(f"{name} has no config.json; write a folder as save_pretrained writes it, or module:factory")
    return folder.resolve()


def _source(name: str) -> str:
    """A text that changes with the file of a factory."""
    module, _, function = name.partition(":")
    if not function.isidentifier():
        raise refusal(f"{name} names no function; write module:factory, such as train:build_model")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise refusal(
            f"{name}: there is no module {module!r}; run this where it can be imported, or write a folder with "
            "config.json"
        )
    path = Path(spec.origin) if spec.origin else None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path and path.is_file() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
