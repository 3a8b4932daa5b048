"""Everything else: logs, other kinds of parallelism, removed sections, and settings that only DeepSpeed has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import NOTHING, DocumentValues, Key, KeyEffect
from unishard.contract.field_rows import asked, left_to_script, row, saved_by_script, started_elsewhere
from unishard.contract.key_rows import boolean, drops, own, refuses
from unishard.contract.render import AUTO
from unishard.contract.rules import NO_KEY, Fit, Rule
from unishard_arguments.deepspeed.facts import device, dropped, may_reach, only, quiet, stage
from unishard_deepspeed.keys import ROWS, Row, Use, spellings, used
from unishard_deepspeed.keys.values import COMPILE


def _own(key: str, row: Row) -> Key:
    """A setting that only DeepSpeed has: it goes to `native.deepspeed`, unless unishard writes the same anyway."""
    same, convert = row.use is Use.SAME, row.values.convert
    note = (
        "a setting of DeepSpeed only, about time and memory"
        if same
        else "only DeepSpeed has it, so another engine trains without it"
    )
    native_row = own(f"deepspeed.{key}", convert, Fit.IGNORED if same else Fit.APPROXIMATE, note)
    usual = False if row.constant is NOTHING and row.values.types == (bool,) else row.constant

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value is None or value == AUTO:
            return dropped("DeepSpeed's default stands, or what transformers computes; affects only time and memory")
        return dropped("the value without the key") if convert(value) == usual else native_row.read(value, document)

    return _limited(key, native_row._replace(read=read))


def _limited(key: str, row: Key) -> Key:
    """The row, for the cases in which DeepSpeed reads the key."""
    if ".stage3_" in key:
        return only(row, lambda document: may_reach(document, 3), "only used at stage 3")
    if ".offload_" in key or key == "aio":
        places = [what for what in ("param", "optimizer") if key == "aio" or f".offload_{what}." in key]
        return only(
            row,
            lambda document: any(device(document, what) in ("nvme", AUTO) for what in places),
            "only used with nvme",
        )
    if key in ("prescale_gradients", "gradient_predivide_factor"):
        return only(
            row, lambda document: stage(document) < 2, "DeepSpeed divides before the sum only at stages 0 and 1"
        )
    return row


def _log(row: Row) -> Key:
    """A key about logs and times, whose value is looked at all the same, since DeepSpeed fails on one of another
    type.
    """

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value is None or value in (AUTO, math.inf):  # Accelerate silences DeepSpeed with steps_per_print: inf
            return KeyEffect(Fit.IGNORED, _LOGS)
        row.values.convert(value)
        return dropped(_LOGS)

    return Key(read, (), Fit.IGNORED, _LOGS)


def _off(value: Any) -> bool:
    """Whether a section is off: it says so wherever it says anything."""
    switches = list(_switches(value))
    return not value or value is None or (bool(switches) and not any(switches))


def _switches(value: Any) -> Any:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == "enabled":
                yield bool(quiet(boolean, inner, True))
            else:
                yield from _switches(inner)


def _removed(why: str) -> Key:
    """A section of older versions."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if _off(value) or quiet(boolean, value) is False:
            return KeyEffect(Fit.IGNORED, "is off, but DeepSpeed 0.19.8 refuses the key", rejected_upstream=True)
        return KeyEffect(Fit.UNSUPPORTED, why)

    return Key(read, (), Fit.UNSUPPORTED, why)


_COMPILE = "only used by engine.compile() in the script; set compile.mode for torch.compile"
_LOGS = "only logs and timers"


def _compile(value: Any, document: DocumentValues) -> KeyEffect:
    old = sorted(value.keys() - COMPILE) if isinstance(value, Mapping) else []
    if not old:
        return dropped(_COMPILE)
    return KeyEffect(Fit.IGNORED, f"{_COMPILE}; DeepSpeed 0.19.8 refuses {', '.join(old)}", rejected_upstream=True)


KEYS: Mapping[str, Key] = {
    **{key: _log(row) for key, row in used(Use.LOG).items() if "." not in key},
    **{name: _own(key, row) for key, row in used(Use.SAME, Use.OTHER).items() for name in spellings(key)},
    **{key: _removed(row.text) for key, row in used(Use.REMOVED).items()},
    **{name: drops(row.ignored) for key, row in ROWS.items() if row.ignored for name in spellings(key)},
    "gradient_allreduce_op": refuses(
        "sums gradients instead of averaging them; write mean, and scale the loss",
        lambda value: str(value).lower() == "mean",
    ),
    "seq_parallel_comm_data_type": drops("a name of older versions; only used with sequence parallelism"),
    "hybrid_engine": refuses("replaces the engine by one for generation; remove it, and call engine.generate", _off),
    "compile": Key(_compile, (), Fit.IGNORED, _COMPILE),
    "data_efficiency": refuses("drops tokens and samples (random-LTD, curriculum); remove it", _off),
}


RULES: Mapping[str, Rule] = {
    "activation_checkpointing": left_to_script(
        "torch.utils.checkpoint around the blocks, or model.gradient_checkpointing_enable()"
    ),
    "compile.mode": left_to_script("engine.compile(), or torch.compile of each block"),
    "compile.backend": left_to_script("engine.compile(backend=...)"),
    **saved_by_script("engine.save_checkpoint(...)"),
    **started_elsewhere(
        nodes="pass deepspeed --num_nodes, or --hostfile",
        processes_per_node="pass deepspeed --num_gpus, or --hostfile",
        endpoint="pass deepspeed --master_addr and --master_port",
        rendezvous="DeepSpeed's launcher numbers the ranks itself; training is the same",
        rendezvous_id="DeepSpeed's launcher needs none",
        rendezvous_options="DeepSpeed's launcher has none; or start the script with torchrun --rdzv-conf",
        max_restarts="DeepSpeed's launcher does not restart (but with --elastic_training); start the script with "
        "torchrun --max-restarts",
        environment="write them into .deepspeed_env, which DeepSpeed's launcher sends to every host",
    ),
    **asked(Fit.IGNORED, NO_KEY, {"strict": "only affects this report"}),
    "native": row(
        Fit.EXACT,
        "any key",
        "native.deepspeed, as it is",
        to=lambda cfg, topology: dict(cfg.native.get("deepspeed", {})),
    ),
}
