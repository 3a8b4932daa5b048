"""What the block `fsdp_config` says: FSDP's arguments under names of Accelerate, with defaults of its launcher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Path, Unreadable
from unishard.contract.key_rows import boolean, integer, listed
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder
from unishard.formats.accelerate.entries import TOOL, block_of, dropped, overlooked, refused
from unishard.formats.accelerate.sequence import name_of, size_of
from unishard.formats.engines.block import EngineBlock, SourceKey
from unishard.formats.names import names

NAMES: Mapping[str, str] = {
    f"fsdp_{name}": name
    for name in names(
        "version sharding_strategy reshard_after_forward offload_params auto_wrap_policy transformer_layer_cls_to_wrap "
        "min_num_params backward_prefetch forward_prefetch state_dict_type use_orig_params cpu_ram_efficient_loading "
        "sync_module_states activation_checkpointing activation_checkpointing_offload ignored_modules"
    )
} | {"fsdp_offload_params": "cpu_offload"}
"""FSDP's argument by the name that Accelerate gives it. The prefix may be left out (commands/launch.py)."""

CLASSES = "fsdp_transformer_layer_cls_to_wrap"
_NULLABLE = names(
    "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type "
    "fsdp_ignored_modules"
)
"""Not passed on where they are null; Accelerate makes the text `none` of every other null."""

_DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
_AUTOCAST = f"{TOOL} also runs FSDP1 in torch.autocast: some operations stay in fp32; without it all run in this dtype"
_LIST = "read as class names; write them comma-separated, Accelerate 1.15.0 takes no list"


def fsdp_entries(
    document: Mapping[str, Any], precision: str, source_key: SourceKey, topology: Topology | None
) -> list[Entry]:
    """What FSDP's arguments in a document say.

    Args:
        document: The whole.
        precision: In which format it computes.
        source_key: Where it says that.
        topology: The ranks, where they are known.
    """
    arguments = EngineBlock("fsdp", ("fsdp_config",), {argument: (name,) for name, argument in NAMES.items()})
    block = {_full(name): (name, value) for name, value in block_of(document, "fsdp_config").items()}
    version = _version(block)
    entries = list(_twice(document, block))
    for full, (name, value) in block.items():
        if full == CLASSES and value == "" and not _by_class(block):
            entries.append(
                dropped(
                    ("fsdp_config", str(name)), value, "is only read with fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
                )
            )
            continue
        entries += _argument(arguments, full, ("fsdp_config", str(name)), value)
    entries += _groups(arguments, document, version, topology)
    if precision in _DTYPES:
        arguments.add(
            "mixed_precision",
            _policy(_DTYPES[precision], version),
            _autocast(source_key) if version == 1 else source_key,
        )
    return [*entries, *arguments.entries(defaults=_assumed(arguments.native, version), topology=topology)]


def _autocast(source_key: SourceKey) -> SourceKey:
    """Where FSDP1 gets its dtypes, beside which Accelerate runs the forward in torch.autocast (accelerator.py,
    prepare_model).
    """
    return source_key._replace(fit=Fit.APPROXIMATE, note="; ".join(filter(None, (_AUTOCAST, source_key.note))))


def _by_class(block: Mapping[str, tuple[Any, Any]]) -> bool:
    _, policy = block.get("fsdp_auto_wrap_policy", ("", ""))
    return str(policy).upper() == "TRANSFORMER_BASED_WRAP"


def _full(name: Any) -> str:
    return str(name) if str(name).startswith("fsdp") else f"fsdp_{name}"


def _twice(document: Mapping[str, Any], block: Mapping[str, tuple[Any, Any]]) -> Iterator[Entry]:
    for name, value in block_of(document, "fsdp_config").items():
        last, _ = block[_full(name)]
        if last != name:
            yield dropped(
                ("fsdp_config", str(name)), value, f"is repeated by {last}, which takes precedence", copy_verbatim=False
            )


def version_of(document: Mapping[str, Any]) -> int:
    """Which FSDP a document runs."""
    return _version({_full(name): (name, value) for name, value in block_of(document, "fsdp_config").items()})


def _version(block: Mapping[str, tuple[Any, Any]]) -> int:
    """Which FSDP runs; the launcher assumes 1, where the wizard writes 2."""
    try:
        return 2 if integer(1, 2)(block["fsdp_version"][1]) == 2 else 1
    except (KeyError, Unreadable):
        return 1


def _argument(arguments: EngineBlock, full: str, path: Path, value: Any) -> Iterator[Entry]:
    """Hand one key on to FSDP, or say at once what it means."""
    if full not in NAMES:
        yield overlooked(path, value, NAMES)
    elif value is None and full in _NULLABLE:
        yield dropped(path, value, "is null: Accelerate uses its default")
    else:
        fit, note = (
            (Fit.EQUIVALENT, _LIST) if full.endswith("cls_to_wrap") and not isinstance(value, str) else (Fit.EXACT, "")
        )
        try:
            taken = value if is_placeholder(value) else _READ.get(full, lambda value: value)(value)
            arguments.add(NAMES[full], taken, SourceKey(path, value, fit=fit, note=note))
        except Unreadable as error:
            yield refused(path, value, str(error))


def _word(words: tuple[str, ...]) -> Callable[[Any], str]:
    """Reads one of an enumeration's words, in any case, or its number."""

    def read(value: Any) -> str:
        choice = str(value).upper()
        if choice.isdecimal() and 1 <= int(choice) <= len(words):
            return words[int(choice) - 1]
        if choice in words:
            return choice
        raise Unreadable(f"must be one of {', '.join(words)}, got {shown(value)}; write one of them", value)

    return read


_READ: Mapping[str, Callable[[Any], Any]] = {
    "fsdp_version": integer(1, 2),
    "fsdp_backward_prefetch": lambda value: (
        "NO_PREFETCH" if str(value).upper() == "NO_PREFETCH" else _word(("BACKWARD_PRE", "BACKWARD_POST"))(value)
    ),
    "fsdp_state_dict_type": _word(("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
    "fsdp_transformer_layer_cls_to_wrap": listed,
    "fsdp_min_num_params": integer(0),
} | dict.fromkeys(
    names(
        "fsdp_offload_params fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading "
        "fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"
    ),
    boolean,
)
"""The argument from the key's value, which reaches the training processes as text."""

_LAUNCHER: Mapping[str, Any] = {"version": 1, "auto_wrap_policy": "NO_WRAP", "activation_checkpointing": False}
"""What decides the training where the file is silent: the launcher's, not the wizard's (commands/launch.py)."""

_LEAST = 100_000_000
"""The launcher's `fsdp_min_num_params`, where a size is read at all."""


def _assumed(native: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    by_size = str(native.get("auto_wrap_policy")).upper() == "SIZE_BASED_WRAP"
    saved = {"state_dict_type": "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"}
    return {**_LAUNCHER, **saved, **({"min_num_params": _LEAST} if by_size else {})}


_AXES = {axis: name_of(f"dp_{axis}") for axis in ("replicate", "shard")}


def _groups(
    arguments: EngineBlock, document: Mapping[str, Any], version: int, topology: Topology | None
) -> Iterator[Entry]:
    """Groups of ranks that hold a copy each, which Accelerate builds only for FSDP2."""
    block = block_of(document, "parallelism_config")
    sizes = {}
    for axis, name in _AXES.items():
        try:
            sizes[axis] = integer(1)(block.get(name, 1))
        except Unreadable as error:
            yield refused(("parallelism_config", name), block[name], str(error))
    paths = {axis: ("parallelism_config", name) for axis, name in _AXES.items() if name in block and axis in sizes}
    within = math.prod(size_of(block.get(name_of(axis), 1)) for axis in ("tp", "cp", "sp"))
    fault = _fault(sizes, version, topology, within) if len(sizes) == len(_AXES) and paths else ""
    if not fault and len(sizes) == len(paths) == len(_AXES) and min(sizes.values()) > 1:
        # A copy is also that of the ranks that share a sample, and of those with other parts of weights.
        sharing = math.prod(size_of(block.get(name_of(axis), 1)) for axis in ("tp", "cp"))
        mesh = sizes | {"shard": sizes["shard"] * sharing}
        arguments.add("mesh", mesh, *(SourceKey(path, block[path[1]]) for path in paths.values()))
        return
    for path in paths.values():
        value = block[path[1]]
        yield (
            refused(path, value, fault)
            if fault
            else dropped(path, value, "all ranks share one copy, as without it", copy_verbatim=False)
        )


def _fault(sizes: Mapping[str, int], version: int, topology: Topology | None, within: int) -> str:
    """Why Accelerate refuses such groups, each rank of which is so many; empty if it does not, or the key of those says
    it.
    """
    total = sizes["replicate"] * sizes["shard"]
    if total == 1:
        return ""
    if version == 1:
        return f"{TOOL} has groups only in FSDP2; write fsdp_version: 2 or HYBRID_SHARD"
    if sizes["shard"] == 1:
        return "leaves FSDP nothing to shard; write parallelism_config_dp_shard_size above 1"
    if topology is not None and topology.world_size > 1 and within == 1 and topology.world_size != total:
        return f"makes {total} ranks of the {topology.world_size} that there are; their product must be num_processes"
    return ""


def _policy(dtype: str, version: int) -> Mapping[str, str]:
    """The policy that Accelerate makes of `mixed_precision` (utils/dataclasses.py, set_mixed_precision): one format for
    everything.
    """
    return dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype" if version == 1 else "output_dtype"), dtype)
