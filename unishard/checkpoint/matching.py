"""Matches the tensors of a checkpoint with those of a running model, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.tensor_names import PARAMETERS, optimizer_part, parameter_of
from unishard.errors import CheckpointError, in_one_line

_SHOWN = 8


class Wanted(NamedTuple):
    """The optimizer state of one parameter."""

    tensors: frozenset[str]
    """Keys of state tensors with the parameter's shape."""
    numbers: frozenset[str]
    """Keys of other state, such as a step count."""


class Match(NamedTuple):
    """What to load."""

    model: tuple[str, ...]
    """Names of parameters and buffers."""
    optimizer: Mapping[str, Wanted]
    """By parameter, its state in the checkpoint; parameters that were never updated are absent."""
    notes: tuple[str, ...]
    """What does not match and is skipped."""


def fit(
    manifest: Manifest, model: Mapping[str, Sequence[int]], optimizer: Mapping[str, Wanted], *, strict: bool
) -> Match:
    """Compare the tensors of a checkpoint with those of the running model and optimizer.

    Args:
        manifest: Of the checkpoint.
        model: Shapes of the model's parameters and buffers, by their names in a checkpoint, each once.
        optimizer: The state that the optimizer keeps for each trainable parameter after its first update.
        strict: Whether a mismatch is an error.

    Raises:
        CheckpointError: There are mismatches and `strict` is true; lists them.
    """
    problems: list[str] = []
    model_names = _model(manifest, model, problems)
    states = _optimizer(manifest, model, optimizer, problems)
    if problems and strict:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            "the checkpoint does not match the model or the optimizer; load it into the ones that it was saved from, "
            "or pass strict=False to load only what matches:\n" + "\n".join(map(in_one_line, problems[:_SHOWN])) + more
        )
    return Match(tuple(model_names), states, tuple(problems))


def _model(manifest: Manifest, wanted: Mapping[str, Sequence[int]], problems: list[str]) -> Iterable[str]:
    stored = {name: facts.shape for name, facts in manifest.tensors.items() if parameter_of(name) is not None}
    aliases = {PARAMETERS + alias: PARAMETERS + name for alias, name in manifest.ties.items()}
    fitting = []
    for name, shape in wanted.items():
        if name not in stored:
            near = get_close_matches(name, stored, 1)
            hint = f"; was it renamed from {near[0].removeprefix(PARAMETERS)}?" if near else ""
            problems.append(f"{name.removeprefix(PARAMETERS)}: not in the checkpoint{hint}")
        elif list(shape) != list(stored[name]):
            problems.append(
                f"{name.removeprefix(PARAMETERS)}: has shape {tuple(shape)}, but {tuple(stored[name])} in the "
                "checkpoint"
            )
        else:
            fitting.append(name)
    used = {aliases.get(name, name) for name in fitting}
    for name in stored:
        if name not in wanted and aliases.get(name, name) not in used:
            problems.append(f"{name.removeprefix(PARAMETERS)}: in the checkpoint, but not in the model")
    return fitting


def _optimizer(
    manifest: Manifest, model: Mapping[str, Sequence[int]], wanted: Mapping[str, Wanted], problems: list[str]
) -> dict[str, Wanted]:
    if not wanted:
        return {}
    if manifest.optimizer is None:
        problems.append("optimizer: the checkpoint has no optimizer state; training would start with a new optimizer")
        return {}
    stored: dict[str, dict[str, list[int]]] = {}
    for name, facts in manifest.tensors.items():
        if part := optimizer_part(name):
            stored.setdefault(part[0], {})[part[1]] = facts.shape
    fitting = {}
    for name, needs in wanted.items():
        state = stored.pop(name, {})
        if not state:
            continue
        if state.keys() == needs.tensors | needs.numbers:
            shape = model.get(PARAMETERS + name, ())
            if all(list(state[key]) == list(shape) for key in needs.tensors):
                fitting[name] = needs
            else:
                problems.append(f"{name}: its optimizer state in the checkpoint has another shape; it is reset")
            continue
        saved, used = ", ".join(sorted(state)), ", ".join(sorted(needs.tensors | needs.numbers)) or "nothing"
        problems.append(
            f"{name}: the checkpoint's {manifest.optimizer.class_name} kept {saved}, the current optimizer keeps {used}"
        )
    problems += [f"{name}: was trainable, but is not now" for name in stored]
    return fitting
