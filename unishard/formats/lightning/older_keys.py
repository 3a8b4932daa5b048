"""Arguments of the Trainer that Lightning 2 does not have any more (pytorch_lightning 1.0 to 1.9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.key_rows import boolean, refuses
from unishard.contract.rules import Fit
from unishard.formats.lightning.keys import TRAINER, off
from unishard.formats.names import ignored, names

__all__ = ["OLDER", "place_in", "strategy_in"]

_DISTRIBUTED = names("ddp ddp_spawn ddp_cpu ddp2 dp ddp_sharded ddp_sharded_spawn deepspeed fsdp horovod")
_PLACES = ("accelerator", "distributed_backend")
"""Where Lightning 1 named the strategy, before 1.5."""


def _script(what: str) -> Key:
    def read(value: Any, given: DocumentValues) -> KeyEffect:
        return KeyEffect(Fit.IGNORED, "is off") if off(value) else KeyEffect(Fit.NEEDS_INPUT, what)

    return Key(read, "your training script", Fit.NEEDS_INPUT, what)


def _nonfinite(value: Any, given: DocumentValues) -> KeyEffect:
    return KeyEffect(fields={"training.nonfinite": "raise"}) if boolean(value) else KeyEffect(Fit.IGNORED, "is off")


def _gpus(value: Any, given: DocumentValues) -> KeyEffect:
    """`devices`, where 0 means the CPU."""
    if off(value) or value in (0, "0", [], "auto") or "devices" in given:
        return left_out("the launcher decides it: torchrun --nproc-per-node ... --nnodes ...")
    return TRAINER["devices"].read(value, given)


OLDER: Mapping[str, Key] = {
    **ignored("lightning/ignored_older.txt"),
    "amp_backend": refuses(
        "Apex is gone; write precision: 16-mixed or bf16-mixed", lambda value: off(value) or value == "native"
    ),
    "tpu_cores": refuses("only CUDA devices and CPUs are supported; write devices", off),
    "ipus": refuses("only CUDA devices and CPUs are supported; write devices", off),
    "gpus": Key(_gpus, "launch.processes_per_node, launch.environment"),
    "replace_sampler_ddp": TRAINER["use_distributed_sampler"],
    "terminate_on_nan": Key(_nonfinite, "training.nonfinite"),
    "auto_lr_find": _script("find the learning rate in the training script, and write it as optimizer.lr"),
    "auto_scale_batch_size": _script("find the batch size in the training script; write training.micro_batch_size"),
    "stochastic_weight_avg": _script("average the weights in the training script (torch.optim.swa_utils)"),
    "truncated_bptt_steps": _script("cut the sequences in the training script"),
    "reload_dataloaders_every_epoch": _script("rebuild the DataLoader every epoch"),
    "train_percent_check": TRAINER["limit_train_batches"],
    "early_stop_callback": _script("decide in the training script when to stop"),
}
"""Each with what it says today."""


def place_in(trainer: Mapping[str, Any]) -> str:
    """The argument that names the strategy in a file from before Lightning 1.5; empty where none does."""
    return next(
        (place for place in _PLACES if isinstance(trainer.get(place), str) and trainer[place] in _DISTRIBUTED), ""
    )


def strategy_in(trainer: Mapping[str, Any]) -> Any:
    """The strategy, wherever it is named; None where nothing names it."""
    if "strategy" in trainer or not (place := place_in(trainer)):
        return trainer.get("strategy")
    return "ddp_spawn" if trainer[place] == "ddp_cpu" else trainer[place]
