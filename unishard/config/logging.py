"""What the engine logs by itself, how often, and where to."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from unishard.config.paths import Directory
from unishard.config.relevance import OffAt, UnusedIf
from unishard.config.section import Section, refuse

Destination = Literal["progress", "jsonl", "tensorboard", "wandb", "mlflow"]

_FILES = ("jsonl", "tensorboard", "mlflow")
"""Destinations that write into `logging.dir`; MLflow only without `mlflow_uri`."""
_USERS = {
    "every_steps": ("progress", "jsonl", "tensorboard", "wandb", "mlflow"),
    "dir": ("jsonl", "tensorboard", "wandb", "mlflow"),
    "module_steps": ("jsonl",),
    "project": ("wandb", "mlflow"),
    "run_name": ("wandb", "mlflow"),
    "wandb_entity": ("wandb",),
    "wandb_group": ("wandb",),
    "wandb_mode": ("wandb",),
    "mlflow_uri": ("mlflow",),
}
"""The destinations that read each field."""


def _unread(field: str) -> UnusedIf:
    return UnusedIf(lambda cfg: not {*_USERS[field]} & {*cfg.logging.to}, f"only {' and '.join(_USERS[field])} read it")


class Logging(Section):
    """What the engine logs by itself: loss, gradient norm, learning rate, throughput and memory, and the values of
    `engine.log`.

    Training does not change. `logging: [progress, jsonl]` stands for `to`.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("to",)
    unused_if: ClassVar[tuple[UnusedIf, ...]] = (UnusedIf(lambda cfg: not cfg.logging.to, "nothing is logged"),)

    to: Annotated[list[Destination], OffAt([])] = Field(default=[])
    """Where rank 0 writes. `progress`: a line on standard error. `jsonl`: one JSON object per line in `dir`/log.jsonl.
    `tensorboard`: event files in `dir`. `wandb`: Weights & Biases. `mlflow`: an MLflow run. The last three need their
    package: `pip install 'unishard[tensorboard]'`, `[wandb]`, `[mlflow]`. Empty: nothing is measured."""
    every_steps: Annotated[int, _unread("every_steps")] = Field(default=10, ge=1)
    """Log after every N optimizer steps, counted from the start of the training. The loss is the mean over these
    steps."""
    dir: Annotated[Directory, _unread("dir")] = Field(default=None)
    """Directory for the files of `jsonl`, `tensorboard`, of `mlflow` without `mlflow_uri`, and of `wandb` (default
    there: ./wandb)."""
    module_steps: Annotated[list[int], _unread("module_steps")] = Field(default=[])
    """Optimizer steps, counted from 1, in which each module is measured: mean and root mean square of its output and of
    the gradient of its output, and the norm of each weight and of its gradient, one JSON object per line in
    `dir`/modules.jsonl. Needs `jsonl` in `to`. The other steps cost nothing more. Modules inside a compiled block are
    not seen."""
    project: Annotated[str | None, _unread("project")] = Field(default=None)
    """Project of `wandb`, experiment of `mlflow`. `null`: their default."""
    run_name: Annotated[str | None, _unread("run_name")] = Field(default=None)
    """Name of the run in `wandb` and `mlflow`. `null`: they choose one."""
    wandb_entity: Annotated[str | None, _unread("wandb_entity")] = Field(default=None)
    """User or team of `wandb` that owns the run. `null`: your default one."""
    wandb_group: Annotated[str | None, _unread("wandb_group")] = Field(default=None)
    """Group of runs in `wandb`. `null`: none."""
    wandb_mode: Annotated[Literal["online", "offline"], _unread("wandb_mode")] = Field(default="online")
    """`offline`: `wandb` writes files for `wandb sync` and needs no network."""
    mlflow_uri: Annotated[str | None, _unread("mlflow_uri")] = Field(default=None)
    """Tracking URI of `mlflow`, a server or a database. `null`: the SQLite database `dir`/mlflow.db."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[tuple[str, str]] = []
        if len(set(self.to)) < len(self.to):
            problems.append(("to", f"names a destination twice: {', '.join(self.to)}; write each once"))
        texts = ("dir", "project", "run_name", "wandb_entity", "wandb_group", "mlflow_uri")
        empty = [field for field in texts if getattr(self, field) is not None and not getattr(self, field).strip()]
        problems += [(field, "is empty; write a text, or null for none") for field in empty]
        if any(step < 1 for step in self.module_steps):
            least = min(self.module_steps)
            problems.append(
                ("module_steps", f"counts from 1, got {least}; write numbers of at least 1, such as [1, 100]")
            )
        writing = [name for name in _FILES if name in self.to and not (name == "mlflow" and self.mlflow_uri)]
        if self.dir is None and writing:
            problems.append(
                ("dir", f"is missing; {' and '.join(writing)} in logging.to need a directory for their files")
            )
        for field in [field for field, users in _USERS.items() if field in self.changed and not {*users} & {*self.to}]:
            needed = ", ".join(_USERS[field])
            problems.append(
                (field, f"is unused unless logging.to has one of {needed}; add one, or remove logging.{field}")
            )
        refuse(problems)
        return self
