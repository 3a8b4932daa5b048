"""Checkpoints that transformers' Trainer has saved without unishard, for an engine to continue from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unishard.checkpoint.convert import convert, formats
from unishard.checkpoint.own_format import OWN
from unishard.checkpoint.tensor_names import PARAMETERS, of_optimizer
from unishard.contract.checkpoint_format import Contents
from unishard.contract.training_facts import ScheduleFacts, optimizer_of
from unishard.distributed import process_group
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import on_first
from unishard.engine.engine import Engine
from unishard.errors import CheckpointError

__all__ = ["converted", "is_sharded"]


def is_sharded(folder: Path) -> bool:
    """Whether FSDP or DeepSpeed under transformers has saved a checkpoint, in files of their own."""
    return any(format_.recognises(folder) for format_ in formats().values() if format_ is not OWN)


@contextmanager
def converted(folder: Path, engine: Engine, groups: Sequence[Sequence[str]], scratch: Path) -> Iterator[Path]:
    """A checkpoint of unishard with what the Trainer has saved, until the end of the block. Collective.

    Args:
        folder: The Trainer's checkpoint: of FSDP or DeepSpeed, or with `optimizer.pt`.
        engine: Has the weights of one with `optimizer.pt` already.
        groups: Names of the parameters in each group of the Trainer's optimizer.
        scratch: A folder that all ranks share.

    Raises:
        CheckpointError: On every rank: it cannot be converted.
    """
    group, made = process_group.host_group(), scratch / f".unishard-{folder.name}"
    sharded = is_sharded(folder)
    weights = {} if sharded else engine.weights.state_dict()

    def make() -> None:
        shutil.rmtree(made, ignore_errors=True)
        if sharded:
            convert(folder, made)
        else:
            made.mkdir(parents=True)
            assert OWN.write is not None
            OWN.write(_contents(folder / "optimizer.pt", engine.module, weights, groups), made, lambda size: None)

    try:
        on_first(group, make)
        yield made
    finally:
        with suppress(CheckpointError):  # a rank may be gone
            on_first(group, lambda: shutil.rmtree(made, ignore_errors=True))


def _contents(
    path: Path, module: nn.Module, weights: Mapping[str, Tensor], groups: Sequence[Sequence[str]]
) -> Contents:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); remove it to start from the weights only"
        ) from error
    then = [len(group["params"]) for group in saved["param_groups"]]
    if then != [len(names) for names in groups]:
        raise CheckpointError(
            f"{path}: has groups of {then} parameters, but the optimizer of this Trainer has groups of "
            f"{[len(names) for names in groups]}; resume with the model, the optimizer and the weight decay it was "
            "saved with, or remove the file to start from the weights only"
        )
    names = {
        number: name
        for group, group_names in zip(saved["param_groups"], groups, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers() if name in weights]
    tensors = {PARAMETERS + name: weights[name] for name in (*parameters, *buffers)}
    for number, state in saved["state"].items():
        for key, value in state.items():
            if value is not None:
                tensors[of_optimizer(names[number], key)] = torch.as_tensor(value)
    step = max((int(state["step"]) for state in saved["state"].values() if "step" in state), default=0)
    options = [
        (group_names, group) for group, group_names in zip(saved["param_groups"], groups, strict=True) if group_names
    ]
    return Contents(
        shards={name: _whole(value) for name, value in tensors.items()},
        step=step,
        world_size=1,
        optimizer=optimizer_of(options, {key for state in saved["state"].values() for key in state}),
        buffers=tuple(buffers),
        schedule=ScheduleFacts(updates=step),
        versions={"torch": str(torch.__version__)},
    )


def _whole(values: Tensor) -> LazyShard:
    flat: Any = values.reshape(-1)
    return LazyShard(values.shape, values.dtype, 0, flat.numel(), lambda begin, end: flat[begin:end])
