"""How the optimizer of a config updates the parameters of a model: a row for each name, whatever the layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from unishard.config import Config
from unishard.contract.kit.parameter_groups import groups_of, matrices_of
from unishard.contract.model_shape import ModelShape, ParameterShape

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


class Updated(NamedTuple):
    """Parameters of one shape whose names differ only in numbers, as of layers, and that are updated alike."""

    names: str
    """Their names, with `*` for a number that may be any, and `1-3,5` where other parameters have the other ones."""
    shape: tuple[int, ...]
    number: int
    by: str
    """The optimizer; `frozen` if there is none."""
    lr: float | None = None
    """Before the schedule."""
    weight_decay: float | None = None


def updates_of(cfg: Config, shape: ModelShape) -> list[Updated]:
    """What the config's optimizer does with each parameter, in model order.

    Raises:
        ConfigError: Patterns of the section `optimizer` do not fit the model.
    """
    found: dict[tuple[str, Updated], list[str]] = {}
    rows = _of_parameters(cfg, shape)
    for each in shape.parameters:
        found.setdefault((_NUMBER.sub("*", each.name), rows[each.name]), []).append(each.name)
    patterns = [pattern for pattern, _ in found]
    return [
        row._replace(names=_together(names, pattern, only=patterns.count(pattern) == 1), number=len(names))
        for (pattern, row), names in found.items()
    ]


def _of_parameters(cfg: Config, shape: ModelShape) -> dict[str, Updated]:
    section = cfg.optimizer
    matrices = matrices_of(section, shape.trainable)
    groups = groups_of(section, _names(shape.trainable), _names(shape.frozen), matrices)
    rows = {each.name: Updated("", each.shape, 1, "frozen") for each in shape.parameters}
    for group in groups:
        by = "adamw" if section.name == "muon" and not group.matrices else section.name
        for name in group.names:
            rows[name] = rows[name]._replace(by=by, lr=group.lr, weight_decay=group.weight_decay)
    return rows


def _names(parameters: Iterable[ParameterShape]) -> list[str]:
    return [each.name for each in parameters]


def _together(names: list[str], pattern: str, *, only: bool) -> str:
    """One text for names that differ in numbers: a pattern if that says which they are, else the names.

    Args:
        names: Of one row.
        pattern: What they have in common.
        only: Whether no other row has that pattern.
    """
    if len(names) == 1:
        return names[0]
    places = [sorted({int(number) for number in place}) for place in zip(*map(_NUMBER.findall, names), strict=True)]
    parts = pattern.split("*")
    whole = prod(map(len, places)) == len(names)
    if not only and not whole:
        return ", ".join(names)
    texts = [str(numbers[0]) if len(numbers) == 1 else "*" if only else _ranges(numbers) for numbers in places]
    return "".join(part + text for part, text in zip(parts, [*texts, ""], strict=True))


def _ranges(numbers: list[int]) -> str:
    """`0-2,5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
