"""Compares an export with what plain `save_pretrained` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from dev.models.case import Case, micro_batch
from dev.models.runs import WORLD

__all__ = ["EQUAL", "difference"]

EQUAL = "equal"


def difference(
    case: Case, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], exported: Path
) -> str | None:
    """How an export differs from `save_pretrained` of the model in plain torch: `equal`, or what is different; None for
    other models.

    Args:
        case: The case.
        parameters: The engine's, by their names in the model.
        buffers: The engine's.
        exported: Folder of the export.
    """
    model = case.build()
    if not hasattr(model, "save_pretrained"):
        return None
    case.loss(model, micro_batch(case, 0, 0, WORLD))  # a forward may set `problem_type` in its config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _of_folders(exported, Path(folder))


def _of_folders(found: Path, right: Path) -> str:
    there, wanted = ({path.name for path in folder.iterdir()} for folder in (found, right))
    if there != wanted:
        return f"files: {', '.join(sorted(there ^ wanted))}"
    for name in sorted(wanted):
        if (found / name).read_bytes() != (right / name).read_bytes():
            of = _of_tensors if name.endswith(".safetensors") else _of_json
            return f"{name}: {of(found / name, right / name)}"
    return EQUAL


def _of_tensors(found: Path, right: Path) -> str:
    with safe_open(found, "pt") as one, safe_open(right, "pt") as other:
        there, wanted = set(one.keys()), set(other.keys())
        if there != wanted:
            return (
                f"names, such as {min(there - wanted, default='nothing')} for {min(wanted - there, default='nothing')}"
            )
        wrong = [name for name in sorted(wanted) if not _same(one.get_tensor(name), other.get_tensor(name))]
    return f"values of {', '.join(wrong[:3])}" if wrong else "only the order or the head of the file"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _of_json(found: Path, right: Path) -> str:
    one, other = (json.loads(path.read_text()) for path in (found, right))
    return f"keys {', '.join(sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)))}"
