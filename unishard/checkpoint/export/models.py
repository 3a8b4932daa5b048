"""What an export needs of a live model of any library."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from unishard.checkpoint.export.assets import Assets
from unishard.checkpoint.export.sources import sources_of
from unishard.distributed.shards import LazyShard


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
        from unishard.checkpoint.export import adapters

        return adapters.assets_of(module)
    if _is_a(module, "transformers", "PreTrainedModel"):
        from unishard.checkpoint.export import pretrained

        return pretrained.assets_of(module, shards)
    return Assets(
        kind="plain",
        names={"model": {source: source for source in dict.fromkeys(sources_of(module).values())}},
        files={},
    )


def _is_a(module: nn.Module, package: str, name: str) -> bool:
    kind: Any = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return isinstance(kind, type) and isinstance(module, kind)
