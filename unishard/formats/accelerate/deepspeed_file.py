"""What DeepSpeed's own file says, where `deepspeed_config_file` names one."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path
from unishard.contract.render import AUTO
from unishard.errors import ConfigError
from unishard.formats.accelerate.deepspeed import KNOWN, LAUNCHER, MOE, NAMES, experts, no_file
from unishard.formats.accelerate.entries import TOOL, block_of, dropped, overlooked, precision_of, refused
from unishard.formats.engine_block import EngineBlock, Spot
from unishard.formats.source import Source, open_named

__all__ = ["FILE", "file_entries", "opened"]

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


def file_entries(source: Source, spot: Spot, topology: Topology | None) -> list[Entry]:
    """What a document says that names DeepSpeed's own file.

    Args:
        source: The document.
        spot: Where it says in which format it computes.
        topology: The ranks, where they are known.
    """
    block = block_of(source.data, "deepspeed_config")
    entries = [_beside(str(name), value) for name, value in block.items() if name not in (FILE[-1], MOE)]
    if not spot.assumed and spot.value is not None and precision_of(source.data) == "no":
        entries.append(
            dropped(
                spot.path,
                spot.value,
                f"the file decides; {TOOL} refuses this beside it, so it is left out",
                copy_verbatim=False,
            )
        )
    elif not spot.assumed and spot.value is not None:
        entries.append(refused(spot.path, spot.value, _BESIDE))
    else:
        entries.append(Entry(spot.path, spot.value, KeyEffect(), spot.assumed))
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
    return [*entries, Entry(FILE, name, KeyEffect(note="its keys follow")), *_beside_file(document, topology)]


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
    found = open_named(str(name), folder)
    return found.data if found else _inside(str(name))


def _inside(text: str) -> Mapping[str, Any] | None:
    """JSON, or JSON in base64, which Accelerate takes as well (utils/deepspeed.py)."""
    for content in (text, _decoded(text)):
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


def _beside_file(document: Mapping[str, Any], topology: Topology | None) -> list[Entry]:
    """What DeepSpeed makes of the file after Accelerate has filled in what it can."""
    block = EngineBlock("deepspeed", FILE, native=dict(document))
    said = dict(flat(document))
    for key, value in _FILLED.items():
        if said.get(key) == AUTO:
            block.add(key, value, Spot((*FILE, *key.split(".")), AUTO))
    return block.entries(topology=topology)
