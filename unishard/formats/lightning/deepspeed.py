"""The arguments of Lightning's `DeepSpeedStrategy` (2.6.6) under DeepSpeed's names for them, or the DeepSpeed config
that it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from unishard.contract.entries import Entry, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import is_true
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.engines.block import EngineBlock, SourceKey
from unishard.formats.files.source import open_source
from unishard.formats.lightning.precision import dtype_of, word_of
from unishard.formats.lightning.rows import TIMEOUT, left, off
from unishard.formats.lightning.strategy import Strategy
from unishard.formats.names import ignored, names

ARGUMENTS: Mapping[str, Any] = {
    "zero_optimization": True,
    "stage": 2,
    "offload_optimizer": False,
    "offload_parameters": False,
    "offload_params_device": "cpu",
    "nvme_path": "/local_nvme",
    "params_buffer_count": 5,
    "params_buffer_size": 100_000_000,
    "max_in_cpu": 1_000_000_000,
    "offload_optimizer_device": "cpu",
    "optimizer_buffer_count": 4,
    "block_size": 1048576,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "thread_count": 1,
    "pin_memory": False,
    "sub_group_size": 1_000_000_000_000,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "zero_allow_untested_optimizer": True,
    "logging_batch_size_per_gpu": "auto",
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
}
"""The arguments that DeepSpeed's JSON is made of (`_create_default_config`), and their defaults, several of which are
not DeepSpeed's own."""
SCALING: Mapping[str, Any] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""The arguments that become the `fp16` block under a 16-bit precision, and their defaults."""
OWN: Mapping[str, Key] = {**ignored("lightning/ignored_deepspeed.txt", left), "timeout": TIMEOUT}
"""The arguments that concern only Lightning."""
_KNOWN = {*ARGUMENTS, *SCALING, "config"}

_ZERO = names("stage overlap_comm allgather_bucket_size reduce_bucket_size sub_group_size")
_SAME = {
    "zero_optimization": names("contiguous_gradients allgather_partitions reduce_scatter"),
    "aio": names("block_size queue_depth single_submit overlap_events thread_count"),
    "activation_checkpointing": names(
        "partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary"
    ),
}
"""Arguments by block that are DeepSpeed's own defaults as well, and count where they are written."""
_OFFLOADED: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "offload_optimizer": ("offload_optimizer", "offload_optimizer_device", {"buffer_count": "optimizer_buffer_count"}),
    "offload_parameters": (
        "offload_param",
        "offload_params_device",
        {"buffer_count": "params_buffer_count", "buffer_size": "params_buffer_size", "max_in_cpu": "max_in_cpu"},
    ),
}
"""The block by the switch of what is offloaded, the argument that says where, and those of files by their keys."""


def _names(written: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key of the JSON with the arguments that decide it, of which the last has its value."""
    values = {**ARGUMENTS, **written}
    blocks = {"activation_checkpointing"}
    if not is_true(values["zero_optimization"]):
        yield "zero_optimization.stage", ("zero_optimization",)
    else:
        blocks.add("zero_optimization")
        yield from ((f"zero_optimization.{name}", (name,)) for name in _ZERO)
        yield "zero_allow_untested_optimizer", ("zero_allow_untested_optimizer",)
        for switch, (section, device, sizes) in _OFFLOADED.items():
            if is_true(values[switch]):
                block = f"zero_optimization.{section}"
                yield f"{block}.device", (switch, device)
                yield f"{block}.pin_memory", ("pin_memory",)
                files = {"nvme_path": "nvme_path", **sizes} if values[device] == "nvme" else {}
                yield from ((f"{block}.{key}", (name,)) for key, name in files.items())
                blocks |= {"aio"} if files else set()
    for block in _SAME:
        yield from ((f"{block}.{name}", (name,)) for name in _SAME[block] if name in written and block in blocks)
    if values["logging_batch_size_per_gpu"] != "auto":
        yield "train_micro_batch_size_per_gpu", ("logging_batch_size_per_gpu",)


def entries_of(strategy: Strategy, precision: Entry, folder: Path | None) -> Iterator[Entry]:
    """What the strategy and its arguments say.

    Args:
        strategy: The strategy.
        precision: The Trainer's, which Lightning writes into the JSON.
        folder: The folder of the file.
    """
    config = strategy.arguments.get("config")
    # The Trainer writes 0.0 where nothing is to be clipped; Fabric leaves DeepSpeed's default of 1.0.
    defaults: dict[str, Any] = {} if strategy.fabric else {"gradient_clipping": 0.0}
    if config is None:
        block = EngineBlock("deepspeed", strategy.base)
        used = _add_arguments(strategy, block, defaults)
    else:
        try:
            native = config if isinstance(config, Mapping) else open_source((folder or Path()) / _path(config)).data
        except (ConfigError, Unreadable) as error:
            note = f"cannot be read: {error}; put the file beside this one, or write its keys here"
            yield strategy.says({"backend": "deepspeed"})
            yield strategy.of("config", KeyEffect(Fit.UNSUPPORTED, " ".join(note.split())))
            yield precision._replace(effect=left_out(_REPLACED))
            yield from _rest(strategy, {"config"}, _REPLACED)
            return
        block, used = EngineBlock("deepspeed", strategy.place("config"), native=dict(native)), {"config"}
    scaled, left_over = _add_precision(strategy, block, precision)
    yield from (_in_trainer(entry, inside=config is not None) for entry in strategy.entries(block, defaults))
    yield from left_over
    yield from _rest(strategy, used | scaled, _IDLE if config is None else _REPLACED)


_REPLACED = "not used: config replaces every DeepSpeed argument"
_IDLE = "has no effect with the other arguments"


def _path(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable("must be a DeepSpeed config or the path of one")
    return value


def _add_arguments(strategy: Strategy, block: EngineBlock, defaults: dict[str, Any]) -> set[str]:
    """Add what is written to the JSON, and the rest to the defaults; the arguments that are used."""
    written = {**strategy.stands_for, **strategy.arguments}
    used: set[str] = set()
    for key, arguments in _names(written):
        value = 0 if arguments == ("zero_optimization",) else {**ARGUMENTS, **written}[arguments[-1]]
        used.update(arguments)
        if written.keys().isdisjoint(arguments):
            defaults[key] = value
        else:
            block.add(key, value, *strategy.source_keys(*arguments))
    return used


def _rest(strategy: Strategy, used: Collection[str], why: str) -> Iterator[Entry]:
    for name, value in strategy.arguments.items():
        if name in _KNOWN and name not in used:
            yield strategy.of(name, left_out("is off" if off(value) else why))
    yield from strategy.table(OWN, _KNOWN)


def _add_precision(strategy: Strategy, block: EngineBlock, precision: Entry) -> tuple[set[str], list[Entry]]:
    """Add the section that Lightning writes for the precision where the JSON has none (fabric/strategies/deepspeed.py,
    `_format_precision_config`); the arguments that are used, and the precision's entry where nothing is added.
    """
    try:
        word = word_of(precision.value)
    except Unreadable as error:
        return set(), [precision._replace(effect=KeyEffect(Fit.UNSUPPORTED, str(error)))]
    section = dtype_of(word)
    if section == "fp32":
        plain = block.native.keys().isdisjoint(("fp16", "bf16", "bfloat16", "torch_autocast"))
        return set(), [precision._replace(effect=KeyEffect(fields={"precision.compute": "fp32"} if plain else {}))]
    if section in block.native:
        return set(), [precision._replace(effect=KeyEffect(Fit.IGNORED, _IN_CONFIG))]
    key = SourceKey(precision.path, precision.value, precision.assumed)
    if word.endswith("true"):
        key = key._replace(fit=Fit.EQUIVALENT, note=_ROUNDED.format(word))
    block.add(f"{section}.enabled", True, key)
    used = SCALING.keys() if section == "fp16" else set()
    for name in used:
        there = strategy.source_keys(name) if name in strategy.arguments else [key]
        block.add(f"fp16.{name}", strategy.arguments.get(name, SCALING[name]), *there)
    return set(used), []


_IN_CONFIG = "the block in the DeepSpeed config decides; Lightning only casts the inputs"
_ROUNDED = "{} also rounds the initial weights; DeepSpeed still keeps fp32 master weights"
_ACCUMULATION = "Lightning 2.6.6 refuses this key in the DeepSpeed config; write accumulate_grad_batches"


def _in_trainer(entry: Entry, *, inside: bool) -> Entry:
    """A key that Lightning wants as an argument of the Trainer."""
    moved = inside and entry.path[-1] == "gradient_accumulation_steps" and entry.effect.fit is Fit.EXACT
    return entry.but(Fit.EQUIVALENT, _ACCUMULATION) if moved and not entry.assumed else entry
