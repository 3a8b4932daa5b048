"""`deepspeed` of TrainingArguments, handed on to DeepSpeed's own table (transformers 5.23,
integrations/deepspeed.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Undecided, Unreadable, left_out
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder
from unishard.formats.beside.precedence import same_value
from unishard.formats.engines.block import EngineBlock, SourceKey
from unishard.formats.files.source import Source
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.json_argument import opened
from unishard.formats.hf.loop import DEEPSPEED, off
from unishard.formats.names import names

_RATES = {
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "weight_decay": "optimizer.params.weight_decay",
}
_THEIRS = "the {0} of the DeepSpeed config counts (transformers 5.23, deepspeed_optim_sched)"


def with_precedence(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, those ignored that another place decides."""
    return _checkpointed(_beside_deepspeed(entries))


def _beside_deepspeed(entries: Sequence[Entry]) -> list[Entry]:
    engine_keys = {
        entry.key.removeprefix(f"{DEEPSPEED}.") for entry in entries if entry.path[0] == DEEPSPEED and not entry.assumed
    }
    # The argument itself sets the engine where DeepSpeed's config could be read.
    read = any(entry.path == (DEEPSPEED,) and "backend" in entry.effect.fields for entry in entries)
    return [settle for entry in entries for settle in _settle(entry, engine_keys)] if read else list(entries)


def _settle(entry: Entry, engine_keys: set[str]) -> list[Entry]:
    optimizer = any(key.startswith("optimizer") for key in engine_keys)
    scheduler = any(key.startswith("scheduler") for key in engine_keys)
    for key, (argument, note) in SILENT.items():
        if (
            entry.key == argument
            and key not in engine_keys
            and entry.effect.fields.get("training.gradient_clipping") != 1.0
        ):
            return _ignored(entry, note)
    if optimizer and entry.key in ("optim", "optim_args"):
        return _ignored(entry, _THEIRS.format("optimizer"))
    if optimizer and entry.key in _RATES:
        if _RATES[entry.key] not in engine_keys:
            return _ignored(entry, _THEIRS.format("optimizer"))
        fields = {field: value for field, value in entry.effect.fields.items() if field != "optimizer.no_decay"}
        # DeepSpeed's optimizer gets one group of parameters, so nothing is exempt.
        return [entry._replace(effect=KeyEffect(Fit.EXACT, "", fields))]
    if scheduler and entry.key in (
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "warmup_ratio",
        "max_steps",
    ):
        return _ignored(entry, _THEIRS.format("scheduler"))
    return [entry]


def _ignored(entry: Entry, note: str) -> list[Entry]:
    """Nothing where it is only assumed, which makes no difference."""
    taken = _taken(entry)
    return (
        []
        if entry.assumed
        else [
            entry._replace(
                effect=KeyEffect(Fit.IGNORED, note, copy_verbatim=taken, rejected_upstream=not taken, notable=True)
            )
        ]
    )


def _taken(entry: Entry) -> bool:
    """Whether transformers takes the value, which it looks at even where another place decides."""
    try:
        VALUES.get(entry.key, bool)(entry.value)
    except Unreadable:
        return False
    return entry.effect.fit is not Fit.UNSUPPORTED


def _checkpointed(entries: Sequence[Entry]) -> list[Entry]:
    """Blocks run again if one of the places says so."""
    field = "activation_checkpointing"
    on = any(entry.effect.fields.get(field) == "full" for entry in entries)
    return [_quiet(entry, field) if on and entry.effect.fields.get(field) == "none" else entry for entry in entries]


def _quiet(entry: Entry, field: str) -> Entry:
    fields = {name: value for name, value in entry.effect.fields.items() if name != field}
    return entry._replace(effect=left_out("is on in another place")._replace(fields=fields))


Arguments = Callable[[str], Any]
"""What TrainingArguments say or assume for a key; None where the document is no whole set of them."""

_FILL: Mapping[str, tuple[str, Callable[[Arguments], Any]]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", lambda get: get("per_device_train_batch_size")),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda get: get("gradient_accumulation_steps")),
    "gradient_clipping": ("max_grad_norm", lambda get: get("max_grad_norm")),
    "optimizer.params.lr": ("learning_rate", lambda get: get("learning_rate")),
    "optimizer.params.betas": ("adam_beta1 and adam_beta2", lambda get: [get("adam_beta1"), get("adam_beta2")]),
    "optimizer.params.eps": ("adam_epsilon", lambda get: get("adam_epsilon")),
    "optimizer.params.weight_decay": ("weight_decay", lambda get: get("weight_decay")),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda get: get("learning_rate")),
    "scheduler.params.total_num_steps": ("max_steps", lambda get: _total(get)),
    "scheduler.params.warmup_num_steps": ("warmup_steps", lambda get: _climb(get)),
    "fp16.enabled": ("fp16 or fp16_full_eval", lambda get: not off(get("fp16")) or not off(get("fp16_full_eval"))),
    "bf16.enabled": ("bf16 or bf16_full_eval", lambda get: not off(get("bf16")) or not off(get("bf16_full_eval"))),
}
"""What transformers writes in place of `"auto"`, and refuses to contradict (`trainer_config_process`)."""


def filled_from(key: str) -> tuple[str, ...]:
    """The arguments that take the place of `"auto"` at a key of DeepSpeed's config."""
    words = re.findall(r"\w+", _FILL[key][0]) if key in _FILL else []
    return tuple(word for word in words if word not in ("and", "or"))


def _total(get: Arguments) -> int | None:
    """The updates, where `max_steps` says them."""
    steps = get("max_steps")
    return int(steps) if isinstance(steps, int | float) and steps > 0 else None


def _climb(get: Arguments) -> int | None:
    """The updates of the warm-up, of which transformers hands on at least one; None where the dataset decides."""
    steps = get("warmup_steps") or get("warmup_ratio") or 0
    if not isinstance(steps, int | float) or 0 < steps < 1:
        total = _total(get)
        return math.ceil(total * steps) if total and isinstance(steps, float) else None
    return max(1, int(steps))


_OF_THE_FILE = names("sharding.strategy precision.compute training.gradient_clipping optimizer.name scheduler.name")
"""What only DeepSpeed's own config says for certain; arguments that are written say the last four as well."""

SILENT: Mapping[str, tuple[str, str]] = {
    "gradient_clipping": (
        "max_grad_norm",
        'not used: DeepSpeed clips to its default, 1.0; write gradient_clipping: "auto" in its config',
    )
}
"""Keys whose absence from DeepSpeed's config makes an argument ignored."""


def partitioned(value: Any, source: Source, get: Arguments, topology: Topology | None) -> list[Entry]:
    """The entries of the argument.

    Args:
        value: A mapping, or the path of a JSON file.
        source: The document.
        get: The other arguments.
        topology: The ranks.
    """
    if off(value):
        return [Entry(("deepspeed",), value, left_out("is off"))]
    config = opened(value, source) if isinstance(value, str) else value
    if isinstance(config, str):
        return _absent(value, config)
    if not isinstance(config, Mapping):
        note = f"must be a mapping or the path of a JSON file, got {shown(value)}; write one of them"
        return [Entry(("deepspeed",), value, KeyEffect(Fit.UNSUPPORTED, note))]
    on = KeyEffect(fields={"backend": "deepspeed"})
    entries = [Entry(("deepspeed",), value if isinstance(value, str) else True, on, assumed=not isinstance(value, str))]
    return entries + _read(config, get, topology)


def _absent(value: Any, why: str) -> list[Entry]:
    """A config that is not there, so that its values must be decided elsewhere."""
    undecided = Undecided(f"the DeepSpeed config {value}, which was not found", required=True)
    note = f"{why}; its stage, precision, clipping, offload, optimizer and schedule are unknown"
    on = Entry(("deepspeed", "zero_optimization"), None, KeyEffect(fields={"backend": "deepspeed"}), assumed=True)
    return [
        Entry(
            ("deepspeed",),
            value,
            KeyEffect(Fit.NEEDS_INPUT, note, dict.fromkeys(_OF_THE_FILE, undecided), copy_verbatim=True),
        ),
        on,
    ]


def _read(config: Mapping[str, Any], get: Arguments, topology: Topology | None) -> list[Entry]:
    values = dict(flat(config))
    whole = get("per_device_train_batch_size") is not None
    fills = {key: fill(get) for key, (_, fill) in _FILL.items() if whole and values.get(key) == AUTO}
    filled = {key: value for key, value in fills.items() if value is not None}
    if values.get("train_batch_size") == AUTO and whole:
        # The product of the other two and the ranks says nothing of its own.
        filled["train_batch_size"] = None
    block = EngineBlock(
        "deepspeed",
        ("deepspeed",),
        native={key: item for key, item in config.items() if key != "train_batch_size" or key not in filled},
    )
    for key, item in filled.items():
        if item is not None:
            block.add(key, item, SourceKey(("deepspeed", *key.split(".")), AUTO))
    if not {"bf16", "fp16"} & set(config):
        for key, item in _mixed(get).items():
            block.add(f"{key}.enabled", item, SourceKey(("deepspeed", key, "enabled"), item, assumed=True))
    entries = block.placed(_checked(entry, values, get, whole) for entry in block.parsed(topology=topology))
    if "train_batch_size" in filled:
        note = "transformers fills in the product of the other two and the ranks"
        entries.append(Entry(("deepspeed", "train_batch_size"), AUTO, left_out(note)))
    return entries


def _mixed(get: Arguments) -> dict[str, bool]:
    """What Accelerate adds where the config names no format (`DeepSpeedPlugin.set_mixed_precision`, accelerate
    1.15.0).
    """
    return {name: True for name in ("bf16", "fp16") if not off(get(name)) and get(name) != AUTO}


def _checked(entry: Entry, values: Mapping[str, Any], get: Arguments, whole: bool) -> Entry:
    """The entry, refused where transformers stops because it contradicts an argument."""
    if not whole or entry.assumed or entry.key not in _FILL or values.get(entry.key) in (AUTO, None):
        return entry
    name, fill = _FILL[entry.key]
    argument = fill(get)
    unknown = any(is_placeholder(one) for one in (argument if isinstance(argument, list) else [argument]))
    if argument is None or unknown or same_value(values[entry.key], argument):
        return entry
    note = f'transformers refuses this: {name} is {shown(argument)}; make them equal, or write "auto"'
    return entry.but(Fit.UNSUPPORTED, note)
