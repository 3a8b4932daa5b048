"""The updates of a model on a `DeepSpeedEngine`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from unishard.contract.adapter import Updates
from unishard.contract.private_api import PrivateApi
from unishard.distributed.host_read import HostRead
from unishard.distributed.nested_tensors import hook_gradients
from unishard.distributed.shards import Shard, SteppedShard
from unishard.errors import ContractError
from unishard_deepspeed.model import ZeroModel
from unishard_deepspeed.optimizer.optimizer_state import ZeroOptimizerState
from unishard_deepspeed.optimizer.unused_parameters import UnusedParameters
from unishard_deepspeed.private.partitioned import gather
from unishard_deepspeed.private.window import WindowGradients
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer
from unishard_deepspeed.sharding.gathering import refuse_unused_output

_requires_grad = attrgetter("requires_grad")


@final
class ZeroUpdates(Updates):
    """Gradients that the engine reduces, and its optimizer."""

    model: ZeroModel

    def __init__(
        self,
        model: ZeroModel,
        zero: ZeroOptimizer,
        *,
        skippable: Collection[nn.Parameter],
        missing: Sequence[PrivateApi],
    ) -> None:
        """Take over the optimizer.

        Args:
            model: What trains.
            zero: DeepSpeed's optimizer.
            skippable: Parameters that a rank may skip.
            missing: Patches that a window with an unused parameter needs, and whose private names DeepSpeed lacks.
        """
        super().__init__(model, zero.optimizer)
        engine, inner = zero.engine, zero.inner
        self._engine, self._zero, self._strategy = engine, zero, zero.spec.strategy
        self._clipping, self._window = zero.clipping(), WindowGradients(zero)
        self.reduces_each_backward = engine.zero_optimization_partition_gradients()
        trained = set(inner.trained).difference(skippable)
        self.shared_parameters = {
            name: parameter for name, parameter in model.module.named_parameters() if parameter in trained
        }
        in_order = self.reduces_each_backward and not zero.gathers
        self._unused = UnusedParameters(
            zero,
            model.device,
            missing,
            [*self.shared_parameters.values()] if in_order else [],
            alike=zero.spec.compares_ranks and not skippable,
        )
        self.optimizer_state = ZeroOptimizerState(zero, self._unused.masters, self.drop_gradients)
        if getattr(inner.optimizer, "steps_late", False):
            self.calls_in_update = zero.calls_in_update()
        # Before DeepSpeed's hooks on the outputs, which fail at some stages if a backward is not the engine's.
        # A function, not a method: copying the model, for example to average weights, must not copy the engine.
        self._output_hook = model.module.register_forward_hook(
            lambda module, args, output: self._watch_early(module, output)
        )

    def watch(self, output: Any) -> None:
        """Show parameters to the script: a hook on the model has watched the output before DeepSpeed's hooks on it."""
        self.model.shown.show()

    def _watch_early(self, module: nn.Module, output: Any) -> None:
        if module is self.model.module:  # not a copy of it
            hook_gradients(output, self.on_gradient)

    def input_gradients(self, *, graph: bool) -> None:
        """Refuse what DeepSpeed's hooks on outputs take for its own backward.

        Stage 0 then raises, stages 1 and 2 reduce too early, and all divide the gradient by the accumulation steps
        (DeepSpeed 0.19.8, runtime/engine.py, _backward_prologue_per_tensor). Stage 3 frees parameters that a backward
        through gradients uses again.

        Raises:
            ContractError: The engine cannot do this.
        """
        plain = self._zero.gathers and self._engine.gradient_accumulation_steps() == 1 and not graph
        if plain or not any(
            map(_requires_grad, self.model.module.parameters())
        ):  # frozen: the forward was not DeepSpeed's
            return
        request = " with create_graph=True, as for a gradient penalty," if graph else ""
        raise ContractError(
            f"torch.autograd.grad of an output{request} does not work with sharding.strategy {self._strategy} on "
            "DeepSpeed; set backend: fsdp" + (", sharding: no_shard and precision: fp32" if graph else "")
        )

    def gradients_in_forward(self) -> None:
        """Refuse them at stage 3, which frees parameters in each backward, unless some stay gathered.

        Raises:
            ContractError: Parameters are gathered for each forward and backward.
        """
        if self._zero.gathers and not self.model.kept:
            raise ContractError(
                "the forward computes gradients of its own, as by torch.autograd.grad(energy, positions), for which "
                f"DeepSpeed frees parameters with sharding.strategy {self._strategy}; put the forward and the backward "
                "into a block `with engine.weights.unsharded(names):` with the names of all parameters, as of "
                "model.named_parameters() before unishard.prepare, or set sharding: shard_grad_op"
            )

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the `DeepSpeedEngine`, without its division by accumulation steps."""
        self.model.shown.hide()
        # A new tensor: DeepSpeed's hook on the model's outputs divides an output that is the loss by the accumulation
        # steps, because it runs before the hook that `backward` registers (DeepSpeed 0.19.8, runtime/engine.py,
        # _backward_prologue_per_tensor).
        try:
            self._engine.backward(loss.view(()), scale_wrt_gas=False)
        except AssertionError as error:
            refuse_unused_output(error)
            raise
        for case in self.model.cases:
            case.after_backward(self.model.kept)
        self._unused.record_backward()
        self.model.shown.show(gradients=True)

    def begin(self, *, last: bool) -> None:
        """Show no gradients any more: DeepSpeed learns of the end of a window from `step`."""
        self.model.shown.hide()

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[float | HostRead, bool | None]:
        """Update with `DeepSpeedEngine.step`."""
        with self.model.shown.hidden():
            self._unused.find()
            self._clipping.prepare(max_norm, divisor)
            with self._window.finished():
                outcome = self._clipping.step()
            self._zero.gather_after()
            skipped = outcome[1] is False
            for case in self.model.cases if not skipped else ():
                case.updated()
            self._end_window(skipped=skipped)
        return outcome

    def _end_window(self, *, skipped: bool) -> None:
        self._unused.forget()
        for case in self.model.cases:
            case.end_window(skipped=skipped)

    def without_gradient(self) -> Collection[str]:
        """Those that no hook has seen: DeepSpeed takes the gradients away."""
        if not self._unused.is_gap:
            return []
        used = self._unused.used
        return [name for name, parameter in self.shared_parameters.items() if parameter not in used]

    @property
    def gradient_order(self) -> str:
        """At stage 2, where DeepSpeed fills its buckets with gradients in the order in which they come."""
        return self._unused.order

    def finish_gradients(self) -> None:
        """Reduce what `DeepSpeedEngine.step` would reduce."""
        self._unused.find()
        self._window.reduce()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """The shard in ZeRO's flat gradients."""
        if create:
            self._unused.include(parameter)
        unused = self._unused.unused
        return None if unused and parameter in unused else self._window.shard(parameter)

    def drop_gradients(self) -> None:
        """Drop gradients, also in DeepSpeed's buffers."""
        with self.model.shown.hidden():
            self._window.drop()
            self._end_window(skipped=False)
            gather([*self.model.kept])

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside DeepSpeed's."""
        return self._zero.inner.optimizer

    def stepped(self) -> Sequence[Tensor]:
        """Flat master weights."""
        return [*self._unused.masters.shards]

    def stepped_memory(self) -> Callable[[], dict[nn.Parameter, SteppedShard]]:
        """Flat master weights, or parts of them.

        Stages 1 and 2 keep only the group that steps in the optimizer, of which a rank's flat master weight may have no
        element of some parameters (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, _optimizer_step).
        """
        masters = self._unused.masters
        nowhere = SteppedShard(next(iter(masters.shards)).new_empty(0))

        def now() -> dict[nn.Parameter, SteppedShard]:
            return {
                each: SteppedShard(*masters.stepped_tensor(each)) if each in masters.masters else nowhere
                for each in self._zero.stepping(masters)
                if each not in masters.unused
            }

        return now

    def close(self) -> None:
        """Remove the hooks, and leave the optimizer to the engine."""
        self._unused.remove()
        self._output_hook.remove()
        del self._engine, self._zero, self._clipping, self._window, self._unused, self.optimizer_state
