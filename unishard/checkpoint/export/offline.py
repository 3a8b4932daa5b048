"""Exports the weights of a checkpoint, in one process, block by block, usually without the model's class or
transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from unishard.checkpoint import manifest, tensor_names
from unishard.checkpoint.export.assets import FOLDER, INDEX, Assets, require_inside
from unishard.checkpoint.export.destination import require_free
from unishard.checkpoint.export.from_config import assets_of_config
from unishard.checkpoint.export.layout import ExportContents, lay_out
from unishard.checkpoint.export.tokenizers import tokenizer_files
from unishard.checkpoint.export.writing import Advance, write
from unishard.checkpoint.files import path_of, read_bytes
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.verifying import opened, verified
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import Ranks
from unishard.errors import CheckpointError


def export_checkpoint(
    checkpoint_folder: Path,
    out: Path,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Path | None = None,
    model: Path | None = None,
    progress: Callable[[int], Advance] = lambda total: lambda written: None,
    *,
    overwrite: bool = False,
) -> ExportContents:
    """Write the weights of a checkpoint in the Hugging Face layout. Every tensor is verified against its hash.

    Args:
        checkpoint_folder: A complete checkpoint.
        out: Empty or nonexistent, unless `overwrite` is set.
        dtype: `fp32`, `bf16` or `fp16`; None for the dtype in the model's config, else fp32.
        max_shard_size: Maximum size of a file, such as `5GB` or a number of bytes.
        tokenizer: A folder with a tokenizer; None for the one beside the pretrained weights, if any.
        model: A folder with the `config.json` of a transformers model (needs transformers); None for the one in the
            checkpoint.
        progress: Called with the total number of bytes; what it returns, with the number of further bytes written.
        overwrite: Whether to replace an earlier export in `out`, once the new one is complete.

    Returns:
        What was written; without a `config.json` if the checkpoint has none.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, the model cannot be exported, an argument is invalid,
            or the folder cannot be written. Nothing is left behind.
    """
    out = path_of(out, "export")
    facts = manifest.read(checkpoint_folder)
    tensors = opened(checkpoint_folder, facts)
    require_free(out, overwrite=overwrite)
    assets = _assets(checkpoint_folder, facts) if model is None else _described(model, facts, tensors)
    shards = {source: _checked(tensors, source, facts) for source in assets.sources}
    layout = lay_out(assets, shards, dtype, max_shard_size)
    layout.others.update(tokenizer_files(tokenizer))
    write(out, shards, layout.files, layout.others, Ranks(), progress(layout.size), overwrite=overwrite)
    return layout


def _assets(folder: Path, facts: Manifest) -> Assets:
    """The checkpoint's assets; only names if the checkpoint was converted from another tool and has none."""
    if INDEX not in facts.files:
        parameters = [tensor_names.parameter_of(name) for name in facts.tensors]
        names = {name: name for name in parameters if name is not None and name not in facts.ties}
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

    shards = {name: tensors.lazy(key) for key in facts.tensors if (name := tensor_names.parameter_of(key)) is not None}
    return assets_of_config(model, shards)


def _checked(tensors: Tensors, source: str, facts: Manifest) -> LazyShard:
    name = tensor_names.PARAMETERS + source
    return verified(tensors.lazy(name), tensors.folder, source, facts.tensors.get(name))
