"""Saves a run and goes on from what was saved, on whatever engine, strategy and number of ranks."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch.distributed as dist

from unishard.checkpoint import directory, finding
from unishard.checkpoint.background import Background
from unishard.checkpoint.saving import Retention, save, without_collections
from unishard.config import Config
from unishard.distributed import process_group
from unishard.distributed.on_ranks import on_first
from unishard.engine.state.autosave import EXIT_CODE, Automatic
from unishard.engine.state.restore import Restoring
from unishard.errors import ContractError
from unishard.export.online import export as write_export
from unishard.plugins.backend import Resumed

__all__ = ["Checkpointing"]

_logger = logging.getLogger("unishard")

_savers: WeakValueDictionary[Path, Checkpointing] = WeakValueDictionary()
"""Which open engine of this process saves in a directory."""


class Checkpointing(Restoring):
    """`save`, `load`, `wait` and `export`. `TrainingEngine` inherits it."""

    _cfg: Config
    _background: Background
    _automatic: Automatic | None
    _state_to_save: Callable[[], Any] | None = None
    _first_save = True

    @abstractmethod
    def _require_boundary(self, call: str) -> None:
        """Raise ContractError on a closed engine, inside an accumulation window, and inside `frozen`."""

    @abstractmethod
    def _require_open(self, call: str) -> None:
        """Raise ContractError on a closed engine."""

    @abstractmethod
    def _meet(self, call: str, detail: str = "") -> None:
        """Raise RankMismatchError on every rank where another one is in another call, unless the config says not to look. Collective."""

    @without_collections()
    def save(self, root: str | Path | None = None, *, state: Any = None) -> Path:
        """Save the run: model, optimizer, schedule, loss scale, random numbers, data position and `state`. Collective.

        A new directory `step-...` appears in `root` when everything is in it and on the disk; what goes wrong before leaves nothing
        behind. Each rank writes what it holds; of buffers that differ between ranks, such as running means, rank 0's are kept.
        `checkpoint.keep_last` and `keep_every` are applied afterwards.

        Args:
            root: Holds the checkpoints of the run, on a file system that all ranks share; left out, `checkpoint.dir`.
            state: Anything of yours made of dicts, lists, numbers, texts and tensors; `load` returns it. Rank 0's counts.

        Returns:
            The checkpoint. With `checkpoint.async_save` it is there when `wait` returns, or the next `save` does.

        Raises:
            CheckpointError: On every rank: it could not be written, or `state` holds something else; or, with
                `checkpoint.async_save`, the save before this one failed.
            ContractError: Inside an accumulation window, inside `frozen`, on a closed engine, no directory is named anywhere, or
                another open engine of this process saves there.
            RankMismatchError: Another rank did not call it.
        """
        self._require_boundary("save")
        place = self._directory(root, "save")
        self._claim(place)
        self._meet("save", f", to {place}")
        group = process_group.host_group()
        self._background.wait()
        self._settle_state()
        snapshot = self._snapshot(state, group)
        if self._automatic is not None:
            self._automatic.saved()
        cfg = self._cfg.checkpoint
        retention = Retention(cfg.keep_last, cfg.keep_every)
        if self._first_save:
            self._first_save = False
            on_first(group, lambda: directory.clean(place))
        if cfg.async_save:
            copy = self._background.stage(snapshot)
            self._background.start(lambda own: save(place, copy, retention, own))
            return place / finding.name_of(snapshot.step)
        return save(place, snapshot, retention, group)

    def on_save(self, state: Callable[[], Any]) -> None:
        """Say what a save that the config asks for takes along; a `save` of yours takes what it is given.

        Args:
            state: Returns the state, as `save` takes it. Called on every rank.
        """
        self._state_to_save = state

    def _save_if_due(self) -> None:
        """At the end of a window: save if the config says so, and end the process after a signal. Collective."""
        cause = None if self._automatic is None else self._automatic.due(self._updates)
        if cause is None:
            return
        folder = self.save(state=None if self._state_to_save is None else self._state_to_save())
        if cause.ends:
            self._background.wait()
            _logger.warning("%s: saved in %s; the process ends with exit code %d", cause.text, folder, EXIT_CODE)
            raise SystemExit(EXIT_CODE)

    @without_collections()
    def load(
        self, source: str | Path = "latest", *, strict: bool = True, verify: Literal["files", "bits"] | None = "files", data: bool = True
    ) -> Resumed | None:
        """Go on from a checkpoint, of any engine, strategy and number of ranks. Collective. Call it after `prepare`, before the loop.

        Every tensor of the model and of the optimizer is filled, from the parts of the files that this rank needs. The config that
        runs now counts: its learning rates, schedule and precision. What differs from the checkpoint's is logged, and listed in what
        is returned. With another number of ranks, torch's random numbers are seeded anew from `training.seed`, the step and the rank.

        Args:
            source: A checkpoint, a directory of checkpoints, whose newest complete one is taken, or `"latest"` for that of
                `checkpoint.dir`, where there need not be any yet.
            strict: Whether every name, shape and kind of optimizer state must be the same on both sides. Else what fits is taken,
                and what does not is logged.
            verify: Check the files' checksums before anything is read (`"files"`), or also, after it, that every bit is in its place
                (`"bits"`), which proves the resumed state on any engine and number of ranks; None to trust the disk.
            data: Whether the next training loader goes on where that of the checkpoint was; False to begin an epoch, as with other data.

        Returns:
            Where training goes on; None for `"latest"` if there is no checkpoint in `checkpoint.dir`.

        Raises:
            CheckpointError: On every rank, before anything has been changed: there is no such checkpoint, it is damaged, or does not
                fit the model or the optimizer. After it: `verify="bits"` found a difference.
            ContractError: Inside an accumulation window, inside `frozen`, on a closed engine, a forward still waits for its backward,
                `verify` is something else, or `checkpoint.dir` is not set.
            RankMismatchError: Another rank did not call it, or with other arguments.
        """
        self._require_boundary("load")
        self._require_no_graph("load")
        if verify not in ("files", "bits", None):
            raise ContractError(f'load: verify is {verify!r}; write "files", "bits", or None to trust the disk')
        newest = source == "latest"
        place = self._directory(None, "load") if newest else Path(source)
        self._meet("load", f", from {place}, strict={strict}, verify={verify}, data={data}")
        group = process_group.host_group()
        self._background.wait()
        folder = on_first(group, lambda: finding.latest(place) if newest else finding.locate(place, "latest"))
        if folder is None:
            if dist.get_rank() == 0:
                _logger.info("no checkpoint in %s; training starts from the beginning", place)
            return None
        return self._restore(folder, group, strict=strict, verify=verify, data=data)

    def export(self, folder: str | Path, *, dtype: str | None = None, max_shard_size: int | str = "5GB", tokenizer: Any = None) -> Path:
        """Write the weights as Hugging Face lays them out: safetensors, config, tokenizer; of a PEFT model its adapters. Collective.

        Each rank writes what it holds straight into its place: nothing is gathered. The bytes are the same whichever engine, strategy
        and number of ranks trained, and those of `unishard export` from a checkpoint. `from_pretrained` reads them.

        Args:
            folder: Empty or not there yet, on a file system that all ranks share.
            dtype: `fp32`, `bf16` or `fp16`, rounded once, from the masters; None for what the model's config names, else fp32.
            max_shard_size: Of one file, such as `5GB` or a number of bytes.
            tokenizer: A tokenizer or processor of transformers, or a folder that holds one, to lie beside the weights.

        Returns:
            The folder.

        Raises:
            CheckpointError: On every rank: the model cannot be exported, an argument is wrong, or a rank cannot write.
            ContractError: Inside an accumulation window, or on a closed engine.
            RankMismatchError: Another rank did not call it, or with other arguments.
        """
        self._require_boundary("export")
        self._meet("export", f", to {folder}")
        self._settle_state()
        write_export(
            folder,
            self._module,
            self._to_export(),
            dtype=dtype,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            group=process_group.host_group(),
        )
        return Path(folder)

    def wait(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises:
            CheckpointError: On every rank: it failed.
            ContractError: On a closed engine.
        """
        self._require_open("wait")
        self._background.wait()

    def _claim(self, root: Path) -> None:
        """Two engines, such as those of a GAN, would replace each other's checkpoints of the same step."""
        if _savers.setdefault(root.resolve(), self) is not self:
            raise ContractError(
                f"save: another engine of this process saves in {root}; give each a directory of its own, or close the other one first"
            )

    def _stop_saving(self) -> None:
        """Watch no signals, and let other engines save where this one did."""
        if self._automatic is not None:
            self._automatic.close()
        for root in [root for root, engine in _savers.items() if engine is self]:
            del _savers[root]

    def _directory(self, given: str | Path | None, call: str) -> Path:
        chosen = self._cfg.checkpoint.dir if given is None else given
        if chosen is None:
            raise ContractError(
                f"{call} needs a directory; pass one, as in engine.{call}('checkpoints'), or set checkpoint.dir in the config"
            )
        return Path(chosen)
