"""Load transformers models without a full copy on any rank: `prepare` reads safetensors tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unishard.checkpoint.files import path_of
from unishard.config import Config, expect_config
from unishard.config.topology import Topology
from unishard.contract.kit.materialization import set_reader
from unishard.distributed import agreement
from unishard.engine.model.initialization import without_data
from unishard.engine.model.quantization.loading import quantize
from unishard.engine.model.quantization.requirements import require_installed
from unishard.engine.model.unprepared import refuse_forwards
from unishard.engine.model.weight_files import facts_of, files_of, instead_of, opened, shapes_of
from unishard.engine.model.weight_sources import sources_of
from unishard.errors import ModelError
from unishard.failures import lifetime, monitor_client
from unishard.failures.endings import explain_lost_connections


def from_pretrained(cls: Any, path: str | Path, cfg: Config, **kwargs: Any) -> nn.Module:
    """Load a transformers model whose parameters `prepare` reads from safetensors. Collective.

    Until then parameters are on the meta device on every rank; buffers have their data. `prepare` reads one unit (on
    DeepSpeed one parameter) at a time: where parameters are sharded (`full_shard`, and the hybrid strategies on FSDP2),
    each rank reads its own slices; else rank 0 reads and broadcasts. So every rank needs the same files. Parameters are
    fp32 whatever the files' dtype, because they become the master weights; `prepare(train=False)` casts them to
    `precision.compute`. Names are mapped as in `cls.from_pretrained`; what that makes of several tensors of the files,
    such as stacked experts, is made by the same operations, one parameter at a time; tied weights follow the config.

    With `quantization` in the config, linear layers hold quantized bytes in place of their weights, which `prepare`
    makes from the parts that it reads; add adapters of peft to the model before `prepare`.

    Args:
        cls: A transformers model class such as `LlamaForCausalLM`, or an Auto class such as `AutoModelForCausalLM`.
        path: Directory with `config.json` and `model.safetensors`, or several files and their index, as
            `save_pretrained` writes.
        cfg: The config that `prepare` will get.
        kwargs: Overrides of the model's config, such as `attn_implementation="eager"`.

    Returns:
        The model, in evaluation mode like after `cls.from_pretrained`: call `engine.train()`.

    Raises:
        ConfigError: `cfg` is not a config, bitsandbytes is missing, or there is nothing to quantize.
        RankMismatchError: On every rank: the files differ between ranks.
        ModelError: `cls` is not such a class, there are no safetensors, tensors are missing, unexpected or have another
            shape, or transformers cannot make a parameter from them.
    """
    expect_config(cfg)
    if cfg.quantization.on:
        require_installed(cfg.quantization.type)
    lifetime.ensure(Topology.from_environment(), cfg.communication)
    folder = path_of(path, "from_pretrained")
    model = _empty(cls, folder, kwargs)
    files = files_of(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    sources = sources_of(model, shapes_of(folder, files), partial(_read, folder, files))
    loaded = {id(parameters[name]) for name in sources if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in loaded] + [
        name for name in buffers if name not in sources
    ]
    _refuse_gaps(model, folder, missing, sorted(sources.keys() - parameters.keys() - buffers.keys()))
    for name, source in sources.items():
        target = parameters.get(name, buffers.get(name))
        if target is not None and source.shape != tuple(target.shape):
            raise ModelError(
                f"{folder}: {source.origin} has the shape {source.shape}, and {name} of {type(model).__name__} has "
                f"{tuple(target.shape)}; load it with the config that it was saved with"
            )
        if name in parameters:
            set_reader(parameters[name], source.read)
        elif name in buffers:
            buffers[name].copy_(source.read(0, buffers[name].numel()).view(buffers[name].shape))
    if cfg.quantization.on:
        quantize(model, cfg.quantization)
    refuse_forwards(model)
    with explain_lost_connections(), monitor_client.blocking_call():
        agreement.agree(facts_of(folder, files), f"files in {folder}")
    return model.eval()


def _empty(cls: Any, folder: Path, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model without data, with tied weights."""
    try:
        from transformers import AutoConfig, PreTrainedModel
        from transformers.initialization import no_init_weights
    except ModuleNotFoundError as error:
        raise ModelError(
            f"from_pretrained needs {error.name}, which is not installed; pip install 'unishard[hf]'"
        ) from error
    auto = getattr(cls, "__module__", "").startswith("transformers.models.auto.") and hasattr(cls, "from_config")
    if not auto and not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ModelError(
            "from_pretrained needs a model class of transformers, such as AutoModelForCausalLM, got "
            f"{getattr(cls, '__name__', cls)!r}; build "
            "any other model inside unishard.init(cfg), and load its weights there on rank 0"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: config.json not found; {instead_of(folder)}")
    if "trust_remote_code" in kwargs:
        raise ModelError(
            f"{folder}: from_pretrained never runs code of a folder; leave trust_remote_code out, and pass the class"
        )
    distrusted = {"trust_remote_code": False} if auto else {}
    read, build = (AutoConfig, cls.from_config) if auto else (cls.config_class, cls._from_config)
    try:
        config = read.from_pretrained(folder, **kwargs, **distrusted)
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
    try:
        with without_data(), no_init_weights():
            model: Any = build(config, dtype=torch.float32, **distrusted)
    except ValueError as error:  # an Auto class that has no model for this config
        raise ModelError(f"{folder}: {cls.__name__} cannot be built ({next(iter(str(error).splitlines()))})") from error
    # As after cls.from_pretrained: an export without a dtype uses that of the files, and their tokenizer.
    model.config.dtype = named
    model.config._name_or_path = model.name_or_path = str(folder)
    model.tie_weights()
    return model  # type: ignore[no-any-return]


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


def _read(folder: Path, files: Mapping[str, str], key: str, begin: int, end: int) -> Tensor:
    """The elements between two offsets of a flattened tensor. Reads only the rows that they are in."""
    with opened(folder, files[key]) as file:
        tensor = file.get_slice(key)
        shape = tensor.get_shape()
        if not shape:
            return file.get_tensor(key).reshape(-1)[begin:end]  # type: ignore[no-any-return]
        row = math.prod(shape[1:])
        first, last = begin // row, -(-end // row)
        return tensor[first:last].reshape(-1)[begin - first * row : end - first * row]  # type: ignore[no-any-return]
