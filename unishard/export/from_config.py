"""What an export needs of a model that is there as a config alone: a checkpoint converted from another tool's says nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from unishard.checkpoint.lazy_shards import LazyShard
from unishard.errors import CheckpointError
from unishard.export import pretrained
from unishard.export.assets import Assets

__all__ = ["assets_of"]


def assets_of(folder: Path, stretches: Mapping[str, LazyShard]) -> Assets:
    """What `save_pretrained` would write of the model that a folder describes, its tensors apart. The model is made without data.

    Args:
        folder: Holds the `config.json` of a model of transformers, and what else is to lie beside the tensors, such as a tokenizer.
        stretches: Of each tensor, by its name in the model; their shapes alone are looked at.

    Raises:
        CheckpointError: There is no such file, it names no class of transformers, or the model has other tensors.
    """
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError("what a config.json describes, transformers alone knows; install it: pip install transformers") from error
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no config.json here; name the folder of a model of transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        (name,) = config.architectures or ["none"]
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        model.tie_weights()
    except Exception as error:  # whatever transformers makes of a file that is not one of its own
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(f"{path}: transformers makes no model of it ({reason}); name the config.json of the model") from error
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    model.config._name_or_path = str(folder)
    return pretrained.assets_of(model, stretches)
