"""transformers models: the names and files that their `save_pretrained` writes (transformers 5.23,
modeling_utils.py).
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unishard.checkpoint.export.assets import Assets, TensorSlice, tokenizer_beside
from unishard.checkpoint.export.optional_files import optional, warn_once, written_by
from unishard.checkpoint.export.plan import available
from unishard.checkpoint.export.sources import sources_of
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed.dtypes import DTYPES, declared_by, name_of
from unishard.distributed.shards import LazyShard

_VIEWS = CORE_PRIVATE_API["export-conversions"]
_CONVERTED = "transformers computes it when it saves, but an export only copies contiguous slices and joins rows"
_INSTEAD = (
    "load the checkpoint's tensors into the model in one process (unishard.checkpoint.tensor_reader.Tensors), "
    "and call its save_pretrained"
)


def transformers_assets(model: Any, shards: Mapping[str, LazyShard]) -> Assets:
    """What `save_pretrained` would write, without tensors."""
    _warn_of_own_save(next(kind for kind in type(model).__mro__ if "save_pretrained" in vars(kind)))
    sources = sources_of(model)
    ignored = set(model._keys_to_ignore_on_save or ())
    saved = _without_aliases(model, {name: source for name, source in sources.items() if name not in ignored})
    names, pieces, joined, refusal = _converted(model, {name: available(sources[name], shards).shape for name in saved})
    return Assets(
        kind="model",
        names={"model": {exported: sources[name] for exported, name in names.items()}},
        pieces=pieces,
        joined=joined,
        kept=_kept(model, {name: sources[name] for name in saved}),
        files=_files(model),
        refusal=refusal or _quantized(model),
    )


def _warn_of_own_save(kind: type) -> None:
    """Say that a class, or a mixin of it, replaces `save_pretrained`, and may write more than this module knows of."""
    from transformers import PreTrainedModel

    if kind is not PreTrainedModel:
        warn_once(
            f"{kind.__name__}.save_pretrained replaces that of transformers, and an export does not call it: what it "
            "writes besides weights and config is missing; build the model in one process as here, load the exported "
            "weights, and call its save_pretrained"
        )


class _Converted(NamedTuple):
    """What transformers' conversion makes of a model's tensors, by their names in the file."""

    names: dict[str, str]
    """The name in the model."""
    pieces: dict[str, TensorSlice]
    """What part of it, where it is not all."""
    joined: dict[str, list[str]]
    """The names in the model, where it is several tensors, one behind the other."""
    refusal: str | None = None
    """A reason where the files would hold something else."""


def _refused(what: str, why: str) -> _Converted:
    return _Converted({}, {}, {}, f"{what}: {_CONVERTED}{why}")


def _converted(model: Any, shapes: Mapping[str, torch.Size]) -> _Converted:
    """The names under which a model's tensors are saved: transformers' own conversion, applied to meta tensors.

    Args:
        model: Sharded or not.
        shapes: Shapes of its tensors.
    """
    if not _VIEWS.works:
        return _refused(type(model).__name__, f" ({_VIEWS.refusal()})")
    from transformers.core_model_loading import revert_weight_conversion

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    name_of = {_storage(tensor): name for name, tensor in empty.items()}
    try:
        with _KeepViews() as mode:
            found: dict[str, Tensor] = revert_weight_conversion(model, dict(empty))
    except Exception as error:  # any error: a model that can be trained must still be saved
        return _refused(type(model).__name__, f" ({error}); {_INSTEAD}")
    converted = _Converted({}, {}, {})
    for exported, tensor in found.items():
        whole, parts = mode.joined.get(_storage(tensor), (tensor, [tensor]))
        names = [name_of.get(_storage(part), "") for part in parts]
        changed = any(
            not each.is_contiguous() or each._version for each in (tensor, *parts)
        )  # rearranged, or changed in place
        partial = whole is not parts[0] and any(
            name and part.shape != shapes[name] for name, part in zip(names, parts, strict=True)
        )
        if "" in names or changed or partial or whole is not tensor:
            return _refused(f"{exported} of {type(model).__name__}", f"; {_INSTEAD}")
        converted.names[exported] = names[0]
        if len(names) > 1:
            converted.joined[exported] = names
        elif tensor.shape != shapes[names[0]]:
            converted.pieces[exported] = TensorSlice(start=int(tensor.storage_offset()), shape=list(tensor.shape))
    return converted


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


class _KeepViews(TorchFunctionMode):
    """Skips `Tensor.contiguous`, so that a non-contiguous view is not copied: a view of it may be contiguous again;
    records joined rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By storage, what `torch.cat` has made along dim 0, and of what."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.contiguous:
            return args[0]
        result = function(*args, **kwargs or {})
        if function is torch.cat and not (args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)):
            self.joined[_storage(result)] = result, list(args[0])
        return result


def _without_aliases(model: nn.Module, sources: dict[str, str]) -> list[str]:
    """Names, without those that the class declares as tied to another name that is kept.

    A tie that the class does not declare is exported under each of its names, since no reader would tie them again.
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


def _kept(model: nn.Module, sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Those of the tensors that the class keeps in fp32, by the dtype of an export."""
    kept = {name_of(dtype): declared_by(model, word) for word, dtype in DTYPES.items()}
    return {
        dtype: [*dict.fromkeys(sources[name] for name in sources if name in names)]
        for dtype, names in kept.items()
        if not names.isdisjoint(sources)
    }


def _files(model: Any) -> dict[str, bytes]:
    return (
        optional("config.json", partial(_config_and_code, model))
        | optional("generation_config.json", partial(_generation_config, model))
        | optional("the tokenizer", partial(_tokenizer_of, model))
    )


def _config_and_code(model: Any) -> dict[str, bytes]:
    settled = copy.deepcopy(model.config)
    files = optional("the code of the model", partial(_code, model, settled))
    config = json.loads(settled.to_json_string())
    config.pop("transformers_weights", None)
    config["architectures"] = [type(model).__name__]
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return files


def _code(model: Any, config: Any) -> dict[str, bytes]:
    """The source files of custom classes that were registered with transformers; adds references to them to the
    config.
    """
    from transformers.dynamic_module_utils import custom_object_save

    own = [each for each in (model, config) if each._auto_class is not None]
    return written_by(lambda folder: [custom_object_save(each, folder, config=config) for each in own])


def _generation_config(model: Any) -> dict[str, bytes]:
    if not model.can_generate() or model.generation_config is None:
        return {}
    text: str = model.generation_config.to_json_string(use_diff=True, keys_to_pop=["compile_config"])
    return {"generation_config.json": text.encode()}


def _tokenizer_of(model: Any) -> dict[str, bytes]:
    """That beside the weights from which the model was loaded."""
    origin = getattr(getattr(model, "config", None), "_name_or_path", None)
    return tokenizer_beside(Path(origin)) if origin else {}


def _quantized(model: Any) -> str | None:
    if getattr(model, "hf_quantizer", None) is None:
        return None
    return (
        f"{type(model).__name__} is quantized, which an export does not support; train adapters on it and export those"
    )


# PEFT adapters: the names and files that its `save_pretrained` writes (peft 0.21, utils/save_and_load.py), without the
# tensors.

_PREFIX = "base_model.model."
"""Prefix of the names of adapters that transformers itself adds to a model."""
_COMPUTED = (
    "is computed when it is saved, which an export cannot do; load the checkpoint into the model and save it with peft"
)


def adapter_assets(model: Any) -> Assets:
    """What `save_pretrained` would write, without tensors and model card: one folder per adapter, `default` at the top
    level.
    """
    names: dict[str, dict[str, str]] = {}
    files: dict[str, bytes] = {}
    refusals = []
    for adapter in model.peft_config:
        folder = "" if adapter == "default" or len(model.peft_config) == 1 else f"{adapter}/"
        found, refusal = _names(model, adapter)
        names[f"{folder}adapter_model"] = found
        file = f"{folder}adapter_config.json"
        files |= optional(file, partial(_config, model, adapter, file))
        refusals += [refusal] if refusal else []
    files |= optional("the tokenizer", partial(_tokenizer_of, model))
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

    given = model.peft_config[adapter]
    name = given.base_model_name_or_path
    if not name or (Path(name) / "config.json").exists():
        yield
        return
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a valid name on the hub
        cached = None
    local = copy.copy(given)
    local.base_model_name_or_path = str(Path(cached).parent) if isinstance(cached, str) else None
    model.peft_config[adapter] = local
    try:
        yield
    finally:
        model.peft_config[adapter] = given


def _config(model: Any, adapter: str, file: str) -> dict[str, bytes]:
    given = model.peft_config[adapter]
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in given.to_dict().items()}
    config["inference_mode"] = True
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = type(base)
    if given.base_model_name_or_path is None:
        config["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
    if given.task_type is None:
        config["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return {file: json.dumps(config, indent=2, sort_keys=True).encode()}


# -- What an export needs of a live model of any library -------------------------------------------


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
    if _is_a(module, "transformers", "PreTrainedModel"):
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
        what = (
            f"{type(module).__name__} cannot be exported from the checkpoint: {type(error).__name__}: {error}; to "
            "export it nevertheless, give the folder of its config: unishard export --model"
        )
        warn_once(what)
        return Assets(kind="plain", names={}, files={}, refusal=what).to_files()


def _is_a(module: nn.Module, package: str, name: str) -> bool:
    kind: Any = getattr(sys.modules.get(package), name, None) if package in sys.modules else None
    return isinstance(kind, type) and isinstance(module, kind)
