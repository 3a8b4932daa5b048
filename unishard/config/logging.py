"""What the engine logs by itself, how often, and where to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from unishard.config.paths import Directory
from unishard.config.relevance import Has, Not, OffAt, OnlyWith
from unishard.config.section import Section

Destination = Literal["progress", "jsonl", "tensorboard", "wandb", "mlflow"]

_FILES = ("jsonl", "tensorboard", "mlflow")
"""Destinations that write into `logging.dir`; MLflow only without `mlflow_uri`."""


def _read_by(*names: str) -> OnlyWith:
    return OnlyWith(
        {"to": Has(names)},
        f"only {' and '.join(names)} read it",
        f"is unused unless logging.to has one of {', '.join(names)}; add one, or remove logging.{{field}}",
    )


_LOGGED = OnlyWith({"to": Not([])}, "nothing is logged")
_READ_BY_BOTH = _read_by("wandb", "mlflow")
_READ_BY_WANDB = _read_by("wandb")


class Logging(Section):
    """What the engine logs by itself: loss, gradient norm, learning rate, throughput and memory, and the values of
    `engine.log`.

    Training does not change. `logging: [progress, jsonl]` stands for `to`.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("to",)

    to: Annotated[list[Destination], OffAt([])] = Field(default=[])
    """Where rank 0 writes. `progress`: a line on standard error. `jsonl`: one JSON object per line in `dir`/log.jsonl.
    `tensorboard`: event files in `dir`. `wandb`: Weights & Biases. `mlflow`: an MLflow run. The last three need their
    package: `pip install 'unishard[tensorboard]'`, `[wandb]`, `[mlflow]`. Empty: nothing is measured."""
    every_steps: Annotated[int, _LOGGED, _read_by("progress", "jsonl", "tensorboard", "wandb", "mlflow")] = Field(
        default=10, ge=1
    )
    """Log after every N optimizer steps, counted from the start of the training. The loss is the mean over these
    steps."""
    dir: Annotated[Directory, _LOGGED, _read_by("jsonl", "tensorboard", "wandb", "mlflow")] = Field(default=None)
    """Directory for the files of `jsonl`, `tensorboard`, of `mlflow` without `mlflow_uri`, and of `wandb` (default
    there: ./wandb)."""
    module_steps: Annotated[list[int], _LOGGED, _read_by("jsonl")] = Field(default=[])
    """Optimizer steps, counted from 1, in which each module is measured: mean and root mean square of its output and of
    the gradient of its output, and the norm of each weight and of its gradient, one JSON object per line in
    `dir`/modules.jsonl. Needs `jsonl` in `to`. The other steps cost nothing more. Modules inside a compiled block are
    not seen."""
    project: Annotated[str | None, _LOGGED, _READ_BY_BOTH] = Field(default=None)
    """Project of `wandb`, experiment of `mlflow`. `null`: their default."""
    run_name: Annotated[str | None, _LOGGED, _READ_BY_BOTH] = Field(default=None)
    """Name of the run in `wandb` and `mlflow`. `null`: they choose one."""
    wandb_entity: Annotated[str | None, _LOGGED, _READ_BY_WANDB] = Field(default=None)
    """User or team of `wandb` that owns the run. `null`: your default one."""
    wandb_group: Annotated[str | None, _LOGGED, _READ_BY_WANDB] = Field(default=None)
    """Group of runs in `wandb`. `null`: none."""
    wandb_mode: Annotated[Literal["online", "offline"], _LOGGED, _READ_BY_WANDB] = Field(default="online")
    """`offline`: `wandb` writes files for `wandb sync` and needs no network."""
    mlflow_uri: Annotated[str | None, _LOGGED, _read_by("mlflow")] = Field(default=None)
    """Tracking URI of `mlflow`, a server or a database. `null`: the SQLite database `dir`/mlflow.db."""

    def _problems(self) -> Iterator[tuple[str, str]]:
        if len(set(self.to)) < len(self.to):
            yield "to", f"names a destination twice: {', '.join(self.to)}; write each once"
        for field in ("dir", "project", "run_name", "wandb_entity", "wandb_group", "mlflow_uri"):
            if (text := getattr(self, field)) is not None and not text.strip():
                yield field, "is empty; write a text, or null for none"
        if any(step < 1 for step in self.module_steps):
            yield (
                "module_steps",
                f"counts from 1, got {min(self.module_steps)}; write numbers of at least 1, such as [1, 100]",
            )
        writing = [name for name in _FILES if name in self.to and not (name == "mlflow" and self.mlflow_uri)]
        if self.dir is None and writing:
            yield "dir", f"is missing; {' and '.join(writing)} in logging.to need a directory for their files"
