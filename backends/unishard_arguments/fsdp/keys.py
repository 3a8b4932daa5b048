"""FSDP's own arguments, those of FSDP1's constructor and of `fully_shard` (torch 2.13): one row each.

A few belong to Accelerate (1.15.0) around them. FSDP1 and FSDP2 name things differently;
`version` tells which of the two a document speaks of. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.key_rows import boolean, integer, is_true, listed, one_of, refuses
from unishard.contract.rules import Fit
from unishard_arguments.fsdp.precision import PRECISION

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "FULL_SHARD": {"sharding.strategy": "full_shard", "sharding.reshard_after_forward": True},
    "SHARD_GRAD_OP": {"sharding.strategy": "full_shard", "sharding.reshard_after_forward": False},
    "NO_SHARD": {"sharding.strategy": "no_shard"},
    "HYBRID_SHARD": {"sharding.strategy": "hybrid_shard", "sharding.reshard_after_forward": True},
    "HYBRID_SHARD_ZERO2": {"sharding.strategy": "hybrid_shard", "sharding.reshard_after_forward": False},
}
"""FSDP1's strategies in the order of their numbers, from 1 (torch.distributed.fsdp.ShardingStrategy), in the config's
words."""

_VERSION_1 = (
    "sharding_strategy",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
)
_NO_SHARDS = "nothing is sharded, so nothing is gathered unit by unit"
_IGNORED = "Accelerate 1.15.0 ignores this key with version 1 and runs FULL_SHARD; translated as what it asks for"


def _version(document: DocumentValues) -> int:
    """1 or 2; that of FSDP1's arguments where it is not set."""
    version = document.get("version")
    return int(version) if str(version) in ("1", "2") else 1 if any(key in document for key in _VERSION_1) else 2


def _word(value: Any) -> str:
    """The name of one of FSDP1's strategies, also from its number.

    Raises:
        Unreadable: It names none.
    """
    names = list(STRATEGIES)
    name = str(value).strip().upper().removeprefix("SHARDINGSTRATEGY.").removeprefix("_")
    if name.isdigit() and 1 <= int(name) <= len(names):
        return names[int(name) - 1]
    if name not in names:
        raise Unreadable(
            f"must be one of {', '.join(names)} or their numbers 1 to 5, got {shown(value)}; write one of the names "
            "(DeepSpeed's stages count otherwise: stage 3 is FULL_SHARD, stage 0 is NO_SHARD)",
            value,
        )
    return name


def _resharding(value: Any) -> bool:
    """FSDP2's flag.

    Raises:
        Unreadable: It is a word of FSDP1.
    """
    if str(value).strip().upper() in STRATEGIES:
        raise Unreadable(
            f"must be true or false with version 2, got {shown(value)}; write true for FULL_SHARD, false for "
            "SHARD_GRAD_OP",
            value,
        )
    return boolean(value)


def strategy_of(document: DocumentValues) -> Mapping[str, Any]:
    """What the arguments together say about the strategy, in the config's words.

    Raises:
        Unreadable: The argument that decides it cannot have its value.
    """
    if _version(document) == 1:
        return STRATEGIES[_asked(document)]
    fields: dict[str, Any] = {"sharding.strategy": _within(document)}
    if fields["sharding.strategy"] != "no_shard":
        fields["sharding.reshard_after_forward"] = _reshards(document.get("reshard_after_forward"))
    return fields


def _asked(document: DocumentValues) -> str:
    """The strategy of version 1; Accelerate's users also write it as `reshard_after_forward`."""
    words = [
        value for key in ("sharding_strategy", "reshard_after_forward") if (value := document.get(key)) is not None
    ]
    return _resharding_of_version_1(words[0]) if words else "FULL_SHARD"


def _resharding_of_version_1(value: Any) -> str:
    return {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}.get(str(value).strip().lower()) or _word(value)


def _reshards(value: Any) -> bool:
    """Whether FSDP2 drops parameters after forward.

    A number above 1 is a size of groups, over which they stay sharded.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value > 1
    return True if value is None else _resharding(value)


def _within(document: DocumentValues) -> str:
    """The strategy that the mesh means."""
    mesh = document.get("mesh")
    if mesh is None:
        return "full_shard"
    sizes = _sizes(mesh)
    if _group(sizes, document) == 1:
        return "no_shard"
    return "full_shard" if not sizes or sizes.get("replicate") == 1 else "hybrid_shard"


def _sharded(document: DocumentValues) -> bool:
    try:
        return bool(strategy_of(document)["sharding.strategy"] != "no_shard")
    except Unreadable:
        return True  # the argument at fault is refused at its own place


def _set(
    read: Callable[[Any, DocumentValues], KeyEffect], fields: tuple[str, ...], fit: Fit = Fit.EXACT, note: str = ""
) -> Key:
    """A row that has nothing to say where the value is null."""
    return Key(lambda value, document: _UNSET if value is None else read(value, document), fields, fit, note)


_UNSET = KeyEffect(Fit.IGNORED, "is not set")


def _time(why: str, *words: str, copy_verbatim: bool = False) -> Key:
    """An argument that affects only time, memory or files: a flag, or one of these words."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        one_of(dict.fromkeys(word.lower() for word in words))(value) if words else boolean(value)
        return KeyEffect(Fit.IGNORED, why, copy_verbatim=copy_verbatim)

    return _set(read, (), Fit.IGNORED, why)


def _version_key(value: Any, document: DocumentValues) -> KeyEffect:
    if str(value) not in ("1", "2"):
        raise Unreadable(f"must be 1 or 2, got {shown(value)}; write 2", value)
    if str(value) == "2":
        return KeyEffect(fields={"backend": "fsdp"})
    return KeyEffect(Fit.EQUIVALENT, _FSDP1, {"backend": "fsdp"})


_FSDP1 = (
    "FSDP2 runs instead, the same maths; only a parameter that no rank used gets no update there, while FSDP1's flat "
    "gradients are zeros and weight decay and momentum still move it (torch 2.13)"
)


def _strategy_key(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return _UNSET if _version(document) == 2 else KeyEffect(fields=strategy_of(document))
    name = _word(value)
    if _version(document) == 2:
        return KeyEffect(
            Fit.IGNORED, "FSDP2 has no such argument and Accelerate 1.15.0 ignores it; reshard_after_forward decides"
        )
    return KeyEffect(fields=STRATEGIES[name])


def _reshard_key(value: Any, document: DocumentValues) -> KeyEffect:
    if _version(document) == 1:
        if value is None:
            return _UNSET if "sharding_strategy" in document else KeyEffect(fields=strategy_of(document))
        name = _resharding_of_version_1(value)
        if "sharding_strategy" in document:
            return KeyEffect(Fit.IGNORED, "sharding_strategy decides with version 1, in which this key has no effect")
        return KeyEffect(Fit.EXACT if name == "FULL_SHARD" else Fit.APPROXIMATE, _IGNORED, STRATEGIES[name])
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    if whole_number and value < 1:
        raise Unreadable(f"must be true, false or a number of ranks, got {value}; write true or false", value)
    fields = dict(strategy_of(document))
    if fields["sharding.strategy"] == "no_shard":
        return KeyEffect(Fit.IGNORED, _NO_SHARDS, fields)
    if whole_number and value > 1:
        note = (
            f"after forward the parameters stay sharded over groups of {value} ranks there, and over all that share a "
            "copy here"
        )
        return KeyEffect(Fit.EQUIVALENT, note, fields)
    return KeyEffect(fields=fields)


def _offload_key(value: Any, document: DocumentValues) -> KeyEffect:
    place = "cpu" if boolean(value) else "none"
    if place == "cpu" and not _sharded(document):
        return KeyEffect(Fit.UNSUPPORTED, "only what is sharded can be offloaded; choose FULL_SHARD, or remove the key")
    return KeyEffect(fields={"offload.params": place, "offload.optimizer": place})


def _pin_key(value: Any, document: DocumentValues) -> KeyEffect:
    pinned = boolean(value)
    if not is_true(document.get("cpu_offload")):
        return KeyEffect(Fit.IGNORED, "nothing is offloaded")
    return KeyEffect(fields={"offload.pin_memory": pinned})


_POLICIES = {word.lower(): word for word in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")}
_NO_UNITS = "FSDP gathers the model as one unit; here blocks are units: same maths, less memory"


def _policy_key(value: Any, document: DocumentValues) -> KeyEffect:
    policy = one_of(_POLICIES)(value)
    if not _sharded(document):
        return KeyEffect(Fit.IGNORED, _NO_SHARDS)
    if policy == "NO_WRAP":
        return KeyEffect(Fit.EQUIVALENT, _NO_UNITS, {"sharding.units": "auto"})
    if policy == "SIZE_BASED_WRAP":
        return KeyEffect(
            Fit.EQUIVALENT,
            "units are cut at another place: at the model's blocks of this size",
            {"sharding.units": "auto"},
        )
    names = document.get("transformer_layer_cls_to_wrap")
    return KeyEffect(fields={"sharding.units": listed(names) if names else "auto"})


def _classes_key(value: Any, document: DocumentValues) -> KeyEffect:
    if value in ("", []):
        return _UNSET
    names = listed(value)
    if not _sharded(document):
        return KeyEffect(Fit.IGNORED, _NO_SHARDS)
    policy = document.get("auto_wrap_policy")
    if policy is not None and _POLICIES.get(str(policy).lower()) != "TRANSFORMER_BASED_WRAP":
        return KeyEffect(Fit.IGNORED, f"is only read with auto_wrap_policy TRANSFORMER_BASED_WRAP, not {policy}")
    return KeyEffect(fields={"sharding.units": names})


def _size_key(value: Any, document: DocumentValues) -> KeyEffect:
    size = integer(0)(value)
    if str(document.get("auto_wrap_policy")).upper() != "SIZE_BASED_WRAP":
        return KeyEffect(Fit.IGNORED, "is only read with auto_wrap_policy SIZE_BASED_WRAP")
    if not _sharded(document):
        return KeyEffect(Fit.IGNORED, _NO_SHARDS)
    return KeyEffect(
        Fit.EQUIVALENT, "FSDP cuts at any module of this size, not only at blocks", {"sharding.min_unit_params": size}
    )


_NOT_MANAGED = (
    "whole on every rank there too, but FSDP neither casts these modules nor averages their gradients, and here both "
    "is done: the same for modules that are frozen in the compute dtype"
)


def _ignored_key(value: Any, document: DocumentValues) -> KeyEffect:
    """A regular expression for whole names of modules; here one for the beginning of names of their parameters."""
    if _off(value):
        return _UNSET
    if not isinstance(value, str):
        raise Unreadable(f"must be a regular expression for names of modules, got {shown(value)}; write one", value)
    try:
        re.compile(value)
    except re.error as error:
        raise Unreadable(f"must be a regular expression, got {shown(value)} ({error}); write one", value) from None
    if not _sharded(document):
        return KeyEffect(Fit.IGNORED, "nothing is sharded, so every rank holds every module whole")
    return KeyEffect(Fit.APPROXIMATE, _NOT_MANAGED, {"sharding.replicate": [rf"^(?:{value})\."]})


def _checkpointing_key(value: Any, document: DocumentValues) -> KeyEffect:
    if isinstance(value, list | tuple) and value:
        return KeyEffect(fields={"activation_checkpointing": listed(value)})
    return KeyEffect(fields={"activation_checkpointing": "full" if boolean(value) else "none"})


def _activations_key(value: Any, document: DocumentValues) -> KeyEffect:
    if _off(document.get("activation_checkpointing")):
        boolean(value)
        return KeyEffect(Fit.IGNORED, "is only read with activation_checkpointing")
    return KeyEffect(fields={"offload.activations": "cpu" if boolean(value) else "none"})


def _mesh_key(value: Any, document: DocumentValues) -> KeyEffect:
    fields: dict[str, Any] = {"sharding.strategy": _within(document)}
    if fields["sharding.strategy"] == "hybrid_shard":
        fields["sharding.group_size"] = _group(_sizes(value), document)
    return KeyEffect(fields=fields)


def _sizes(mesh: Any) -> Mapping[str, int]:
    """The sizes of the axes that are said.

    Raises:
        Unreadable: It is no mesh of these two axes.
    """
    if not isinstance(mesh, Mapping) or not mesh or set(mesh) - {"replicate", "shard"}:
        raise Unreadable(
            f"must be a mapping with replicate and shard, got {shown(mesh)}; write {{replicate: 2, shard: 8}}", mesh
        )
    sizes = {axis: integer(-1)(size) for axis, size in mesh.items() if size is not None}
    if 0 in sizes.values():
        raise Unreadable("must hold numbers of at least 1, or -1 for the rest of the ranks, got 0; write one of them")
    return {axis: size for axis, size in sizes.items() if size > 0}


def _group(sizes: Mapping[str, int], document: DocumentValues) -> Any:
    """Ranks that share a copy; None for those that there are."""
    if "shard" in sizes or sizes.get("replicate", 1) == 1:
        return sizes.get("shard")
    if document.topology is None:
        return Undecided(f"the number of ranks, divided by {sizes['replicate']}; give --world-size", by_ranks=True)
    return max(document.topology.world_size // sizes["replicate"], 1)


_FILES = ("full_state_dict", "local_state_dict", "sharded_state_dict", "full", "sharded", "1", "2", "3")


def _files_key(value: Any, document: DocumentValues) -> KeyEffect:
    kind = one_of({word: word for word in _FILES})(value)
    # FSDP2 writes no local files, so the key is not repeated beside its arguments.
    return KeyEffect(
        Fit.IGNORED, "concerns only checkpoint files", copy_verbatim=not kind.startswith("local") and kind != "2"
    )


_NO_XLA = "only PyTorch's own devices are supported, not XLA; remove it"
_OFF = (None, False, "", 0, "false", "False", "no", "none", "None")


def _off(value: Any) -> bool:
    return value in _OFF if not isinstance(value, list | dict | tuple) else not value


KEYS: Mapping[str, Key] = {
    "version": _set(_version_key, ("backend",), Fit.EXACT, "version 1 is emulated by FSDP2"),
    "sharding_strategy": Key(_strategy_key, ("sharding.strategy", "sharding.reshard_after_forward")),
    "reshard_after_forward": Key(_reshard_key, ("sharding.strategy", "sharding.reshard_after_forward")),
    "mesh": _set(_mesh_key, ("sharding.strategy", "sharding.group_size")),
    "cpu_offload": _set(_offload_key, ("offload.params", "offload.optimizer")),
    "pin_memory": _set(_pin_key, ("offload.pin_memory",)),
    "auto_wrap_policy": _set(_policy_key, ("sharding.units",)),
    "transformer_layer_cls_to_wrap": _set(_classes_key, ("sharding.units",)),
    "min_num_params": _set(_size_key, ("sharding.min_unit_params",), Fit.EQUIVALENT),
    "ignored_modules": _set(_ignored_key, ("sharding.replicate",), Fit.APPROXIMATE, _NOT_MANAGED),
    "backward_prefetch": _time(
        "affects only time; the next unit is always prefetched, see communication.prefetch_bucket_size",
        *("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "NONE", "1", "2", "3"),
    ),
    "forward_prefetch": _time("affects only time; see communication.prefetch_bucket_size"),
    "limit_all_gathers": _time("affects only memory and time; FSDP2 always limits them"),
    "use_orig_params": _time("FSDP2 always keeps the parameters' own names and groups"),
    "sync_module_states": _time("prepare always gives every rank the parameters of rank 0"),
    "cpu_ram_efficient_loading": _time("concerns how the training script loads the model", copy_verbatim=True),
    "state_dict_type": _set(_files_key, (), Fit.IGNORED, "concerns only checkpoint files"),
    "activation_checkpointing": _set(_checkpointing_key, ("activation_checkpointing",)),
    "activation_checkpointing_offload": _set(_activations_key, ("offload.activations",)),
    **PRECISION,
    "xla": refuses(_NO_XLA, _off),
    "xla_fsdp_v2": refuses(_NO_XLA, _off),
    "xla_fsdp_settings": refuses(_NO_XLA, _off),
    "xla_fsdp_grad_ckpt": refuses(_NO_XLA, _off),
}
"""FSDP's arguments and what each says."""
