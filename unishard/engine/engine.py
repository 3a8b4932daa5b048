"""The engine: the contract of the training loop, the same around every backend.

`Engine` states each call's promise and hands the work to the part of `unishard.engine` that does it; what differs between engines is in
its adapter (`unishard.engine.adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import EllipsisType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.data.batches import Window
from unishard.engine.prepared_model import PreparedModel
from unishard.engine.results import Step
from unishard.errors import ContractError

__all__ = ["Engine"]


class Engine(PreparedModel):
    """A prepared model and, if it trains, its optimizer, with the loop around them. `unishard.prepare` makes it.

    Every method but `on_save` and `close` is collective: call it on all ranks. A call on a closed engine, and a call that trains on a
    model that was prepared with `train=False`, raises `ContractError`. Where ranks make different calls, all of them raise
    `RankMismatchError`, which names each rank's call.
    """

    # -- the loop ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch; in evaluation mode without a graph, as under `torch.no_grad`. Collective.

        Raises:
            ContractError: The engine is closed, or a `lockstep` block runs in training mode.
        """
        self._order.require_open("forward")
        if self._order.frozen:  # through the module, not through what an adapter wraps it in, which would wait for gradients
            self._order.enter("forward", ", frozen")
            return self.module(*args, **kwargs)
        if self._accumulation is None or not self.module.training:
            return self._evaluation.run("forward", args, kwargs)
        if self._evaluation.lockstep_open is not None:
            raise ContractError("the model was put in training mode inside engine.lockstep(); do that after the block")
        return self._accumulation.forward(*args, **kwargs)

    def backward(self, loss: Tensor, num_items: int | Tensor | None = None) -> None:
        """Backward of one micro-batch. Collective.

        Args:
            loss: Scalar. Without `num_items` the mean loss of this micro-batch, which the engine divides by the length of the
                accumulation window. With it the sum of the losses of this micro-batch's items.
            num_items: How many items (tokens, samples) `loss` sums over on this rank, 0 or more. The update then uses the gradient
                of the mean over all items of the window and of all ranks, however unevenly they are spread. Pass it for every
                micro-batch of a window and on every rank, or not at all.

        Raises:
            ContractError: `loss` is no scalar tensor with a graph, the engine is closed, it has not been called since the last
                step (gradients of `engine.module(...)` would not be reduced), `step` has not been called since the last
                backward, or `num_items` is no count or is missing for a part of the window.
        """
        self._training("backward").backward(loss, num_items)

    def step(self, clip_grad_norm: float | EllipsisType | None = ...) -> Step:
        """After every micro-batch. Updates the parameters at the end of an accumulation window, else only counts. Collective.

        Args:
            clip_grad_norm: Largest gradient norm for this update, None for no clipping; left out, `training.gradient_clipping`.

        Returns:
            What was done. `grad_norm` is the norm before clipping, a Python float, the same on every rank and engine.

        Raises:
            ContractError: No backward since the last step, the engine is closed, `clip_grad_norm` is not positive, or the window
                has no items.
            NonFiniteError: On every rank: a gradient is infinite or not a number on one of them, `training.nonfinite` is `raise`,
                and a lower loss scale cannot help. The window is over and nothing was updated.
            CheckpointError: On every rank: a save that the config asks for failed, after the update.
            SystemExit: On every rank, with code 85: a signal of `checkpoint.on_signal` came, and the run is saved.
        """
        step = self._training("step").step(clip_grad_norm)
        if not self._order.micro_batch:
            self._checkpoints.save_if_due()
        return step

    def discard(self) -> None:
        """Drop the accumulation window: its gradients are dropped as if its backward calls had not been made. Collective.

        Nothing is updated and the schedule stays. The next backward begins a new window, and a loop over `batches` continues with
        the first batch of the next one. Works at any point of a window, also after a forward without a backward; where nothing
        is pending it does nothing.

        Raises:
            ContractError: The engine is closed.
        """
        self._order.require_open("discard")
        self._order.enter("discard")
        if self._accumulation is not None:
            self._accumulation.discard()

    def batches(self, loader: Iterable[Any], *, progress: bool = False) -> Iterator[Any]:
        """This rank's batches, moved to the device. Collective: all ranks must iterate.

        Looks one accumulation window ahead, so that the incomplete one at the end is divided by its true length
        (`training.last_window: step`) or left out (`drop`). In evaluation mode there are no windows: every batch is yielded, also
        while the training loop outside is in the middle of one.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number, as `unishard.dataloader` does, except inside
                `lockstep`.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Raises:
            ContractError: A batch was not followed by backward and step, or an earlier loop stopped inside a window.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        return self._batching.batches(loader, progress=progress)

    def windows(self, loader: Iterable[Any], *, lengths: Iterable[int] | None = None, progress: bool = False) -> Iterator[Window]:
        """This rank's batches in accumulation windows, one for each update. Collective: all ranks must iterate.

        Like `batches`, for loops that need to see a whole window before its first forward, or windows of changing length.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number.
            lengths: Batches in each window, the same on every rank; left out, `training.gradient_accumulation_steps` in each. It
                ends the loop if it ends first.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Yields:
            The batches of one window, each moved to the device when it is taken out.

        Raises:
            ContractError: As `batches`; or a length is not positive.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        return self._batching.windows(loader, lengths=lengths, progress=progress)

    def mean(self, value: Tensor | float) -> float:
        """Mean of a scalar over the ranks. Collective.

        Args:
            value: A scalar, such as a loss to be logged.
        """
        self._order.require_open("mean")
        self._order.enter("mean")
        total = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().reshape(()).clone()
        with self._order.awaiting():
            dist.all_reduce(total)
            return float(total.item() / dist.get_world_size())

    def train(self, mode: bool = True) -> Self:
        """Put the model in training mode, or in evaluation mode.

        Args:
            mode: False for evaluation mode.
        """
        if mode:
            self._training("train")
        self._order.require_open("train")
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model in evaluation mode."""
        return self.train(False)

    def set_trainable(self, names: str | Iterable[str], trainable: bool = True) -> None:
        """Freeze parameters, or make them trainable (again), from the next accumulation window on. Collective.

        What plain torch does when `requires_grad` is toggled and gradients are None: a frozen parameter keeps its value and its
        optimizer state, without decay, and one that has never trained starts with fresh state and a step count of its own.

        Args:
            names: Names of parameters, of modules (all their parameters) or patterns such as `*.lora_A.*`; a tied parameter has
                several names, and each of them means it. Only what was trainable when the model was prepared may train.
            trainable: Whether they train.

        Raises:
            ContractError: Inside a window, a name matches nothing, a parameter was frozen in `prepare`, or none is left to train.
            RankMismatchError: The ranks give different names.
        """
        training = self._training("set_trainable")
        self._order.require_boundary("set_trainable")
        self._order.enter("set_trainable")
        training.adapter.set_trainable(self._trainable.choose(names, trainable), trainable)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Forwards inside pass gradients on to their inputs and leave none on this model's parameters. Collective.

        For the loss of another engine that is computed through this model: keep its `backward` inside as well, since activation
        checkpointing runs the forward again there. Neither the accumulation window nor the gradients of this engine change.
        """
        self._order.require_open("frozen")
        was, self._order.frozen = self._order.frozen, True
        try:
            with self._adapter.frozen():
                yield
        finally:
            self._order.frozen = was

    # -- evaluation -------------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, such as that of transformers, without a graph. Collective.

        Each rank gives its own inputs and gets its own sequences, as long as they come out. Where parameters are sharded, finished
        ranks continue to compute until all are done, if `generate` takes `synced_gpus` as that of transformers does; one that does
        not must make the same number of forwards on every rank.

        Args:
            args: For the model's `generate`.
            kwargs: For the model's `generate`.

        Raises:
            ContractError: The model has no `generate`, or the engine is closed.
        """
        self._order.require_open("generate")
        return self._evaluation.generate(*args, **kwargs)

    def lockstep(self) -> AbstractContextManager[None]:
        """A block in which ranks may make different numbers of forwards, or of `generate`. Collective.

        A rank that leaves the block replays its last call, or one of another rank if it made none, until all have left. Nothing
        of this is seen from outside; it costs one small collective a call. Evaluation mode only.

        Raises:
            ContractError: The model is in training mode, the block is inside another one, or the engine is closed.
            RankMismatchError: At the same turn one rank calls the model and another one `generate`.
        """
        self._order.require_open("lockstep")
        return self._evaluation.lockstep()

    def gather_for_metrics(self, data: Any, *, pad: float | None = None) -> Any:
        """What all ranks computed for a batch, on every rank, in the order of the dataset. Collective.

        With a loader of `unishard.dataloader` in an evaluation loop of `engine.batches`, the samples that pad the last batches are
        left out.

        Args:
            data: Tensors with one row a sample, or lists of strings or numbers with one entry a sample, in dicts, lists and tuples.
                Ranks may have different numbers of rows. A tensor without dimensions, such as a mean loss, gives one entry a rank.
            pad: Value that pads dimensions behind the first where they differ between ranks, such as the lengths of generated
                sequences; left out, they must be equal.

        Returns:
            The same containers; tensors are detached and on the device that they came from.

        Raises:
            ContractError: Something in `data` is neither; or it is not one row a sample where samples must be left out; or the
                engine is closed.
            RankMismatchError: The ranks hold different structures, dtypes or lengths.
        """
        self._order.require_open("gather_for_metrics")
        return self._evaluation.gather_for_metrics(data, pad=pad)
