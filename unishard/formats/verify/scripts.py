"""What transformers makes of the TrainingArguments in a file of LLaMA-Factory, ms-swift or TRL, which hand theirs on to
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unishard.formats import catalog
from unishard.formats.hf.shipped import shipped
from unishard.formats.verify.hf import settings_of as hf_settings

_DECIDES: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("optimizer.lr",),
    "weight_decay": ("optimizer.weight_decay",),
    "adam_beta2": ("optimizer.betas",),
    "lr_scheduler_type": ("scheduler.name", "scheduler.total_steps", "scheduler.warmup_steps"),
    "per_device_train_batch_size": ("training.micro_batch_size",),
    "gradient_accumulation_steps": ("training.gradient_accumulation_steps",),
    "bf16": ("precision.compute",),
}
"""What is known only where the file has the argument, if the tool around transformers has a default of its own."""
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "evaluation_strategy": "eval_strategy",
}
_RATIO = "warmup_ratio"


def settings_of(document: Mapping[str, Any], folder: Path | None, tool: str) -> dict[str, Any]:
    """The settings with which the tool's trainer would train, without those that the tool itself assumes.

    Raises what transformers raises.

    Args:
        document: The file.
        folder: Where it lies.
        tool: The name of its format.
    """
    found = hf_settings(_arguments(document), folder)
    assumed = catalog.get(tool).silent(document).keys() - document.keys()  # type: ignore[attr-defined]
    unknown = {field for key in assumed for field in _DECIDES.get(key, ())}
    if "torch_dtype" in document and not {"bf16", "fp16"} & document.keys():
        unknown.add("precision.compute")
    return {field: value for field, value in found.items() if field not in unknown}


def _arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the names of transformers 5: these tools also run with versions that have the older ones."""
    found = {_RENAMED.get(key, key): value for key, value in document.items()}
    if isinstance(found.get("fsdp"), Mapping):  # as ms-swift writes it
        found |= found["fsdp"]
    named = found.get("deepspeed")
    if isinstance(named, str) and named in (configs := shipped("swift")):
        found["deepspeed"] = configs[named]
    if found.get(_RATIO) and not found.get("warmup_steps"):
        found["warmup_steps"] = found[_RATIO]
    return found
