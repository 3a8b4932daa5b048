"""The engine: the training loop's contract, the same for every backend.

`Engine` documents each call and delegates it to the module of `unishard.engine` that does it; what differs between
sharding engines is in the adapter (`unishard.contract.adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import EllipsisType
from typing import Any, Never, Self

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.config.hints.arguments import refuse_keywords
from unishard.contract.results import Step
from unishard.data.batches import Window, to_device
from unishard.engine.loop.inference_mode import with_inference_as_no_grad, without_inference_mode
from unishard.engine.loop.passes import Passes
from unishard.engine.parameters_by_name import ParametersByName
from unishard.engine.state.unsharded import naming_sharded_reads
from unishard.errors import ContractError
from unishard.failures.endings import names_causes
from unishard.observe.one_number import check_number

__all__ = ["Engine"]


@names_causes
@with_inference_as_no_grad
class Engine(ParametersByName):
    """A prepared model and, for training, its optimizer, with the training loop. Created by `unishard.prepare`.

    Every method except `log`, `on_save` and `close` is collective: call it on all ranks. A call on a closed engine, or
    a training call on a model prepared with `train=False`, raises `ContractError`. If ranks make different calls, all
    of them raise `RankMismatchError`, which names each rank's call.
    """

    # -- the loop
    # ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch; in evaluation mode without a graph, as under `torch.no_grad`. Collective.

        Tensors on another device are moved to `engine.device`, as in `batches`.

        Raises:
            ContractError: The engine is closed, or the model is in training mode inside a `lockstep` block.
        """
        with naming_sharded_reads(self._adapter):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            raise ContractError("the model was put in training mode inside engine.lockstep(); do that after the block")
        return self._accumulation.forward(*args, **kwargs)

    def backward(self, loss: Tensor, num_items: int | Tensor | None = None, **refused: Never) -> None:
        """Run the backward of one micro-batch. Collective.

        Args:
            loss: A scalar. Without `num_items`, the mean loss of this micro-batch; the engine divides it by the length
                of the accumulation window. With `num_items`, the sum of the losses of this micro-batch's items.
            num_items: How many items (tokens, samples) `loss` sums over on this rank, 0 or more. The update then uses
                the gradient of the mean over all items of the window and of all ranks, however they are distributed.
                Pass it for every micro-batch of a window and on every rank, or not at all.
            refused: Nothing: arguments of torch's `backward`, such as `retain_graph`, are not accepted.

        Raises:
            ContractError: `loss` is not a scalar tensor with a graph, the engine is closed, the engine was not called
                since the last step (gradients of `engine.module(...)` would not be reduced), `step` was not called
                since the last backward, or `num_items` is not a count or is missing for some micro-batches of the
                window.
        """
        refuse_keywords("backward", refused)
        with naming_sharded_reads(self._adapter):
            self._training("backward").backward(loss, num_items)

    def step(self, clip_grad_norm: float | EllipsisType | None = ...) -> Step:
        """End a micro-batch; at the end of an accumulation window, update the parameters. Call it after every backward.

        Collective.

        Args:
            clip_grad_norm: Maximum gradient norm for this update, None for no clipping; by default
                `training.gradient_clipping`.

        Returns:
            What was done. `grad_norm` is the norm before clipping, a Python float, the same on every rank; it is read,
            as `updated` and `skipped` are, when you access it, and the call does not wait for the device.

        Raises:
            ContractError: No backward since the last step, the engine is closed, `clip_grad_norm` is not positive, or
                the window has no items.
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

        Nothing is updated and the schedule does not advance. The next backward begins a new window, and a loop over
        `batches` continues with the first batch of the next one. Works at any point of a window, also after a forward
        without a backward; without pending gradients it does nothing.

        Raises:
            ContractError: The engine is closed.
        """
        self._order.require_open("discard")
        self._order.check_now("discard")
        if self._accumulation is not None:
            self._accumulation.discard()

    def batches(self, loader: Iterable[Any], *, progress: bool = False) -> Passes[Any]:
        """Yield this rank's batches, moved to the device. Collective: all ranks must iterate.

        Reads one accumulation window ahead, so that an incomplete last window is divided by its true length
        (`training.last_window: step`) or dropped (`drop`). In evaluation mode there are no windows: every batch is
        yielded, also while the training loop outside is in the middle of a window.

        A checkpoint has the position of the loader that the last update was made with. It is lost, with a warning, if
        `loader` is an `enumerate`, a generator or another object that hides a loader or reads ahead of the loop; a bar
        of tqdm does not.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number, as `unishard.dataloader`
                does, except inside `lockstep`.
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
            loader: Yields this rank's own batches; every rank must yield the same number.
            lengths: Batches in each window, the same on every rank; by default `training.gradient_accumulation_steps`
                in each. The loop ends when `lengths` or `loader` ends.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Returns:
            As of `batches`; yields the batches of one window at a time, each moved to the device when it is read.

        Raises:
            ContractError: As in `batches`; or a length is not positive.
            DataError: As in `batches`.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        return self._batching.windows(loader, lengths=lengths, progress=progress)

    def mean(self, value: Tensor | float) -> float:
        """Average a scalar over the ranks. Collective.

        Args:
            value: A number or a tensor with one, such as a loss to log.

        Raises:
            ContractError: It is something else, or the engine is closed.
        """
        self._order.require_open("mean")
        check_number("mean", "value", value)
        self._order.check_now("mean")
        total = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().reshape(()).clone()
        with self._order.awaiting():
            dist.all_reduce(total)
            return float(total.item() / dist.get_world_size())

    def log(self, **values: Tensor | float) -> None:
        """Log your own values beside the engine's, to what `logging.to` names.

        Not collective, and free where it names nothing.

        Rank 0's values are written, the other ranks' are ignored: pass `engine.mean(value)` for the mean over the
        ranks. They belong to the record of the step that has just ended, or to the next one if that step has none;
        several values of one name are averaged. A tensor is read when the record is written, so the call does not wait
        for the device.

        Args:
            values: Numbers or tensors with one element, by name: `engine.log(accuracy=0.9)`,
                `engine.log(**{"eval/loss": loss})`.

        Raises:
            ContractError: A value is no number, a name is one that the engine logs itself, or the engine is closed.
        """
        self._training("log").observers.on_log(values)

    def train(self, mode: bool = True) -> Self:
        """Set the model to training or evaluation mode. Collective.

        The first evaluation after training makes buffers that differ between ranks equal, as `training.buffers` says.

        Args:
            mode: False for evaluation mode.
        """
        if mode:
            self._training("train")
        self._order.require_open("train")
        if self.module.training and not mode:
            self._buffers.equalize("eval")
        self._observers.on_evaluate(not mode)
        self.module.train(mode)
        return self

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
                parameter any of its names. Only parameters that were trainable in `prepare` can be unfrozen.
            trainable: False to freeze them.

        Raises:
            ContractError: Inside a window, a name matches nothing, a parameter was frozen in `prepare`, or no trainable
                one would be left.
            RankMismatchError: The ranks pass different names.
        """
        training = self._training("set_trainable")
        self._order.require_boundary("set_trainable")
        self._order.check_now("set_trainable")
        training.adapter.set_trainable(self._trainable.choose(names, trainable), trainable)

    @without_inference_mode
    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the whole model inside the block: gradients reach inputs, but not its parameters. Collective.

        For another engine's loss that is computed through this model. Keep its `backward` inside the block too, because
        activation checkpointing recomputes the forward there. This engine's accumulation window and gradients do not
        change.
        """
        self._order.require_open("frozen")
        self._order.require_sharded("frozen")
        was, self._order.frozen = self._order.frozen, True
        try:
            with self._adapter.frozen():
                yield
        finally:
            self._order.frozen = was

    # -- evaluation
    # -------------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate`, such as that of transformers, without a graph. Collective.

        Each rank passes its own inputs, which are moved to `engine.device`, and gets its own sequences, which may
        differ in length. With sharded parameters, finished ranks continue to compute until all are done, if `generate`
        takes `synced_gpus` as in transformers; otherwise it must make the same number of forwards on every rank.

        Args:
            args: For the model's `generate`.
            kwargs: For the model's `generate`.

        Raises:
            ContractError: The model has no `generate`, or the engine is closed.
        """
        self._order.require_open("generate")
        return self._evaluation.generate(*args, **kwargs)

    def lockstep(self) -> AbstractContextManager[None]:
        """Allow ranks to make different numbers of forwards, or of `generate` calls, inside the block. Collective.

        A rank that leaves the block replays its last call, or that of another rank if it made none, until all ranks are
        done. The replayed calls have no visible effect; the cost is one small collective per call. Evaluation mode
        only.

        Raises:
            ContractError: The model is in training mode, the block is inside another one, or the engine is closed.
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
                lists and tuples. Ranks may have different numbers of rows. A 0-d tensor, such as a mean loss, gives one
                entry per rank.
            pad: Value to pad dimensions after the first if they differ between ranks, such as the lengths of generated
                sequences; by default they must be equal.

        Returns:
            The same containers; tensors are detached and on their original device.

        Raises:
            ContractError: `data` contains something else; it does not have one row per sample although padding must be
                removed; or the engine is closed.
            RankMismatchError: The ranks hold different structures, dtypes or lengths.
        """
        self._order.require_open("gather_for_metrics")
        return self._evaluation.gather_for_metrics(data, pad=pad)
