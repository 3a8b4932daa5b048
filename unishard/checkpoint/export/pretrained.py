"""transformers models: the names and files that their `save_pretrained` writes (transformers 5.23,
modeling_utils.py).
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unishard.checkpoint.export.assets import Assets, TensorSlice
from unishard.checkpoint.export.layout import available
from unishard.checkpoint.export.optional_files import optional, warn_once, written_by
from unishard.checkpoint.export.sources import sources_of
from unishard.checkpoint.export.tokenizers import tokenizer_beside
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed.dtypes import DTYPES, declared_by, name_of
from unishard.distributed.lazy_shards import LazyShard

_VIEWS = CORE_PRIVATE_API["export-conversions"]
_CONVERTED = "transformers computes it when it saves, but an export only copies contiguous slices and joins rows"
_INSTEAD = (
    "load the checkpoint's tensors into the model in one process (unishard.checkpoint.tensor_reader.Tensors), "
    "and call its save_pretrained"
)


def transformers_assets(model: Any, shards: Mapping[str, LazyShard]) -> Assets:
    """What `save_pretrained` would write, without tensors."""
    _warn_of_own_save(next(kind for kind in type(model).__mro__ if "save_pretrained" in vars(kind)))
    sources = saved_tensors(model, sources_of(model))
    saved = saved_names(model, sources, {source: available(source, shards).shape for source in sources.values()})
    return Assets(
        kind="model",
        names={"model": saved.names},
        pieces=saved.pieces,
        joined=saved.joined,
        kept=_kept(model, sources),
        files=_files(model),
        refusal=saved.refusal or _quantized(model),
    )


class SavedNames(NamedTuple):
    """The tensors that `save_pretrained` writes, by their names in the file."""

    names: dict[str, str]
    """The name in the model."""
    pieces: dict[str, TensorSlice]
    """The part of the model's tensor, if it is not the whole tensor."""
    joined: dict[str, list[str]]
    """The names in the model, if the tensor consists of several, one after the other."""
    refusal: str | None = None
    """A reason where the files would hold something else."""


def saved_tensors(model: Any, sources: Mapping[str, str]) -> dict[str, str]:
    """Those tensors of a model that `save_pretrained` writes, by each name that it keeps, with their first names."""
    ignored = set(model._keys_to_ignore_on_save or ())
    saved = {name: source for name, source in sources.items() if name not in ignored}
    return {name: saved[name] for name in _without_aliases(model, saved)}


def saved_names(model: Any, sources: Mapping[str, str], shapes: Mapping[str, torch.Size]) -> SavedNames:
    """What `save_pretrained` would call the tensors of a model.

    Args:
        model: Sharded or not; its tensors are not read.
        sources: Of `saved_tensors`.
        shapes: By the first names.
    """
    converted = _converted(model, {name: shapes[source] for name, source in sources.items()})
    return converted._replace(
        names={exported: sources[name] for exported, name in converted.names.items()},
        joined={exported: [sources[name] for name in names] for exported, names in converted.joined.items()},
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


def _refused(subject: str, why: str) -> SavedNames:
    return SavedNames({}, {}, {}, f"{subject}: {_CONVERTED}{why}")


def _converted(model: Any, shapes: Mapping[str, torch.Size]) -> SavedNames:
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
        with _whole(model, empty), _KeepViews() as mode:
            reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(empty))
    except Exception as error:  # any error: a model that can be trained must still be saved
        return _refused(type(model).__name__, f" ({error}); {_INSTEAD}")
    converted = SavedNames({}, {}, {})
    for exported, tensor in reverted.items():
        whole, parts = mode.joined.get(_storage(tensor), (tensor, [tensor]))
        names = [name_of.get(_storage(part), "") for part in parts]
        changed = any(
            not view.is_contiguous() or view._version for view in (tensor, *parts)
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


@contextmanager
def _whole(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """A block in which a model says that its parameters are these: conversions ask for shapes, and engines shard."""
    find = model.get_parameter
    vars(model)["get_parameter"] = lambda name: tensors[name] if name in tensors else find(name)
    try:
        yield
    finally:
        del vars(model)["get_parameter"]


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


class _KeepViews(TorchFunctionMode):
    """Skips `Tensor.contiguous`, so that a non-contiguous view is not copied: a view of it may be contiguous again.
    Also records which tensors were joined along dim 0.
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
    """The tensors that the class keeps in fp32, by the dtype of an export."""
    declared = {name_of(dtype): declared_by(model, word) for word, dtype in DTYPES.items()}
    return {
        dtype: [*dict.fromkeys(sources[name] for name in sources if name in names)]
        for dtype, names in declared.items()
        if not names.isdisjoint(sources)
    }


def _files(model: Any) -> dict[str, bytes]:
    return (
        optional("config.json", partial(_config_and_code, model))
        | optional("generation_config.json", partial(_generation_config, model))
        | optional("the tokenizer", partial(tokenizer_of, model))
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

    custom = [part for part in (model, config) if part._auto_class is not None]
    return written_by(lambda folder: [custom_object_save(part, folder, config=config) for part in custom])


def _generation_config(model: Any) -> dict[str, bytes]:
    if not model.can_generate() or model.generation_config is None:
        return {}
    text: str = model.generation_config.to_json_string(use_diff=True, keys_to_pop=["compile_config"])
    return {"generation_config.json": text.encode()}


def tokenizer_of(model: Any) -> dict[str, bytes]:
    """That beside the weights from which the model was loaded."""
    origin = getattr(getattr(model, "config", None), "_name_or_path", None)
    return tokenizer_beside(Path(origin)) if origin else {}


def _quantized(model: Any) -> str | None:
    ours = any(getattr(part, "is_quantized", False) for part in model.modules())
    if getattr(model, "hf_quantizer", None) is None and not ours:
        return None
    return (
        f"{type(model).__name__} is quantized, which an export does not support; train adapters on it and export those"
    )
