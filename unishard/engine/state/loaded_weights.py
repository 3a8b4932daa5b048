"""What `engine.weights.load` reads: full tensors by name, of a mapping or of a directory with safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from unishard.engine.model import weight_files
from unishard.errors import CheckpointError

_NAMED = 5


def reader_of(source: Mapping[str, Tensor] | str | Path | None) -> Callable[[str], Tensor]:
    """What reads a full tensor by its name."""
    if isinstance(source, Mapping):
        return source.__getitem__
    folder = Path(source or "")
    files = weight_files.files_of(folder)

    def read(name: str) -> Tensor:
        with weight_files.opened(folder, files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read


def names_to_load(
    source: Mapping[str, Tensor] | str | Path | None,
    shapes: Mapping[str, torch.Size],
    ties: Mapping[str, str],
    *,
    strict: bool,
) -> list[str]:
    """The names to load, each once.

    Raises:
        CheckpointError: Names or shapes do not match.
    """
    if source is None:
        raise CheckpointError("weights.load: rank 0 passed None; pass it the weights, or a folder with safetensors")
    if isinstance(source, Mapping):
        source_shapes = {name: tuple(value.shape) for name, value in source.items()}
    else:
        source_shapes = weight_files.shapes_of(Path(source), weight_files.files_of(Path(source)))
    wrong = [
        f"{name} has the shape {source_shapes[name]}, not {tuple(shapes[name])}"
        for name in source_shapes.keys() & shapes.keys()
        if source_shapes[name] != tuple(shapes[name])
    ]
    has = source_shapes.keys() | {name for name, first in ties.items() if first in source_shapes}
    has |= {first for name, first in ties.items() if name in source_shapes}
    if strict:
        wrong += [f"{name} is missing" for name in shapes if name not in has]
        wrong += [f"{name} is not in the model" for name in source_shapes if name not in shapes]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        hint = "" if not strict else ", or strict=False"
        raise CheckpointError(f"weights.load: {'; '.join(wrong[:_NAMED])}{more}; pass weights of this model{hint}")
    first = {ties.get(name, name): name for name in reversed([*source_shapes]) if name in shapes}
    return [*first.values()]
