"""What an export needs of a live model of any library."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from unishard.checkpoint.export.adapters import adapter_assets
from unishard.checkpoint.export.assets import Assets
from unishard.checkpoint.export.optional_files import warn_once
from unishard.checkpoint.export.pretrained import transformers_assets
from unishard.checkpoint.export.sources import sources_of
from unishard.distributed.lazy_shards import LazyShard


def assets_of(module: nn.Module, shards: Mapping[str, LazyShard]) -> Assets:
    """What an export needs of a model besides its tensors.

    A model that cannot be exported is no error here: see `Assets.refusal`.

    Args:
        module: Sharded or not; its tensors are not read.
        shards: The tensors by their names in the module; only their full shapes are used, which a sharded module may
            not know.
    """
    # The library of a module is already imported, so nothing is imported to check.
    if _is_a(module, "peft", "PeftModel") or getattr(module, "_hf_peft_config_loaded", False):
        return adapter_assets(module)
    if is_transformers_model(module):
        return transformers_assets(module, shards)
    return Assets(
        kind="plain",
        names={"model": {source: source for source in dict.fromkeys(sources_of(module).values())}},
        files={},
    )


def stored_assets(module: nn.Module, shards: Mapping[str, LazyShard]) -> dict[str, bytes]:
    """The files of `assets_of` to store in a checkpoint, which is saved even where they cannot be made."""
    try:
        return assets_of(module, shards).to_files()
    except Exception as error:  # of any library or user
        reason = (
            f"{type(module).__name__} cannot be exported from the checkpoint: {type(error).__name__}: {error}; to "
            "export it nevertheless, give the folder of its config: unishard checkpoint export --model"
        )
        warn_once(reason)
        return Assets(kind="plain", names={}, files={}, refusal=reason).to_files()


def is_transformers_model(module: nn.Module) -> bool:
    """Whether `save_pretrained` of transformers writes it."""
    return _is_a(module, "transformers", "PreTrainedModel")


def _is_a(module: nn.Module, package: str, name: str) -> bool:
    kind: Any = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return isinstance(kind, type) and isinstance(module, kind)
