"""A prepared model outside the loop: its parts, properties, checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn

from unishard.config.hints import names
from unishard.contract.adapter import InferenceAdapter
from unishard.contract.plan import RunPlan
from unishard.contract.results import Placement, Resumed
from unishard.data.warn_once import WarnOnce
from unishard.distributed.dtypes import DTYPES
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.batching import Batching
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.call_order import CallOrder, Phase
from unishard.engine.loop.equal_values import EqualValues
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.guarded_module import GuardedModule
from unishard.engine.loop.inplace_writes import InplaceWrites
from unishard.engine.loop.module_order import named_with_class, watch_modules
from unishard.engine.loop.outside_batches import OutsideBatches
from unishard.engine.loop.trainable import Trainable
from unishard.engine.loop.written_parameters import WrittenParameters
from unishard.engine.model.compilation import eager_modules
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.optimizer_calls import OptimizerCalls
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.schedulers import TorchSchedule
from unishard.engine.process import Process
from unishard.engine.state.parameter_access import GradientAccess, ParameterAccess
from unishard.engine.state.run import Run
from unishard.engine.state.save_and_load import SaveAndLoad
from unishard.engine.state.tensors import StateTensors
from unishard.engine.state.unsharded import explain_sharded_read
from unishard.errors import ContractError
from unishard.failures import lifetime
from unishard.observe.chosen import observers_of
from unishard.observe.expected_memory import ExpectedMemory
from unishard.observe.observer import Observers

__all__ = ["PreparedModel"]


class PreparedModel(Process):
    """The part of `Engine` outside the loop. Delegates each call to the module of `unishard.engine` that does it."""

    def __init__(self, adapter: InferenceAdapter, plan: RunPlan, written: WrittenParameters | None) -> None:
        """Set up the parts of the engine around an adapter. Collective.

        Args:
            adapter: The sharded model; an `EngineAdapter` for training.
            plan: What its parts do.
            written: What finds writes past the engine; None where the module's own tensors are the weights.
        """
        module, device, training, guard, planned = (
            adapter.module,
            adapter.device,
            adapter.training,
            plan.guard,
            plan.model,
        )
        self._plan, self._adapter = plan, adapter
        self._order = order = CallOrder(
            module,
            device,
            window=plan.loop.gradient_accumulation_steps,
            precision=planned.precision,
            communication=guard.communication,
        )
        if adapter.forward_is_collective and order.compares_ranks and guard.shards:
            watch_modules(order, {**planned.casting, **named_with_class(adapter.gathered_modules())})
        memory = ExpectedMemory(plan.memory)
        self._observers = Observers() if training is None else observers_of(plan.observe, training, order, memory)
        self._buffers = Buffers(plan.loop.buffers, adapter, order)
        self._evaluation = Evaluation(adapter, order, self._buffers, trains=training is not None)
        warn = WarnOnce()
        self._batching = Batching(plan.loop, module, device, order, self._evaluation, self._observers, warn)
        outside = OutsideBatches(self._batching.training, warn)
        self._outside = outside
        self._trainable = Trainable(module)
        self._tensors = StateTensors(adapter, training)
        self._parameters = ParameterAccess(adapter, order, self._tensors)
        self._accumulation: Accumulation | None = None
        if training is None:
            module.eval()
        elif plan.optimizer is not None:
            built, groups = plan.optimizer, training.optimizer.param_groups
            schedule = (
                Schedule(built.schedule, groups) if built.scheduler is None else TorchSchedule(built.scheduler, groups)
            )
            calls = OptimizerCalls(
                training, built.optimizer or training.torch_optimizer, planned.name, order.require_no_gradients
            )
            eager = eager_modules(module)
            units = {name: unit for name, unit in planned.casting.items() if unit in eager}
            self._accumulation = Accumulation(
                plan.loop,
                LossScale(planned.precision),
                training,
                order,
                schedule,
                calls,
                self._trainable,
                planned.classes,
                outside,
                self._observers,
                written=written,
                held=EqualValues(module, order, device, full=guard.full_weights) if order.compares_ranks else None,
                inplace=None if guard.full_weights else InplaceWrites(units, order, gathers=guard.gathers),
            )
            if written is not None:
                written.begin(order)
            self._gradients = GradientAccess(self._parameters, self._accumulation, order, self._tensors)
        self._checkpoints = SaveAndLoad(
            Run(
                training=plan.loop,
                checkpoint=plan.checkpoint,
                text=plan.text.saved,
                packages=list(dict.fromkeys(["torch", *plan.backend.requires])),
                adapter=adapter,
                order=order,
                tensors=self._tensors,
                buffers=self._buffers,
                batching=self._batching,
                observers=self._observers,
                accumulation=self._accumulation,
                model_class=planned.name,
                group_names=[] if plan.optimizer is None else plan.optimizer.groups,
            )
        )
        dtypes = {planned.precision.compute, *([planned.precision.master] if training is not None else [])}
        self._guarded = GuardedModule(
            module,
            dtypes={DTYPES[name] for name in dtypes},
            devices={device, *([torch.device("cpu")] if planned.offload.params != "none" else [])},
            full=guard.full_weights,
            class_name=planned.name,
            trains=training is not None,
            require_no_gradients=order.require_no_gradients,
            generate=self._evaluation.of_module(),
        )

    # -- what it is
    # -------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model, sharded in place, with its module and parameter names."""
        return self._adapter.module

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._adapter.device

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; its `param_groups` hold the live learning rates.

        Only the engine steps, zeroes, saves and loads it: other calls raise `ContractError` and say what to call
        instead. Schedulers can be built on it, such as `ReduceLROnPlateau`, if the engine's own schedule is constant.
        """
        return self._training("optimizer").optimizer.public

    @property
    def lr(self) -> float:
        """Learning rate for the next update (first parameter group)."""
        return self._training("lr").schedule.lr

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied before backward and gradients are divided after it; 1.0 except in
        fp16.
        """
        return (
            LossScale(self._plan.model.precision).value
            if self._accumulation is None
            else self._accumulation.loss_scale.value
        )

    @property
    def resumed(self) -> Resumed | None:
        """The result of the last `load`, also of the one in `prepare` (`checkpoint.on_existing: resume`); None for a
        new run.
        """
        return self._checkpoints.resumed

    def placement(self) -> Placement:
        """What the engine holds, read from its live tensors."""
        return self._adapter.placement()

    # -- checkpoints and export
    # -------------------------------------------------------------------------------------------

    def save(self, root: str | Path | None = None, *, state: Any = None, metric: float | Tensor | None = None) -> Path:
        """Save a checkpoint: model, optimizer, schedule, loss scale, random state, data position and `state`.

        Collective.

        A new directory `step-...` appears in `root` once it is complete and on the disk; a failed save leaves nothing
        behind. Each rank writes its shards; buffers that differ between ranks, such as running means, are made equal
        first (`training.buffers`). Ctrl-C ends the save only after it is complete, the second one at once.
        `checkpoint.keep_last`, `keep_every` and `keep_best` are applied afterwards.

        Args:
            root: Directory of the run's checkpoints, on a file system that all ranks share; by default
                `checkpoint.dir`.
            state: Your own data made of dicts, lists, numbers, strings and tensors; `load` returns it. Rank 0's is
                saved.
            metric: A number such as the validation loss, the same on all ranks, by which `checkpoint.keep_best` and
                `load("best")` find the best checkpoint.

        Returns:
            The checkpoint directory. With `checkpoint.async_save` it is complete when `wait` or the next `save`
            returns.

        Raises:
            CheckpointError: On every rank: it could not be written, `state` contains something else, or, with
                `checkpoint.async_save`, the previous save failed; or this is the first save in `checkpoint.dir` and it
                holds another run (`checkpoint.on_existing: error`).
            ContractError: Inside an accumulation window, inside `frozen`, on a closed engine, no directory is set, or
                another open engine of this process saves there; or `metric` is no number.
            RankMismatchError: Another rank did not call it, or passed another metric.
        """
        return self._checkpoints.save(root, state=state, metric=metric)

    def load(
        self,
        source: str | Path = "latest",
        *,
        strict: bool = True,
        verify: Literal["files", "bits"] | None = "files",
        data: bool = True,
    ) -> Resumed | None:
        """Resume from a checkpoint of any engine, strategy and number of ranks. Collective.

        Call it after `prepare`, before the loop.

        Reads every tensor of the model and the optimizer; each rank reads only its shards. Learning rates, schedule and
        precision come from the current config. Differences from the checkpoint are logged, and listed in the result.
        With another number of ranks, random generators are seeded from `training.seed`, the step and the rank.

        Args:
            source: A checkpoint; a directory of checkpoints, of which the newest complete one is used; `"latest"` for
                the newest in `checkpoint.dir`, which may have none yet; or `"best"` for the one there with the best
                metric of the newest run.
            strict: Whether every name, shape and kind of optimizer state must match. If False, what matches is loaded,
                and the rest is logged.
            verify: `"files"` checks the files' checksums before reading; `"bits"` also checks afterwards that every
                tensor is bit-equal to what was saved, on any engine and number of ranks; None checks nothing.
            data: Whether the next training loader continues at the checkpoint's data position; False to begin an epoch,
                for example with other data.

        Returns:
            Where training continues; None for `"latest"` if `checkpoint.dir` has no checkpoint.

        Raises:
            CheckpointError: On every rank, before anything is changed: there is no such checkpoint, it is damaged, or
                it does not
                match the model or the optimizer. Afterwards: `verify="bits"` found a difference.
            ContractError: Inside an accumulation window, inside `frozen`, on a closed engine, a forward still waits for
                its backward, `verify` is something else, or `checkpoint.dir` is not set.
            RankMismatchError: Another rank did not call it, or called it with other arguments.
        """
        return self._checkpoints.load(source, strict=strict, verify=verify, data=data)

    def on_save(self, state: Callable[[], Any]) -> None:
        """Set the user state for automatic saves; an explicit `save` uses its own argument.

        Args:
            state: A function that returns the state for `save`. Called on every rank.
        """
        self._checkpoints.on_save(state)

    def wait(self) -> None:
        """Wait until the background save is complete. Collective.

        Raises:
            CheckpointError: On every rank: it failed.
            ContractError: On a closed engine.
        """
        self._order.require_open("wait")
        self._checkpoints.wait()

    def export(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        max_shard_size: int | str = "5GB",
        tokenizer: Any = None,
        overwrite: bool = False,
    ) -> Path:
        """Export the weights in Hugging Face's layout: safetensors, config, tokenizer; for a PEFT model its adapters.

        Collective.

        Each rank writes its shards directly into the files; nothing is gathered. The bytes are the same for every
        engine, strategy and number of ranks, and for `unishard export` from a checkpoint. `from_pretrained` reads them.

        Args:
            folder: An empty or new directory, unless `overwrite` is set; on a file system that all ranks share.
            dtype: `fp32`, `bf16` or `fp16`, rounded once from the master weights; None for the dtype in the model's
                config, or fp32.
            max_shard_size: Maximum size of a file, such as `5GB` or a number of bytes.
            tokenizer: A tokenizer or processor of transformers, or a directory with one, to save with the weights.
            overwrite: Whether to replace an earlier export in `folder`, with all that the folder holds, once the new
                one is complete.

        Returns:
            The directory.

        Raises:
            CheckpointError: On every rank: the model cannot be exported, an argument is invalid, `folder` is not empty
                (with `overwrite`: no earlier export), or a rank cannot write.
            ContractError: Inside an accumulation window, or on a closed engine.
            RankMismatchError: Another rank did not call it, or called it with other arguments.
        """
        return self._checkpoints.export(
            folder, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer, overwrite=overwrite
        )

    # -- what it is not
    # ---------------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # for type checkers every name would be there

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that has raised AttributeError, whose own text is wanted
                return object.__getattribute__(self, name)
            hint = names.METHODS.get(name, "")
            if not hint and not name.startswith("_") and hasattr(self.module, name):
                hint = f"it is one of the model: engine.module.{name}"
            what = f"{type(self).__name__!r} object has no attribute {name!r}{hint and f'; {hint}'}"
            raise AttributeError(what, name=name, obj=self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ContractError(
            "an engine cannot be copied or pickled; average its weights with engine.ema(decay), write them with "
            "engine.export(folder), or "
            "read one with engine.parameter(name)"
        )

    # -- the end
    # ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the engine's resources. A second call does nothing; any other use afterwards is an error."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close(next((error for error in exc if isinstance(error, BaseException)), None))

    def _close(self, why: BaseException | None) -> None:
        if self._order.phase is Phase.CLOSED:
            return
        if why is not None and (
            note := explain_sharded_read(self._adapter, why)
        ):  # from the script, outside the engine's calls
            why.add_note(note)
        lifetime.ended_by(why)
        self._order.close(why)
        try:
            self._guarded.close()
            if self._accumulation is not None:
                self._accumulation.close()
            self._checkpoints.close()
        finally:
            self._adapter.close()

    def _training(self, call: str) -> Accumulation:
        """The training loop's state.

        Raises:
            ContractError: The engine is closed, or the model was prepared with `train=False`.
        """
        self._order.require_open(call)
        if self._accumulation is None:
            raise ContractError(
                f"{call} needs an engine for training, but this model was prepared with train=False; prepare it "
                "without train=False, or "
                "call the engine that trains"
            )
        return self._accumulation
