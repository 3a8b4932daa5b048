"""What llm-foundry's keys say about checkpoints (Composer 0.32, utils/misc.py; llm-foundry
0.22).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, left_out
from unishard.contract.key_rows import integer, number, text
from unishard.contract.rules import Fit
from unishard.formats.composer.batches import updates

__all__ = ["SAVED"]

_STEPS = 1000
"""llm-foundry's interval if it is not set."""
_LAST = "Composer also saves at the end of the training; call engine.save() there"
_NOWHERE = "nothing is saved without save_folder"


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
        return left_out(_NOWHERE)
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
