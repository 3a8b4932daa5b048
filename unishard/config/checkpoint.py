"""When and where the state of a training is written, so that it can go on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from unishard.config.aliases import Spellings
from unishard.config.section import Section, refuse

__all__ = ["SIGNALS", "Checkpoint"]

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
"""The signals at which a checkpoint can be asked for. The others cannot be caught, or mean something else to Python or to torch."""


def _signal(value: Any) -> Any:
    """The name of a signal with its `SIG`, in capitals."""
    if not isinstance(value, str):
        return value
    word = value.upper().removeprefix("SIG")
    if f"SIG{word}" not in SIGNALS:
        raise PydanticCustomError(
            "signal", "{value} is no signal that can be waited for; write one of {known}", {"value": value, "known": ", ".join(SIGNALS)}
        )
    return f"SIG{word}"


Signal = Annotated[
    Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"],
    BeforeValidator(_signal),
    Spellings(tuple(name.removeprefix("SIG") for name in SIGNALS)),
]


class Checkpoint(Section):
    """When and where the state of a training is written, so that it can go on. `checkpoint: runs/a` stands for `dir`."""

    shorthand: ClassVar[tuple[str, ...]] = ("dir",)

    dir: str | None = Field(default=None)
    """Directory of the run's checkpoints, one inner directory for each: where `engine.save()` writes and `engine.load("latest")` looks.
    All ranks must see the same one, on every node. `null`: nothing is saved by itself, and `engine.save(dir)` must be told where."""
    every_steps: int | None = Field(default=None, ge=1)
    """Saves by itself after every so many updates, counted from the start of the training: at steps 500, 1000, ... also after a resume.
    `null`: not by steps."""
    every_minutes: float | None = Field(default=None, gt=0, le=525_600, allow_inf_nan=False)
    """Saves by itself at the first end of an update at which the last checkpoint is this many minutes old. `null`: not by time."""
    keep_last: int | None = Field(default=None, ge=1)
    """How many of the newest checkpoints in `dir` are kept. Older ones are deleted once a newer one is complete. `null` keeps all."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are never deleted, however old. Needs `keep_last`, since nothing is deleted
    without."""
    async_save: bool = Field(default=False)
    """Whether a save copies the state to host memory and returns, and files are written while the training goes on. It takes as much host
    memory as the state of the node's ranks. One save is under way at a time; its errors are raised by the next call."""
    on_signal: list[Signal] = Field(default=[])
    """Signals such as `[SIGTERM, SIGUSR1]`, in any case, with or without `SIG`. When any rank gets one, all of them save at the end of the
    current update, and that ends the process with exit code 85. Batch systems send one before they stop a job (Slurm:
    `sbatch --signal=USR1@120`). A job script can tell by the code that the run is to be started again."""

    @property
    def automatic(self) -> bool:
        """Whether something is saved without being asked for."""
        return self.every_steps is not None or self.every_minutes is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[tuple[str, str]] = []
        if self.dir is not None and not self.dir.strip():
            problems.append(("dir", "is empty; write a directory, or null for none"))
        if self.dir is None:
            asked = ("every_steps", "every_minutes", "on_signal")
            what = "needs a directory to save in; set checkpoint.dir, or remove it"
            problems += [(field, what) for field in asked if getattr(self, field)]
        if self.keep_every is not None and self.keep_last is None:
            what = "has no meaning without keep_last, which alone deletes checkpoints; set checkpoint.keep_last or remove it"
            problems.append(("keep_every", what))
        refuse(problems)
        return self
