"""`engine.framework`: what a framework with a loop of its own needs of an engine, and an ordinary loop does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unishard.contract.adapter import ShardedModel
from unishard.contract.plan import RunPlan
from unishard.engine.entering import entered
from unishard.engine.guards.graph import reaches
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.routed_calls import RoutedCalls
from unishard.engine.state.save_and_load import SaveAndLoad
from unishard.engine.state.sharded_reads import refuse_sharded_read
from unishard.engine.training_only import require_training
from unishard.engine.weights import Weights
from unishard.errors import ContractError
from unishard.sequence.whole_calls import WholeCalls


@entered
class Framework:
    """Calls for frameworks that hold the model and decide about the loop; `engine.framework`."""

    def __init__(
        self,
        adapter: ShardedModel,
        plan: RunPlan,
        order: CallOrder,
        accumulation: Accumulation | None,
        weights: Weights,
        checkpoints: SaveAndLoad,
        routed: RoutedCalls,
        whole_calls: WholeCalls | None,
        close: Callable[[], None],
    ) -> None:
        """Called by `unishard.prepare`."""
        self._adapter = adapter
        self._precision, self._plain = plan.model.precision, plan.model.plain
        self._order = order
        self._accumulation = accumulation
        self._weights = weights
        self._checkpoints = checkpoints
        self._routed = routed
        self._whole_calls = whole_calls
        self._close = close

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming micro-batch ends its accumulation window, in a loop that decides that by itself.

        Call it before each forward, with the same value on every rank; a value holds until the next call or the end of
        the window. Not for loops over `Engine.batches` or `windows`, which know. Not collective.

        The length of such a window is not known before its end, so mean losses are divided by it in the update. A
        window whose end was said goes on if the next forward, or the next call of this, comes in place of `step`.

        Args:
            last: Whether the coming micro-batch is the last one of its window.

        Raises:
            ContractError: Inside a window whose length is known, between a forward and its backward, on a closed
                engine, or the window goes on after its gradients were read.
        """
        require_training(self._accumulation, self._order, "framework.set_boundary").set_boundary(last)

    def scaled_backward(self, loss: Tensor) -> None:
        """Run the backward of a loss that is already divided by the length of the window. Collective.

        In place of `Engine.backward`, for every micro-batch of a window or for none: the update then uses the sum of
        the gradients over the window, averaged over the ranks.

        Args:
            loss: A scalar.

        Raises:
            ContractError: As in `Engine.backward`.
        """
        training = require_training(self._accumulation, self._order, "framework.scaled_backward")
        try:
            training.backward(loss, None, scaled=True)
        except RuntimeError as error:
            refuse_sharded_read(self._adapter, error)
            raise

    def routed(self, *methods: str, parts: Iterable[str] = (), itself: bool = True) -> nn.Module:
        """Let calls of the model itself run through the engine, and `generate` of its parts. Not collective.

        The model keeps its identity and its weights' names; its class becomes a subclass of its own with the same name,
        until the engine is closed or `routed` is called again.

        Args:
            methods: Names of methods, besides `generate`, that are to run as the engine's forward too: `compute_loss`.
            parts: Names of modules inside the model, such as `encoder`, that are called from outside.
            itself: Whether a call of the model runs through the engine; else it only runs the model's own code, such as
                that of a module of Lightning, which calls the model that is one of `parts`.

        Returns:
            `engine.module`: `model(...)` is then `engine(...)`, unless `itself` is false.

        Raises:
            ContractError: The model has no such method or part.
        """
        self._order.require_open("framework.routed")
        return self._routed.open(methods, [*parts], itself=itself)

    def finish_whole(self, finish: Callable[[Mapping[str, Any], Tensor], Tensor]) -> None:
        """Set what routed calls return of whole sequences, under `parallel.sequence`; nothing without it.

        For a model whose forward a framework has replaced by one that leaves out positions: a rank makes one of each
        position that it has, and only the whole knows which one of them is left out. Not collective.

        Args:
            finish: Takes the arguments of a call by their names, and an output joined from the parts of all ranks,
                `[batch, sequence, ...]`; returns what the caller gets in its place.
        """
        if self._whole_calls is not None:
            self._whole_calls.finish = finish

    def reached_by(self, loss: Tensor) -> bool:
        """Whether the backward of a loss would leave gradients on the model; never inside `Weights.frozen`.

        Not collective.
        """
        training = require_training(self._accumulation, self._order, "framework.reached_by")
        return reaches(loss, training.updates.leaves().values())

    def on_save(self, state: Callable[[], Any]) -> None:
        """Set what returns `state` for automatic saves, on every rank; an explicit `save` uses its own argument."""
        self._checkpoints.on_save(state)

    def leave(self, root: str | Path) -> None:
        """Release a directory of checkpoints as soon as what was saved there is complete. Not collective.

        The engine otherwise owns it until `close`, and no other engine of this process may save there.

        Args:
            root: What `save` was passed.
        """
        self._order.require_open("framework.leave")
        self._checkpoints.leave(root)

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
        self._order.require("framework.release")
        rounded = self._weights.rounded(self._plain.dtypes)
        if rounded is not None:
            raise ContractError(
                f"release: {rounded} was rounded to {self._precision.compute} by prepare(..., train=False), and what "
                "it was is lost; build the model again, or prepare it with precision: fp32"
            )
        forget, weights = self._adapter.releasing(), self._weights.state_dict(all_ranks=True)
        module = self._adapter.module
        self._close()
        self._plain.restore(weights)
        forget()
        return module
