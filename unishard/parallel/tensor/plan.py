"""Which modules and parameters of a model a plan names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import nn

from unishard.errors import ModelError
from unishard.parallel.tensor.known import ADDED, REFUSED

_ADAPTED = "base_model.model."
"""What peft puts before the names of a model."""
_EXAMPLE = 'parallel: {tensor: {size: 2, plan: {"layers.*.up": colwise, "layers.*.down": rowwise}}}'


class PlanEntry(NamedTuple):
    """An entry of a plan."""

    pattern: str
    style: str

    def names(self, name: str) -> bool:
        """Whether it names a module or a parameter; `*` stands for a number."""
        regex = re.escape(self.pattern).replace(r"\*", r"\d+")
        return re.fullmatch(rf"(?:{re.escape(_ADAPTED)})?{regex}", name) is not None


def rules_of(model: nn.Module, plan: Literal["auto"] | Mapping[str, str]) -> list[PlanEntry]:
    """The entries of a plan; by `auto` those that models of transformers come with.

    Raises:
        ModelError: The model comes with none.
    """
    if plan == "auto":
        plan = _own_plan(model)
        if not any("*" in pattern for pattern in plan):  # a head is no plan
            raise ModelError(
                f"parallel.tensor: {type(model).__name__} comes without a plan; write one, as in {_EXAMPLE}"
            )
    return [PlanEntry(*each) for each in plan.items()]


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Of the outermost models of transformers in a model, which have those of the models inside, with what is added."""
    plan: dict[str, str] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not hasattr(type(module), "tp_plan"):
            continue
        each: Any = module
        prefix, kind = f"{name}." if name else "", each.config.model_type
        if kind in REFUSED:
            raise ModelError(
                f"parallel.tensor: the plan of {kind} cannot be used, as {REFUSED[kind]}; write one of your own"
            )
        if not prefix.startswith(inside):
            plan |= {prefix + pattern: style for pattern, style in each.tp_plan.items()}
            inside = (*inside, prefix)
        if each.base_model is each:
            plan |= {prefix + pattern: style for pattern, style in ADDED.get(kind, {}).items()}
    return plan


def styled(rules: list[PlanEntry], names: Iterator[str], *, all_match: bool) -> dict[str, str]:
    """The style of each of the names that rules name.

    Args:
        rules: Of a plan.
        names: Of modules and parameters.
        all_match: Whether a rule that names nothing is an error.

    Raises:
        ModelError: Two rules disagree, or one names nothing.
    """
    found: dict[str, PlanEntry] = {}
    used: set[PlanEntry] = set()
    for name in names:
        for rule in rules:
            if not rule.names(name):
                continue
            used.add(rule)
            before = found.setdefault(name, rule)
            if before.style != rule.style:
                raise ModelError(
                    f"parallel.tensor.plan names {name} twice: {before.pattern}: {before.style} and {rule.pattern}: "
                    f"{rule.style}; remove one of them"
                )
    for rule in rules:
        if all_match and rule not in used:
            raise ModelError(
                f"parallel.tensor.plan: {rule.pattern} names no module and no parameter; write full names, with * for "
                "a number"
            )
    return {name: rule.style for name, rule in found.items()}
