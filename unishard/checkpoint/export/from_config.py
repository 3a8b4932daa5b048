"""What an export needs of a model given only by its config: a checkpoint converted from another tool has no such
information.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from unishard.checkpoint.export import pretrained
from unishard.checkpoint.export.assets import Assets
from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError


def assets_of_config(folder: Path, shards: Mapping[str, LazyShard]) -> Assets:
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
