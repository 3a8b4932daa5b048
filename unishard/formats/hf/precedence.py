"""Which of two places counts where TrainingArguments and an engine's config speak of one thing."""

from __future__ import annotations

from collections.abc import Sequence

from unishard.contract.entries import Entry, KeyEffect, Unreadable, left_out
from unishard.contract.rules import Fit
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.switches import DEEPSPEED
from unishard.formats.hf.zero import SILENT

__all__ = ["with_precedence"]

_RATES = {
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "weight_decay": "optimizer.params.weight_decay",
}
_THEIRS = "the {0} of the DeepSpeed config counts (transformers 5.23, deepspeed_optim_sched)"


def with_precedence(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, those ignored that another place decides."""
    return _checkpointed(_beside_deepspeed(entries))


def _beside_deepspeed(entries: Sequence[Entry]) -> list[Entry]:
    said = {
        entry.key.removeprefix(f"{DEEPSPEED}.") for entry in entries if entry.path[0] == DEEPSPEED and not entry.assumed
    }
    # The argument itself sets the engine where DeepSpeed's config could be read.
    read = any(entry.path == (DEEPSPEED,) and "backend" in entry.effect.fields for entry in entries)
    return [settle for entry in entries for settle in _settle(entry, said)] if read else list(entries)


def _settle(entry: Entry, said: set[str]) -> list[Entry]:
    optimizer = any(key.startswith("optimizer") for key in said)
    scheduler = any(key.startswith("scheduler") for key in said)
    for key, (argument, note) in SILENT.items():
        if entry.key == argument and key not in said and entry.effect.fields.get("training.gradient_clipping") != 1.0:
            return _ignored(entry, note)
    if optimizer and entry.key in ("optim", "optim_args"):
        return _ignored(entry, _THEIRS.format("optimizer"))
    if optimizer and entry.key in _RATES:
        if _RATES[entry.key] not in said:
            return _ignored(entry, _THEIRS.format("optimizer"))
        fields = {field: value for field, value in entry.effect.fields.items() if field != "optimizer.no_decay"}
        # DeepSpeed's optimizer gets one group of parameters, so nothing is exempt.
        return [entry._replace(effect=KeyEffect(Fit.EXACT, "", fields))]
    if scheduler and entry.key in (
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "warmup_ratio",
        "max_steps",
    ):
        return _ignored(entry, _THEIRS.format("scheduler"))
    return [entry]


def _ignored(entry: Entry, note: str) -> list[Entry]:
    """Nothing where it is only assumed, which makes no difference."""
    taken = _taken(entry)
    return (
        []
        if entry.assumed
        else [
            entry._replace(
                effect=KeyEffect(Fit.IGNORED, note, copy_verbatim=taken, rejected_upstream=not taken, notable=True)
            )
        ]
    )


def _taken(entry: Entry) -> bool:
    """Whether transformers takes the value, which it looks at even where another place decides."""
    try:
        VALUES.get(entry.key, bool)(entry.value)
    except Unreadable:
        return False
    return entry.effect.fit is not Fit.UNSUPPORTED


def _checkpointed(entries: Sequence[Entry]) -> list[Entry]:
    """Blocks run again if one of the places says so."""
    field = "activation_checkpointing"
    on = any(entry.effect.fields.get(field) == "full" for entry in entries)
    return [_quiet(entry, field) if on and entry.effect.fields.get(field) == "none" else entry for entry in entries]


def _quiet(entry: Entry, field: str) -> Entry:
    fields = {name: value for name, value in entry.effect.fields.items() if name != field}
    return entry._replace(effect=left_out("is on in another place")._replace(fields=fields))
