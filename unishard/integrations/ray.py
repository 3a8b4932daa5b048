"""Ray Train: report metrics with a checkpoint that Ray keeps track of, and resume from the one that it hands over.

For the function that Ray's TorchTrainer runs on its workers, or a script of `unishard launch --ray`. The checkpoint is
ours, written by all ranks into the storage of the run, and not copied: any number of workers resumes it, on either
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unishard.checkpoint.finding import latest
from unishard.contract.results import Resumed
from unishard.engine.engine import Engine
from unishard.errors import BackendError, CheckpointError, ConfigError, ContractError, Problem
from unishard.integrations.saving import refuse_copies

__all__ = ["report", "resume"]


def report(engine: Engine, metrics: Mapping[str, Any], *, save: bool = True, state: Any = None) -> Path | None:
    """Report metrics to Ray, by default with a checkpoint. Collective: Ray waits for all workers.

    Which checkpoints stay is `CheckpointConfig(num_to_keep=...)` of Ray: it does not go on with a run one of whose
    checkpoints is gone, so `checkpoint.keep_last` would end it.

    Args:
        engine: The engine, between two windows.
        metrics: Numbers by name; those of rank 0 count. A number that a rank has alone is made that of all by
            `engine.mean`.
        save: Whether to save and to report the checkpoint.
        state: Your own data for the checkpoint, as in `engine.save`.

    Returns:
        The checkpoint, in `checkpoints` in the storage of the run; None without one.

    Raises:
        BackendError: Ray Train is not installed.
        CheckpointError: The storage of the run is not a folder that can be written to as such.
        ConfigError: `checkpoint.keep_last` or `copy_to` is set.
        ContractError: This is not a worker of Ray Train.
    """
    train = _train()
    if not save:
        train.report(dict(metrics))
        return None
    if engine._checkpoints.deletes:
        problem = "would delete checkpoints that Ray counts on; remove it, and set CheckpointConfig(num_to_keep=...)"
        raise ConfigError([Problem("checkpoint.keep_last", problem)])
    refuse_copies(engine._checkpoints.copy_to)
    folder = engine.save(_root(train), state=state)
    engine.wait()  # Ray may hand it over at once
    checkpoint = train.Checkpoint.from_directory(str(folder)) if engine.is_main else None
    train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)
    return folder


def resume(engine: Engine) -> Resumed | None:
    """Resume after a worker was lost, or in a new run of the same name. Collective: call it after `prepare`.

    Takes the newest checkpoint that `report` has saved in this run, whether or not Ray has noted it before the loss;
    else the one that Ray hands to its workers. A run that has resumed in `prepare` (`checkpoint.on_existing: resume`)
    stays where it is.

    Args:
        engine: The engine.

    Returns:
        Where the run continues; None at its start.

    Raises:
        BackendError: Ray Train is not installed.
        CheckpointError: It cannot be loaded, as in `engine.load`.
        ContractError: This is not a worker of Ray Train.
    """
    train = _train()
    root, checkpoint = _root(train), train.get_checkpoint()
    if engine.resumed is not None:
        return engine.resumed
    if latest(root) is not None:
        return engine.load(root)
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:  # the folder itself, where it is one
        return engine.load(Path(folder))


def _train() -> Any:
    """Ray Train, in a worker."""
    try:
        from ray import train
    except ImportError as error:
        raise BackendError(f"reporting to Ray needs Ray Train ({error}); pip install 'unishard[ray]'") from None
    try:
        train.get_context().get_world_rank()
    except RuntimeError as error:
        raise ContractError(
            f"this process is no worker of Ray Train ({str(error).splitlines()[0]}); call it in the function of a "
            "TorchTrainer, or in a script of `unishard launch --ray`"
        ) from None
    return train


def _root(train: Any) -> Path:
    storage = train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise CheckpointError(
            f"{storage.experiment_fs_path}: is on {storage.storage_filesystem.type_name}, and ranks write a checkpoint "
            "into one folder; set RunConfig(storage_path=...) to a folder that all workers share"
        )
    return Path(storage.experiment_fs_path, "checkpoints")
