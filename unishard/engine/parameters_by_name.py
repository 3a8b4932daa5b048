"""Parameters and gradients of a prepared model, read and written by name, and their moving average."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from unishard.engine.prepared_model import PreparedModel
from unishard.engine.state.moving_average import MovingAverage, begin_average
from unishard.engine.state.unsharded import unsharded

__all__ = ["ParametersByName"]


class ParametersByName(PreparedModel):
    """The part of `Engine` that reads and writes tensors by the names of the user's model, whatever the sharding."""

    def parameter(self, name: str) -> Tensor:
        """Read a master weight, at any time. Collective.

        Args:
            name: Name in `module.named_parameters()`; for a tied parameter any of its names.

        Returns:
            A full copy on `device`, in fp32, or complex64 if it is complex; for a frozen parameter a copy of what the
            engine keeps, which may be rounded to `precision.compute`.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
        """
        return self._parameters.parameter(name)

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with. Collective.

        Args:
            name: Name in `module.named_parameters()`.
            value: The full tensor, any floating dtype and device. Rank 0's value is used; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, `value` does not fit it, a forward waits for its backward, or the
                engine is closed.
        """
        self._parameters.set_parameter(name, value)

    def gathered(self, names: Iterable[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Edit several master weights: on exit the tensors are written back, as with `set_parameter`. Collective.

        For editing: the tensors have no graph. To use weights in a loss, see `unsharded`. Rank 0's edits are used.
        After an exception inside the block, nothing is written.

        Args:
            names: Names in `module.named_parameters()`. All these parameters are gathered at once, in fp32, on every
                rank.

        Yields:
            Full fp32 tensors by name, on `device`; tied names share one tensor. Edit them in place.

        Raises:
            ContractError: There is no such parameter, a tensor was replaced by one that does not fit, a forward waits
                for its backward, or the engine is closed.
        """
        return self._parameters.gathered(names)

    def unsharded(self, names: Iterable[str]) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Use weights outside the forward of their modules, in a loss for example: full tensors that autograd knows.

        Collective.

        For a fused loss that takes `lm_head.weight`, a penalty on weights, or an output projection with the embedding's
        weight. Put the forward and its backward into the block, and `step` after it. To edit weights, see `gathered`.

        Args:
            names: Names in `module.named_parameters()`. All these parameters, and those that are gathered with them,
                are in memory at once
                on every rank: naming all of them needs the memory of the unsharded model.

        Yields:
            The parameters by name, as the model's modules have them in the block: full, in the dtype that the model
            computes with. Tied names share one parameter. They are only valid in the block.

        Raises:
            ContractError: There is no such parameter, a parameter was edited, the block ends before a backward that
                needs it, it is inside another one, or the engine is closed.
            RankMismatchError: The ranks pass different names.
        """
        return unsharded(self._parameters, self._adapter, self._order, names)

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
        """Read the gradient that the coming update will use: averaged over the window and the ranks, before clipping.

        Collective.

        Call it between the backward of a window's last micro-batch and `step`.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter has one gradient under all its names.

        Returns:
            A full fp32 copy on `device`; None for a frozen parameter and for one that no rank used.

        Raises:
            ContractError: There is no such parameter, the window is not at its end, or the engine is closed.
        """
        self._training("grad")
        return self._gradients.grad(name)

    def set_grad(self, name: str, value: Tensor) -> None:
        """Replace the gradient that the coming update will use, before its norm is computed and it is clipped.

        Collective.

        Args:
            name: Name in `module.named_parameters()`, of a trainable parameter.
            value: The full gradient in the units of `grad`, any floating dtype and device. Rank 0's is used; every rank
                must pass one.

        Raises:
            ContractError: There is no such parameter, it is frozen, `value` does not fit it, the window is not at its
                end, or the engine is closed.
        """
        self._training("set_grad")
        self._gradients.set_grad(name, value)

    def grad_norms(self) -> dict[str, float]:
        """L2 norm of each trainable parameter's gradient before clipping; the norm of these norms is `Step.grad_norm`.

        Collective: one all-reduce of one number per parameter; nothing is gathered. Call it where `grad` can be called.

        Returns:
            Norms by name with fp32 accuracy, the same on every rank; a tied parameter has its first name, and
            parameters without a gradient are omitted.

        Raises:
            ContractError: The window is not at its end, or the engine is closed.
        """
        self._training("grad_norms")
        return self._gradients.grad_norms()

    def ema(self, decay: float = 0.999) -> MovingAverage:
        """Keep an exponential moving average of the weights that train, from now on. Collective.

        It starts at the current weights, and each update that was not skipped makes it
        `decay * average + (1 - decay) * weights`, in fp32 and in the shards of the master weights: no communication,
        and one pass over this rank's shards. `save` includes it. After a load, also that of
        `checkpoint.on_existing: resume` in `prepare`, it continues with the saved average, on any engine and number of
        ranks: call this before the first training forward.

        Args:
            decay: The part of the average that an update keeps, from 0 to 1.

        Returns:
            The average: `with ema.weights():` evaluates, generates and exports with it, and `ema.parameter(name)` reads
            it.

        Raises:
            CheckpointError: On every rank: the average of the loaded checkpoint cannot be read.
            ContractError: `decay` is something else, there is one already, inside an accumulation window, or on a
                closed engine.
            RankMismatchError: Another rank did not call it, or with another `decay`.
        """
        training = self._training("ema")
        average, training.after_update = begin_average(decay, training.adapter, self._tensors, self._order)
        return average
