"""Everything else: logs, other kinds of parallelism, removed sections, and settings that only DeepSpeed has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config
from unishard.mapping.entries import Given, Key, Meaning
from unishard.mapping.express import AUTO
from unishard.mapping.field_rows import saved_by_script
from unishard.mapping.key_rows import boolean, drops, integer, number, own, refuses, text
from unishard.mapping.rules import SCRIPT, Fit, Rule, When
from unishard_deepspeed.arguments.facts import device, dropped, only, quiet, stage
from unishard_deepspeed.constants import CONSTANTS
from unishard_deepspeed.keys import ACCEPTED, REMOVED, SAME_MATHS

__all__ = ["EXPRESSIONS", "KEYS", "assumed"]

_Z = "zero_optimization."
_SAME = frozenset(
    {
        "gradient_predivide_factor",
        "prescale_gradients",
        *(f"{_Z}{name}" for name in ("memory_efficient_linear", "zero_hpz_partition_size", "parameter_alignment")),
        *(f"{_Z}{name}" for name in ("ignore_unused_parameters", "override_module_apply")),
    }
)
"""Settings of DeepSpeed that another engine's results do not depend on but for rounding, beside those of `SAME_MATHS`."""
_LOGS = frozenset(
    (
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "log_level"),
        *("vocabulary_size", "comms_logger", "flops_profiler", "timers", "tensorboard", "csv_monitor", "wandb", "comet"),
    )
)


def assumed(given: Given) -> dict[str, Any]:
    """Nothing here is decided where the config is silent."""
    return {}


def _as_it_is(value: Any) -> Any:
    return value


def _converter(kind: type | tuple[type, ...]) -> Callable[[Any], Any]:
    by_kind: dict[Any, Callable[[Any], Any]] = {bool: boolean, int: integer(), (int, float): number(), str: text}
    return by_kind.get(kind, _as_it_is)


def _own(key: str) -> Key:
    """A setting that only DeepSpeed has: it goes to `native.deepspeed`, unless unishard writes the same anyway."""
    convert = _converter(ACCEPTED[key])
    same = key in SAME_MATHS or key in _SAME
    note = "a setting of DeepSpeed alone, about time and memory" if same else "only DeepSpeed has it, so another engine trains without it"
    row = own(f"deepspeed.{key}", convert, Fit.IGNORED if same else Fit.APPROXIMATE, note)
    usual = CONSTANTS[key][0] if key in CONSTANTS else False if ACCEPTED[key] is bool else None

    def read(value: Any, given: Given) -> Meaning:
        if value is None or value == AUTO:
            return dropped("DeepSpeed's default stands, or what transformers computes from the model; about time and memory alone")
        found = convert(value)
        return dropped("as unishard has it") if found == usual else row.read(value, given)

    return Key(read, "", row.fit, note)


def _log(key: str) -> Key:
    """A key about logs and times, whose value is looked at all the same, since DeepSpeed fails on one of another type."""
    convert = _converter(ACCEPTED[key])

    def read(value: Any, given: Given) -> Meaning:
        if value is None or value in (AUTO, math.inf):  # Accelerate silences DeepSpeed with steps_per_print: inf
            return Meaning(Fit.IGNORED, "logs or times alone")
        convert(value)
        return dropped("logs or times alone")

    return Key(read, "", Fit.IGNORED, "logs or times alone")


def _settings() -> dict[str, Key]:
    """Rows of the settings that `native.deepspeed` takes."""
    rows = {key: _own(key) for key in ACCEPTED if key not in _LOGS and key != "activation_checkpointing"}
    for key in [key for key in rows if ".stage3_" in key]:
        rows[key] = only(rows[key], lambda given: stage(given) == 3, "DeepSpeed reads it at stage 3 alone")
        rows[key.replace("stage3_", "")] = rows[key]
    for what in ("param", "optimizer"):
        for key in [key for key in rows if f".offload_{what}." in key]:
            rows[key] = only(rows[key], _in_files(what), "is read for nvme alone")
    for key in ("prescale_gradients", "gradient_predivide_factor"):
        rows[key] = only(rows[key], lambda given: stage(given) < 2, "DeepSpeed divides before the sum at stages 0 and 1 alone")
    rows["aio"] = only(rows["aio"], lambda given: _in_files("param")(given) or _in_files("optimizer")(given), "is read for nvme alone")
    return rows


def _in_files(what: str) -> Callable[[Given], bool]:
    return lambda given: device(given, what) == "nvme"


def _off(value: Any) -> bool:
    """Whether a section is off: it says so wherever it says anything."""
    found = list(_switches(value))
    return not value or value is None or (bool(found) and not any(found))


def _switches(value: Any) -> Any:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "enabled":
                yield bool(quiet(boolean, inner, True))
            else:
                yield from _switches(inner)


def _removed(key: str) -> Key:
    """A section of older versions."""
    why = f"{REMOVED[key]}"

    def read(value: Any, given: Given) -> Meaning:
        if _off(value) or quiet(boolean, value) is False:
            return Meaning(Fit.IGNORED, "is off; DeepSpeed 0.19.8 refuses the key even so")
        return Meaning(Fit.UNSUPPORTED, why)

    return Key(read, "", Fit.UNSUPPORTED, why)


def _size(value: Any) -> bool:
    """Whether a degree of parallelism is one, which is none."""
    found = list(_degrees(value))
    return _off(value) or not any(degree > 1 for degree in found)


def _degrees(value: Any) -> Any:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if str(name).endswith("_size"):
                yield quiet(integer(), inner, 1)
            else:
                yield from _degrees(inner)
    else:
        yield quiet(integer(), value, 1)


_RANKS = "splits ranks in other ways than data parallelism, which the config has no field for; remove it"
_COMPILE = "acts where the training script calls engine.compile() alone; set compile.mode for torch.compile"
_COMPILES = frozenset(
    (
        *("deepcompile", "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation", "passes"),
        *("offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log", "offload_parameters"),
        *("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
        "keep_all_input_tensors",
    )
)
_CHECKPOINTING = (
    "configures deepspeed.checkpointing, which a model must call: on its own it recomputes nothing. Set activation_checkpointing "
    "in unishard to do so"
)


def _tensor_parallel(value: Any, given: Given) -> Meaning:
    return Meaning(Fit.IGNORED, "is off") if _size(value) else Meaning(Fit.UNSUPPORTED, _RANKS)


def _compile(value: Any, given: Given) -> Meaning:
    old = sorted(set(value) - _COMPILES) if isinstance(value, Mapping) else []
    if not old:
        return dropped(_COMPILE)
    return Meaning(Fit.IGNORED, f"{_COMPILE}; DeepSpeed 0.19.8 refuses {', '.join(old)}")


KEYS: Mapping[str, Key] = {
    **{key: _log(key) for key in sorted(_LOGS)},
    **_settings(),
    **{key: _removed(key) for key in REMOVED if not key.startswith(_Z)},
    "activation_checkpointing": drops(_CHECKPOINTING),
    "zero_allow_untested_optimizer": drops("lets DeepSpeed take an optimizer that it does not list"),
    "zero_force_ds_cpu_optimizer": drops("whether torch's class may step on the host; the same to rounding"),
    "gradient_allreduce_op": refuses(
        "adds gradients up instead of averaging them; write mean, and multiply the learning rate or the loss instead",
        lambda value: str(value).lower() == "mean",
    ),
    "sequence_parallel_size": refuses(_RANKS, _size),
    "data_parallel_size": drops("follows from the ranks"),
    "seq_parallel_communication_data_type": drops("acts with sequence parallelism alone"),
    "seq_parallel_comm_data_type": drops("acted with sequence parallelism alone, and is a name of older versions"),
    "tensor_parallel": Key(_tensor_parallel, "", Fit.UNSUPPORTED, _RANKS),
    "expert_parallel": refuses(_RANKS, _off),
    "use_data_before_expert_parallelism": drops("acts with expert parallelism alone"),
    "pipeline": drops("acts on a PipelineModule alone"),
    "hybrid_engine": refuses("replaces the engine by one for generation; remove it, and call engine.generate", _off),
    "compile": Key(_compile, "", Fit.IGNORED, _COMPILE),
    "autotuning": drops("belongs to the deepspeed launcher's --autotuning"),
    "weight_quantization": drops("belongs to inference"),
    "data_efficiency": refuses(
        "drops tokens and samples in training (random-LTD, curriculum), which no other engine does; remove it", _off
    ),
    "disable_allgather": drops("is read by nothing (DeepSpeed 0.19.8)"),
    "checkpoint": drops("concerns checkpoints alone"),
    "datastates_ckpt": drops("concerns checkpoints alone"),
}

_NOT_COMPILED = When("mode is none", lambda cfg: cfg.compile.mode == "none", Fit.EXACT, "")


def _recomputes(cfg: Config) -> bool:
    return cfg.activation_checkpointing != "none"


EXPRESSIONS: Mapping[str, Rule] = {
    "activation_checkpointing": Rule(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "torch.utils.checkpoint around the blocks (a transformers model: model.gradient_checkpointing_enable()); the section "
        "activation_checkpointing of DeepSpeed's config recomputes nothing on its own",
        when=(When("none", lambda cfg: not _recomputes(cfg), Fit.EXACT, ""),),
    ),
    "compile.mode": Rule(Fit.NEEDS_INPUT, SCRIPT, "engine.compile(), or torch.compile of each block", when=(_NOT_COMPILED,)),
    "compile.backend": Rule(Fit.NEEDS_INPUT, SCRIPT, "engine.compile(backend=...)", when=(_NOT_COMPILED,)),
    **saved_by_script("engine.save_checkpoint(...)"),
    "strict": Rule(Fit.IGNORED, "", "about unishard's report", when=(When("false", lambda cfg: not cfg.strict, Fit.EXACT, ""),)),
    "native": Rule(Fit.EXACT, "any key", "native.deepspeed, as it is", to=lambda cfg, topology: dict(cfg.native.get("deepspeed", {}))),
}
