"""A prepared model outside the loop: what it is, its parameters and gradients by name, its checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Config
from unishard.distributed import process_group
from unishard.engine.adapter import EngineAdapter, InferenceAdapter
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.batching import Batching
from unishard.engine.loop.call_order import CallOrder, Phase
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.trainable import Trainable
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.schedulers import TorchSchedule
from unishard.engine.results import Placement, Resumed
from unishard.engine.state.parameter_access import GradientAccess, ParameterAccess
from unishard.engine.state.run import Run
from unishard.engine.state.save_and_load import SaveAndLoad
from unishard.engine.state.tensors import StateTensors
from unishard.errors import ContractError

__all__ = ["PreparedModel"]


class PreparedModel:
    """What `Engine` is besides the loop. Each call is handed to the part of `unishard.engine` that does it."""

    def __init__(
        self,
        cfg: Config,
        adapter: EngineAdapter | InferenceAdapter,
        *,
        model_class: str,
        group_names: Sequence[Sequence[str]] = (),
        scheduler: LRScheduler | None = None,
    ) -> None:
        """Put the loop around an adapter. Collective.

        Args:
            cfg: What runs.
            adapter: The sharded model; an `EngineAdapter` if it trains.
            model_class: Class of the model before it was sharded.
            group_names: Names of the parameters in each group of the optimizer.
            scheduler: Of an optimizer whose group dicts are those of the adapter's; None for the config's schedule.
        """
        training = adapter if isinstance(adapter, EngineAdapter) else None
        self._cfg = cfg
        self._adapter = adapter
        self._order = order = CallOrder(cfg, adapter.module, adapter.device)
        self._evaluation = Evaluation(adapter, order, trains=training is not None)
        self._batching = Batching(cfg, adapter.module, adapter.device, order, self._evaluation)
        self._trainable = Trainable(adapter.module)
        tensors = StateTensors(adapter, training)
        self._parameters = ParameterAccess(adapter, order, tensors)
        self._accumulation: Accumulation | None = None
        if training is None:
            adapter.module.eval()
        else:
            groups = training.optimizer.param_groups
            schedule = Schedule(cfg.scheduler, groups) if scheduler is None else TorchSchedule(scheduler, groups)
            self._accumulation = Accumulation(cfg, training, order, schedule)
            self._gradients = GradientAccess(self._parameters, self._accumulation, order, tensors)
        run = Run(cfg, adapter, order, tensors, self._batching, self._accumulation, model_class, group_names)
        self._checkpoints = SaveAndLoad(run)

    # -- what it is -------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model, sharded in place; the names of its modules and parameters are the user's."""
        return self._adapter.module

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._adapter.device

    @property
    def optimizer(self) -> Any:
        """The optimizer that steps; its `param_groups` hold the live learning rates."""
        return self._training("optimizer").adapter.optimizer

    @property
    def lr(self) -> float:
        """Learning rate that the next update will use (first parameter group)."""
        return self._training("lr").schedule.lr

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward, and the gradients divided by after it; 1.0 except in fp16."""
        return LossScale(self._cfg.precision).value if self._accumulation is None else self._accumulation.loss_scale.value

    def placement(self) -> Placement:
        """What the engine holds, read from its live tensors."""
        return self._adapter.placement()

    # -- parameters and gradients -----------------------------------------------------------------------------------------

    def parameter(self, name: str) -> Tensor:
        """A master weight, at any time. Collective.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter is there under each of its names.

        Returns:
            A copy, fp32, full, on `device`; of a frozen parameter what the engine keeps of it, perhaps rounded to
            `precision.compute`.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
        """
        return self._parameters.parameter(name)

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with. Collective.

        Args:
            name: Name in `module.named_parameters()`.
            value: Full, any floating dtype and device. Rank 0's counts; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, `value` does not fit it, a forward waits for its backward, or the engine
                is closed.
        """
        self._parameters.set_parameter(name, value)

    def gathered(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Edit several master weights: on leaving, what is in the tensors is written back, as `set_parameter` does. Collective.

        Rank 0's edits count. After an exception inside, nothing is written.

        Args:
            names: Names in `module.named_parameters()`. All these parameters are gathered at once, in fp32, on every rank.

        Yields:
            Tensors by name, fp32, full, on `device`; tied names share one. Edit them in place.

        Raises:
            ContractError: There is no such parameter, a tensor was replaced by one that does not fit, a forward waits for its
                backward, or the engine is closed.
        """
        return self._parameters.gathered(names)

    def parameter_norms(self) -> dict[str, float]:
        """L2 norm of each master weight, frozen ones too, at any time. Collective: one all-reduce, as `grad_norms`.

        Returns:
            Norms by name, fp32 accuracy, the same on every rank; a tied parameter under its first name.

        Raises:
            ContractError: The engine is closed.
        """
        self._order.require_open("parameter_norms")
        return self._parameters.parameter_norms()

    def grad(self, name: str) -> Tensor | None:
        """The gradient that the coming update will use: averaged over the window and the ranks, before clipping. Collective.

        Call it between the backward of a window's last micro-batch and `step`.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter has one gradient under all its names.

        Returns:
            A copy, fp32, full, on `device`; None for a frozen parameter and for one that no rank used.

        Raises:
            ContractError: There is no such parameter, the window is not at its end, or the engine is closed.
        """
        self._training("grad")
        return self._gradients.grad(name)

    def set_grad(self, name: str, value: Tensor) -> None:
        """Replace the gradient that the coming update will use; its norm and clipping see the new one. Collective.

        Args:
            name: Name in `module.named_parameters()`, of a trainable parameter.
            value: In units of `grad`, full, any floating dtype and device. Rank 0's counts; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, it is frozen, `value` does not fit it, the window is not at its end, or
                the engine is closed.
        """
        self._training("set_grad")
        self._gradients.set_grad(name, value)

    def grad_norms(self) -> dict[str, float]:
        """L2 norm of each trainable parameter's gradient, before clipping; the root of their squares' sum is `Step.grad_norm`.

        Collective: one all-reduce of one number for each parameter; nothing is gathered. Call it where `grad` can be called.

        Returns:
            Norms by name, fp32 accuracy, the same on every rank; a tied parameter under its first name, those without a gradient
            left out.

        Raises:
            ContractError: The window is not at its end, or the engine is closed.
        """
        self._training("grad_norms")
        return self._gradients.grad_norms()

    # -- checkpoints and export -------------------------------------------------------------------------------------------

    def save(self, root: str | Path | None = None, *, state: Any = None) -> Path:
        """Save the run: model, optimizer, schedule, loss scale, random numbers, data position and `state`. Collective.

        A new directory `step-...` appears in `root` when everything is in it and on the disk; what goes wrong before leaves nothing
        behind. Each rank writes its shards; of buffers that differ between ranks, such as running means, rank 0's are kept.
        `checkpoint.keep_last` and `keep_every` are applied afterwards.

        Args:
            root: Holds the checkpoints of the run, on a file system that all ranks share; left out, `checkpoint.dir`.
            state: Anything of yours made of dicts, lists, numbers, texts and tensors; `load` returns it. Rank 0's counts.

        Returns:
            The checkpoint. With `checkpoint.async_save` it is complete when `wait` returns, or the next `save` does.

        Raises:
            CheckpointError: On every rank: it could not be written, or `state` holds something else; or, with
                `checkpoint.async_save`, the save before this one failed.
            ContractError: Inside an accumulation window, inside `frozen`, on a closed engine, no directory is named anywhere, or
                another open engine of this process saves there.
            RankMismatchError: Another rank did not call it.
        """
        return self._checkpoints.save(root, state=state)

    def load(
        self, source: str | Path = "latest", *, strict: bool = True, verify: Literal["files", "bits"] | None = "files", data: bool = True
    ) -> Resumed | None:
        """Resume from a checkpoint, of any engine, strategy and number of ranks. Collective. Call it after `prepare`, before the loop.

        Every tensor of the model and of the optimizer is filled, from the pieces of the files that this rank needs. The config that
        runs now counts: its learning rates, schedule and precision. What differs from the checkpoint's is logged, and listed in what
        is returned. With another number of ranks, torch's random numbers are seeded anew from `training.seed`, the step and the rank.

        Args:
            source: A checkpoint, a directory of checkpoints, whose newest complete one is taken, or `"latest"` for that of
                `checkpoint.dir`, where there need not be any yet.
            strict: Whether every name, shape and kind of optimizer state must be the same on both sides. Else what fits is taken,
                and what does not is logged.
            verify: Check the files' checksums before anything is read (`"files"`), or also, after it, that every bit is in its place
                (`"bits"`), which proves the resumed state on any engine and number of ranks; None to trust the disk.
            data: Whether the next training loader continues where that of the checkpoint was; False to begin an epoch, as with other
                data.

        Returns:
            Where training continues; None for `"latest"` if there is no checkpoint in `checkpoint.dir`.

        Raises:
            CheckpointError: On every rank, before anything has been changed: there is no such checkpoint, it is damaged, or does not
                fit the model or the optimizer. After it: `verify="bits"` found a difference.
            ContractError: Inside an accumulation window, inside `frozen`, on a closed engine, a forward still waits for its backward,
                `verify` is something else, or `checkpoint.dir` is not set.
            RankMismatchError: Another rank did not call it, or with other arguments.
        """
        return self._checkpoints.load(source, strict=strict, verify=verify, data=data)

    def on_save(self, state: Callable[[], Any]) -> None:
        """Say what a save that the config asks for takes along; a `save` of yours takes what it is given.

        Args:
            state: Returns the state, as `save` takes it. Called on every rank.
        """
        self._checkpoints.on_save(state)

    def wait(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises:
            CheckpointError: On every rank: it failed.
            ContractError: On a closed engine.
        """
        self._order.require_open("wait")
        self._checkpoints.wait()

    def export(self, folder: str | Path, *, dtype: str | None = None, max_shard_size: int | str = "5GB", tokenizer: Any = None) -> Path:
        """Write the weights as Hugging Face lays them out: safetensors, config, tokenizer; of a PEFT model its adapters. Collective.

        Each rank writes its shards straight into place: nothing is gathered. The bytes are the same whichever engine, strategy
        and number of ranks trained, and those of `unishard export` from a checkpoint. `from_pretrained` reads them.

        Args:
            folder: Empty or not there yet, on a file system that all ranks share.
            dtype: `fp32`, `bf16` or `fp16`, rounded once, from the master weights; None for what the model's config names, else fp32.
            max_shard_size: Of one file, such as `5GB` or a number of bytes.
            tokenizer: A tokenizer or processor of transformers, or a folder that holds one, to lie beside the weights.

        Returns:
            The folder.

        Raises:
            CheckpointError: On every rank: the model cannot be exported, an argument is wrong, or a rank cannot write.
            ContractError: Inside an accumulation window, or on a closed engine.
            RankMismatchError: Another rank did not call it, or with other arguments.
        """
        return self._checkpoints.export(folder, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the engine. Calling it twice is fine; using the engine afterwards is an error."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close(next((error for error in exc if isinstance(error, BaseException)), None))

    def _close(self, why: BaseException | None) -> None:
        if self._order.phase is Phase.CLOSED:
            return
        process_group.ended_by(why)
        self._order.close(why)
        try:
            self._checkpoints.close()
        finally:
            self._adapter.close()

    def _training(self, call: str) -> Accumulation:
        """What trains.

        Raises:
            ContractError: The engine is closed, or the model was prepared with `train=False`.
        """
        self._order.require_open(call)
        if self._accumulation is None:
            raise ContractError(
                f"{call} is for an engine that trains, and this model was prepared with train=False; leave train=False out to train the "
                "model, or call the engine that trains"
            )
        return self._accumulation
