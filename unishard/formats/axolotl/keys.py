"""axolotl's keys that say how a model is trained (axolotl 0.18.0, src/axolotl/utils/schemas and
core/builders/base.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import NOTHING, DocumentValues, Key, KeyEffect, Undecided, Unreadable, left_out
from unishard.contract.key_rows import boolean, integer, number, refuses
from unishard.contract.rules import Fit
from unishard.formats.axolotl.rules import SAVED
from unishard.formats.hf.kept import AXOLOTL
from unishard.formats.hf.keys import KEYS as ARGUMENTS
from unishard.formats.hf.loop import DEEPSPEED, FSDP, checkpointing, matmul, off
from unishard.formats.hf.optimizing import named
from unishard.formats.names import each, ignored, names

IGNORED: Mapping[str, Key] = {
    **ignored("axolotl/ignored.txt", off=off),
    **each(
        "tensor_parallel_size context_parallel_size sequence_parallel_degree expert_parallel_size",
        refuses(
            "parallelism within a model is not supported; write 1 and use more ranks",
            lambda value: off(value) or value == 1,
        ),
    ),
}
"""Keys that a config of the training does not need, and some that it cannot say."""

TOOL = "axolotl 0.18.0"
ENGINES = ("fsdp", "fsdp_config", "fsdp_version", "deepspeed", "dp_shard_size", "dp_replicate_size")
"""Keys that hold an engine's own."""


_SAME = names(
    "gradient_accumulation_steps max_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
    "optim_args optim_target_modules lr_scheduler_kwargs seed fp16 gradient_checkpointing_kwargs torch_compile "
    "torch_compile_backend torch_compile_mode ddp_broadcast_buffers neftune_noise_alpha auto_find_batch_size "
    "accelerator_config warmup_ratio"
)
_EIGHT = "8-bit state there, the dtype of the master weights here: more exact, more memory"
_OWN = {
    "optimi_adamw": ("adamw", Fit.EQUIVALENT, "torch's AdamW: the same algorithm"),
    "ao_adamw_8bit": ("adamw", Fit.APPROXIMATE, _EIGHT),
    "ao_adamw_4bit": ("adamw", Fit.APPROXIMATE, _EIGHT.replace("8-bit", "4-bit")),
    "ao_adamw_fp8": ("adamw", Fit.APPROXIMATE, _EIGHT.replace("8-bit", "fp8")),
    "flash_adamw": ("adamw", Fit.APPROXIMATE, _EIGHT),
}
_OTHERS = names(
    "adopt_adamw came_pytorch muon dion sinkgd flash_adam flash_sgd flash_sgdw flash_lion q_galore_adamw8bit"
)


def _optimizer(value: Any, given: DocumentValues) -> KeyEffect:
    return named("adamw_torch_fused" if value is None else value, _OWN, _OTHERS)


def _brain(value: Any, given: DocumentValues) -> KeyEffect:
    """`bf16`: true, false, `auto` or `full`."""
    word = str(value).lower()
    if word == "full":
        return left_out("only evaluates in bf16 (core/builders/base.py)")
    if off(value) or (word == "auto" and not off(given.get("fp16"))):
        return left_out("is off")
    if word != "auto":
        boolean(value)
    return _mixed(given, "auto is bf16 where the device has it, and fp16 elsewhere" if word == "auto" else "")


def _mixed(given: DocumentValues, note: str) -> KeyEffect:
    """Computing in bf16. axolotl also loads the model in it (`resolve_dtype`), and only the engines then keep fp32
    master weights.
    """
    fields: dict[str, Any] = {"precision.compute": "bf16"}
    fsdp = not off(given.get("fsdp")) or not off(given.get("fsdp_config"))
    if fsdp:
        fields["precision.reduce"] = "bf16"
    elif off(given.get("deepspeed")) and off(given.get("adapter")):
        # DistributedDataParallel of a model in bf16: weights, gradients and optimizer state.
        fields |= {"precision.master": "bf16", "precision.reduce": "bf16"}
    elif off(given.get("deepspeed")):
        note = note or "LoRA's weights are fp32 and the frozen ones bf16 there"
    return KeyEffect(Fit.EQUIVALENT if note else Fit.EXACT, note, fields)


def _pure(value: Any, given: DocumentValues) -> KeyEffect:
    """`bfloat16`, which switches on what `bf16` does (`_configure_precision_settings`)."""
    return _mixed(given, "") if not off(value) and boolean(value) else left_out("is off")


def _tf32(value: Any, given: DocumentValues) -> KeyEffect:
    """True, false, or `auto`, which asks the GPU; axolotl also switches it off where nothing is said
    (core/builders/base.py).
    """
    if value is None:
        return left_out("is not set")
    if str(value).lower() == "auto":
        note = "auto is TF32 where the GPU has it; torch uses it only there too"
        return KeyEffect(Fit.EXACT, note, {"precision.matmul": "tf32"})
    return matmul(value)


_FALLS = "a cosine that stops falling before the end is not supported; build the scheduler in the training script"


def _checkpointing(value: Any, given: DocumentValues) -> KeyEffect:
    """True, false, or a way to keep activations elsewhere."""
    if str(value).lower() in ("offload", "offload_disk", "unsloth"):
        note = f"{value}: what blocks keep stays in device memory here; losses are the same"
        return KeyEffect(Fit.EQUIVALENT, note, {"activation_checkpointing": "full"})
    return checkpointing(value, given)


def _schedule(value: Any, given: DocumentValues) -> KeyEffect:
    if str(value).lower() in ("one_cycle", "rex"):
        why = f"the schedule {value} is not supported; build the scheduler in the training script"
        return KeyEffect(Fit.UNSUPPORTED, why)
    effect = ARGUMENTS["lr_scheduler_type"].read("cosine" if value is None else value, given)
    end = given.get("cosine_min_lr_ratio")
    if str(value or "cosine").lower() != "cosine" or not end:
        return effect
    return effect._replace(fields={**effect.fields, "scheduler.min_lr_ratio": number(0, 1)(end)})


def _end(value: Any, given: DocumentValues) -> KeyEffect:
    if not value:
        return left_out("is off")
    if str(given.get("lr_scheduler_type") or "cosine").lower() != "cosine":
        return left_out("only used with the cosine schedule")
    return KeyEffect(fields={"scheduler.min_lr_ratio": number(0, 1)(value)})


def _still(value: Any, given: DocumentValues) -> KeyEffect:
    """`cosine_constant_lr_ratio`: where the rate stops falling."""
    if not value or not given.get("cosine_min_lr_ratio"):
        return left_out("only used with cosine_min_lr_ratio")
    if number(0, 1)(value) == 1 or number(0, 1)(given.get("cosine_min_lr_ratio")) == 1:
        return left_out("changes nothing here")
    return KeyEffect(Fit.UNSUPPORTED, _FALLS)


def _warmup(value: Any, given: DocumentValues) -> KeyEffect:
    if value is None and given.get("warmup_ratio") is None:
        return _assumed_warmup(given)
    return ARGUMENTS["warmup_steps"].read(value or 0, given)


def _assumed_warmup(given: DocumentValues) -> KeyEffect:
    """`_configure_warmup_and_logging`: 3 % of the updates, at most 100."""
    steps = given.get("max_steps")
    if str(given.get("lr_scheduler_type")).lower() == "constant":
        return KeyEffect(Fit.IGNORED, "the constant schedule has no warm-up")
    if steps:
        return KeyEffect(fields={"scheduler.warmup_steps": min(int(0.03 * integer(1)(steps)), 100)})
    who = "0.03 times the number of updates, at most 100, as axolotl assumes"
    return KeyEffect(Fit.NEEDS_INPUT, f"the value is {who}", {"scheduler.warmup_steps": Undecided(who)})


def _batch(value: Any, given: DocumentValues) -> KeyEffect:
    """`batch_size`: samples in one update of a rank (`normalize_config`)."""
    if off(value) or "gradient_accumulation_steps" in given:
        return left_out("gradient_accumulation_steps counts")
    per_step = integer(1)(given.get("per_device_train_batch_size") or 1)
    if integer(1)(value) < per_step:
        raise Unreadable(
            f"must be at least micro_batch_size ({per_step}), got {value}; write gradient_accumulation_steps"
        )
    return KeyEffect(fields={"training.gradient_accumulation_steps": integer(1)(value) // per_step})


_RAY = "start it with unishard launch --ray"


def _workers(value: Any, given: DocumentValues) -> KeyEffect:
    """`ray_num_workers`: on any host."""
    if off(value) or off(given.get("use_ray")):
        return left_out("only used with use_ray")
    return KeyEffect(
        Fit.EQUIVALENT,
        f"workers of Ray on any host; {_RAY}",
        {"launch.processes_per_node": integer(1)(value)},
        copy_verbatim=True,
    )


def _argument(name: str) -> Key:
    """The row of TrainingArguments, where null is what axolotl leaves unset (core/builders/base.py)."""
    return _optional(ARGUMENTS[AXOLOTL.get(name, name)])


def _optional(row: Key) -> Key:
    """The same row, with null for the tool's own value."""

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        if value is not None or row.tool_default is None:
            return row.read(value, given)
        if row.tool_default is NOTHING:
            return left_out("is not set")
        return row.read(row.tool_default, given)

    return row._replace(read=read)


def _engine(name: str) -> Key:
    return Key(
        lambda value, given: KeyEffect(fields={"backend": name}), "backend", note=f"its keys are those of {name}"
    )


KEYS: Mapping[str, Key] = {
    "micro_batch_size": _optional(ARGUMENTS["per_device_train_batch_size"]._replace(tool_default=1)),
    "num_epochs": _argument("num_epochs"),
    **{name: _argument(name) for name in _SAME},
    "batch_size": Key(_batch, "training.gradient_accumulation_steps"),
    "optimizer": Key(_optimizer, "optimizer.name", tool_default="adamw_torch_fused"),
    "lr_scheduler": _argument("lr_scheduler")._replace(read=_schedule, tool_default="cosine"),
    "cosine_min_lr_ratio": Key(_end, "scheduler.min_lr_ratio"),
    "cosine_constant_lr_ratio": Key(_still, "", Fit.UNSUPPORTED, _FALLS),
    "warmup_steps": Key(_warmup, "scheduler.warmup_steps", tool_default=None),
    "bf16": Key(_brain, "precision.compute, precision.master, precision.reduce", tool_default="auto"),
    "tf32": Key(_tf32, "precision.matmul"),
    "bfloat16": Key(_pure, "precision.compute, precision.master, precision.reduce"),
    "gradient_checkpointing": Key(_checkpointing, "activation_checkpointing"),
    "use_ray": Key(lambda value, given: left_out("is off" if off(value) else _RAY), "", Fit.IGNORED, _RAY),
    "ray_num_workers": Key(
        _workers, "launch.processes_per_node", Fit.EQUIVALENT, f"workers of Ray on any host; {_RAY}"
    ),
    **SAVED,
    **{name: _engine(FSDP) for name in ENGINES},
    DEEPSPEED: _engine(DEEPSPEED),
    **IGNORED,
}
"""axolotl's keys and what each says."""
