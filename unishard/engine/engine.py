"""The engine: the training loop's contract, the same for every backend.

`Engine` documents each call and delegates it to the part that does it; what differs between sharding engines is in the
adapter (`unishard.contract.adapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import InferenceAdapter
from unishard.contract.plan import RunPlan
from unishard.contract.results import Placement, Resumed, Step
from unishard.data.batches import Window, to_device
from unishard.data.wrappers import WarnOnce
from unishard.engine.assembly import guarded_module, observers_of, order_of_calls, training_guards, training_windows
from unishard.engine.guards.edited_gradients import Shown
from unishard.engine.guards.graph import reaches
from unishard.engine.guards.inference_mode import with_inference_as_no_grad, without_inference_mode
from unishard.engine.guards.outside_batches import OutsideBatches
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.batching import Batching
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.passes import Passes
from unishard.engine.loop.phase import Phase
from unishard.engine.loop.routed_calls import RoutedCalls
from unishard.engine.loop.trainable import Trainable
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.other_names import OtherNames
from unishard.engine.state import parameter_access
from unishard.engine.state.moving_average import MovingAverage, begin_average
from unishard.engine.state.run import Run
from unishard.engine.state.save_and_load import SaveAndLoad
from unishard.engine.state.tensors import StateTensors
from unishard.engine.state.weights import Weights
from unishard.errors import ContractError
from unishard.failures import lifetime
from unishard.failures.endings import names_causes
from unishard.observe.expected_memory import ExpectedMemory
from unishard.observe.observer import Observers, check_number


@names_causes
@with_inference_as_no_grad
class Engine(OtherNames):
    """A prepared model and, for training, its optimizer, with the training loop. Created by `unishard.prepare`.

    Every method except `log`, `print`, `placement`, `set_boundary`, `routed`, `reached_by`, `leave`, `on_save` and
    `close` is collective: call it on all ranks, with the same arguments but for a rank's own data. If ranks make
    different calls, all of them raise `RankMismatchError`, which names each rank's call. A call on a closed engine, or
    a training call on a model prepared with `train=False`, raises `ContractError`.
    """

    def __init__(self, adapter: InferenceAdapter, plan: RunPlan) -> None:
        """Set up the parts of the engine around an adapter. Collective."""
        training, module, warn = adapter.training, adapter.module, WarnOnce()
        self._adapter, self._precision = adapter, plan.model.precision
        self._order = order = order_of_calls(adapter, plan)
        self._observers = Observers()
        if training is not None:
            self._observers = observers_of(plan.observe, training, order, ExpectedMemory(plan.memory))
        self._buffers = Buffers(plan.loop.buffers, adapter, order)
        self._evaluation = Evaluation(adapter, order, self._buffers, trains=training is not None)
        self._batching = Batching(plan.loop, module, adapter.device, order, self._evaluation, self._observers, warn)
        self._outside = OutsideBatches(lambda: self._batching.training.open, order, warn)
        self._trainable = Trainable(module)
        self._tensors = StateTensors(adapter, training)
        self._parameters = parameter_access.ParameterAccess(adapter, order, self._tensors)
        self._weights = Weights(adapter, order, self._tensors, self._parameters)
        self._accumulation: Accumulation | None = None
        if training is None or plan.optimizer is None:
            module.eval()
        else:
            shown: Shown = {}
            guards = training_guards(training, plan, order, self._trainable, self._outside, shown)
            self._accumulation = training_windows(training, plan.optimizer, plan, order, self._observers, guards)
            self._gradients = parameter_access.GradientAccess(
                self._parameters, self._accumulation, order, self._tensors, shown
            )
        run = Run(
            training=plan.loop,
            checkpoint=plan.checkpoint,
            text=plan.text.saved,
            packages=["torch", *(name for name in plan.backend.requires if name != "torch")],
            adapter=adapter,
            order=order,
            tensors=self._tensors,
            buffers=self._buffers,
            batching=self._batching,
            observers=self._observers,
            accumulation=self._accumulation,
            model_class=plan.model.name,
            group_names=[] if plan.optimizer is None else plan.optimizer.groups,
        )
        self._checkpoints = SaveAndLoad(run)
        self._guarded = guarded_module(adapter, plan, order, self._evaluation)
        self._routed = RoutedCalls(module, order, self)
        self._plain = plan.model.plain

    # -- the loop ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch; in evaluation mode without a graph, as under `torch.no_grad`. Collective.

        Tensors on another device are moved to `engine.device`, as in `batches`.

        Raises:
            ContractError: The model is in training mode inside a `lockstep` block.
        """
        try:
            self._order.require_open("forward")
            if self._adapter.device.type != "cpu":  # there, nothing is elsewhere
                args, kwargs = to_device((args, kwargs), self._adapter.device)
            self._buffers.stale = self._buffers.stale or self.module.training
            if self._order.frozen:  # not through the adapter, whose wrapper would expect gradients
                self._order.check_sampled("forward", ", frozen")
                with self._order.forwarding():
                    return self.module(*args, **kwargs)
            if self._accumulation is None or not self.module.training:
                self._outside.skip()
                return self._evaluation.run("forward", args, kwargs)
            if self._evaluation.lockstep_open is not None:
                raise ContractError(
                    "the model was put in training mode inside engine.lockstep(); do that after the block"
                )
            return self._accumulation.forward(*args, **kwargs)
        except RuntimeError as error:
            parameter_access.refuse_sharded_read(self._adapter, error)
            raise

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its accumulation window, in a loop that decides that by itself.

        Call it before each forward, with the same value on every rank; a value holds until the next call or the end of
        the window. Not for loops over `batches` or `windows`, which know. Not collective.

        The length of such a window is not known before its end, so mean losses are divided by it in the update. A
        window whose end was said goes on if the next forward, or the next call of this, comes in place of `step`.

        Args:
            last: Whether the coming micro-batch is the last one of its window.

        Raises:
            ContractError: Inside a window whose length is known, between a forward and its backward, on a closed
                engine, or the window goes on after its gradients were read.
        """
        self._training("set_boundary").set_boundary(last)

    def backward(self, loss: Tensor, num_items: int | Tensor | None = None, *, scaled: bool = False) -> None:
        """Run the backward of one micro-batch. Collective.

        Args:
            loss: A scalar. Without `num_items`, the mean loss of this micro-batch; the engine divides it by the length
                of the accumulation window. With `num_items`, the sum of the losses of this micro-batch's items.
            num_items: How many items (tokens, samples) `loss` sums over on this rank, 0 or more; for every micro-batch
                of a window and on every rank, or for none. The update then uses the gradient of the mean over all items
                of the window and of all ranks.
            scaled: Whether `loss` is already divided, as frameworks do: the update then uses the sum of the gradients
                over the window, averaged over the ranks. For every micro-batch of a window, or for none.

        Raises:
            ContractError: `loss` is not a scalar tensor with a graph, the engine was not called since the last step
                (gradients of `engine.module(...)` would not be reduced), `step` was not called since the last backward,
                or `num_items` is not a count or is missing for some micro-batches of the window.
        """
        try:
            self._training("backward").backward(loss, num_items, scaled=scaled)
        except RuntimeError as error:
            parameter_access.refuse_sharded_read(self._adapter, error)
            raise

    def step(self, clip_grad_norm: float | EllipsisType | None = ...) -> Step:
        """End a micro-batch, after every backward; at the end of an accumulation window, make the update. Collective.

        Args:
            clip_grad_norm: Maximum norm for this update, None for no clipping; by default `training.gradient_clipping`.

        Returns:
            What was done. `grad_norm` is the norm before clipping, a Python float, the same on every rank; `updated`,
            `skipped` and it are read when you access them, so that the call does not wait for the device.

        Raises:
            ContractError: No backward since the last step, a window without items, or `clip_grad_norm` is not positive.
            NonFiniteError: On every rank: a gradient is infinite or NaN on one of them, `training.nonfinite` is
                `raise`, and a lower loss scale cannot help. The window is over and nothing was updated.
            CheckpointError: On every rank: an automatic save failed, after the update.
            SystemExit: On every rank, with code 85: a signal of `checkpoint.on_signal` arrived, and the run is saved.
        """
        step = self._training("step").step(clip_grad_norm)
        if not self._order.micro_batch:
            self._checkpoints.save_if_due()
        return step

    def discard(self) -> None:
        """Discard the accumulation window and its gradients, as if its backward calls had not been made. Collective.

        The schedule does not advance, the next backward begins a new window, and a loop over `batches` continues with
        the first batch of the next one. Works at any point of a window, also after a forward without a backward;
        elsewhere it does nothing.
        """
        self._order.require_open("discard")
        self._order.check_now("discard")
        if self._accumulation is not None:
            self._accumulation.discard()

    def batches(self, loader: Iterable[Any], *, progress: bool = False) -> Passes[Any]:
        """Yield this rank's batches, moved to the device. Collective: all ranks must iterate.

        Reads one accumulation window ahead, so that an incomplete last window is divided by its true length
        (`training.last_window: step`) or dropped (`drop`). In evaluation mode every batch is yielded, also while the
        training loop outside is in the middle of a window.

        A checkpoint has the position of the loader that the last update was made with, unless `loader` is a generator,
        an `enumerate` or another object that hides a loader or reads ahead (a bar of tqdm does not): then it warns.

        Args:
            loader: Yields this rank's own batches, on every rank as many, as `unishard.dataloader` does, except inside
                `lockstep`.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Returns:
            An object like torch's `DataLoader`: each iteration is a pass over the loader, and its length is the number
            of batches that the next one yields, after a resume those that are left.

        Raises:
            ContractError: A batch was not followed by backward and step, an earlier loop stopped inside a window, or a
                loop in training mode, such as a validation without `eval`, begins inside a window of another one.
            DataError: The loaders read the same share on two ranks, shard the data twice, repeat samples in each
                update, or have a batch size that contradicts `training.global_batch_size` (docs/data.md); also a
                checkpoint's position does not fit the loader.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        return self._batching.batches(loader, progress=progress)

    def windows(
        self, loader: Iterable[Any], *, lengths: Iterable[int] | None = None, progress: bool = False
    ) -> Passes[Window]:
        """Yield this rank's batches in accumulation windows, one per update. Collective: all ranks must iterate.

        Like `batches`, for loops that need a complete window before its first forward, or windows of different lengths.

        Args:
            loader: As for `batches`.
            lengths: Batches in each window, the same on every rank; by default `training.gradient_accumulation_steps`
                in each. The loop ends when `lengths` or `loader` ends.
            progress: As for `batches`.

        Returns:
            As of `batches`; yields the batches of one window at a time, each moved to the device when it is read.

        Raises:
            ContractError: As in `batches`, whose other errors it raises too; or a length is not positive.
        """
        return self._batching.windows(loader, lengths=lengths, progress=progress)

    def mean(self, value: Tensor | float) -> float:
        """Average a scalar over the ranks. Collective.

        Args:
            value: A number or a tensor with one, such as a loss to log.

        Raises:
            ContractError: It is something else.
        """
        self._order.require_open("mean")
        check_number("mean", "value", value)
        self._order.check_now("mean")
        total = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().reshape(()).clone()
        with self._order.awaiting():
            dist.all_reduce(total)
            return float(total.item() / dist.get_world_size())

    def log(self, **values: Tensor | float) -> None:
        """Log your own values beside the engine's, to what `logging.to` names. Not collective.

        Rank 0's values are written: pass `engine.mean(value)` for the mean over the ranks. They belong to the record of
        the step that has just ended, or to the next one if that step has none; several values of one name are averaged.
        A tensor is read when the record is written, so the call does not wait for the device.

        Args:
            values: Numbers or tensors with one element, by name: `accuracy=0.9`, `**{"eval/loss": loss}`.

        Raises:
            ContractError: A value is no number, or a name is one that the engine logs itself.
        """
        self._training("log").observers.on_log(values)

    def train(self, mode: bool = True) -> Self:
        """Set the model to training mode, or with False to evaluation mode. Collective.

        The first evaluation after training makes buffers that differ between ranks equal, as `training.buffers` says.
        Returns the engine; `with engine.eval():` ends in the mode of before, and closes nothing.
        """
        if mode:
            self._training("train")
        self._order.require_open("train")
        if self.module.training and not mode:
            self._buffers.equalize("eval")
        self._observers.on_evaluate(not mode)
        before = self.module.training
        self.module.train(mode)
        return cast(Self, EngineInMode(self, before))

    def eval(self) -> Self:
        """Set the model to evaluation mode. Collective, as `train`."""
        return self.train(False)

    def set_trainable(self, names: str | Iterable[str], trainable: bool = True) -> None:
        """Freeze parameters, or unfreeze them, from the next accumulation window on. Collective.

        As in plain torch when `requires_grad` changes and gradients are None: a frozen parameter keeps its value and
        its optimizer state, without weight decay, and one that was never trained starts with new state and its own step
        count.

        Args:
            names: Names of parameters, of modules (all their parameters) or patterns such as `*.lora_A.*`; for a tied
                parameter any of its names.
            trainable: False to freeze them.

        Raises:
            ContractError: Inside a window, a name matches nothing, a parameter was frozen in `prepare`, or no trainable
                one would be left.
        """
        training = self._training("set_trainable")
        self._order.require("set_trainable")
        self._order.check_now("set_trainable")
        training.adapter.set_trainable(self._trainable.choose(names, trainable), trainable)

    @without_inference_mode
    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the whole model inside the block: gradients reach inputs, but not its parameters. Collective.

        For another engine's loss that is computed through this model; this engine's window and gradients do not change.
        Keep its `backward` inside the block too, because activation checkpointing recomputes the forward there.
        """
        self._order.require("frozen")
        was, self._order.frozen = self._order.frozen, True
        try:
            with self._adapter.frozen():
                yield
        finally:
            self._order.frozen = was

    # -- evaluation --------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate` with these arguments, as of transformers, without a graph. Collective.

        Each rank passes its own inputs, which are moved to `engine.device`, and gets its own sequences, which may
        differ in length. With sharded parameters, finished ranks continue to compute until all are done, if `generate`
        takes `synced_gpus` as in transformers; otherwise it must make the same number of forwards on every rank.

        Raises:
            ContractError: The model has no `generate`.
        """
        self._order.require_open("generate")
        return self._evaluation.generate(*args, **kwargs)

    def lockstep(self) -> AbstractContextManager[None]:
        """Allow ranks to make different numbers of forwards, or of `generate` calls, inside the block. Collective.

        A rank that leaves the block replays its last call, or that of another rank if it made none, until all ranks are
        done. The replayed calls have no visible effect; the cost is one small collective per call.

        Raises:
            ContractError: The model is in training mode, or the block is inside another one.
            RankMismatchError: In the same turn one rank calls the model and another one `generate`.
        """
        self._order.require_open("lockstep")
        return self._evaluation.lockstep()

    def gather_for_metrics(self, data: Any, *, pad: float | None = None) -> Any:
        """Gather what all ranks computed for a batch, on every rank, in dataset order. Collective.

        With `unishard.dataloader` and `engine.batches` in an evaluation loop, the samples that pad the last batches are
        removed.

        Args:
            data: Tensors with one row per sample, or lists of strings or numbers with one entry per sample, in dicts,
                lists and tuples; as many as each rank has. A 0-d tensor, such as a mean loss, gives one entry per rank.
            pad: Value to pad dimensions after the first if they differ between ranks, such as the lengths of generated
                sequences; by default they must be equal.

        Returns:
            The same containers; tensors are detached and on their original device.

        Raises:
            ContractError: `data` contains something else, or not one row per sample although padding must be removed.
            RankMismatchError: The ranks hold different structures, dtypes or lengths.
        """
        self._order.require_open("gather_for_metrics")
        return self._evaluation.gather_for_metrics(data, pad=pad)

    # -- parameters and gradients by name ----------------------------------------------------------

    def parameter(self, name: str) -> Tensor:
        """Read a master weight, at any time. Collective.

        Args:
            name: Name in `module.named_parameters()`; for a tied parameter any of its names.

        Returns:
            A full copy on `device`, in fp32, or complex64 if it is complex; for a frozen parameter a copy of what the
            engine keeps, which may be rounded to `precision.compute`.

        Raises:
            ContractError: There is no such parameter.
        """
        return self._parameters.parameter(name)

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with. Collective.

        Args:
            name: Name in `module.named_parameters()`.
            value: The full tensor, any floating dtype and device. Rank 0's value is used; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, `value` does not fit it, or a forward waits for its backward.
        """
        self._parameters.set_parameter(name, value)

    def gathered(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Edit several master weights: on exit the tensors are written back, as with `set_parameter`. Collective.

        Rank 0's edits are used, none after an exception inside the block. To use weights in a loss, see `unsharded`.

        Args:
            names: Names in `module.named_parameters()`; all these are in memory at once on every rank.

        Yields:
            Full fp32 tensors without a graph by name, on `device`; tied names share one tensor. Edit them in place.

        Raises:
            ContractError: There is no such parameter, a tensor was replaced by one that does not fit, or a forward
                waits for its backward.
        """
        return self._parameters.gathered(names)

    def unsharded(self, names: Iterable[str]) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Use full weights, which autograd knows, outside the forward of their modules. Collective.

        For a fused loss that takes `lm_head.weight`, a penalty on weights, or an output projection with the embedding's
        weight. Put the forward and its backward into the block, and `step` after it. To edit weights, see `gathered`.

        Args:
            names: Names in `module.named_parameters()`; all these, and those that are gathered with them, are in memory
                at once on every rank.

        Yields:
            The parameters by name, as the model's modules have them in the block, and valid only there: full, in the
            dtype that the model computes with. Tied names share one parameter.

        Raises:
            ContractError: There is no such parameter, a parameter was edited, the block ends before a backward that
                needs it, or it is inside another one.
        """
        return parameter_access.unsharded(self._parameters, self._adapter, self._order, names)

    def state_dict(self, *, dtype: str | None = None, all_ranks: bool = False) -> dict[str, Tensor]:
        """Read all weights and persistent buffers into host memory, one at a time. Collective, at any time.

        Args:
            dtype: `fp32`, `bf16` or `fp16`, for floating-point tensors; what a class of transformers keeps in fp32 is
                fp32. None for the master weights as they are.
            all_ranks: Whether every rank gets them; each then holds the whole model in host memory.

        Returns:
            Full tensors by name, as the unsharded model's `state_dict`, on rank 0; empty on the others unless
            `all_ranks` is set. Tied names share one tensor.

        Raises:
            ContractError: There is no such dtype.
        """
        self._order.require_open("state_dict")
        return self._weights.state_dict(dtype, all_ranks=all_ranks)

    def load_weights(self, source: Mapping[str, Tensor] | str | Path | None, *, strict: bool = True) -> None:
        """Replace all weights, and every copy that the engine computes with, one at a time. Collective.

        The optimizer's state stays, and so do schedule and step count: to continue a run, see `load`.

        Args:
            source: Full tensors by name, as `state_dict` returns them, or a directory with safetensors in the layout of
                `save_pretrained`. Rank 0's is used; the others may pass None.
            strict: Whether every name must match; if not, what matches is loaded.

        Raises:
            CheckpointError: On every rank, before anything is changed: a name is missing or unknown, a shape differs,
                or the files cannot be read.
            ContractError: Inside an accumulation window or `unsharded`.
        """
        self._order.require("load_weights")
        self._weights.load(source, strict=strict)
        self._buffers.begin()

    def weights(self, *, dtype: str | None = None, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Stream all weights and persistent buffers, for example to an inference server. Collective: iterate over all.

        Args:
            dtype: As in `state_dict`.
            merged: Whether to add LoRA adapters of peft to the weights that they change, under the base model's names.

        Yields:
            Name and full tensor on `device`, on every rank, one at a time: no rank ever holds the whole model twice.
            Tied weights come once, under their first name.

        Raises:
            ContractError: There is no such dtype, or `merged` finds adapters other than LoRA of linear layers.
        """
        self._order.require_open("weights")
        return self._weights.stream(dtype, merged=merged)

    def routed(self, *methods: str, parts: Iterable[str] = ()) -> nn.Module:
        """Let calls of the model itself run through the engine, for frameworks that hold a model and call it.

        Not collective. The model keeps its identity and its weights' names; its class becomes a subclass of its own
        with the same name, until the engine is closed or `routed` is called again.

        Args:
            methods: Names of methods, besides `generate`, that are to run as the engine's forward too: `compute_loss`.
            parts: Names of modules inside the model, such as `encoder`, that are called from outside.

        Returns:
            `engine.module`: `model(...)` is then `engine(...)`.

        Raises:
            ContractError: The model has no such method or part.
        """
        self._order.require_open("routed")
        return self._routed.open(methods, [*parts])

    def reached_by(self, loss: Tensor) -> bool:
        """Whether the backward of a loss would leave gradients on the model; never inside `frozen`. Not collective."""
        return reaches(loss, self._training("reached_by").adapter.leaves())

    def parameter_norms(self) -> dict[str, float]:
        """L2 norm of each master weight, frozen ones too, at any time. Collective: one all-reduce, as `grad_norms`.

        Returns:
            Norms by name, fp32 accuracy, the same on every rank; a tied parameter under its first name.
        """
        self._order.require_open("parameter_norms")
        return self._parameters.parameter_norms()

    def grad(self, name: str) -> Tensor | None:
        """Read the gradient of the coming update: averaged over window and ranks, before clipping. Collective.

        Call it between the backward of a window's last micro-batch and `step`.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter has one gradient under all its names.

        Returns:
            A full fp32 copy on `device`; None for a frozen parameter and for one that no rank used.

        Raises:
            ContractError: There is no such parameter, or the window is not at its end.
        """
        self._training("grad")
        return self._gradients.grad(name)

    def set_grad(self, name: str, value: Tensor) -> None:
        """Replace the gradient of the coming update, before its norm is computed and it is clipped. Collective.

        Args:
            name: Name in `module.named_parameters()`, of a trainable parameter.
            value: Full, in the units of `grad`, any floating dtype and device. Rank 0's is used; every rank passes one.

        Raises:
            ContractError: As in `grad`; or the parameter is frozen, or `value` does not fit it.
        """
        self._training("set_grad")
        self._gradients.set_grad(name, value)

    def grad_norms(self) -> dict[str, float]:
        """L2 norm of each gradient that `grad` reads; the norm of these norms is `Step.grad_norm`.

        Collective: one all-reduce of one number per parameter; nothing is gathered. Call it where `grad` can be called.

        Returns:
            As of `parameter_norms`; parameters without a gradient are omitted.

        Raises:
            ContractError: The window is not at its end.
        """
        self._training("grad_norms")
        return self._gradients.grad_norms()

    def grad_norm(self) -> Tensor:
        """The norm that `step` will return as `grad_norm`, before the step, which uses it again if its engine can.

        Collective. Call it where `grad` can be called.

        Returns:
            A 0-d fp32 tensor on `device`, the same on every rank; FSDP2 does not wait for it.

        Raises:
            ContractError: The window is not at its end.
        """
        self._training("grad_norm")
        return self._gradients.grad_norm()

    def ema(self, decay: float = 0.999) -> MovingAverage:
        """Keep an exponential moving average of the weights that train, from now on. Collective.

        It starts at the current weights, and each update that was not skipped makes it
        `decay * average + (1 - decay) * weights`, in fp32, in one pass over this rank's shards. `save` includes it.
        After a load, also that of `checkpoint.on_existing: resume` in `prepare`, it continues with the saved average of
        any engine and number of ranks: call this before the first training forward.

        Args:
            decay: The part of the average that an update keeps, from 0 to 1.

        Returns:
            The average: `with ema.weights():` evaluates, generates and exports with it, `ema.parameter(name)` reads it.

        Raises:
            CheckpointError: On every rank: the average of the loaded checkpoint cannot be read.
            ContractError: `decay` is something else, there is one already, or inside an accumulation window.
        """
        training = self._training("ema")
        average, training.after_update = begin_average(decay, training.adapter, self._tensors, self._order)
        return average

    # -- what it is --------------------------------------------------------------------------------

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
        """The factor of the loss in backward, by which gradients are divided after it; 1.0 except in fp16."""
        return LossScale(self._precision).value if self._accumulation is None else self._accumulation.loss_scale.value

    @property
    def resumed(self) -> Resumed | None:
        """What the last `load` returned, or `prepare` with `checkpoint.on_existing: resume`; None for a new run."""
        return self._checkpoints.resumed

    def placement(self) -> Placement:
        """What the engine holds, read from its live tensors."""
        return self._adapter.placement()

    @property
    def rank(self) -> int:
        """This process among all of the run, from 0."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes what only one process should; not to guard collective calls."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only, as the built-in `print`; above the progress bar if one is shown. Not collective.

        The values are computed on every rank: `engine.print(engine.mean(loss))` is right.
        """
        if self.is_main:
            print(*values, **options)  # noqa: T201 (what the method is for)

    # -- checkpoints and export --------------------------------------------------------------------

    def save(self, root: str | Path | None = None, *, state: Any = None, metric: float | Tensor | None = None) -> Path:
        """Save model, optimizer, schedule, loss scale, random state, data position and `state`. Collective.

        A new directory `step-...` appears in `root` once it is complete and on the disk; a failed save leaves nothing
        behind. Each rank writes its shards; of buffers that differ between ranks, such as running means, the checkpoint
        has each rank's and the merged ones (`training.buffers`). Ctrl-C ends the save only after it is complete, the
        second one at once. `checkpoint.keep_last`, `keep_every` and `keep_best` are applied afterwards.

        Args:
            root: Directory of the run's checkpoints, which all ranks share; by default `checkpoint.dir`.
            state: Your own dicts, lists, numbers, strings and tensors; `load` returns them: rank 0's where the other
                ranks pass the same or None, else each rank's own, and rank 0's on another number of ranks.
            metric: A number such as the validation loss, the same on all ranks, by which `checkpoint.keep_best` and
                `load("best")` find the best checkpoint.

        Returns:
            The checkpoint; with `checkpoint.async_save` it is complete when `wait` or the next `save` returns.

        Raises:
            CheckpointError: On every rank: it could not be written, `state` contains something else, or, with
                `checkpoint.async_save`, the previous save failed; or this is the first save in `checkpoint.dir` and it
                holds another run (`checkpoint.on_existing: error`).
            ContractError: Inside an accumulation window or `frozen`, no directory is set, another open engine of this
                process saves there, or `metric` is no number.
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
        """Resume from a checkpoint of any engine, strategy and number of ranks, before the loop. Collective.

        Each rank reads its shards. Learning rates, schedule and precision come from the current config; differences
        from the checkpoint are logged, and listed in the result. With another number of ranks, random generators are
        seeded from `training.seed`, the step and the rank.

        Args:
            source: A checkpoint; a directory of checkpoints, of which the newest complete one is used; `"latest"` for
                the newest in `checkpoint.dir`, which may have none yet; or `"best"` for the one there with the best
                metric of the newest run.
            strict: Whether every name, shape and kind of optimizer state must match; if not, what does not is logged.
            verify: `"files"` checks the files' checksums before reading; `"bits"` also checks afterwards that every
                tensor is bit-equal to what was saved, on any engine and number of ranks; None checks nothing.
            data: Whether the next training loader continues at the checkpoint's data position; False to begin an epoch,
                for example with other data.

        Returns:
            Where training continues; None for `"latest"` if `checkpoint.dir` has no checkpoint.

        Raises:
            CheckpointError: On every rank, before anything is changed: there is no such checkpoint, it is damaged, or
                it does not match the model or the optimizer. Afterwards: `verify="bits"` found a difference.
            ContractError: Inside an accumulation window or `frozen`, a forward still waits for its backward, `verify`
                is something else, or `checkpoint.dir` is not set.
        """
        return self._checkpoints.load(source, strict=strict, verify=verify, data=data)

    def leave(self, root: str | Path) -> None:
        """Release a directory of checkpoints as soon as what was saved there is complete.

        The engine otherwise owns it until `close`, and no other engine of this process may save there.

        Args:
            root: What `save` was passed.
        """
        self._order.require_open("leave")
        self._checkpoints.leave(root)

    def on_save(self, state: Callable[[], Any]) -> None:
        """Set what returns `state` for automatic saves, on every rank; an explicit `save` uses its own argument."""
        self._checkpoints.on_save(state)

    def wait(self) -> None:
        """Wait until the background save is complete. Collective.

        Raises:
            CheckpointError: On every rank: it failed.
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
        """Export safetensors, config and tokenizer for `from_pretrained`; of a PEFT model its adapters. Collective.

        Each rank writes its shards directly into the files; nothing is gathered. The bytes are the same for every
        engine, strategy and number of ranks, and for `unishard export` from a checkpoint.

        Args:
            folder: An empty or new directory, unless `overwrite` is set; on a file system that all ranks share.
            dtype: `fp32`, `bf16` or `fp16`, rounded once from the master weights; what a class of transformers keeps
                in fp32 is fp32. None for the dtype in the model's config, or fp32.
            max_shard_size: Maximum size of a file, such as `5GB` or a number of bytes.
            tokenizer: A tokenizer or processor of transformers, or a directory with one, to save with the weights.
            overwrite: Whether to replace an earlier export in `folder`, with all that it holds, once this is complete.

        Returns:
            The directory.

        Raises:
            CheckpointError: On every rank: the model cannot be exported, an argument is invalid, `folder` is not empty
                (with `overwrite`: no earlier export), or a rank cannot write.
            ContractError: Inside an accumulation window.
        """
        return self._checkpoints.export(
            folder, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer, overwrite=overwrite
        )

    # -- the end -----------------------------------------------------------------------------------

    def release(self) -> nn.Module:
        """Close the engine, and make its model plain again, so that it can be used or prepared once more. Collective.

        For a model that is evaluated and then trained, or trained in two runs. Every rank gets the full weights, in
        host memory: those that trained in `precision.master`, the others as they are. Hooks and methods that the model
        got after `prepare` are removed.

        Returns:
            The model.

        Raises:
            BackendError: This torch lacks a private name that FSDP2 needs for it.
            ContractError: `train=False` rounded the weights to `precision.compute`, or inside an accumulation window.
        """
        self._order.require("release")
        plain, rounded = self._plain, self._weights.rounded(self._plain.dtypes)
        if rounded is not None:
            raise ContractError(
                f"release: {rounded} was rounded to {self._precision.compute} by prepare(..., train=False), and what "
                "it was is lost; build the model again, or prepare it with precision: fp32"
            )
        forget, weights = self._adapter.releasing(), self._weights.state_dict(None, all_ranks=True)
        module = self.module
        self._close(None)
        plain.restore(weights)
        forget()
        return module

    def close(self) -> None:
        """Release the engine's resources. A second call does nothing; any other use afterwards is an error."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close(next((error for error in exc if isinstance(error, BaseException)), None))

    def _close(self, why: BaseException | None) -> None:
        if self._order.phase is Phase.CLOSED or lifetime.is_forked():
            return
        # From the script, outside the engine's calls.
        if why is not None and (note := parameter_access.explain_sharded_read(self._adapter, why)):
            why.add_note(note)
        lifetime.ended_by(why)
        self._order.close(why)
        try:
            self._routed.close()
            self._guarded.close()
            if self._accumulation is not None:
                self._accumulation.close()
            self._checkpoints.close()
        finally:
            self._adapter.close()

    def _training(self, call: str) -> Accumulation:
        """The training loop's state, which an engine for inference has not."""
        if self._order.closed:
            self._order.require_open(call)
        if self._accumulation is None:
            raise ContractError(
                f"{call} needs an engine for training, but this model was prepared with train=False; prepare it "
                "without train=False, or call the engine that trains"
            )
        return self._accumulation


class EngineInMode(Engine):
    """What `train` and `eval` return: the same engine, but for a `with` block."""

    __slots__ = ("_before",)

    def __init__(self, engine: Engine, before: bool) -> None:
        object.__setattr__(self, "__dict__", vars(engine))
        self._before = before

    def __exit__(self, *exc: object) -> None:
        if self._accumulation is None or any(exc):
            super().__exit__(*exc)
        elif self._order.phase is not Phase.CLOSED:
            self.train(self._before)
