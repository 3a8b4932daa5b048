"""LightningCLI's `optimizer` and `lr_scheduler` (2.6.6): torch's classes and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Entry, Key, KeyEffect, Path, Undecided, Unreadable, interpret, left_out
from unishard.contract.key_rows import boolean, drops, number, sets
from unishard.contract.rules import Fit
from unishard.formats.lightning.built import Built, built, short
from unishard.formats.lightning.rows import UNSET
from unishard.formats.names import each

_NAMES = {
    "AdamW": "adamw",
    "Adam": "adam",
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "Lion": "lion",
    "FusedAdam": "adamw",
    "DeepSpeedCPUAdam": "adamw",
    "AdamW8bit": "adamw_8bit",
    "PagedAdamW8bit": "adamw_8bit",
}
_OTHER = "this optimizer is not supported; build it in the training script"
_THEIRS: Mapping[str, Mapping[str, Any]] = {
    "adagrad": {"lr": 1e-2},
    "lion": {"lr": 1e-4},
    "adamw": {},
    "adamw_8bit": {},
}
"""Defaults of the classes that are not unishard's."""


def _pair(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Unreadable(f"must be two numbers, got {shown(value)}; write [0.9, 0.999]")
    return tuple(number(0, 1)(item) for item in value)


OPTIMIZER: Mapping[str, Key] = {
    "lr": sets("optimizer.lr", number(0)),
    "betas": sets("optimizer.betas", _pair),
    "eps": sets("optimizer.eps", number(0)),
    "weight_decay": sets("optimizer.weight_decay", number(0)),
    "amsgrad": sets("optimizer.amsgrad", boolean),
    "momentum": sets("optimizer.momentum", number(0)),
    "nesterov": sets("optimizer.nesterov", boolean),
    **each("foreach fused capturable differentiable use_triton", drops("how the update is computed, not what")),
}
"""Arguments of torch's optimizers; any other must be at its default."""
_NOTHING: Mapping[str, Any] = {
    "maximize": False,
    "dampening": 0,
    "lr_decay": 0,
    "initial_accumulator_value": 0,
    "adam_w_mode": True,
    "adamw_mode": True,
    "min_8bit_size": 4096,
    "optim_bits": 32,
    "is_paged": False,
    "percentile_clipping": 100,
    "block_wise": True,
    "block_size": 256,
    "bf16_stochastic_round": False,
}
_NOTES = {
    "PagedAdamW8bit": "its state lies in device memory and is not paged to the host",
    "torchao": "bitsandbytes' kernels instead of torchao's",
}
"""What is otherwise of a class, or of those of a package."""


def optimizer_entries(value: Any, path: Path) -> Iterator[Entry]:
    """What the optimizer's class and arguments say."""
    optimizer = built(value)
    if optimizer is None:
        yield Entry(path, value, UNSET if not value else KeyEffect(Fit.NEEDS_INPUT, _OTHER))
        return
    name = _NAMES.get(short(optimizer.path))
    place = (*path, optimizer.key) if optimizer.key else path
    if name is None:
        yield Entry(place, optimizer.path, KeyEffect(Fit.NEEDS_INPUT, _OTHER))
        yield from _all(optimizer, path, KeyEffect(Fit.NEEDS_INPUT, _OTHER))
        return
    note = _NOTES.get(short(optimizer.path)) or _NOTES.get(optimizer.path.partition(".")[0], "")
    fit = Fit.APPROXIMATE if note else Fit.EXACT
    yield Entry(place, optimizer.path, KeyEffect(fit, note, {"optimizer.name": name}))
    arguments = {
        key: item
        for key, item in optimizer.arguments.items()
        if item is not None and not (key in _NOTHING and item == _NOTHING[key])
    }
    keys = {key: row for key, row in OPTIMIZER.items() if key in arguments or key == "lr"}
    for entry in interpret(
        keys, arguments, tool=f"{short(optimizer.path)} as unishard makes it", defaults=_THEIRS.get(name)
    ):
        yield entry.at(*path, *optimizer.inside.get(entry.path[0], ("init_args",)), *entry.path)
    for key in optimizer.arguments.keys() - arguments.keys():
        yield Entry(
            (*path, *optimizer.inside[key], key),
            optimizer.arguments[key],
            left_out("is the default"),
        )


_EPOCHS = "LightningCLI steps it each epoch, and here it steps each update; write scheduler.total_steps"
_OWN = "steps once an epoch there; build one in the training script that steps once an update"


def scheduler_entries(value: Any, path: Path) -> Iterator[Entry]:
    """What the scheduler's class and arguments say.

    LightningCLI returns it without an interval, so that it moves once an epoch (pytorch/cli.py,
    `configure_optimizers`).
    """
    scheduler = built(value)
    if scheduler is None:
        yield Entry(path, value, UNSET if not value else KeyEffect(Fit.NEEDS_INPUT, _OWN))
        return
    place = (*path, scheduler.key) if scheduler.key else path
    if short(scheduler.path) != "CosineAnnealingLR" or scheduler.arguments.get("eta_min"):
        yield Entry(place, scheduler.path, KeyEffect(Fit.NEEDS_INPUT, _OWN))
        yield from _all(scheduler, path, KeyEffect(Fit.NEEDS_INPUT, _OWN))
        return
    yield Entry(
        place,
        scheduler.path,
        KeyEffect(Fit.APPROXIMATE, "moves once an update, not once an epoch", {"scheduler.name": "cosine"}),
    )
    for key, item in scheduler.arguments.items():
        steps = Undecided(f"T_max ({item} epochs) times the optimizer steps of an epoch")
        effect = KeyEffect(Fit.NEEDS_INPUT, _EPOCHS, {"scheduler.total_steps": steps}) if key == "T_max" else UNSET
        yield Entry((*path, *scheduler.inside[key], key), item, effect)


def _all(instance: Built, path: Path, effect: KeyEffect) -> Iterator[Entry]:
    for key, item in instance.arguments.items():
        yield Entry((*path, *instance.inside[key], key), item, effect)


RECIPES: Mapping[str, Callable[[Any, Path], Iterator[Entry]]] = {
    "optimizer": optimizer_entries,
    "lr_scheduler": scheduler_entries,
}
"""Readers, by the key."""
