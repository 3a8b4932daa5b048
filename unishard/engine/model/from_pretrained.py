"""Load transformers models without a full copy on any rank: `prepare` reads safetensors tensor by tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unishard.checkpoint.regular_file import path_of
from unishard.config import Config, expect_config
from unishard.config.topology import Topology
from unishard.distributed import process_group
from unishard.engine.model.init import without_data
from unishard.engine.model.materialization import set_reader
from unishard.engine.model.weight_files import facts_of, files_of, opened, shapes_of
from unishard.errors import ModelError
from unishard.failures import lifetime, monitor_client
from unishard.failures.endings import naming_causes

__all__ = ["from_pretrained"]


def from_pretrained(cls: Any, path: str | Path, cfg: Config, **kwargs: Any) -> nn.Module:
    """Load a transformers model whose parameters `prepare` reads from safetensors. Collective.

    Until then parameters are on the meta device on every rank; buffers have their data. `prepare` reads one unit (on
    DeepSpeed one parameter) at a time: where parameters are sharded (`full_shard`, and the hybrid strategies on FSDP2),
    each rank reads its own slices; else rank 0 reads and broadcasts. So every rank needs the same files. Parameters are
    fp32 whatever the files' dtype, because they become the master weights; `prepare(train=False)` casts them to
    `precision.compute`. Names are mapped as in `cls.from_pretrained`; tied weights follow the config.

    Args:
        cls: A transformers model class such as `LlamaForCausalLM`; not an Auto class.
        path: Directory with `config.json` and `model.safetensors`, or several files and their index, as
            `save_pretrained` writes.
        cfg: The config that `prepare` will get.
        kwargs: Overrides of the model's config, such as `attn_implementation="eager"`.

    Returns:
        The model, in evaluation mode like after `cls.from_pretrained`: call `engine.train()`.

    Raises:
        ConfigError: `cfg` is not a config.
        RankMismatchError: On every rank: the files differ between ranks.
        ModelError: `cls` is not such a class, there are no safetensors, tensors are missing, unexpected or have another
            shape, or transformers converts several tensors of the files into one parameter.
    """
    expect_config(cfg)
    lifetime.ensure(Topology.from_environment(), patience=cfg.communication.desync_timeout)
    folder = path_of(path, "from_pretrained")
    model = _empty(cls, folder, kwargs)
    files = files_of(folder)
    tensors = shapes_of(folder, files)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    sources = _sources(model, tensors, folder)
    given = {id(parameters[name]) for name in sources if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given] + [
        name for name in buffers if name not in sources
    ]
    _refuse_gaps(model, folder, missing, sorted(sources.keys() - parameters.keys() - buffers.keys()))
    for name, key in sources.items():
        read = partial(_read, folder, files[key], key)
        target = parameters.get(name, buffers.get(name))
        if target is not None and tensors[key] != tuple(target.shape):
            raise ModelError(
                f"{folder}: {key} has the shape {tensors[key]}, and {name} of {cls.__name__} has "
                f"{tuple(target.shape)}; load it with the config that it was saved with"
            )
        if name in parameters:
            set_reader(parameters[name], read)
        elif name in buffers:
            buffers[name].copy_(read(0, buffers[name].numel()).view(buffers[name].shape))
    with naming_causes(), monitor_client.asking():
        process_group.agree(facts_of(folder, files), f"files in {folder}")
    return model.eval()


def _empty(cls: Any, folder: Path, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model without data, with tied weights."""
    try:
        from transformers import PreTrainedModel
        from transformers.initialization import no_init_weights
    except ModuleNotFoundError as error:
        raise ModelError(
            f"from_pretrained needs {error.name}, which is not installed; pip install 'unishard[hf]'"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ModelError(
            "from_pretrained needs a model class of transformers, such as LlamaForCausalLM, got "
            f"{getattr(cls, '__name__', cls)!r}; build "
            "any other model inside unishard.init(cfg), and load its weights there on rank 0"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: config.json not found; pass a directory written by save_pretrained")
    built: Any = cls
    try:
        config = built.config_class.from_pretrained(folder, **kwargs)
    except (
        OSError,
        ValueError,
        TypeError,
        RecursionError,
    ) as error:  # transformers and json have no error of their own for a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            f"{folder / 'config.json'}: transformers cannot read it ({reason:.200}); give a model's config.json"
        ) from error
    named = config.dtype
    # Built in fp32, whatever dtype (that of the files) the config names, so buffers are as in training from scratch.
    with without_data(), no_init_weights():
        model: Any = built._from_config(config, dtype=torch.float32)
    # As after cls.from_pretrained: an export without a dtype uses that of the files, and their tokenizer.
    model.config.dtype = named
    model.config._name_or_path = model.name_or_path = str(folder)
    model.tie_weights()
    return model  # type: ignore[no-any-return]


def _sources(model: Any, keys: Iterable[str], folder: Path) -> dict[str, str]:
    """Map names in the model to tensors in the files by transformers' rules, without those that it ignores."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state = model.state_dict()
    rename: Callable[..., tuple[str, str | None]] = partial(
        rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=state
    )
    ignored = _ignored(model)
    sources: dict[str, str] = {}
    for key in keys:
        name, converted = rename(key, renamings, converters)
        if name not in state and key in state:
            name, converted = rename(key, [], [])
        if converted is not None and name in state:
            raise ModelError(
                f"{folder}: transformers makes {name} of {type(model).__name__} from several tensors ({key}); "
                "load it inside unishard.init(cfg) with cls.from_pretrained, which needs the full model on rank 0"
            )
        if name in state or not any(re.search(pattern, name) for pattern in ignored):
            sources[name] = key
    return sources


def _ignored(model: Any) -> list[str]:
    """Names in a file that transformers ignores (transformers 5.23, modeling_utils.py,
    _adjust_missing_and_unexpected_keys).
    """
    return [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]


def _refuse_gaps(model: nn.Module, folder: Path, missing: list[str], unexpected: list[str]) -> None:
    allowed = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    problems = [
        f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for what, names in (("missing from the files", missing), ("only in the files", unexpected))
        if names
    ]
    if problems:
        note = " (transformers would initialize some of them)" if missing and allowed else ""
        raise ModelError(
            f"{folder} does not contain a {type(model).__name__}: {'; '.join(problems)}{note}; load it with the class "
            "that saved it, or, "
            "for a new head, inside unishard.init(cfg) with cls.from_pretrained, which needs the full model on rank 0"
        )


def _read(folder: Path, name: str, key: str, begin: int, end: int) -> Tensor:
    """The elements between two offsets of a flattened tensor. Reads only the rows that they are in."""
    with opened(folder, name) as file:
        found = file.get_slice(key)
        shape = found.get_shape()
        if not shape:
            return file.get_tensor(key).reshape(-1)[begin:end]  # type: ignore[no-any-return]
        row = math.prod(shape[1:])
        first, last = begin // row, -(-end // row)
        return found[first:last].reshape(-1)[begin - first * row : end - first * row]  # type: ignore[no-any-return]
