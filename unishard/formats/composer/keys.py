"""The keys of a training YAML of llm-foundry 0.22 and of MosaicML's run files, and of Composer's older ones.

llm-foundry refuses a key that it does not know, unless it stands below `variables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, left_out
from unishard.contract.key_rows import DETERMINISTIC, SEED, drops, integer, number, refuses, text
from unishard.contract.rules import Fit
from unishard.formats.composer.batches import BATCHES, updates
from unishard.formats.composer.fsdp_keys import FSDP
from unishard.formats.composer.optimization_keys import OPTIMIZATION
from unishard.formats.names import ignored

_STEPS = 1000
"""llm-foundry's interval if it is not set."""
_LAST = "Composer also saves at the end of the training; call engine.save() there"


def _folder(value: Any, given: DocumentValues) -> KeyEffect:
    if not value:
        return left_out("is not set")
    named = text(value).replace("{run_name}", str(given.get("run_name") or "{run_name}"))
    implied = {} if "save_interval" in given else {"checkpoint.every_steps": _STEPS}
    if "://" in named or "{" in named:
        why = "is no directory of a file system" if "://" in named else "has names in it that Composer fills in"
        who = Undecided(f"save_folder, which {why}: {value}")
        return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {who.who}", {"checkpoint.dir": who, **implied})
    fields = {"checkpoint.dir": named, **implied}
    return (
        KeyEffect(Fit.EQUIVALENT, f"llm-foundry saves every {_STEPS} updates; {_LAST}", fields)
        if implied
        else KeyEffect(fields=fields)
    )


def _interval(value: Any, given: DocumentValues) -> KeyEffect:
    if not given.get("save_folder"):
        return left_out("nothing is saved without save_folder")
    if isinstance(value, str) and value.strip().endswith("sec"):
        minutes = number(0)(value.strip().removesuffix("sec")) / 60
        return KeyEffect(Fit.EQUIVALENT, _LAST, {"checkpoint.every_minutes": minutes or None})
    steps = updates(value, given)
    if isinstance(steps, Undecided):
        return KeyEffect(
            Fit.NEEDS_INPUT,
            f"comes from {steps.who}; call engine.save() there, or set checkpoint.every_steps",
            copy_verbatim=True,
        )
    return KeyEffect(Fit.EQUIVALENT if steps else Fit.EXACT, _LAST, {"checkpoint.every_steps": steps or None})


def _kept(value: Any, given: DocumentValues) -> KeyEffect:
    count = integer(-1)(value)
    if not count:
        return KeyEffect(
            Fit.NEEDS_INPUT,
            "keeps none where they are uploaded; upload in your script, set checkpoint.keep_last",
            copy_verbatim=True,
        )
    return KeyEffect(fields={"checkpoint.keep_last": None if count < 0 else count})


SAVED: Mapping[str, Key] = {
    "save_folder": Key(
        _folder, "checkpoint.dir", note=f"llm-foundry saves every {_STEPS} updates where save_interval is not said"
    ),
    "save_interval": Key(_interval, "checkpoint.every_steps", Fit.EQUIVALENT, _LAST),
    "save_num_checkpoints_to_keep": Key(_kept, "checkpoint.keep_last", note="-1 keeps all"),
}
"""What each key says."""


_WHOLE = "layers that are split between ranks are not supported; remove it and use only fsdp_config"


def _tensor_parallel(value: Any, given: DocumentValues) -> KeyEffect:
    degree = value.get("tensor_parallel_degree", 1) if isinstance(value, Mapping) else value
    if degree in (None, 1, {}):
        return KeyEffect(Fit.IGNORED, "is off")
    return KeyEffect(Fit.UNSUPPORTED, _WHOLE)


def _compiled(value: Any, given: DocumentValues) -> KeyEffect:
    if value is None or value is False:
        return KeyEffect(fields={"compile.mode": "none"})
    settings = value if isinstance(value, Mapping) else {}
    fields: dict[str, Any] = {"compile.mode": "full"}
    if settings.get("backend"):
        fields["compile.backend"] = str(settings["backend"])
    rest = sorted(set(settings) - {"backend"})
    note = f"{', '.join(rest)} would be left out: affects only time" if rest else ""
    return KeyEffect(Fit.EQUIVALENT if rest else Fit.EXACT, note, fields)


_RECIPE = "the script merges another section into the file; write that section's keys here"

KEYS: Mapping[str, Key] = {
    **BATCHES,
    **FSDP,
    **OPTIMIZATION,
    **SAVED,
    "seed": SEED,
    "tp_config": Key(_tensor_parallel, "", Fit.UNSUPPORTED, _WHOLE),
    "parallelism_config.tp": Key(_tensor_parallel, "", Fit.UNSUPPORTED, _WHOLE),
    "default_seed": SEED._replace(note="of Composer's benchmarks"),
    "recipe_name": refuses(_RECIPE, lambda value: not value),
    "use_recipe": refuses(_RECIPE, lambda value: not value),
    "lr_scheduler": refuses(
        "belongs to a script with a schedule of its own; write scheduler with a name", lambda value: not value
    ),
    "compile_config": Key(_compiled, "compile.mode, compile.backend"),
    "deterministic_mode": DETERMINISTIC,
    "algorithms": refuses("only Composer has them, but for gradient clipping; remove it", lambda value: not value),
    "scheduler": drops("is empty"),
    "optimizer": drops("is empty"),
    **ignored("composer/ignored.txt"),
}
"""What each says; the rows of an engine's arguments stand in the engine's table."""

RUN: Mapping[str, Key] = {
    key: drops("only concerns MosaicML's platform")
    for key in (
        *("name", "run_name", "image", "integrations", "command", "compute", "cluster"),
        *("gpu_type", "gpu_num", "scheduling", "env_variables", "metadata"),
    )
}
"""The keys around `parameters` in a run file of MosaicML."""


def deferred(key: Key) -> Key:
    """The same row, with its fields undecided where a value names what the file does not hold."""

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        if not (isinstance(value, str) and "${" in value) or not key.fields:
            return key.read(value, given)
        who = Undecided(f"{value}, which the file does not have")
        return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {who.who}", dict.fromkeys(key.fields.split(", "), who))

    return Key(read, key.fields, key.fit, key.note, key.tool_default)
