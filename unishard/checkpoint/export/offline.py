"""Exports the weights of a checkpoint, in one process, block by block, usually without the model's class or
transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.checkpoint import manifest
from unishard.checkpoint.export import pretrained
from unishard.checkpoint.export.assets import FOLDER, INDEX, Assets, require_inside, tokenizer_files
from unishard.checkpoint.export.plan import Layout, lay_out
from unishard.checkpoint.export.pretrained import assets_of
from unishard.checkpoint.export.writing import Advance, problem_with, require_free, write
from unishard.checkpoint.files import OutsideFolderError, file_inside, path_of, read_bytes
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.verifying import verified
from unishard.distributed.on_ranks import Ranks, ranks_of
from unishard.distributed.shards import LazyShard
from unishard.errors import CheckpointError, RankMismatchError

# -- what an export needs of a model given only by its config --------------------------------------
# A checkpoint converted from another tool has no such information.


def _assets_of(folder: Path, shards: Mapping[str, LazyShard]) -> Assets:
    """What `save_pretrained` would write of the model described in a folder, without tensors.

    The model is built on the meta device.

    Args:
        folder: Holds the `config.json` of a transformers model, and other files to export, such as a tokenizer.
        shards: The tensors by their names in the model; only their shapes are used.

    Raises:
        CheckpointError: There is no such file, transformers cannot build a model from it, or the model has other
            tensors.
    """
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            "building a model from config.json needs transformers; install it: pip install transformers"
        ) from error
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json here; give the folder of a transformers model")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        (name,) = config.architectures or ["none"]
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        model.tie_weights()
        if (folder / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers can raise anything for an unsuitable file
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"{path}: transformers cannot build a model from it ({reason}); give the model's config.json"
        ) from error
    model.config._name_or_path = str(folder)
    return pretrained.transformers_assets(model, shards)


def export_checkpoint(
    checkpoint_folder: Path,
    out: Path,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Path | None = None,
    model: Path | None = None,
    start: Callable[[int], None] = lambda total: None,
    advance: Advance = lambda written: None,
    *,
    overwrite: bool = False,
) -> Layout:
    """Write the weights of a checkpoint in the Hugging Face layout. Every tensor is verified against its hash.

    Args:
        checkpoint_folder: A complete checkpoint.
        out: Empty or nonexistent, unless `overwrite` is set.
        dtype: `fp32`, `bf16` or `fp16`; None for the dtype in the model's config, else fp32.
        max_shard_size: Maximum size of a file, such as `5GB` or a number of bytes.
        tokenizer: A folder with a tokenizer; None for the one beside the pretrained weights, if any.
        model: A folder with the `config.json` of a transformers model (needs transformers); None for the one in the
            checkpoint.
        start: Called with the total number of bytes.
        advance: Called with the number of further bytes written.
        overwrite: Whether to replace an earlier export in `out`, once the new one is complete.

    Returns:
        What was written; without a `config.json` if the checkpoint has none.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, the model cannot be exported, an argument is invalid,
            or the folder cannot be written. Nothing is left behind.
    """
    out = path_of(out, "export")
    facts, tensors = manifest.read(checkpoint_folder), Tensors(checkpoint_folder)
    require_free(out, overwrite=overwrite)
    assets = _assets(checkpoint_folder, facts) if model is None else _described(model, facts, tensors)
    shards = {source: _checked(tensors, source, facts) for source in assets.sources}
    layout = lay_out(assets, shards, dtype, max_shard_size)
    layout.others.update(tokenizer_files(tokenizer))
    start(layout.size)
    write(out, shards, layout.files, layout.others, Ranks(), advance, overwrite=overwrite)
    return layout


def _assets(folder: Path, facts: Manifest) -> Assets:
    """The checkpoint's assets; only names if the checkpoint was converted from another tool and has none."""
    if INDEX not in facts.files:
        found = [manifest.parameter_of(name) for name in facts.tensors]
        names = {name: name for name in found if name is not None and name not in facts.ties}
        return Assets(kind="plain", names={"model": names}, files={})
    files: dict[str, bytes] = {}
    for name, file in facts.files.items():
        if name.startswith(FOLDER):
            require_inside(name)
            try:
                files[name] = read_bytes(file_inside(folder, name), file.bytes)
            except OutsideFolderError as error:
                raise CheckpointError(f"{folder}: {error}; do not trust this checkpoint") from None
            except OSError as error:
                raise CheckpointError(f"{folder / name}: {error.strerror}; the checkpoint is incomplete") from error
            if f"{zlib.crc32(files[name]):08x}" != file.crc32:
                raise CheckpointError(f"{folder / name}: its checksum differs from the manifest; the file is damaged")
    return Assets.from_files(files)


def _described(model: Path, facts: Manifest, tensors: Tensors) -> Assets:

    shards = {name: tensors.stretch(key) for key in facts.tensors if (name := manifest.parameter_of(key)) is not None}
    return _assets_of(model, shards)


def _checked(tensors: Tensors, source: str, facts: Manifest) -> LazyShard:
    name = manifest.PARAMETERS + source
    return verified(tensors.stretch(name), tensors.folder, source, facts.tensors.get(name))


# -- Exports the model of a running engine: each rank writes its own shards ------------------------


def export(
    folder: str | Path,
    module: nn.Module,
    shards: Mapping[str, LazyShard],
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
    advance: Advance = lambda written: None,
) -> Layout:
    """Write weights in the Hugging Face layout. Collective.

    Args:
        folder: Empty or nonexistent, unless `overwrite` is set; the same on all ranks, on a shared file system.
        module: The model, sharded or not; only its names and config are used.
        shards: This rank's shard of each parameter and persistent buffer, by its name in the module.
        dtype: `fp32`, `bf16` or `fp16`; None for the dtype in the model's config, else fp32.
        max_shard_size: Maximum size of a file, such as `5GB` or a number of bytes.
        tokenizer: A transformers tokenizer or processor, or a folder with one; rank 0's is saved.
        overwrite: Whether to replace an earlier export there. Only rank 0's is used.
        group: Ranks that together hold the full model; None for all ranks.
        advance: Called with this rank's progress in bytes.

    Returns:
        What was written.

    Raises:
        CheckpointError: On every rank: the model cannot be exported, an argument is invalid, the folder is not free, or
            a rank cannot write. Nothing is left behind.
        RankMismatchError: On every rank: the ranks passed different arguments, or have different models.
    """
    ranks = ranks_of(group)
    out = path_of(folder, "export")

    planned: list[Layout] = []

    def facts() -> tuple[str, str]:
        layout = lay_out(assets_of(module, shards), shards, dtype, max_shard_size)
        if ranks.rank == 0:
            layout.others.update(tokenizer_files(tokenizer))
        planned.append(layout)
        return str(out), layout.digest

    everyone = ranks.each(facts)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            what = f"writes to {theirs[0]}" if theirs[0] != everyone[0][0] else "plans other files"
            raise RankMismatchError(
                f"ranks export different things: rank 0 writes to {everyone[0][0]}, and rank {rank} {what}; call "
                "export on every rank with the same folder, dtype and max_shard_size"
            )
    layout = planned[0]
    taken = ranks.each(lambda: problem_with(out, overwrite=overwrite) if ranks.rank == 0 else None)[0]
    if taken is not None:
        raise CheckpointError(taken)
    write(out, shards, layout.files, layout.others, ranks, advance, overwrite=overwrite)
    return layout
