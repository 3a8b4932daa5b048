"""Unishard's own checkpoints as one of the formats between which `unishard checkpoint convert` converts."""

from __future__ import annotations

import platform
from pathlib import Path

from unishard.checkpoint import manifest
from unishard.checkpoint.directory import write_manifest
from unishard.checkpoint.finding import checkpoints, is_checkpoint, locate
from unishard.checkpoint.planning import SaveResult
from unishard.checkpoint.summary import summary_of
from unishard.checkpoint.tensor_names import OPTIMIZER, PARAMETERS, parameter_of
from unishard.checkpoint.verifying import opened, verified
from unishard.checkpoint.writing import write as write_tensors
from unishard.contract.checkpoint_format import Advance, CheckpointFormat, Contents
from unishard.version import __version__


def _is_own(source: Path) -> bool:
    return is_checkpoint(source) or bool(source.is_dir() and checkpoints(source))


def _read(source: Path) -> Contents:
    folder = locate(source)
    facts = manifest.read(folder)
    tensors = opened(folder, facts)
    taken = [
        name for name in tensors if name.startswith((PARAMETERS, OPTIMIZER)) and parameter_of(name) not in facts.ties
    ]
    left = sorted({name.partition(".")[0] for name in set(tensors) - set(taken)} - {"model"})
    notes = [f"not converted: tensors under {', '.join(left)}, which other formats cannot store"] if left else []
    notes += ["not converted: the data position"] if facts.data else []
    return Contents(
        shards={name: verified(tensors.lazy(name), folder, name, facts.tensors.get(name)) for name in taken},
        step=facts.step,
        world_size=facts.world_size,
        optimizer=facts.optimizer,
        ties=facts.ties,
        frozen=tuple(facts.frozen),
        buffers=tuple(facts.buffers),
        schedule=facts.schedule,
        loss_scale=facts.loss_scale,
        versions=facts.versions,
        model=facts.model.class_name,
        notes=tuple(notes),
    )


def _write(contents: Contents, folder: Path, advance: Advance) -> tuple[str, ...]:
    result = write_tensors(folder, contents.shards, ties=contents.ties, advance=advance, single_process=True)
    assert result is not None
    write_manifest(folder, _manifest_of(contents, result))
    return ()


def _manifest_of(contents: Contents, result: SaveResult) -> manifest.Manifest:
    shapes = {name: tensor.shape for key, tensor in contents.shards.items() if (name := parameter_of(key)) is not None}
    return manifest.Manifest(
        **summary_of(result, contents.buffers),
        versions={**contents.versions, "unishard": __version__, "python": platform.python_version()},
        step=contents.step,
        world_size=contents.world_size,
        model=manifest.ModelRecord(
            class_name=contents.model,
            fingerprint=manifest.fingerprint_of(shapes),
            numel=sum(shape.numel() for name, shape in shapes.items() if name not in contents.buffers),
        ),
        ties=dict(contents.ties),
        frozen=list(contents.frozen),
        buffers=list(contents.buffers),
        optimizer=contents.optimizer,
        schedule=contents.schedule,
        loss_scale=contents.loss_scale,
    )


OWN = CheckpointFormat("unishard", "unishard", _is_own, _read, _write)
"""The format of unishard's own checkpoints."""
