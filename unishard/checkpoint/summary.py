"""The manifest's fields about the files and tensors that were written."""

from __future__ import annotations

import math
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from unishard.checkpoint import tensor_names
from unishard.checkpoint.hashing import hexadecimal
from unishard.checkpoint.manifest import FileFacts, TensorFacts
from unishard.checkpoint.planning import SaveResult


def summary_of(result: SaveResult, buffers: Collection[str]) -> dict[str, Any]:
    """The fields of a manifest that are known only after writing.

    Args:
        result: Of all ranks.
        buffers: Names of the model's tensors that are not parameters.
    """
    return {
        "written": datetime.now(UTC).isoformat(timespec="microseconds"),
        "norms": _norms(result, buffers),
        "files": {
            name: FileFacts(bytes=size, crc32=f"{crc:08x}") for name, (size, crc) in sorted(result.files.items())
        },
        "tensors": {
            name: TensorFacts(shape=list(shape), dtype=result.dtypes[name], hash=hexadecimal(result.hashes[name]))
            for name, shape in sorted(result.shapes.items())
        },
    }


def _norms(result: SaveResult, buffers: Collection[str]) -> dict[str, float]:
    """L2 norm of all parameters, and of each kind of optimizer state with a parameter's shape."""
    squares: dict[str, float] = {}
    for name, square in result.squares.items():
        parameter, part = tensor_names.parameter_of(name), tensor_names.optimizer_part(name)
        if part is not None and result.shapes[name] == result.shapes.get(tensor_names.PARAMETERS + part[0]):
            squares[part[1]] = squares.get(part[1], 0.0) + square
        elif parameter is not None and parameter not in buffers:
            squares["parameters"] = squares.get("parameters", 0.0) + square
    return {kind: math.sqrt(square) for kind, square in squares.items()}
