"""When and where the training state is saved, so that a run can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from unishard.config.paths import Directory, Store
from unishard.config.relevance import Not, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
"""Signals that can trigger a checkpoint. The others cannot be caught, or Python or torch use them."""


def _signal(value: Any) -> Any:
    """The name of a signal with its `SIG`, in capitals."""
    if not isinstance(value, str):
        return value
    name = value.upper().removeprefix("SIG")
    if f"SIG{name}" not in SIGNALS:
        raise PydanticCustomError(
            "signal",
            "{value} cannot trigger a checkpoint; write one of {known}",
            {"value": value, "known": ", ".join(SIGNALS)},
        )
    return f"SIG{name}"


Signal = Annotated[
    Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"],
    BeforeValidator(_signal),
    Spellings(tuple(name.removeprefix("SIG") for name in SIGNALS)),
]

_DIRECTORY = OnlyWith(
    {"dir": Not(None)},
    "there is no checkpoint.dir",
    "needs a directory to save in; set checkpoint.dir, or remove it",
)
_DELETING = OnlyWith(
    {"keep_last": Not(None)},
    "nothing is deleted",
    "is unused without keep_last, because nothing is deleted; set checkpoint.keep_last or remove it",
)


class Checkpoint(Section):
    """When and where the training state is saved, so that a run can be resumed.

    `checkpoint: runs/a` stands for `dir`.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("dir",)

    dir: Directory = Field(default=None)
    """Directory of the run's checkpoints, one subdirectory each. `engine.save()` writes there and
    `engine.load("latest")` reads from it. It must be shared by all ranks on all nodes. `null`: nothing is saved
    automatically, and `engine.save(dir)` needs a directory."""
    copy_to: Annotated[Store, _DIRECTORY] = Field(default=None)
    """URL where each complete checkpoint of `dir` is copied in the background, such as `s3://bucket/run`; exports go to
    its `exports/`. Any scheme of fsspec, whose package must be installed (s3: `s3fs`, gs: `gcsfs`) and which has the
    credentials. `keep_last` holds there too, and a resume takes the newest checkpoint of both places. One run copies to
    a URL at a time. `null`: nothing is copied."""
    on_existing: Annotated[Literal["error", "resume", "new"], _DIRECTORY] = Field(default="error")
    """What a run does if `dir` holds checkpoints of another run already. `resume`: `prepare` resumes from the newest
    one, and `engine.resumed` says where; the first time, when there is none, a new run begins. `error`: the first
    update is an error unless the script has called `engine.load("latest")`. `new`: a new run begins beside the others;
    the names of its checkpoints end with its id, theirs are never deleted, and `latest` is the newest of all. Loading a
    checkpoint of another directory begins a new run, too."""
    every_steps: Annotated[int | None, _DIRECTORY] = Field(default=None, ge=1)
    """Save after every N optimizer steps, counted from the start of the training: at steps 500, 1000, ... also after a
    resume. `null`: never by steps."""
    every_minutes: Annotated[float | None, _DIRECTORY] = Field(default=None, gt=0, le=525_600, allow_inf_nan=False)
    """Save after the first optimizer step once this many minutes have passed since the last checkpoint. `null`: never
    by time."""
    keep_last: int | None = Field(default=None, ge=1)
    """How many of the run's newest checkpoints to keep. Older ones are deleted once a newer one is complete; those of
    other runs are never deleted. `null` keeps all."""
    keep_every: Annotated[int | None, _DELETING] = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are never deleted. Needs `keep_last`, because nothing is deleted
    without it."""
    keep_best: Annotated[int | None, _DELETING] = Field(default=None, ge=1)
    """How many checkpoints with the best metric, of `engine.save(metric=...)`, to keep beside those of `keep_last`.
    Needs `keep_last`."""
    best: Literal["min", "max"] = Field(default="min")
    """Whether the lowest or the highest metric is the best: for `keep_best` and `engine.load("best")`."""
    async_save: bool = Field(default=False)
    """Whether a save copies the state to host memory and returns, so that files are written while the training
    continues. It needs as much host memory as the state of the node's ranks. One save runs at a time; the next call
    raises its errors."""
    on_signal: Annotated[list[Signal], _DIRECTORY] = Field(default=[])
    """Signals such as `[SIGTERM, SIGUSR1]`, in any case, with or without `SIG`. When any rank receives one, all ranks
    save after the current optimizer step and exit with code 85. Batch systems send one before they stop a job (Slurm:
    `sbatch --signal=USR1@120`). The exit code tells a job script to requeue the run."""

    @property
    def automatic(self) -> bool:
        """Whether checkpoints are saved automatically."""
        return self.every_steps is not None or self.every_minutes is not None

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.dir is not None and not self.dir.strip():
            yield "dir", "is empty; write a directory, or null for none"
