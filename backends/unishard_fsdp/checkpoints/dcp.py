"""Reads torch.distributed.checkpoint directories of FSDP scripts: a model and an optimizer, each under its own root
key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unishard.checkpoint.tensor_names import OPTIMIZER, PARAMETERS, of_optimizer, optimizer_part
from unishard.checkpoint.tensor_reader import Tensors
from unishard.contract.checkpoint_format import Contents
from unishard.contract.training_facts import ScheduleFacts, optimizer_of
from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError
from unishard_fsdp.checkpoints.objects import read_objects

_MODELS = ("model.", "app.model.", "state_dict.model.", "module.")
_OPTIMIZERS = ("optim.", "optimizer.", "app.optim.", "app.optimizer.", "state_dict.optimizer.", "state_dict.optim.")
"""Root keys that scripts use; `app` is from torch's tutorial."""


class _Found(NamedTuple):
    shards: dict[str, LazyShard]
    """By their names in a unishard checkpoint."""
    groups: list[tuple[list[str], dict[str, Any]]]
    """Names and options of each parameter group."""
    notes: list[str]


def read(folders: Sequence[Path]) -> Contents:
    """Read directories that form one checkpoint.

    Raises:
        CheckpointError: A directory has no readable index, or none contains a model.
    """
    checkpoint = _Found({}, [], [])
    for folder in folders:
        _add(folder, checkpoint)
    names = {key.removeprefix(PARAMETERS) for key in checkpoint.shards if key.startswith(PARAMETERS)}
    if not names:
        raise CheckpointError(
            f"{folders[0]}: no model under {', '.join(_MODELS)}; save it as {{'model': ..., 'optim': ...}}"
        )
    trained = {part[0] for part in map(optimizer_part, checkpoint.shards) if part is not None}
    _complete(checkpoint, names, trained, folders[0])
    still = tuple(sorted(names - trained)) if trained else ()
    notes = list(checkpoint.notes)
    if still:
        notes.append(
            f"taken as frozen, since they have no optimizer state (some may be buffers or ties): {', '.join(still)}"
        )
    counts = [
        checkpoint.shards[of_optimizer(name, "step")]
        for name in trained
        if of_optimizer(name, "step") in checkpoint.shards
    ]
    step = max((int(count.read(0, 1).item()) for count in counts), default=0)
    notes.append(
        f"the step count is the optimizer's: {step}; not converted: random number state, schedule, data position"
    )
    keys = {part[1] for part in map(optimizer_part, checkpoint.shards) if part is not None}
    return Contents(
        shards=checkpoint.shards,
        step=step,
        world_size=1,
        optimizer=optimizer_of(checkpoint.groups, keys) if checkpoint.groups else None,
        frozen=still,
        schedule=ScheduleFacts(updates=step) if trained else None,
        versions={"torch": str(torch.__version__)},
        notes=tuple(notes),
    )


def _add(folder: Path, checkpoint: _Found) -> None:
    tensors = Tensors(folder, verify=True)
    model = _root(tensors, _MODELS, "")
    optimizer = _root(tensors, _OPTIMIZERS, "state.")
    for name in tensors:
        if optimizer is not None and name.startswith(optimizer + "state."):
            checkpoint.shards[OPTIMIZER + name.removeprefix(optimizer + "state.")] = tensors.lazy(name)
        elif model is not None and name.startswith(model):
            checkpoint.shards[PARAMETERS + name.removeprefix(model)] = tensors.lazy(name)
    if optimizer is not None:
        root = optimizer + "param_groups."
        values, skipped = read_objects(folder, root)
        # Learning rates may be tensors with one element.
        numbers = [name for name in tensors if name.startswith(root) and tensors.shapes[name].numel() == 1]
        values |= {name.removeprefix(root): tensors.full(name).item() for name in numbers}
        try:
            checkpoint.groups.extend(_groups(values))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: {root}*: not in the layout that torch writes ({error}); save the optimizer's state_dict "
                "again"
            ) from error
        if skipped:
            checkpoint.notes.append(f"not converted: optimizer options that are not plain values: {', '.join(skipped)}")
    roots = tuple(each for each in (model, optimizer) if each is not None)
    left = sorted({name.partition(".")[0] for name in (*tensors, *tensors.others) if not name.startswith(roots)})
    if left:
        checkpoint.notes.append(f"not converted: {', '.join(left)}")


def _root(names: Iterable[str], roots: Sequence[str], below: str) -> str | None:
    held = list(names)
    return next((root for root in roots if any(name.startswith(root + below) for name in held)), None)


def _groups(values: Mapping[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """The parameter groups from either layout of torch (torch 2.13, checkpoint/state_dict.py): a list, or options for
    each parameter.

    If both are present, as in what `writing` writes, the list is used, since it has the groups in order.
    """
    if "0.params" in values:
        groups: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            index, _, key = name.partition(".")
            if index.isdecimal() and "." not in key:  # `0.weight` is a parameter
                groups.setdefault(int(index), {})[key] = value
        return [(list(group.pop("params")), group) for _, group in sorted(groups.items())]
    options: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parameter, _, key = name.rpartition(".")
        options.setdefault(parameter, {})[key] = value
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for parameter, held in options.items():
        alike.setdefault(repr(sorted(held.items())), ([], held))[0].append(parameter)
    return list(alike.values())


def _complete(checkpoint: _Found, names: set[str], trained: set[str], folder: Path) -> None:
    """Check that every parameter with optimizer state is in the model, and add those without a group to one."""
    strangers = sorted(trained - names)
    if strangers:
        raise CheckpointError(
            f"{folder}: the optimizer has state of {strangers[0]!r}, which the model does not have; save both together"
        )
    grouped = {name for group, _ in checkpoint.groups for name in group}
    if trained - grouped:
        checkpoint.groups.append((sorted(trained - grouped), {}))
        checkpoint.notes.append("optimizer options are not stored for all parameters; the others use the config's")
