"""What the figures of a run are, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dev.models.exporting import EQUAL
from unishard.contract.tolerances import TOLERANCES

__all__ = ["BOUNDS", "Record", "beyond", "deviation", "precision_of", "shown"]

Record = Mapping[str, Any]
_PARAMETERS = 1e-5
_FP32, _BF16 = TOLERANCES["fp32"], TOLERANCES["bf16"]
BOUNDS = {
    "fp32": {"losses": _FP32.losses, "norms": _FP32.norms, "parameters": _PARAMETERS},
    "bf16": {
        "first loss": _BF16.first_losses,
        "first norm": _BF16.first_norm,
        "losses": _BF16.losses,
        "norms": _BF16.norms,
    },
}
"""For each precision, its figures and the bound of each."""


def beyond(record: Record) -> str | None:
    """What is wrong with a run: an error, or a figure beyond its bound."""
    if "losses" not in record:
        return str(record.get("error") or record["plain"])
    if record.get("export") not in (None, EQUAL):
        return f"export: {record['export']}"
    precision = precision_of(record)
    figures, bounds = deviation([record], precision), tuple(BOUNDS[precision].values())
    held = all(figure <= bound for figure, bound in zip(figures, bounds, strict=True))
    return None if held else f"{shown(figures)}, bounds {shown(bounds)}"


def shown(figures: Sequence[float]) -> str:
    """Figures beside each other."""
    return " / ".join(f"{figure:.0e}" for figure in figures)


def precision_of(record: Record) -> str:
    """The precision of a run."""
    return "bf16" if " bf16" in record["run"] else "fp32"


def deviation(records: Sequence[Record], precision: str) -> tuple[float, ...]:
    """The largest figures of some runs of a precision, in the order of its bounds."""
    losses, norms = (max(max(record[name]) for record in records) for name in ("losses", "norms"))
    if precision == "fp32":
        return losses, norms, max(record["parameters"] for record in records)
    started = [record for record in records if ", from" not in record["run"]]
    first = (max((record[name][0] for record in started), default=0.0) for name in ("losses", "norms"))
    return (*first, losses, norms)
