"""The engine: the training loop's contract, the same for every backend.

`Engine` documents each call and delegates it to the part that does it; what differs between sharding engines is in the
adapter (`unishard.contract.adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import ShardedModel
from unishard.contract.plan import RunPlan
from unishard.contract.results import Resumed, Step
from unishard.data.batches import Window, to_device
from unishard.data.warn_once import WarnOnce
from unishard.engine.around_forward import AroundForward
from unishard.engine.assembly import guarded_module, order_of_calls, training_guards, training_windows
from unishard.engine.entering import entered
from unishard.engine.framework import Framework
from unishard.engine.gradients import Gradients
from unishard.engine.guards.edited_gradients import Shown
from unishard.engine.guards.unshared_data import UnsharedData
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.batching import Batching
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.passes import Passes
from unishard.engine.loop.routed_calls import RoutedCalls
from unishard.engine.loop.trainable import Trainable
from unishard.engine.observers import observers_of
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.other_names import OtherNames
from unishard.engine.place import Phase
from unishard.engine.process import Process
from unishard.engine.state.named_parameters import NamedParameters
from unishard.engine.state.run import Run
from unishard.engine.state.save_and_load import SaveAndLoad
from unishard.engine.state.sharded_reads import explain_sharded_read, refuse_sharded_read
from unishard.engine.state.tensors import StateTensors
from unishard.engine.training_only import require_training
from unishard.engine.weights import Weights
from unishard.errors import ContractError
from unishard.failures import lifetime
from unishard.observe.expected_memory import ExpectedMemory
from unishard.observe.observer import Observers
from unishard.observe.one_number import check_number
from unishard.sequence.whole_calls import WholeCalls


@entered
class Engine(OtherNames, Process):
    """A prepared model and, for training, its optimizer, with the training loop. Created by `unishard.prepare`.

    Every method except `log`, `print` and `close` is collective: call it on all ranks, with the same arguments but for
    a rank's own data. If ranks make different calls, all of them raise `RankMismatchError`, which names each rank's
    call. A call on a closed engine, or a training call on a model prepared with `train=False`, raises `ContractError`.

    What is not the loop is in three parts: `weights`, `gradients` and `framework`.
    """

    def __init__(self, adapter: ShardedModel, plan: RunPlan, around: AroundForward, opened: ExitStack) -> None:
        """Set up the parts of the engine around an adapter, and close them with what is open already. Collective."""
        updates, module, warn = adapter.updates, adapter.module, WarnOnce()
        super().__init__(adapter.device)
        self._adapter, self._around = adapter, around
        self._sequences = sequences = around.sequences
        self._order = order = order_of_calls(adapter, plan)
        self._observers = Observers()
        if updates is not None:
            self._observers = observers_of(plan.observe, updates, order.place, ExpectedMemory(plan.memory))
        self._buffers = Buffers(plan.loop.buffers, adapter, order)
        self._evaluation = Evaluation(adapter, order, self._buffers, around, trains=updates is not None)
        self._batching = Batching(
            plan.loop,
            plan.data_share,
            around.place,
            module,
            adapter.device,
            order,
            self._evaluation,
            self._observers,
            warn,
        )
        self._unshared_data = UnsharedData(lambda: self._batching.training.open, order.place, warn, plan.tensor)
        trainable, tensors = Trainable(module), StateTensors(adapter)
        self._accumulation: Accumulation | None = None
        shown: Shown = {}
        if updates is None or plan.optimizer is None:
            module.eval()
        else:
            guards = training_guards(updates, plan, order, trainable, self._unshared_data, shown, around)
            self._accumulation = training_windows(updates, plan.optimizer, plan, order, self._observers, guards)
            opened.callback(self._accumulation.close)
        self._checkpoints = SaveAndLoad(
            Run(
                training=plan.loop,
                tensor=plan.tensor,
                checkpoint=plan.checkpoint,
                text=plan.text.saved,
                packages=["torch", *(name for name in plan.backend.requires if name != "torch")],
                adapter=adapter,
                order=order,
                tensors=tensors,
                buffers=self._buffers,
                batching=self._batching,
                observers=self._observers,
                accumulation=self._accumulation,
                model_class=plan.model.name,
                group_names=[] if plan.optimizer is None else plan.optimizer.groups,
            )
        )
        opened.callback(self._checkpoints.close)
        self._guarded = guarded_module(adapter, plan, order, self._evaluation)
        opened.callback(self._guarded.close)
        whole = None if sequences is None else WholeCalls(self, sequences, around.place, adapter.device)
        self._routed = RoutedCalls(module, order.blocks, whole or self, self.generate, self._evaluation.require_shared)
        opened.callback(self._routed.close)
        parameters = NamedParameters(adapter, order, tensors)
        self._weights = Weights(adapter, order, parameters, tensors, trainable, self._buffers, self._accumulation)
        self._gradients = Gradients(
            order, parameters, tensors, self._accumulation, shown, LossScale(plan.model.precision)
        )
        self._framework = Framework(
            adapter, plan, order, self._accumulation, self._weights, self._checkpoints, self._routed, whole, self.close
        )
        self._opened = opened.pop_all()

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
            if self._order.blocks.frozen:  # not through the adapter, whose wrapper would expect gradients
                self._order.ranks.check_sampled("forward", ", frozen")
                with self._order.forwarding():
                    return self.module(*args, **kwargs)
            if self._accumulation is None or not self.module.training:
                self._unshared_data.skip()
                return self._evaluation.run("forward", args, kwargs)
            if self._evaluation.lockstep_open is not None:
                raise ContractError(
                    "the model was put in training mode inside engine.lockstep(); do that after the block"
                )
            return self._accumulation.forward(*args, **kwargs)
        except Exception as error:
            refuse_sharded_read(self._adapter, error)
            self._around.refuse_failure(error)
            raise

    def backward(self, loss: Tensor, num_items: int | Tensor | None = None) -> None:
        """Run the backward of one micro-batch. Collective.

        Args:
            loss: A scalar. Without `num_items`, the mean loss of this micro-batch; the engine divides it by the length
                of the accumulation window. With `num_items`, the sum of the losses of this micro-batch's items.
            num_items: How many items (tokens, samples) `loss` sums over on this rank, 0 or more; for every micro-batch
                of a window and on every rank, or for none. The update then uses the gradient of the mean over all items
                of the window and of all ranks.

        Raises:
            ContractError: `loss` is not a scalar tensor with a graph, the engine was not called since the last step
                (gradients of `engine.module(...)` would not be reduced), `step` was not called since the last backward,
                or `num_items` is not a count or is missing for some micro-batches of the window.
        """
        try:
            self._training("backward").backward(loss, num_items, scaled=False)
        except RuntimeError as error:
            refuse_sharded_read(self._adapter, error)
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
        if not self._order.place.micro_batch:
            self._checkpoints.save_if_due()
        return step

    def discard(self) -> None:
        """Discard the accumulation window and its gradients, as if its backward calls had not been made. Collective.

        The schedule does not advance, the next backward begins a new window, and a loop over `batches` continues with
        the first batch of the next one. Works at any point of a window, also after a forward without a backward;
        elsewhere it does nothing.
        """
        self._order.require_open("discard")
        self._order.ranks.check_now("discard")
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

    def split_sequence(self, tensor: Tensor, fill: float | None = None) -> Tensor:
        """This rank's part of a whole tensor, under `parallel.sequence`, for loops that do not read `batches`.

        `batches` splits already. Shift labels before you split them. Not collective.

        Args:
            tensor: `[batch, sequence, ...]`, the same on the ranks that share samples.
            fill: What it is padded with at its end: -100 for targets, 0 for inputs; needed where it is padded.

        Returns:
            `[batch, part, ...]`; the tensor itself where the ranks share no samples.
        """
        return tensor if self._sequences is None else self._sequences.part(tensor, fill)

    def mean(self, value: Tensor | float) -> float:
        """Average a scalar over the ranks. Collective.

        Args:
            value: A number or a tensor with one, such as a loss to log.

        Raises:
            ContractError: It is something else.
        """
        self._order.require_open("mean")
        check_number("mean", "value", value)
        self._order.ranks.check_now("mean")
        total = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().reshape(()).clone()
        with self._order.ranks.awaiting():
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
        for tell in self._training("log").observers.on_log:
            tell(values)

    def train(self, mode: bool = True) -> Self:
        """Set the model to training mode, or with False to evaluation mode. Collective.

        The first evaluation after training makes buffers that differ between ranks equal, as `training.buffers` says.
        Returns the engine; `with engine.eval():` ends in the mode of before, and closes nothing.
        """
        training = self._training("train") if mode else self._accumulation
        self._order.require_open("train")
        if self.module.training and not mode:
            self._buffers.equalize("eval")
        for tell in self._observers.on_evaluate:
            tell(not mode)
        before = self.module.training
        self.module.train(mode)
        if training is not None:
            training.optimizer.train_mode(mode)
        return cast(Self, EngineInMode(self, before))

    def eval(self) -> Self:
        """Set the model to evaluation mode. Collective, as `train`."""
        return self.train(False)

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

    # -- its parts, and what it is -----------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The weights by name: read, write, gather, load, stream, freeze, average."""
        return self._weights

    @property
    def gradients(self) -> Gradients:
        """The gradients of the coming update by name, and their norms."""
        return self._gradients

    @property
    def framework(self) -> Framework:
        """What a framework with a loop of its own needs."""
        return self._framework

    @property
    def module(self) -> nn.Module:
        """The user's model, sharded in place, with its module and parameter names."""
        return self._adapter.module

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
    def resumed(self) -> Resumed | None:
        """What the last `load` returned, or `prepare` with `checkpoint.on_existing: resume`; None for a new run."""
        return self._checkpoints.resumed

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
        """Resume from a checkpoint of any engine, strategy and number of ranks. Collective.

        Each rank reads its shards. Learning rates, schedule and precision come from the current config; differences
        from the checkpoint are logged, and listed in the result. With another number of ranks, random generators are
        seeded from `training.seed`, the step and the rank. A loop over `batches` around the call goes back, too.

        Args:
            source: A checkpoint; a directory of checkpoints, of which the newest complete one is used; a URL of either,
                which each node fetches to a temporary directory; `"latest"` for the newest in `checkpoint.dir`, which
                may have none yet; or `"best"` for the one there with the best metric of the newest run.
            strict: Whether every name, shape and kind of optimizer state must match; if not, what does not is logged.
            verify: `"files"` checks the files' checksums before reading; `"bits"` also checks afterwards that every
                tensor is bit-equal to what was saved, on any engine and number of ranks; None checks nothing.
            data: Whether the open loop, or the next training loader, continues at the checkpoint's data position; False
                to let the loop go on where it is, or to begin an epoch, for example with other data.

        Returns:
            Where training continues; None for `"latest"` if `checkpoint.dir` has no checkpoint.

        Raises:
            CheckpointError: On every rank, before anything is changed: there is no such checkpoint, it is damaged, or
                it does not match the model or the optimizer. Afterwards: `verify="bits"` found a difference.
            ContractError: Inside an accumulation window or `frozen`, a forward still waits for its backward, `verify`
                is something else, or `checkpoint.dir` is not set.
        """
        return self._checkpoints.load(source, strict=strict, verify=verify, data=data)

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
        engine, strategy and number of ranks, and for `unishard checkpoint export` from a checkpoint.

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

    def close(self) -> None:
        """Release the engine's resources. A second call does nothing; any other use afterwards is an error."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def _close(self, why: BaseException | None) -> None:
        if self._order.place.phase is Phase.CLOSED or lifetime.is_forked():
            return
        # From the script, outside the engine's calls.
        if why is not None and (note := explain_sharded_read(self._adapter, why) or self._evaluation.explain(why)):
            why.add_note(note)
        lifetime.ended_by(why)
        self._order.close(why)
        self._opened.close()

    def _training(self, call: str) -> Accumulation:
        return require_training(self._accumulation, self._order, call)


class EngineInMode(Engine):
    """What `train` and `eval` return: the same engine, but for a `with` block."""

    __slots__ = ("_before",)

    def __init__(self, engine: Engine, before: bool) -> None:
        object.__setattr__(self, "__dict__", vars(engine))
        self._before = before

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._accumulation is None or error is not None:
            self._close(error)
        elif self._order.place.phase is not Phase.CLOSED:
            self.train(self._before)
