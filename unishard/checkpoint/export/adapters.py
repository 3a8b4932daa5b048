"""PEFT adapters: the names and files that its `save_pretrained` writes (peft 0.21, utils/save_and_load.py), without the
tensors.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unishard.checkpoint.export.assets import Assets
from unishard.checkpoint.export.optional_files import optional
from unishard.checkpoint.export.pretrained import tokenizer_of
from unishard.checkpoint.export.sources import sources_of

_PREFIX = "base_model.model."
"""Prefix of the names of adapters that transformers itself adds to a model."""
_COMPUTED = (
    "is computed when it is saved, which an export cannot do; load the checkpoint into the model and save it with peft"
)


def adapter_assets(model: Any) -> Assets:
    """The files that `save_pretrained` would write, without tensors and model card. Each adapter has a folder;
    `default` is at the top level.
    """
    names: dict[str, dict[str, str]] = {}
    files: dict[str, bytes] = {}
    refusals = []
    for adapter in model.peft_config:
        folder = "" if adapter == "default" or len(model.peft_config) == 1 else f"{adapter}/"
        adapter_names, refusal = _names(model, adapter)
        names[f"{folder}adapter_model"] = adapter_names
        file = f"{folder}adapter_config.json"
        files |= optional(file, partial(_config, model, adapter, file))
        refusals += [refusal] if refusal else []
    files |= optional("the tokenizer", partial(tokenizer_of, model))
    return Assets(kind="adapter", names=names, files=files, refusal=next(iter(refusals), None))


def _names(model: Any, adapter: str) -> tuple[dict[str, str], str | None]:
    """Maps names in the file to names in the model: peft itself selects them, from meta tensors."""
    from peft import get_peft_model_state_dict

    if model.peft_config[adapter].is_prompt_learning:
        kind = model.peft_config[adapter].peft_type
        return ({}, f"the adapter {adapter!r} ({kind}) {_COMPUTED}")
    sources = sources_of(model)
    stand_ins = {name: torch.empty(1, device="meta") for name in sources}
    source_of = {id(stand_in): sources[name] for name, stand_in in stand_ins.items()}
    with _offline(model, adapter), only_names(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that it also saves embeddings
        chosen: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
    made = next((name for name, stand_in in chosen.items() if id(stand_in) not in source_of), None)
    if made is not None:
        return ({}, f"{made} of the adapter {adapter!r} {_COMPUTED}")
    prefix = _PREFIX if getattr(model, "_hf_peft_config_loaded", False) else ""
    return {prefix + name: source_of[id(stand_in)] for name, stand_in in chosen.items()}, None


@contextmanager
def only_names(model: Any) -> Iterator[None]:
    """Let `state_dict` return only names: peft calls it for those in `modules_to_save`, and engines hook into it."""
    parts = [*model.modules()]
    for part in parts:
        vars(part)["state_dict"] = partial(sources_of, part)
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["state_dict"]


@contextmanager
def _offline(model: Any, adapter: str) -> Iterator[None]:
    """Point the adapter at the cached copy of its base model: peft compares the vocabularies, and would query the hub
    each time.
    """
    from huggingface_hub import try_to_load_from_cache

    config = model.peft_config[adapter]
    name = config.base_model_name_or_path
    if not name or (Path(name) / "config.json").exists():
        yield
        return
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a valid name on the hub
        cached = None
    local = copy.copy(config)
    local.base_model_name_or_path = str(Path(cached).parent) if isinstance(cached, str) else None
    model.peft_config[adapter] = local
    try:
        yield
    finally:
        model.peft_config[adapter] = config


def _config(model: Any, adapter: str, file: str) -> dict[str, bytes]:
    peft_config = model.peft_config[adapter]
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in peft_config.to_dict().items()}
    config["inference_mode"] = True
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = type(base)
    if peft_config.base_model_name_or_path is None:
        config["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
    if peft_config.task_type is None:
        config["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return {file: json.dumps(config, indent=2, sort_keys=True).encode()}
