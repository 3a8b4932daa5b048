"""Writes a directory that an FSDP2 script loads without unishard, with torch's own `dcp.load` and `set_state_dict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unishard.checkpoint.writing import write as write_tensors
from unishard.contract.checkpoint_format import Advance, Contents
from unishard.contract.training_facts import GroupRecord, plain
from unishard_fsdp.checkpoints.objects import add_objects

_GROUPS = "optim.param_groups"


def write(contents: Contents, folder: Path, advance: Advance) -> tuple[str, ...]:
    """Fill an empty folder: `{"model": ..., "optim": ...}`, with parameter groups in both layouts that torch may ask
    for.

    Returns:
        Notes on what is not converted, and why.
    """
    write_tensors(folder, contents.shards, ties=contents.ties, advance=advance)
    notes = ["not converted: step, schedule and loss scale, which torch.distributed.checkpoint directories do not have"]
    if contents.optimizer is not None:
        # All options of torch's optimizer of this name: `dcp.load` fails if one is missing.
        kind = getattr(torch.optim, contents.optimizer.class_name, torch.optim.AdamW)
        options: dict[str, Any] = kind([torch.zeros(1)]).defaults
        defaults = {key: value for key, value in options.items() if plain(value)}
        values: dict[str, tuple[tuple[str | int, ...], Any]] = {}
        for index, group in enumerate(contents.optimizer.groups):
            values |= _values(index, group, defaults)
        add_objects(folder, values)
    return tuple(notes)


def _values(index: int, group: GroupRecord, defaults: dict[str, Any]) -> dict[str, tuple[tuple[str | int, ...], Any]]:
    """A group as torch stores it by default, and under `flatten_optimizer_state_dict` (torch 2.13,
    checkpoint/state_dict.py).
    """
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (defaults | group.options).items()
    }
    values: dict[str, tuple[tuple[str | int, ...], Any]] = {
        f"{_GROUPS}.{index}.{key}": (("optim", "param_groups", index, key), value)
        for key, value in {**options, "params": list(group.names)}.items()
    }
    for name in group.names:
        for key, value in options.items():
            # A separate path: where torch rebuilds nested dictionaries, one path cannot be both a list and a
            # dictionary.
            values[f"{_GROUPS}.{name}.{key}"] = ((f"{_GROUPS}.{name}.{key}",), value)
    return values
