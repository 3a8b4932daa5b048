"""A call of the engine that the ranks compare."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from unishard.errors import ContractError


@dataclass
class ComparedCall:
    """A call, to which guards add what must be the same on all ranks before a backward or a step."""

    name: str
    """The method of the engine."""
    detail: str = ""
    """What the ranks compare, in words."""
    last: bool = True
    """Whether it is of the last micro-batch of its window."""
    num_items: int | Tensor | None = None
    """Of a backward, how many items its loss sums over."""
    scaled: bool = False
    """Whether that loss is divided by the script."""
    skipped: str = ""
    """What has no gradient on this rank."""
    order: str = ""
    """A hash of the order in which gradients came, where they are added up in that order."""
    held: dict[str, str] = field(default_factory=dict)
    """What the update uses, by name. Only in updates whose step is compared at once."""
    refusal: ContractError | None = None
    """What to raise once the ranks have compared the call: before that, the others would wait for this one."""

    def require_allowed(self) -> None:
        """Raise what a guard has found."""
        if self.refusal is not None:
            raise self.refusal
