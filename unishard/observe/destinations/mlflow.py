"""Writes a run of MLflow."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from unishard.contract.plan import ObserveSpec
from unishard.observe.destinations.run_file import RunFile
from unishard.observe.destinations.writer import Values

FILE = "mlflow.db"
"""The SQLite database in `logging.dir`, where no `logging.mlflow_uri` names another place: MLflow 3.17 refuses
files."""


class MLflow:
    """One run, with the fields that the config sets as its parameters; started with the first record."""

    def __init__(self, spec: ObserveSpec) -> None:
        from mlflow.tracking import MlflowClient

        self._asked, self._fields = spec.logging, spec.text.fields
        asked = spec.logging
        self._directory = None if asked.dir is None else Path(asked.dir).absolute()
        if asked.mlflow_uri is None and self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._client: Any = MlflowClient(asked.mlflow_uri or f"sqlite:///{self._directory}/{FILE}")
        self._file = RunFile(asked.dir, "mlflow")
        self._run: str | None = None
        self._written = -1
        """The last step that an earlier run wrote."""

    def write(self, step: int, values: Values) -> None:
        """Log the values of a step that is not there yet."""
        from mlflow.entities import Metric

        self._run = self._run or self._start()
        if step > self._written:
            now = round(time.time() * 1000)
            metrics = [Metric(name, value, now, step) for name, value in values.items() if math.isfinite(value)]
            self._client.log_batch(self._run, metrics=metrics)

    def resume(self, step: int) -> None:
        """Continue the run whose id is in `logging.dir`.

        MLflow cannot drop steps, so those that it has are not written again.
        """
        self._run = self._file.read()
        if self._run is not None:
            names = self._client.get_run(self._run).data.metrics
            histories = (self._client.get_metric_history(self._run, name) for name in names)
            self._written = max((metric.step for history in histories for metric in history), default=-1)
            self._client.update_run(self._run, status="RUNNING")

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._client.set_terminated(self._run)

    def _start(self) -> str:
        from mlflow.entities import Param

        name = self._asked.project or "Default"
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            experiment = existing.experiment_id
        else:  # beside the database, unless a server decides
            place = None if self._asked.mlflow_uri else f"{self._directory}/mlartifacts"
            experiment = self._client.create_experiment(name, artifact_location=place)
        run: str = self._client.create_run(experiment, run_name=self._asked.run_name).info.run_id
        self._client.log_batch(run, params=[Param(path, str(value)[:500]) for path, value in self._fields.items()])
        self._file.write(run)
        return run
