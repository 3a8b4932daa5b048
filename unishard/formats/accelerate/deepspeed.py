"""What the block `deepspeed_config` says: a few of DeepSpeed's arguments under names of Accelerate, or the name of
DeepSpeed's own file.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path, Undecided, Unreadable
from unishard.contract.key_rows import listed, number
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder
from unishard.errors import ConfigError
from unishard.formats.accelerate.entries import TOOL, block_of, dropped, overlooked, precision_of, refused
from unishard.formats.accelerate.sequence import BLOCK, name_of, size_of
from unishard.formats.engines.block import EngineBlock, SourceKey
from unishard.formats.files.source import Source, open_named
from unishard.formats.names import names

NAMES: Mapping[str, str] = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""DeepSpeed's argument by the name that Accelerate gives it (utils/launch.py, utils/dataclasses.py)."""

_STARTS = "launcher setting; start the ranks with torchrun or srun"

LAUNCHER: Mapping[str, str] = {
    "zero3_init_flag": "affects only where the model is created: a model on any device can be sharded",
    "deepspeed_multinode_launcher": _STARTS,
    "deepspeed_hostfile": _STARTS,
    "deepspeed_exclusion_filter": _STARTS,
    "deepspeed_inclusion_filter": _STARTS,
}
"""Keys that change nothing about the training, and why."""

MOE = "deepspeed_moe_layer_cls_names"
"""Names the layers that hold experts."""

KNOWN = (*NAMES, *LAUNCHER, MOE, "deepspeed_config_file")
"""Every key that Accelerate looks at."""

NO_FILE = (None, "none")
"""What `deepspeed_config_file` holds where it names none."""

NEVER = 1e30
"""Clips no norm that can be: what `null` is written as, since Accelerate leaves 0 out and DeepSpeed then clips to
1.0."""

_ACCUMULATION = Undecided("gradient_accumulation_steps of the Accelerator")
_CLIPS = f"{TOOL} clips to 1.0 where the file has no gradient_clipping; so does DeepSpeed since 0.19.3"
OF_THE_FILE = names("sharding.strategy precision.compute training.gradient_clipping optimizer.name scheduler.name")
"""What only DeepSpeed's own file says, once a document names one."""
_NVME = "used as meant; Accelerate 1.15.0 never passes it on: use a deepspeed_config_file"
_CPU_ADAM = "Accelerate 1.15.0 may swap the optimizer for DeepSpeedCPUAdam"
_NO_CLIPPING = "0 is left out, so DeepSpeed clips to 1.0; write a very large norm for no clipping"


def deepspeed_entries(
    document: Mapping[str, Any], precision: str, source_key: SourceKey, topology: Topology | None
) -> list[Entry]:
    """What DeepSpeed's arguments in a document say, which names no file of DeepSpeed's own.

    Args:
        document: The whole.
        precision: In which format it computes.
        source_key: Where it says that.
        topology: The ranks, where they are known.
    """
    arguments = EngineBlock("deepspeed", ("deepspeed_config",), {argument: (name,) for name, argument in NAMES.items()})
    block = block_of(document, "deepspeed_config")
    entries: list[Entry] = []
    for name, value in block.items():
        entries += _argument(arguments, str(name), value, block)
    for name, value, note in (("zero_stage", 2, ""), ("gradient_clipping", 1.0, _CLIPS)):
        if block.get(name) is None:
            option_key = SourceKey(
                ("deepspeed_config", name), value, assumed=name not in block, note=note, notable=bool(note)
            )
            arguments.add(NAMES[name], value, option_key)
    _compute(arguments, precision, source_key)
    _share(arguments, document)
    return [*entries, *arguments.entries(topology=topology)]


def _argument(arguments: EngineBlock, name: str, value: Any, block: Mapping[str, Any]) -> Iterator[Entry]:
    """Hand one key on to DeepSpeed, or say at once what it means."""
    path: Path = ("deepspeed_config", name)
    if name in LAUNCHER:
        yield dropped(path, value, LAUNCHER[name])
    elif name == "deepspeed_config_file":
        yield dropped(path, value, "names no file")
    elif name == MOE:
        yield experts(path, value, block.get("zero_stage"))
    elif name not in NAMES:
        yield overlooked(path, value, KNOWN)
    elif value is None and name not in ("zero_stage", "gradient_clipping"):
        yield dropped(path, value, "is null: Accelerate uses its default")
    elif name.endswith("_nvme_path") and str(block.get(name.replace("nvme_path", "device"))).lower() != "nvme":
        yield dropped(path, value, "nothing is offloaded to it", copy_verbatim=False)
    elif name == "gradient_accumulation_steps" and value == AUTO:
        yield Entry(
            path,
            value,
            KeyEffect(
                Fit.NEEDS_INPUT,
                f"the value comes from {_ACCUMULATION.who}",
                {"training.gradient_accumulation_steps": _ACCUMULATION},
            ),
        )
    elif value is not None:
        try:
            arguments.add(NAMES[name], *_read(name, value, path))
        except Unreadable as error:
            yield refused(path, value, str(error))


def experts(path: Path, value: Any, stage: Any) -> Entry:
    """Layers of which a rank may use only parts, which ZeRO-3 gathers as a whole (accelerator.py,
    set_moe_leaf_modules).
    """
    if value is None or str(stage) != "3":
        return dropped(path, value, "changes nothing below stage 3")
    try:
        return Entry(path, value, KeyEffect(fields={"sharding.conditional_modules": listed(value)}))
    except Unreadable as error:
        return refused(path, value, str(error))


def _read(name: str, value: Any, path: Path) -> tuple[Any, SourceKey]:
    """The argument, and how what Accelerate does with it differs from what the key says."""
    match name:
        case "gradient_clipping":
            return _clipping(value, path)
        case "offload_optimizer_nvme_path" | "offload_param_nvme_path":
            return value, SourceKey(path, value, fit=Fit.EQUIVALENT, note=_NVME)
        case "offload_optimizer_device" if str(value).lower() in ("cpu", "nvme"):
            return str(value).lower(), SourceKey(path, value, fit=Fit.EQUIVALENT, note=_CPU_ADAM)
        case "offload_optimizer_device" | "offload_param_device":
            return str(value).lower(), SourceKey(path, value)
    return value, SourceKey(path, value)


def _clipping(value: Any, path: Path) -> tuple[Any, SourceKey]:
    """The norm: `auto` and 0 come to 1.0 (accelerator.py)."""
    if value == AUTO:
        return 1.0, SourceKey(path, value)
    if is_placeholder(value):
        return value, SourceKey(path, value)
    norm = number(0)(value)
    if not norm:
        return 1.0, SourceKey(path, value, fit=Fit.APPROXIMATE, note=_NO_CLIPPING)
    return (0.0 if norm >= NEVER else norm), SourceKey(path, value)


def _compute(arguments: EngineBlock, precision: str, source_key: SourceKey) -> None:
    """The sections that Accelerate makes of `mixed_precision` (utils/dataclasses.py, set_mixed_precision)."""
    match precision:
        case "fp16":
            arguments.add("fp16", {"enabled": True, "auto_cast": True}, source_key)
        case "bf16" | "fp8":
            arguments.add("bf16", {"enabled": True}, source_key)


def _share(arguments: EngineBlock, document: Mapping[str, Any]) -> None:
    """The ranks that share samples, which Accelerate says to DeepSpeed by `mpu`."""
    name = name_of("sp")
    value = block_of(document, BLOCK).get(name, 1)
    if size_of(value) > 1:
        arguments.add("sequence_parallel_size", size_of(value), SourceKey((BLOCK, name), value))


def no_file(path: Path, name: Any) -> Entry:
    """An entry for a file that is not there: its values must be decided elsewhere."""
    note = (
        f"{name} was not found: its stage, precision, clipping, optimizer and schedule are unknown, and {TOOL} "
        "fails as well; add the file"
    )
    undecided = Undecided(f"{name}, which was not found", required=True)
    return Entry(path, name, KeyEffect(Fit.NEEDS_INPUT, note, dict.fromkeys(OF_THE_FILE, undecided)))


FILE: Path = ("deepspeed_config", "deepspeed_config_file")
"""Where a file names DeepSpeed's own."""
_BESIDE = f"{TOOL} refuses this beside deepspeed_config_file; move it to that file"
_FILLED: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
"""What Accelerate puts in the place of `auto`, where that does not depend on the training script (utils/dataclasses.py,
accelerator.py)."""


def file_entries(source: Source, source_key: SourceKey, topology: Topology | None) -> list[Entry]:
    """What a document says that names DeepSpeed's own file.

    Args:
        source: The document.
        source_key: Where it says in which format it computes.
        topology: The ranks, where they are known.
    """
    block = block_of(source.data, "deepspeed_config")
    entries = [_beside(str(name), value) for name, value in block.items() if name not in (FILE[-1], MOE)]
    if not source_key.assumed and source_key.value is not None and precision_of(source.data) == "no":
        note = f"the file decides; {TOOL} refuses this beside it, so it is left out"
        effect = KeyEffect(Fit.IGNORED, note, rejected_upstream=True)
        entries.append(Entry(source_key.path, source_key.value, effect))
    elif not source_key.assumed and source_key.value is not None:
        entries.append(refused(source_key.path, source_key.value, _BESIDE))
    else:
        entries.append(Entry(source_key.path, source_key.value, KeyEffect(), source_key.assumed))
    name = block[FILE[-1]]
    try:
        document = opened(name, source.folder)
    except ConfigError as error:
        return [*entries, refused(FILE, name, f"cannot be read: {error}")]
    if MOE in block:
        zero = (document or {}).get("zero_optimization")
        entries.append(
            experts(("deepspeed_config", MOE), block[MOE], zero.get("stage", 0) if isinstance(zero, Mapping) else 3)
        )
    if document is None:
        return [*entries, no_file(FILE, name)]
    if "zero_optimization" not in document:
        return [
            *entries,
            refused(
                FILE, name, f"{TOOL} refuses a file without zero_optimization; write zero_optimization: {{stage: 0}}"
            ),
        ]
    return [
        *entries,
        Entry(FILE, name, KeyEffect(note="its keys follow")),
        *_beside_file(document, source.data, topology),
    ]


def _beside(name: str, value: Any) -> Entry:
    path = ("deepspeed_config", name)
    if name in LAUNCHER:
        return dropped(path, value, LAUNCHER[name])
    if name in NAMES:
        return refused(path, value, _BESIDE)
    return overlooked(path, value, KNOWN)


def opened(name: Any, folder: FilePath | None) -> Mapping[str, Any] | None:
    """The file: beside the document, or in the working directory, where Accelerate looks, or what the text itself holds
    as JSON.
    """
    if isinstance(name, Mapping):
        return name
    source = open_named(str(name), folder)
    return source.data if source else _inside(str(name))


def _inside(text: str) -> Mapping[str, Any] | None:
    """JSON, or JSON in base64, which Accelerate takes as well (utils/deepspeed.py)."""
    for content in (text, _decoded(text)):
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict):
            return parsed
    return None


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


def _beside_file(document: Mapping[str, Any], around: Mapping[str, Any], topology: Topology | None) -> list[Entry]:
    """What DeepSpeed makes of the file after Accelerate has filled in what it can."""
    block = EngineBlock("deepspeed", FILE, native=dict(document))
    values = dict(flat(document))
    for key, value in _FILLED.items():
        if values.get(key) == AUTO:
            block.add(key, value, SourceKey((*FILE, *key.split(".")), AUTO))
    _share(block, around)
    return [_in_file(entry) for entry in block.entries(topology=topology)]


def _in_file(entry: Entry) -> Entry:
    """The entry, which Accelerate's own file has no place for."""
    taken = entry.effect.copy_verbatim and entry.effect.fit is Fit.UNSUPPORTED
    return entry._replace(effect=entry.effect._replace(copy_verbatim=taken))
