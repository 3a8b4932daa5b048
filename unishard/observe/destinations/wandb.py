"""Writes a run of Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unishard.contract.plan import ObserveSpec
from unishard.observe.destinations.run_file import RunFile
from unishard.observe.destinations.writer import Values


class Wandb:
    """One run, with the config of the training; started with the first record, so that a resumed training can continue
    it.
    """

    def __init__(self, spec: ObserveSpec) -> None:
        import wandb

        self._init = wandb.init
        self._asked, self._given = spec.logging, spec.text.given
        self._file = RunFile(spec.logging.dir, "wandb")
        self._resumed: str | None = None
        self._run: Any = None

    def write(self, step: int, values: Values) -> None:
        """Log the values; W&B joins those of the same step."""
        self._run = self._run or self._start()
        self._run.log(dict(values), step=step)

    def resume(self, step: int) -> None:
        """Continue the run whose id is in `logging.dir`. W&B itself drops steps that it has already."""
        self._resumed = self._file.read()

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()

    def _start(self) -> Any:
        logging = self._asked
        if logging.dir is not None:
            Path(logging.dir).mkdir(parents=True, exist_ok=True)
        run = self._init(
            project=logging.project,
            entity=logging.wandb_entity,
            group=logging.wandb_group,
            name=logging.run_name,
            mode=logging.wandb_mode,
            dir=logging.dir,
            config=self._given,
            id=self._resumed,
            resume="allow" if self._resumed else None,
        )
        self._file.write(run.id)
        return run
