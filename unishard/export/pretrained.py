"""Models of transformers: the names and files of their `save_pretrained` (transformers 5.23, modeling_utils.py)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from unishard.export import tokenizers
from unishard.export.assets import Assets
from unishard.export.sources import sources_of

__all__ = ["assets_of", "renamed"]


def assets_of(model: Any) -> Assets:
    """What `save_pretrained` would write, its tensors apart."""
    sources = sources_of(model)
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = _without_aliases(model, {name: source for name, source in sources.items() if name not in ignored})
    names, refusal = renamed(model, kept)
    return Assets(
        kind="model",
        names={"model": {exported: sources[name] for name, exported in names.items()}},
        files=_files(model),
        refusal=refusal or _quantized(model),
    )


def renamed(model: Any, names: Iterable[str]) -> tuple[dict[str, str], str | None]:
    """What the files call tensors of the model, and a reason where they would not hold these tensors.

    As `revert_weight_conversion` does it, tensors apart (transformers 5.23, core_model_loading.py).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = [each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)]
    reverse = [each.reverse_transform() for each in reversed(conversions)]
    renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    found: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):
        if apply_converters(name, converters)[1] is not None:
            return found, (
                f"{name} of {type(model).__name__} is not what its files hold: transformers makes several tensors of it, or another one, "
                "when it saves, and an export does not; load the checkpoint's tensors into the model in one process "
                "(unishard.checkpoint.tensors.Tensors) and call its save_pretrained"
            )
        found[name] = apply_renamings(name, renamings)
    return found, None


def _without_aliases(model: nn.Module, sources: dict[str, str]) -> list[str]:
    """Names without those that the class declares to be ties of another one, as long as that one stays.

    A tie that the class does not declare is exported under each of its names, since no reader would tie it again.
    """
    declared = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in (getattr(module, "_tied_weights_keys", None) or {})
    ]
    same: dict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        same[source].append(name)
    dropped: set[str] = set()
    for names in same.values():
        aliases = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in declared)]
        dropped.update(aliases[: len(names) - 1])
    return [name for name in sources if name not in dropped]


def _files(model: Any) -> dict[str, bytes]:
    config = json.loads(model.config.to_json_string())
    config.pop("transformers_weights", None)
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # as fully_shard renames the class (torch 2.13)
    files = {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    if model.can_generate() and model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string(use_diff=True, keys_to_pop=["compile_config"]).encode()
    origin = model.config._name_or_path
    return files | (tokenizers.beside(Path(origin)) if origin else {})


def _quantized(model: Any) -> str | None:
    if getattr(model, "hf_quantizer", None) is None:
        return None
    return f"{type(model).__name__} is quantized, and an export holds plain tensors; train adapters on it, and export those"
