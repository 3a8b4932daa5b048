"""The arguments of Lightning's Trainer and Fabric (2.6.6), one row each, and LightningCLI's keys beside the Trainer.

The arguments of a strategy stand in `arguments.py`; those that are an engine's are read by that engine's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import boolean, integer, number, one_of, refuses
from unishard.contract.rules import SCRIPT, Fit
from unishard.formats.hydra import composed
from unishard.formats.lightning.precision import DEFAULT, precision
from unishard.formats.lightning.shape import built, short
from unishard.formats.names import NO_LOGS, each, ignored, names

UNSET = left_out("is not set")
_OFF = left_out("is off")
_LAUNCH = "the launcher decides it: torchrun --nproc-per-node ... --nnodes ..."


def off(value: Any) -> bool:
    """Whether a value switches its key off."""
    return value is None or value is False or value in ("", "false", "False", "null", "None")


def optional(
    read: Callable[[Any, DocumentValues], KeyEffect], fields: str = "", fit: Fit = Fit.EXACT, note: str = ""
) -> Key:
    """A row that has nothing to say where the value is null."""
    return Key(lambda value, given: UNSET if value is None else read(value, given), fields, fit, note)


def left(why: str) -> Key:
    """A key that concerns only a launcher, a log, or files."""
    return optional(lambda value, given: left_out(why), "", Fit.IGNORED, why)


HYDRA: Mapping[str, Key] = each("_convert_ _partial_ _recursive_", left("how Hydra makes the object"))
"""Its own keys beside `_target_`."""


def _script(what: str, *idle: Any) -> Key:
    """Something that the training script must do, unless the value is one of those with which there is nothing to
    do.
    """

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        if off(value) or value in idle:
            return _OFF
        return KeyEffect(Fit.NEEDS_INPUT, what.format(value=shown(value)), copy_verbatim=True)

    return optional(read, SCRIPT, Fit.NEEDS_INPUT, what.format(value="..."))


def _accumulation(value: Any, given: DocumentValues) -> KeyEffect:
    steps = integer(1)(value)
    fields = {"training.gradient_accumulation_steps": steps}
    if steps == 1 or given.get("strategy") == "DeepSpeedStrategy":
        return KeyEffect(fields=fields)
    return KeyEffect(Fit.EQUIVALENT, "alike in full windows; Lightning divides the last one by the full window", fields)


_SHARDS = "Lightning 2.6.6 cannot clip by norm with FSDP"


def _clipping(value: Any, given: DocumentValues) -> KeyEffect:
    largest = number(0)(value)
    fields = {"training.gradient_clipping": largest or None}
    if str(given.get("gradient_clip_algorithm")).lower() == "value" and largest:
        return KeyEffect(
            Fit.UNSUPPORTED, "only clipping by the global norm is supported; write gradient_clip_algorithm: norm"
        )
    if str(given.get("strategy")).startswith("FSDPStrategy") and largest:
        return KeyEffect(Fit.EQUIVALENT, _SHARDS, fields)
    return KeyEffect(fields=fields)


def _algorithm(value: Any, given: DocumentValues) -> KeyEffect:
    word = one_of({"norm": "norm", "value": "value"})(value)
    if not given.get("gradient_clip_val"):
        return KeyEffect(Fit.IGNORED, "nothing is clipped without gradient_clip_val")
    if word == "value":
        return KeyEffect(Fit.UNSUPPORTED, "every engine clips by the global norm, not each value; write norm")
    return KeyEffect(fields={"training.gradient_clipping": number(0)(given.get("gradient_clip_val")) or None})


def _accelerator(value: Any, given: DocumentValues) -> KeyEffect:
    found = built(value)
    word = short(found.path).removesuffix("Accelerator").lower() if found else str(value).lower()
    if word not in ("auto", "gpu", "cuda", "cpu"):
        return KeyEffect(Fit.UNSUPPORTED, f"only CUDA devices and CPUs are supported, not {word}; write gpu or cpu")
    return left_out(_LAUNCH)


def _filled_in(value: Any) -> bool:
    """Whether a value is a reference, such as Hydra's `${devices}`, which the launch fills in."""
    return isinstance(value, str) and value.startswith("${")


def _devices(value: Any, given: DocumentValues) -> KeyEffect:
    """A number, a list of indices also as text with commas, or -1 and auto for all."""
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    words = [word for item in items if (word := str(item).strip())]
    if _filled_in(value):
        return left_out(_LAUNCH)
    if isinstance(value, bool) or not words or not all(word.lstrip("-").isdigit() or word == "auto" for word in words):
        raise Unreadable(f"must be a number or list of devices, or auto, got {shown(value)}; write auto")
    if words in (["auto"], ["-1"]):
        return left_out("one rank for each device, as launch.processes_per_node: null")
    listed = len(items) > 1 or isinstance(value, list | tuple)
    count = len(words) if listed else integer(1)(words[0])
    each = given.topology.local_world_size if given.topology else count
    fields: dict[str, Any] = {"launch.processes_per_node": each}
    if listed and count == each and given.get("accelerator") != "cpu":
        fields["launch.environment"] = {"CUDA_VISIBLE_DEVICES": ",".join(words)}
    return KeyEffect(fields=fields, copy_verbatim=count == each)


def _nodes(value: Any, given: DocumentValues) -> KeyEffect:
    if _filled_in(value):
        return left_out(_LAUNCH)
    count = integer(1)(value)
    asked = given.topology.world_size // given.topology.local_world_size if given.topology else count
    return KeyEffect(fields={"launch.nodes": asked}, copy_verbatim=count == asked)


_TRAINING_CALLBACKS = {
    "GradientAccumulationScheduler": "the length of windows: engine.windows(loader, lengths=...)",
    "StochasticWeightAveraging": "the averaged weights: torch.optim.swa_utils over engine.weights.read(...)",
    "WeightAveraging": "the averaged weights: torch.optim.swa_utils over engine.weights.read(...)",
    "EMAWeightAveraging": "the averaged weights: engine.weights.average(decay)",
    "EarlyStopping": "when to stop",
    "LearningRateFinder": "the learning rate; write what it found as optimizer.lr",
    "BatchSizeFinder": "the batch size; write what it found as training.micro_batch_size",
    "BackboneFinetuning": "what is frozen when: engine.weights.set_trainable(...)",
    "BaseFinetuning": "what is frozen when: engine.weights.set_trainable(...)",
    "ModelPruning": "which weights are zero: engine.weights.write(...)",
    "LambdaCallback": "what it calls",
}
_QUIET_CALLBACKS = names(
    "ModelCheckpoint OnExceptionCheckpoint LearningRateMonitor DeviceStatsMonitor ModelSummary RichModelSummary "
    "TQDMProgressBar RichProgressBar ProgressBar Timer ThroughputMonitor SpikeDetection"
)

CALLBACKS = (*_TRAINING_CALLBACKS, *_QUIET_CALLBACKS)
"""Lightning's own."""


def _callbacks(value: Any, given: DocumentValues) -> KeyEffect:
    items = value if isinstance(value, list | tuple) else [value]
    names = [short(found.path) if (found := built(item)) else shown(item) for item in items if not off(item)]
    asked = [
        f"{name} decides {_TRAINING_CALLBACKS.get(name, 'what only its code says')}"
        for name in names
        if name not in _QUIET_CALLBACKS
    ]
    if asked:
        return KeyEffect(Fit.NEEDS_INPUT, f"your training loop does it: {'; '.join(asked)}", copy_verbatim=True)
    return left_out("callbacks that only log, report or write files")


def _saving(value: Any, given: DocumentValues) -> KeyEffect:
    if boolean(value):
        return left_out("is on: a ModelCheckpoint among the callbacks says more")
    return KeyEffect(fields={"checkpoint.every_steps": None})


PRECISIONS = ("FSDPPrecision", "MixedPrecision", "DeepSpeedPrecision", "HalfPrecision")
"""Plugins that stand for a word of `precision`."""


def _plugins(value: Any, given: DocumentValues) -> KeyEffect:
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    fields: dict[str, Any] = {}
    formats = False
    for item in items:
        found = built(item)
        name = short(found.path) if found else shown(item)
        if found and name in PRECISIONS:
            fields |= _scaler(found.arguments)
            formats = True
        elif not name.endswith(("Environment", "CheckpointIO")):
            return KeyEffect(Fit.UNSUPPORTED, f"{name} changes how Lightning computes; write precision instead")
    if fields or formats:
        return KeyEffect(fields=fields)
    return left_out("affects only the launch and files")


def _scaler(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The loss scale of a plugin's `GradScaler`."""
    found = built(arguments.get("scaler"))
    if found is None:
        return {}
    said = {
        "precision.initial_loss_scale": ("init_scale", number(1e-30)),
        "precision.loss_scale_growth_interval": ("growth_interval", integer(1)),
    }
    return {field: convert(found.arguments[key]) for field, (key, convert) in said.items() if key in found.arguments}


def _seed(value: Any, given: DocumentValues) -> KeyEffect:
    if off(value):
        return left_out("is off")
    if value is True or str(value).lower() == "true":
        return left_out("LightningCLI draws a new seed in each run; write training.seed for a fixed one")
    return KeyEffect(fields={"training.seed": integer(0, 2**32 - 1)(value)})


_EPOCHS = "your training loop makes this many epochs or updates: {value}"
TRAINER: Mapping[str, Key] = {
    "precision": Key(
        precision, "precision.compute, precision.master, precision.reduce, precision.buffers", tool_default=DEFAULT
    ),
    "accumulate_grad_batches": Key(
        lambda value, given: _accumulation(1 if value is None else value, given),
        "training.gradient_accumulation_steps",
        tool_default=1,
    ),
    "gradient_clip_val": Key(
        lambda value, given: _clipping(value or 0, given), "training.gradient_clipping", note=_SHARDS, tool_default=None
    ),
    "gradient_clip_algorithm": optional(_algorithm, "training.gradient_clipping"),
    "accelerator": optional(_accelerator, "", Fit.IGNORED, _LAUNCH),
    "devices": optional(
        _devices, "launch.processes_per_node, launch.environment", note="a list of indices: CUDA_VISIBLE_DEVICES"
    ),
    "num_nodes": optional(_nodes, "launch.nodes"),
    "callbacks": optional(_callbacks, SCRIPT, Fit.NEEDS_INPUT, "your loop does what callbacks do beyond logging"),
    "enable_checkpointing": optional(_saving, "checkpoint.every_steps", note="true leaves it to the callbacks"),
    "plugins": optional(_plugins, "precision.initial_loss_scale, precision.loss_scale_growth_interval"),
    "sync_batchnorm": _script("call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the model is wrapped"),
    "deterministic": _script("call torch.use_deterministic_algorithms(True); Lightning's value is {value}"),
    "use_distributed_sampler": Key(
        lambda value, given: (
            _OFF
            if value is None or boolean(value)
            else KeyEffect(
                Fit.NEEDS_INPUT,
                "your script shares the samples out itself: hand engine.batches a loader that does",
                copy_verbatim=True,
            )
        ),
        SCRIPT,
    ),
    "reload_dataloaders_every_n_epochs": _script("rebuild the DataLoader every {value} epochs", 0),
    "max_epochs": _script(_EPOCHS, -1),
    "min_epochs": _script(_EPOCHS, 0),
    "max_steps": _script(_EPOCHS, -1),
    "min_steps": _script(_EPOCHS, 0),
    "max_time": _script("your training loop stops after {value}"),
    "limit_train_batches": _script("your training loop uses this much of the data: {value}", 1.0),
    "overfit_batches": _script("your training loop uses this much of the data: {value}", 0, 0.0),
    "fast_dev_run": _script("a trial run of {value} batches; leave it out to train"),
    "detect_anomaly": _script("call torch.autograd.set_detect_anomaly(True), which finds the source of a NaN"),
    **ignored("lightning/ignored_trainer.txt", left),
    **HYDRA,
}
"""The arguments of `Trainer` and `Fabric` but `strategy`."""


def _composed(value: Any, given: DocumentValues) -> KeyEffect:
    if not (files := composed(value)):
        return left_out(NO_LOGS)
    note = f"Hydra adds what other files say ({'; '.join(files)}), which is not read; translate what --cfg job prints"
    return KeyEffect(Fit.APPROXIMATE, note, copy_verbatim=True, notable=True)


BESIDE: Mapping[str, Key] = {
    "seed_everything": optional(_seed, "training.seed"),
    **ignored("lightning/ignored_cli.txt", left),
    "defaults": optional(_composed),
}
"""LightningCLI's keys beside `trainer` but `optimizer` and `lr_scheduler`; it hands every other one to the user's own
classes."""

_DISTRIBUTED = names("ddp ddp_spawn ddp_cpu ddp2 dp ddp_sharded ddp_sharded_spawn deepspeed fsdp horovod")
_PLACES = ("accelerator", "distributed_backend")
"""Where Lightning 1 named the strategy, before 1.5."""


def _script_of_older(what: str) -> Key:
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
    **ignored("lightning/ignored_older.txt", off=off),
    "amp_backend": refuses(
        "Apex is gone; write precision: 16-mixed or bf16-mixed", lambda value: off(value) or value == "native"
    ),
    "gpus": Key(_gpus, "launch.processes_per_node, launch.environment"),
    "replace_sampler_ddp": TRAINER["use_distributed_sampler"],
    "terminate_on_nan": Key(_nonfinite, "training.nonfinite"),
    "auto_lr_find": _script_of_older("find the learning rate in the training script, and write it as optimizer.lr"),
    "auto_scale_batch_size": _script_of_older(
        "find the batch size in the training script; write training.micro_batch_size"
    ),
    "stochastic_weight_avg": _script_of_older("average the weights in the training script (torch.optim.swa_utils)"),
    "truncated_bptt_steps": _script_of_older("cut the sequences in the training script"),
    "reload_dataloaders_every_epoch": _script_of_older("rebuild the DataLoader every epoch"),
    "train_percent_check": TRAINER["limit_train_batches"],
    "early_stop_callback": _script_of_older("decide in the training script when to stop"),
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
