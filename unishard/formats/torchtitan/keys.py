"""The keys of torchtitan 0.2's TOML (torchtitan.config.JobConfig; components/checkpoint.py), and a few older names.

What a file leaves out, JobConfig fills in.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable, left_out
from unishard.contract.key_rows import DETERMINISTIC, SEED, boolean, drops, integer, number, one_of, refuses, sets, text
from unishard.contract.rules import Fit
from unishard.formats.names import ignored

_DUMP, _FOLDER = "job.dump_folder", "checkpoint.folder"
_SILENT: Mapping[str, Any] = {
    _DUMP: "./outputs",
    _FOLDER: "checkpoint",
    "checkpoint.interval": 500,
    "checkpoint.keep_latest_k": 10,
}
_LAST = "torchtitan also saves at the end of the training; call engine.save() there"


def _saves(given: DocumentValues) -> bool:
    return given.get("checkpoint.enable") in (True, "true")


def _value(key: str, given: DocumentValues) -> Any:
    return given.get(key) if key in given else _SILENT[key]


def _directory(given: DocumentValues) -> Mapping[str, Any]:
    dump, folder = text(_value(_DUMP, given)), text(_value(_FOLDER, given))
    return {"checkpoint.dir": folder if dump == "." else posixpath.join(dump, folder)}


def _interval(given: DocumentValues) -> Mapping[str, Any]:
    """In updates, or, in older versions, in seconds."""
    if str(given.get("checkpoint.interval_type")).lower() == "seconds":
        return {"checkpoint.every_minutes": number(1e-9)(_value("checkpoint.interval", given)) / 60}
    return {"checkpoint.every_steps": integer(1)(_value("checkpoint.interval", given))}


def _limit(given: DocumentValues) -> Mapping[str, Any]:
    return {"checkpoint.keep_last": integer(0)(_value("checkpoint.keep_latest_k", given)) or None}


def _enabled(value: Any, given: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return left_out("is off")
    fields = dict(_directory(given)) if _DUMP not in given and _FOLDER not in given else {}
    fields |= {} if "checkpoint.interval" in given else _interval(given)
    fields |= {} if "checkpoint.keep_latest_k" in given else _limit(given)
    return KeyEffect(Fit.EQUIVALENT, _LAST, fields) if fields else left_out(_LAST)


def _key(fields: str, read: Any, note: str = "") -> Key:
    """A key that is only used where checkpoints are written."""

    def effect(value: Any, given: DocumentValues) -> KeyEffect:
        return KeyEffect(fields=read(given)) if _saves(given) else left_out("only used when checkpoint.enable is true")

    return Key(effect, fields, note=note)


def _mode(given: DocumentValues) -> Mapping[str, Any]:
    modes = {"disabled": False, "async": True, "async_with_pinned_mem": True}
    return {"checkpoint.async_save": one_of(modes)(given.get("checkpoint.async_mode"))}


_JOB = "config_file description use_for_integration_test print_args print_config save_config_file custom_config_module"
_OTHERS = (
    "interval_type initial_load_path initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized "
    "last_save_model_only last_save_in_hf model_weights_only export_dtype create_seed_checkpoint load_step load_only "
    "exclude_from_loading enable_first_step_checkpoint enable_ft_dataloader_checkpoints"
)

SAVED: Mapping[str, Key] = {
    _DUMP: _key("checkpoint.dir", _directory, "with checkpoint.folder below it"),
    **{f"job.{name}": drops("launcher setting") for name in _JOB.split()},
    "checkpoint.enable": Key(
        _enabled, "checkpoint.dir, checkpoint.every_steps, checkpoint.keep_last", Fit.EQUIVALENT, _LAST
    ),
    _FOLDER: _key("checkpoint.dir", _directory, "below job.dump_folder"),
    "checkpoint.interval": _key(
        "checkpoint.every_steps", _interval, "checkpoint.every_minutes where interval_type is seconds"
    ),
    "checkpoint.keep_latest_k": _key("checkpoint.keep_last", _limit, "0 keeps all"),
    "checkpoint.async_mode": _key("checkpoint.async_save", _mode),
    **{f"checkpoint.{name}": drops("affects only the files of checkpoints") for name in _OTHERS.split()},
}
"""What each key says."""


DEGREES = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
RESHARDING = {"default": True, "always": True, "never": False}
"""`parallelism.fsdp_reshard_after_forward` in FSDP2's words; `default` is false only with pipeline parallelism."""

ENGINE: Mapping[str, tuple[str, Any]] = {
    "training.enable_cpu_offload": ("cpu_offload", False),
    "training.mixed_precision_param": ("mixed_precision.param_dtype", "bfloat16"),
    "training.mixed_precision_reduce": ("mixed_precision.reduce_dtype", "float32"),
}
"""Keys that FSDP's own table reads, its name of each, and the default."""


def degree(value: Any) -> int:
    """How many ranks share an axis; -1 for those that are left.

    Raises:
        Unreadable: It is none.
    """
    found = int(integer(-1)(value))
    if not found:
        raise Unreadable("must be at least 1, or -1 for the ranks that are left, got 0; write one of them")
    return found


def _betas(value: Any, given: DocumentValues) -> KeyEffect:
    number(0, 1)(value)
    return KeyEffect(
        fields={"optimizer.betas": [number(0, 1)(given.get(f"optimizer.{name}")) for name in ("beta1", "beta2")]}
    )


def _ratio(given: DocumentValues) -> float | None:
    """How much of the training the rate falls; None for all that is left after the warm-up."""
    found = given.get("lr_scheduler.decay_ratio")
    return None if found is None else float(number(0, 1)(found))


def _endless(given: DocumentValues) -> bool:
    """Whether the warm-up lasts as long as the training."""
    warmup, steps = given.get("lr_scheduler.warmup_steps"), given.get("training.steps")
    return isinstance(warmup, int) and isinstance(steps, int) and warmup >= steps > 0


def _constant(given: DocumentValues) -> bool:
    """Whether the rate never falls."""
    try:
        return _ratio(given) == 0 or _endless(given)
    except Unreadable:
        return False


_WARMUP = "update i uses (i + 1) / warmup_steps of the rate there, and i / warmup_steps here"


def _warmup(value: Any, given: DocumentValues) -> KeyEffect:
    steps = int(integer(0)(value))
    if not steps:
        return KeyEffect(fields={"scheduler.warmup_steps": 0})
    if not _constant(given):
        return KeyEffect(Fit.APPROXIMATE, _WARMUP, {"scheduler.warmup_steps": steps})
    note = "the training ends before the warm-up; torchtitan shortens it to training.steps" if _endless(given) else ""
    steps = min(steps, int(given.get("training.steps"))) if _endless(given) else steps
    fields: dict[str, Any] = {"scheduler.warmup_steps": steps - 1}
    if steps > 1:
        fields["scheduler.warmup_start_ratio"] = 1 / steps
    return KeyEffect(Fit.EXACT, note, fields)


def _shape(value: Any, given: DocumentValues) -> KeyEffect:
    name = one_of({"linear": "linear", "cosine": "cosine", "sqrt": "sqrt"})(value)
    if _constant(given):
        return KeyEffect(fields={"scheduler.name": "constant"})
    if name == "sqrt":
        return KeyEffect(
            Fit.UNSUPPORTED,
            "a sqrt decay is not supported; write linear, or build the scheduler in the training script",
        )
    return KeyEffect(fields={"scheduler.name": name})


def _decay(value: Any, given: DocumentValues) -> KeyEffect:
    if value is None:
        return KeyEffect(Fit.IGNORED, "is not set")
    ratio = _ratio(given)
    if not ratio or _endless(given):
        return KeyEffect(fields={"scheduler.name": "constant"})
    steps, warmup = integer(1)(given.get("training.steps")), integer(0)(given.get("lr_scheduler.warmup_steps"))
    if round(steps * ratio) + warmup >= steps:
        return KeyEffect(Fit.IGNORED, "the rate falls from the end of the warm-up on in any case")
    return KeyEffect(
        Fit.UNSUPPORTED,
        "a constant phase before the decay is not supported; remove it, or build the scheduler yourself",
    )


def _least(value: Any, given: DocumentValues) -> KeyEffect:
    found = number(0, 1)(value)
    return (
        KeyEffect(Fit.IGNORED, "the rate does not fall")
        if _constant(given)
        else KeyEffect(fields={"scheduler.min_lr_ratio": found})
    )


def _steps(value: Any, given: DocumentValues) -> KeyEffect:
    total = integer(1)(value)
    if _constant(given) or str(given.get("lr_scheduler.decay_type")).lower() not in ("linear", "cosine"):
        return KeyEffect(
            Fit.NEEDS_INPUT,
            "how long to train is the training script's to decide; end its loop there",
            copy_verbatim=True,
        )
    return KeyEffect(Fit.EXACT, "", {"scheduler.total_steps": total})


def _clip(value: Any, given: DocumentValues) -> KeyEffect:
    limit = math.inf if value in (math.inf, "inf") else number()(value)
    if limit <= 0:
        raise Unreadable(f"must be above 0, got {shown(value)}; write inf for no clipping")
    if given.get("optimizer.early_step_in_backward") in (True, "true"):
        return KeyEffect(
            Fit.IGNORED, "clips nothing: early_step_in_backward has made the update, and no gradient is left"
        )
    return KeyEffect(fields={"training.gradient_clipping": None if math.isinf(limit) else limit})


_RANKS = Undecided("the number of ranks: global_batch_size / (local_batch_size x ranks); add --world-size")


def _global_batch(value: Any, given: DocumentValues) -> KeyEffect:
    size = int(integer(-1)(value))
    if size <= 0:
        return KeyEffect(fields={"training.gradient_accumulation_steps": 1})
    if given.topology is None:
        fields = {"training.global_batch_size": size, "training.gradient_accumulation_steps": _RANKS}
        return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {_RANKS.who}", fields)
    local = given.get("training.batch_size") or given.get("training.local_batch_size")
    each = int(integer(1)(local)) * given.topology.world_size
    if size % each:
        raise Unreadable(f"must be a multiple of {each} (the local batches of all ranks), got {size}; write one")
    return KeyEffect(fields={"training.gradient_accumulation_steps": size // each})


def _checkpointing(value: Any, given: DocumentValues) -> KeyEffect:
    mode = one_of({word: word for word in ("none", "full", "selective", "memory_budget")})(value)
    if mode == "memory_budget":
        note = "torch's compiler chooses there; here the results of matrix products are kept"
        return KeyEffect(Fit.EQUIVALENT, note, {"activation_checkpointing": "selective"})
    if mode != "selective":
        return KeyEffect(fields={"activation_checkpointing": mode})
    option = str(given.get("activation_checkpoint.selective_ac_option"))
    if option == "op":
        note = "torchtitan keeps every second matrix product, here all are kept: only memory differs"
    else:
        note = f"torchtitan recomputes one block in {option}: only memory differs"
    return KeyEffect(Fit.EQUIVALENT, note, {"activation_checkpointing": "selective"})


def _compiled(value: Any, given: DocumentValues) -> KeyEffect:
    parts = given.get("compile.components")
    if boolean(value) and isinstance(parts, list) and "model" not in parts:
        return KeyEffect(Fit.EQUIVALENT, "only the loss is compiled there, nothing here", {"compile.mode": "none"})
    return KeyEffect(fields={"compile.mode": "per_block" if boolean(value) else "none"})


def _compiler(value: Any, given: DocumentValues) -> KeyEffect:
    if not any(given.get(key) in (True, "true") for key in ("compile.enable", "training.compile")):
        return KeyEffect(Fit.IGNORED, "nothing is compiled")
    return KeyEffect(fields={"compile.backend": str(value)})


def _only_1(what: str) -> Key:
    """A degree of a parallelism that unishard does not have."""
    note = f"{what} parallelism is not supported; write 1, use data_parallel_shard_degree"

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        if degree(value) == 1:
            return left_out("is off")
        return KeyEffect(Fit.UNSUPPORTED, note)

    return Key(read, "", Fit.UNSUPPORTED, note)


def _off(value: Any) -> bool:
    return value in (False, None, "", []) or value == "false"


_EARLY = "here the step comes after backward: the same math, more memory; nothing is clipped"


def _early(value: Any, given: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return left_out("is off")
    if "training.global_batch_size" in given and given.get("training.global_batch_size") != -1:
        return KeyEffect(
            Fit.UNSUPPORTED, "it updates after each micro-batch, not once a batch; remove it, or global_batch_size"
        )
    return KeyEffect(Fit.EQUIVALENT, _EARLY, {"training.gradient_clipping": None})


KEYS: Mapping[str, Key] = {
    "optimizer.name": sets("optimizer.name", one_of({"adamw": "adamw", "adam": "adam"}), tool_default="AdamW"),
    "optimizer.lr": sets("optimizer.lr", number(0), tool_default=8e-4),
    "optimizer.beta1": Key(_betas, "optimizer.betas", tool_default=0.9),
    "optimizer.beta2": Key(_betas, "optimizer.betas", tool_default=0.95),
    "optimizer.eps": sets("optimizer.eps", number(0), tool_default=1e-8),
    "optimizer.weight_decay": sets("optimizer.weight_decay", number(0), tool_default=0.1),
    "optimizer.early_step_in_backward": Key(_early, "training.gradient_clipping", Fit.EQUIVALENT, _EARLY),
    "lr_scheduler.warmup_steps": Key(_warmup, "scheduler.warmup_steps", Fit.APPROXIMATE, _WARMUP, tool_default=200),
    "lr_scheduler.decay_ratio": Key(_decay, "scheduler.name"),
    "lr_scheduler.decay_type": Key(_shape, "scheduler.name", tool_default="linear"),
    "lr_scheduler.min_lr_factor": Key(_least, "scheduler.min_lr_ratio"),
    "lr_scheduler.lr_min": Key(_least, "scheduler.min_lr_ratio", note="an older name of min_lr_factor"),
    "training.steps": Key(_steps, "scheduler.total_steps", tool_default=10000),
    "training.local_batch_size": sets("training.micro_batch_size", integer(1), tool_default=8),
    "training.batch_size": sets("training.micro_batch_size", integer(1), note="an older name of local_batch_size"),
    "training.global_batch_size": Key(_global_batch, "training.gradient_accumulation_steps", tool_default=-1),
    "training.max_norm": Key(_clip, "training.gradient_clipping", tool_default=1.0),
    "training.dtype": sets("precision.master", one_of({"float32": "fp32", "bfloat16": "bf16"})),
    "training.seed": SEED._replace(note="an older name of debug.seed"),
    "training.deterministic": DETERMINISTIC._replace(note="an older name of debug.deterministic"),
    "training.compile": Key(_compiled, "compile.mode", note="an older name of compile.enable"),
    "debug.seed": SEED,
    "debug.deterministic": DETERMINISTIC,
    "compile.enable": Key(_compiled, "compile.mode"),
    "compile.backend": Key(_compiler, "compile.backend"),
    "activation_checkpoint.mode": Key(_checkpointing, "activation_checkpointing", tool_default="selective"),
    "parallelism.tensor_parallel_degree": _only_1("tensor"),
    "parallelism.context_parallel_degree": _only_1("context"),
    "parallelism.pipeline_parallel_degree": _only_1("pipeline"),
    "parallelism.expert_parallel_degree": _only_1("expert"),
    "training.data_parallel_type": refuses(
        "no longer exists; write data_parallel_replicate_degree: RANKS, data_parallel_shard_degree: 1",
        lambda value: str(value).lower() != "ddp",
    ),
    **SAVED,
    **ignored("torchtitan/ignored.txt", off=_off),
}
"""What each says. The degrees of data parallelism and what `ENGINE` names stand in FSDP's own table."""
