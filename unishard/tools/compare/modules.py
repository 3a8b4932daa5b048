"""Which module differs first, from the files that `logging.module_steps` writes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unishard.contract.tolerances import Tolerance
from unishard.tools.compare.distance import relative
from unishard.tools.compare.log_lines import lines_in

FILE = "modules.jsonl"
"""Its name beside `log.jsonl`."""
_SAME_WEIGHTS = 1e-6
"""Relative difference of a weight's norm that is rounding."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredModules:
    """What one step has given."""

    modules: dict[str, Row] = field(default_factory=dict)
    """By name, in the order in which they end in the forward."""
    parameters: dict[str, Row] = field(default_factory=dict)


class FirstModule(NamedTuple):
    """The first module that differs."""

    module: str
    """Its name; empty for the model itself."""
    what: str
    """`output`, `gradient` (of its output) or `weights` (the gradient of one of its own)."""
    step: int
    value: str
    """What is compared: `rms` or `mean` of the tensor, or `norm`, with the weight's name."""
    found: float | None
    expected: float | None
    relative: float
    """The difference, relative to the root mean square or the norm that was expected."""
    allowed: float


class Located(NamedTuple):
    """The first module that differs, if it is known."""

    first: FirstModule | None = None
    """None if all modules agree, or the module is not known."""
    notes: tuple[str, ...] = ()
    """Why no module is named, and which ones were not measured in both runs."""


def modules_in(text: str) -> dict[int, MeasuredModules]:
    """The steps of `modules.jsonl` or of a golden file; lines of other kinds are left out."""
    steps: dict[int, MeasuredModules] = {}
    for row in lines_in(text):
        for kind, known in (("module", "modules"), ("parameter", "parameters")):
            if kind in row:
                getattr(steps.setdefault(row["step"], MeasuredModules()), known)[row[kind]] = row
    return steps


def module_lines(text: str) -> str:
    """The lines of modules and parameters in a text, for a golden file."""
    return "".join(f"{line}\n" for line in text.splitlines() if '"module"' in line or '"parameter"' in line)


def first_module(
    found: Mapping[int, MeasuredModules], expected: Mapping[int, MeasuredModules], tolerance: Tolerance
) -> Located:
    """Compare all common steps: outputs in the order of the forward, their gradients in that of the backward, gradients
    of weights.

    Args:
        found: The run.
        expected: What it should have given.
        tolerance: Of the compute dtype.
    """
    steps = sorted(found.keys() & expected.keys())
    most: FirstModule | None = None
    for step in steps:
        allowed = tolerance.norms if step > 1 else tolerance.first_norm
        for difference in _differences(found[step], expected[step], step, allowed):
            if difference.relative > allowed:
                return Located(difference, tuple(_weights_before(found[step], expected[step], difference)))
            if most is None or difference.relative > most.relative:
                most = difference
    if most is None:
        return Located(None, ("no module was measured in both runs",))
    note = f"all modules agree: the largest difference is {most.relative:.1e}, of {_subject(most)}"
    return Located(
        None,
        (
            f"{note}; so what differs is computed outside the model, such as a loss in the script",
            *_unseen(found, expected),
        ),
    )


def _differences(found: MeasuredModules, expected: MeasuredModules, step: int, allowed: float) -> Iterator[FirstModule]:
    common = [name for name in expected.modules if name in found.modules]
    for name in common:
        yield _moments(name, "output", step, found.modules[name], expected.modules[name], allowed)
    backward = sorted((expected.modules[name].get("backward_order") or math.inf, at) for at, name in enumerate(common))
    for _, at in backward:
        one, other = found.modules[common[at]], expected.modules[common[at]]
        if "gradient_rms" in one and "gradient_rms" in other:
            yield _moments(common[at], "gradient", step, one, other, allowed)
    # The gradients of weights, those of the module that comes first in the backward first.
    places = {common[at]: place for place, (_, at) in enumerate(backward)}
    shared = [name for name in expected.parameters if name in found.parameters]
    for name in sorted(shared, key=lambda name: places.get(name.rpartition(".")[0], len(places))):
        values = found.parameters[name].get("gradient_norm"), expected.parameters[name].get("gradient_norm")
        owner, _, parameter = name.rpartition(".")
        yield FirstModule(owner, "weights", step, f"norm of {parameter}", *values, relative(*values), allowed)


def _moments(name: str, quantity: str, step: int, found: Row, expected: Row, allowed: float) -> FirstModule:
    """The larger of the differences of root mean square and mean, both relative to the root mean square."""
    scale = expected.get(f"{quantity}_rms")
    sides = []
    for value in ("rms", "mean"):
        one, other = found.get(f"{quantity}_{value}"), expected.get(f"{quantity}_{value}")
        far = 0.0 if one == other else math.inf
        if one is not None and other is not None and scale:
            far = abs(one - other) / scale
        sides.append(FirstModule(name, quantity, step, value, one, other, far, allowed))
    return max(sides, key=lambda side: side.relative)


def _weights_before(found: MeasuredModules, expected: MeasuredModules, first: FirstModule) -> Iterator[str]:
    """Whether the weights differ already at the start of the step."""
    if first.what != "output" or first.step == 1:
        return
    far = {
        name: relative(row.get("weight_norm"), expected.parameters[name].get("weight_norm"))
        for name, row in found.parameters.items()
        if name in expected.parameters
    }
    worst = max(far, key=lambda name: far[name], default=None)
    if worst is not None and far[worst] > _SAME_WEIGHTS:
        problem = f"the weights differ before step {first.step}, most {worst} ({far[worst]:.1e})"
        yield f"{problem}: the update after step {first.step - 1} differs"


def _unseen(found: Mapping[int, MeasuredModules], expected: Mapping[int, MeasuredModules]) -> Sequence[str]:
    names: list[set[str]] = [{name for step in side.values() for name in step.modules} for side in (found, expected)]
    missing = sorted(names[0] ^ names[1])
    return (
        (f"only one of the runs has {', '.join(missing[:3])}" + (" and others" if len(missing) > 3 else ""),)
        if missing
        else ()
    )


def _subject(first: FirstModule) -> str:
    name = first.module or "the model itself"
    kind = {
        "output": "the output of",
        "gradient": "the gradient of the output of",
        "weights": "a gradient of weights of",
    }[first.what]
    return f"{kind} {name}"


def lines_of(located: Located) -> Iterator[str]:
    """In words, without a line's width."""
    first = located.first
    if first is not None:
        name = first.module or "the model itself"
        quantity = {
            "output": "its output",
            "gradient": "the gradient of its output",
            "weights": "the gradient of its weights",
        }[first.what]
        phase = "forward" if first.what == "output" else "backward"
        values = f"{first.value} of {quantity} is {_shown(first.found)}, not {_shown(first.expected)}"
        if first.what == "weights":
            values = f"the gradient's {first.value} is {_shown(first.found)}, not {_shown(first.expected)}"
        far = f"relative difference {first.relative:.1e}, allowed {first.allowed:.0e}"
        yield f"first module that differs: {name}, in the {phase} of step {first.step}: {values} ({far})"
    yield from located.notes


def _shown(value: float | None) -> str:
    return "missing or not finite" if value is None else f"{value:.7g}"
