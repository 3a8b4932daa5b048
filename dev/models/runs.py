"""The runs of a case: both engines, two strategies, two precisions, and checkpoints that move to the other engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dev.models.case import MICRO_BATCH, Case
from unishard.config import Config
from unishard.config.nested import merge
from unishard.testing.cells import BACKENDS

__all__ = ["MORE", "PRECISIONS", "UPDATES", "WORLD", "Run", "config_of", "runs_of"]

WORLD = 2
UPDATES = 3
MORE = 2
"""Updates after a checkpoint has moved."""
PRECISIONS = ("fp32", "bf16")
_OTHERS = ("shard_grad_op", "no_shard", "shard_optimizer")
# An eps that is large beside the gradients that are 0 but for rounding, such as those of a key's bias: without it,
# AdamW makes whole steps of their signs.
_OPTIMIZER = {"name": "adamw", "lr": 5e-3, "eps": 1e-3, "weight_decay": 0.05}


class Run(NamedTuple):
    """A run of a case."""

    backend: str
    strategy: str
    precision: str
    resumes: str | None = None
    """The backend whose checkpoint of `full_shard` it loads."""

    def __str__(self) -> str:
        moved = f", from {self.resumes}" if self.resumes else ""
        return f"{self.backend} {self.strategy} {self.precision}{moved}"

    @property
    def saves(self) -> bool:
        """Whether it saves a checkpoint for the other engine."""
        return self.strategy == "full_shard"

    @property
    def source(self) -> Run | None:
        """The run whose checkpoint it loads."""
        return Run(self.resumes, "full_shard", self.precision) if self.resumes else None

    @property
    def exports(self) -> bool:
        """Whether it exports its model."""
        return self.saves and self.precision == "fp32"


def runs_of(number: int) -> Iterator[Run]:
    """The runs of a case; the second strategy goes by the case's number."""
    other = _OTHERS[number % len(_OTHERS)]
    for precision in PRECISIONS:
        yield from (Run(backend, strategy, precision) for strategy in ("full_shard", other) for backend in BACKENDS)
        yield from (
            Run(backend, other, precision, resumes) for backend, resumes in zip(BACKENDS, BACKENDS[::-1], strict=True)
        )


def config_of(case: Case, run: Run) -> Config:
    """The config of a run, as a user would write it."""
    plain: dict[str, Any] = {
        "backend": run.backend,
        "sharding": {"strategy": run.strategy},
        "precision": {"compute": run.precision},
        "training": {"micro_batch_size": MICRO_BATCH},
        "optimizer": _OPTIMIZER,
        "communication": {"desync_timeout": 15},
    }
    if case.low_buffers:
        plain["precision"]["buffers"] = run.precision
    if "optimizer" in case.sections:
        del plain["optimizer"]
    return Config.model_validate(merge(plain, case.sections))
