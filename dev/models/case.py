"""A model that people train, with its data: a row of docs/models-tested.csv."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["REORDERED", "SENSITIVE", "Case", "Kind", "drawn", "hugging_face", "micro_batch", "own_loss", "seeded"]

MICRO_BATCH = 2
REORDERED = "bf16: an activation has several uses, whose gradients autograd adds in another order"
"""Why figures are beyond their bounds: the engines add nodes to the graph where units begin and end."""
SENSITIVE = "fp32: attention without a scale: one rounding of a weight moves norms of plain torch by more"
"""Likewise: by 2e-4 after 5 updates, where the cause is in the model."""
Batch = dict[str, Tensor]


def own_loss(model: Any, batch: Batch) -> Tensor:
    """The loss that a model of transformers returns."""
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data and its loop."""

    name: str
    build: Callable[[], nn.Module]
    """The model, the same on every call."""
    sample: Callable[[int], Batch]
    """A sample by its index in the global order."""
    loss: Callable[[Any, Batch], Tensor] = own_loss
    """The loss of a micro-batch, given the engine or, in plain torch, the model."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """What a user would add to the config."""
    low_buffers: bool = False
    """Whether a bf16 run casts buffers too (`precision.buffers`): else plain torch refuses to compute with two
    dtypes."""
    known: str = ""
    """Why figures are beyond their bounds, or why runs end with an error of torch: for its row."""
    before: Callable[[nn.Module, int], None] | None = None
    """What the loop does to the module before each update, given its number from 0."""


class Kind:
    """Cases of one kind: a section of the page."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.cases: list[Case] = []

    def add(self, name: str, build: Callable[[], nn.Module], sample: Callable[[int], Batch], **more: Any) -> None:
        """Add a case; `more` are fields of `Case`."""
        self.cases.append(Case(name, build, sample, **more))


class Drawn(NamedTuple):
    """Random numbers of one sample: the same for the same index and purpose."""

    index: int
    purpose: int = 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.purpose + self.index + 7)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator())

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator())


drawn = Drawn


def micro_batch(case: Case, update: int, rank: int, world: int, device: str = "cpu") -> Batch:
    """The samples of a rank in an update, stacked."""
    first = (update * world + rank) * MICRO_BATCH
    samples = [case.sample(index) for index in range(first, first + MICRO_BATCH)]
    return {name: torch.stack([sample[name] for sample in samples]).to(device) for name in samples[0]}


def seeded(build: Callable[..., nn.Module], *arguments: Any) -> Callable[[], nn.Module]:
    """A function that builds a model with the same parameters on every call."""
    return partial(_seeded, build, arguments)


def _seeded(build: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    torch.manual_seed(0)
    return build(*arguments)


def hugging_face(
    model: str, config: str, *, random: Mapping[str, float] | None = None, **fields: Any
) -> Callable[[], nn.Module]:
    """A function that builds a model of transformers from a config, without anything random in its forward.

    Args:
        model: Name of its class.
        config: Name of the class of its config.
        random: Rates that are not set to 0, such as `encoder_layerdrop`.
        fields: Fields of the config.
    """
    return seeded(_hugging_face, model, config, dict(random or {}), fields)


def _hugging_face(model: str, config: str, random: dict[str, float], fields: dict[str, Any]) -> nn.Module:
    import transformers

    made = getattr(transformers, config)(**fields)
    _set_rates_to_zero(made)
    for name, rate in random.items():
        setattr(made, name, rate)
    torch.manual_seed(0)
    built: nn.Module = getattr(transformers, model)(made)
    return built


_RATES = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")


def _set_rates_to_zero(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and any(rate in name for rate in _RATES):
            setattr(config, name, 0.0)
        elif hasattr(value, "model_type"):  # the config of a part
            _set_rates_to_zero(value)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False
