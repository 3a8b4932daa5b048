"""`fsdp` and `fsdp_config` of TrainingArguments, handed on to FSDP's own table (transformers 5.23,
`_process_fsdp_args`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import boolean, is_true
from unishard.contract.rules import Fit
from unishard.formats.engines.block import EngineBlock, SourceKey, combined
from unishard.formats.files.source import Source
from unishard.formats.hf.json_argument import opened
from unishard.formats.hf.loop import FSDP, off
from unishard.formats.names import names

BOTH = names(
    "version reshard_after_forward cpu_offload auto_wrap_policy transformer_layer_cls_to_wrap min_num_params "
    "cpu_ram_efficient_loading state_dict_type activation_checkpointing xla xla_fsdp_v2 xla_fsdp_settings "
    "xla_fsdp_grad_ckpt"
)
"""Keys of `fsdp_config` that transformers reads for both versions."""

FIRST = names("forward_prefetch backward_prefetch use_orig_params sync_module_states limit_all_gathers")
"""Keys that it reads only for version 1."""

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_DEFAULTS: Mapping[str, Any] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "state_dict_type": "FULL_STATE_DICT",
}
_OVERLOOKED: Mapping[str, str] = {
    "offload_params": "transformers 5.23 ignores it, parameters stay on the device: its name is cpu_offload",
    "sharding_strategy": "transformers 5.23 ignores it: use fsdp or reshard_after_forward",
    "activation_cpu_offload": "only ms-swift reads it; losses are the same, and offload.activations: cpu does it here",
    "mixed_precision": "transformers 5.23 ignores it and uses bf16 and fp16",
    "mixed_precision_policy": "transformers 5.23 ignores it and uses bf16 and fp16",
}
_UNKNOWN = "transformers 5.23 does not know this key of fsdp_config and ignores it"
_ON_2 = "FSDP2 has no such argument; transformers 5.23 ignores it with version 2"
_DDP = "DistributedDataParallel without fsdp and deepspeed, unless the launcher chooses"


def known(key: str) -> bool:
    """Whether `fsdp_config` has such a key, with or without its prefix."""
    return key.removeprefix("fsdp_") in (*BOTH, *FIRST, *_OVERLOOKED)


def _words_of(value: Any) -> list[str]:
    """The words of the deprecated spelling of `fsdp`, such as `full_shard auto_wrap`; none for a flag.

    Raises:
        Unreadable: It is neither.
    """
    if isinstance(value, str) and not is_true(value):
        return value.replace(",", " ").split()
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return [word.strip() for word in value]
    boolean(value)
    return []


def sharded(
    value: Any,
    config: Any,
    source: Source,
    topology: Topology | None,
    where: tuple[str, ...] = ("fsdp_config",),
    implied: bool = False,
) -> list[Entry]:
    """The entries of both arguments.

    Args:
        value: That of `fsdp`.
        config: That of `fsdp_config`: a mapping, a path, or None.
        source: The document.
        topology: The ranks.
        where: Path of the mapping in the document.
        implied: Whether the document has no `fsdp`, but stands for a call that has it.
    """
    if off(value):
        return _without(value, config, source, where)
    keys, entries = _opened(config, source, where)
    try:
        words = _words_of(value)
    except Unreadable as error:
        return [Entry(("fsdp",), value, KeyEffect(Fit.UNSUPPORTED, str(error))), *entries, *_ignored(where, keys)]
    return entries + _read(value, words, keys, topology, where, implied)


def _opened(config: Any, source: Source, where: tuple[str, ...]) -> tuple[Mapping[str, Any], list[Entry]]:
    """The keys of `fsdp_config`, and the entry of what stands there if that is no mapping with keys."""
    if isinstance(config, Mapping) and config:
        return config, []
    if off(config):
        present = where and where[0] in source.data
        # A word such as `no` would be the path of a file to transformers.
        return {}, [
            Entry(
                where,
                config,
                KeyEffect(Fit.IGNORED, "is empty", copy_verbatim=not config, rejected_upstream=bool(config)),
            )
        ] if present else []
    contents = config
    if isinstance(config, str):
        contents = opened(config, source)
    if isinstance(contents, Mapping):
        return contents, [Entry(where, config, KeyEffect(fields={"backend": "fsdp"}))]
    if isinstance(config, str):
        return {}, [Entry(where, config, KeyEffect(Fit.NEEDS_INPUT, str(contents)))]
    message = f"must be a mapping or a path, got {shown(config)}; write a mapping"
    return {}, [Entry(where, config, KeyEffect(Fit.UNSUPPORTED, message))]


def _ignored(where: tuple[str, ...], keys: Mapping[str, Any]) -> list[Entry]:
    note = "only used when fsdp is enabled"
    return [Entry((*where, str(key)), item, left_out(note)) for key, item in keys.items()]


def _without(value: Any, config: Any, source: Source, where: tuple[str, ...]) -> list[Entry]:
    """Nothing is sharded by FSDP, so nothing that tunes it counts."""
    entries = [Entry(("fsdp",), value, left_out("is off"))] if FSDP in source.data else []
    if isinstance(config, Mapping) and config:
        return entries + _ignored(where, config)
    return entries + (_ignored((), {where[0]: config}) if where and where[0] in source.data else [])


def _read(
    value: Any,
    words: Sequence[str],
    keys: Mapping[str, Any],
    topology: Topology | None,
    where: tuple[str, ...],
    implied: bool,
) -> list[Entry]:
    plain = {str(key).removeprefix("fsdp_"): (str(key), item) for key, item in keys.items()}
    second = str(plain.get("version", ("", 2))[1]) != "1"
    taken = {name: item for name, (_, item) in plain.items() if name in BOTH or (name in FIRST and not second)}
    asked, refused = _asked(words, second, taken)
    block = EngineBlock("fsdp", ("fsdp_config",))
    flag = SourceKey(("fsdp",), value, fields={"backend": "fsdp"})
    for name, item in asked.items():
        block.add(name, item, *([] if implied or refused else [flag]))
    for name, item in taken.items():
        block.add(name, item, SourceKey((*where, plain[name][0]), item))
    defaults = {**_DEFAULTS, **({} if second else {"sharding_strategy": "FULL_SHARD"})}
    entries = [_without_null(entry) for entry in block.entries(defaults=defaults, topology=topology)]
    if refused and not implied:
        entries.insert(0, Entry(flag.path, value, KeyEffect(Fit.UNSUPPORTED, refused)))
    elif not asked and not implied:
        entries.insert(0, combined(flag, []))
    return [*entries, *(_overlooked(where, plain[name], name, second) for name in plain if name not in taken)]


def _without_null(entry: Entry) -> Entry:
    """Null, which transformers refuses for many keys, is not repeated."""
    return (
        entry
        if entry.value is not None
        else entry._replace(effect=entry.effect._replace(copy_verbatim=False, rejected_upstream=True))
    )


def _asked(words: Sequence[str], second: bool, taken: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What the words say in FSDP's own, and what is wrong with them."""
    native: dict[str, Any] = {}
    wrong = []
    for option in (word.lower() for word in words):
        if option == "offload":
            native.setdefault("cpu_offload", True)
        elif option in _STRATEGIES and not second:
            # Accelerate gets it under this name with version 1 as well.
            native.setdefault("reshard_after_forward", option)
        elif option in _STRATEGIES[:2]:
            native.setdefault("reshard_after_forward", option == "full_shard")
        elif option in _STRATEGIES:
            wrong.append(f"{option} needs fsdp_config.version: 1 in transformers 5.23; write that, or full_shard")
        elif option != "auto_wrap":
            wrong.append(f"knows no word {option!r}; write {', '.join((*_STRATEGIES, 'offload', 'auto_wrap'))}")
    return {key: item for key, item in native.items() if key not in taken}, "; ".join(wrong)


def _overlooked(where: tuple[str, ...], written: tuple[str, Any], name: str, second: bool) -> Entry:
    key, item = written
    if key.startswith("_"):
        return Entry((*where, key), item, left_out("is a comment"))
    note = _ON_2 if name in FIRST and second else _OVERLOOKED.get(name, _UNKNOWN)
    return Entry((*where, key), item, KeyEffect(Fit.IGNORED, note, copy_verbatim=True, unknown=note is _UNKNOWN))


def replicated() -> Entry:
    """What TrainingArguments mean that switch neither engine on."""
    return Entry(
        ("fsdp",), False, KeyEffect(Fit.EXACT, _DDP, {"backend": "fsdp", "sharding.strategy": "no_shard"}), assumed=True
    )
