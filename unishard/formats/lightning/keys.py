"""The arguments of Lightning's Trainer and Fabric (2.6.6), one row each, and LightningCLI's keys beside the Trainer.

The arguments of a strategy stand in a file of each strategy; those that are an engine's are read by that engine's
backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import boolean, integer, number, one_of
from unishard.contract.rules import SCRIPT, Fit
from unishard.formats.lightning.built import built, short
from unishard.formats.lightning.plugins import plugins
from unishard.formats.lightning.precision import DEFAULT, precision
from unishard.formats.lightning.rows import by_script, left, off, optional
from unishard.formats.lightning.strategies import names_strategy
from unishard.formats.names import ignored

_LAUNCH = "the launcher decides it: torchrun --nproc-per-node ... --nnodes ..."


def _accumulation(value: Any, document: DocumentValues) -> KeyEffect:
    steps = integer(1)(value)
    fields = {"training.gradient_accumulation_steps": steps}
    if steps == 1 or document.get("strategy") == "DeepSpeedStrategy":
        return KeyEffect(fields=fields)
    return KeyEffect(Fit.EQUIVALENT, "alike in full windows; Lightning divides the last one by the full window", fields)


_SHARDS = "Lightning 2.6.6 cannot clip by norm with FSDP"


def _clipping(value: Any, document: DocumentValues) -> KeyEffect:
    largest = number(0)(value)
    fields = {"training.gradient_clipping": largest or None}
    if str(document.get("gradient_clip_algorithm")).lower() == "value" and largest:
        return KeyEffect(
            Fit.UNSUPPORTED, "only clipping by the global norm is supported; write gradient_clip_algorithm: norm"
        )
    if str(document.get("strategy")).startswith("FSDPStrategy") and largest:
        return KeyEffect(Fit.EQUIVALENT, _SHARDS, fields)
    return KeyEffect(fields=fields)


def _algorithm(value: Any, document: DocumentValues) -> KeyEffect:
    algorithm = one_of({"norm": "norm", "value": "value"})(value)
    if not document.get("gradient_clip_val"):
        return KeyEffect(Fit.IGNORED, "nothing is clipped without gradient_clip_val")
    if algorithm == "value":
        return KeyEffect(Fit.UNSUPPORTED, "every engine clips by the global norm, not each value; write norm")
    return KeyEffect(fields={"training.gradient_clipping": number(0)(document.get("gradient_clip_val")) or None})


def _accelerator(value: Any, document: DocumentValues) -> KeyEffect:
    instance = built(value)
    accelerator = short(instance.path).removesuffix("Accelerator").lower() if instance else str(value).lower()
    if names_strategy(accelerator):
        return KeyEffect(
            Fit.UNSUPPORTED,
            f"Lightning 2 no longer takes {accelerator} as an accelerator; write it as strategy, and gpu here",
        )
    if accelerator not in ("auto", "gpu", "cuda", "cpu"):
        return KeyEffect(
            Fit.UNSUPPORTED, f"only CUDA devices and CPUs are supported, not {accelerator}; write gpu or cpu"
        )
    return left_out(_LAUNCH)


def _filled_in(value: Any) -> bool:
    """Whether a value is a reference, such as OmegaConf's `${devices}`, which the launch fills in."""
    return isinstance(value, str) and value.startswith("${")


def _devices(value: Any, document: DocumentValues) -> KeyEffect:
    """A number, a list of indices also as text with commas, or -1 and auto for all."""
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    words = [index for item in items if (index := str(item).strip())]
    if _filled_in(value):
        return left_out(_LAUNCH)
    if isinstance(value, bool) or not words or not all(word.lstrip("-").isdigit() or word == "auto" for word in words):
        raise Unreadable(f"must be a number or list of devices, or auto, got {shown(value)}; write auto", value)
    if words in (["auto"], ["-1"]):
        return left_out("one rank for each device, as launch.processes_per_node: null")
    listed = len(items) > 1 or isinstance(value, list | tuple)
    count = len(words) if listed else integer(1)(words[0])
    per_node = document.topology.local_world_size if document.topology else count
    fields: dict[str, Any] = {"launch.processes_per_node": per_node}
    if listed and count == per_node and document.get("accelerator") != "cpu":
        fields["launch.environment"] = {"CUDA_VISIBLE_DEVICES": ",".join(words)}
    return KeyEffect(fields=fields)


def _nodes(value: Any, document: DocumentValues) -> KeyEffect:
    if _filled_in(value):
        return left_out(_LAUNCH)
    count = integer(1)(value)
    asked = document.topology.world_size // document.topology.local_world_size if document.topology else count
    return KeyEffect(fields={"launch.nodes": asked})


def _saving(value: Any, document: DocumentValues) -> KeyEffect:
    if boolean(value):
        return left_out("is on: write the section checkpoint for what a ModelCheckpoint says")
    return KeyEffect(fields={"checkpoint.every_steps": None})


def _seed(value: Any, document: DocumentValues) -> KeyEffect:
    if off(value):
        return left_out("is off")
    if value is True or str(value).lower() == "true":
        return left_out("LightningCLI draws a new seed in each run; write training.seed for a fixed one")
    return KeyEffect(fields={"training.seed": integer(0, 2**32 - 1)(value)})


_CALLBACKS = "your training loop does what they do beyond logs; a ModelCheckpoint is the section checkpoint here"
_BUILT = "LightningCLI builds it, and unishard from its own section: write {}"
_EPOCHS = "your training loop makes this many epochs or updates: {value}"
TRAINER: Mapping[str, Key] = {
    "precision": Key(
        precision,
        ("precision.compute", "precision.master", "precision.reduce", "precision.buffers"),
        tool_default=DEFAULT,
    ),
    "accumulate_grad_batches": Key(
        lambda value, document: _accumulation(1 if value is None else value, document),
        ("training.gradient_accumulation_steps",),
        tool_default=1,
    ),
    "gradient_clip_val": Key(
        lambda value, document: _clipping(value or 0, document),
        ("training.gradient_clipping",),
        note=_SHARDS,
        tool_default=None,
    ),
    "gradient_clip_algorithm": optional(_algorithm, ("training.gradient_clipping",)),
    "accelerator": optional(_accelerator, (), Fit.IGNORED, _LAUNCH),
    "devices": optional(
        _devices, ("launch.processes_per_node", "launch.environment"), note="a list of indices: CUDA_VISIBLE_DEVICES"
    ),
    "num_nodes": optional(_nodes, ("launch.nodes",)),
    "callbacks": by_script(_CALLBACKS),
    "enable_checkpointing": optional(_saving, ("checkpoint.every_steps",), note="true leaves it to you"),
    "plugins": optional(plugins, ("precision.initial_loss_scale", "precision.loss_scale_growth_interval")),
    "sync_batchnorm": by_script(
        "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the model is wrapped"
    ),
    "deterministic": by_script("call torch.use_deterministic_algorithms(True); Lightning's value is {value}"),
    "use_distributed_sampler": Key(
        lambda value, document: (
            left_out("is off")
            if value is None or boolean(value)
            else KeyEffect(
                Fit.NEEDS_INPUT,
                "your script shares the samples out itself: hand engine.batches a loader that does",
            )
        ),
        (SCRIPT,),
    ),
    "reload_dataloaders_every_n_epochs": by_script("rebuild the DataLoader every {value} epochs", 0),
    "max_epochs": by_script(_EPOCHS, -1),
    "min_epochs": by_script(_EPOCHS, 0),
    "max_steps": by_script(_EPOCHS, -1),
    "min_steps": by_script(_EPOCHS, 0),
    "max_time": by_script("your training loop stops after {value}"),
    "limit_train_batches": by_script("your training loop uses this much of the data: {value}", 1.0),
    "overfit_batches": by_script("your training loop uses this much of the data: {value}", 0, 0.0),
    "fast_dev_run": by_script("a trial run of {value} batches; leave it out to train"),
    "detect_anomaly": by_script("call torch.autograd.set_detect_anomaly(True), which finds the source of a NaN"),
    **ignored("lightning/ignored_trainer.txt", left),
}
"""The arguments of `Trainer` and `Fabric` but `strategy`."""

REMOVED: Mapping[str, Key] = ignored("lightning/removed.txt", off=off)
"""The Trainer's arguments of Lightning 1 that Lightning 2 refuses."""

BESIDE: Mapping[str, Key] = {
    "seed_everything": optional(_seed, ("training.seed",)),
    "optimizer": by_script(_BUILT.format("optimizer.name, optimizer.lr and its other arguments")),
    "lr_scheduler": by_script(_BUILT.format("scheduler, which steps once an update and not once an epoch")),
    **ignored("lightning/ignored_cli.txt", left),
}
"""LightningCLI's keys beside `trainer`; it hands every other one to the user's own classes."""


def counted(value: Any) -> int | None:
    """Devices or nodes: a number, or as many as a list names; None where it is open."""
    if isinstance(value, list | tuple):
        return len(value) or None
    text = str(value).strip()
    if "," in text:
        return sum(bool(word.strip()) for word in text.split(","))
    return int(text) if text.isdigit() and 0 < int(text) < 2**31 else None
